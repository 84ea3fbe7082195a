//! Parts of replies: where they are written.

use super::*;
use crate::model::script::{Script, ScriptNetwork, ScriptProcessor};
use crate::model::{Body, Device, Effort, LoadError, LoadSpec, Preprocessed, Processor, Route, TaskError};
use crate::worker::tests::memory::Does;

/// A script that notes where its parts and its replies are written.
struct Watched {
    script: ScriptProcessor,
    are_parts_brief: bool,
    places: Arc<Mutex<Places>>,
}

#[derive(Default)]
struct Places {
    /// The task of the runtime that stands for a reply thread.
    reply: Option<tokio::task::Id>,
    /// That of each part, and its pieces.
    parts: Vec<(tokio::task::Id, usize)>,
}

impl Processor for Watched {
    type Context = Script;
    type Input = Script;
    type Piece = usize;
    type Output = usize;

    fn routes(&self) -> &[Route] {
        self.script.routes()
    }

    fn preprocess(&self, message: &Message) -> Result<Preprocessed<Self>, TaskError> {
        self.script.preprocess(message)
    }

    /// So that replies are written on a reply thread.
    fn effort(&self, _: &Message) -> Effort {
        Effort::Usual
    }

    fn is_streamed(&self, script: &Script) -> bool {
        self.script.is_streamed(script)
    }

    fn are_parts_brief(&self, _: &Script) -> bool {
        self.are_parts_brief
    }

    fn parts(&self, script: &mut Script, input: usize, pieces: Vec<usize>) -> Vec<Body> {
        self.places.lock().unwrap().parts.push((tokio::task::id(), pieces.len()));
        self.script.parts(script, input, pieces)
    }

    fn finish(&self, script: Script, outputs: Vec<usize>) -> Result<Body, TaskError> {
        self.places.lock().unwrap().reply = Some(tokio::task::id());
        self.script.finish(script, outputs)
    }
}

/// For each part of a streamed sequence, whether a reply thread writes it, and its pieces.
async fn written(are_parts_brief: bool, confirmed_after: Duration) -> Vec<(bool, usize)> {
    let places = Arc::new(Mutex::new(Places::default()));
    let own = places.clone();
    let starter = continuous(move |spec: &LoadSpec, device: &Device| {
        let (script, network) = script::load(spec, device)?;
        let watched = Watched { script, are_parts_brief, places: own.clone() };
        Ok::<(Watched, ScriptNetwork), LoadError>((watched, network))
    });
    let rig = Rig::start_model(&starter, "script", |_| ());
    rig.memory.queue("mine", Does::Wait(confirmed_after));
    let body = json!({"prompt": 4, "max_tokens": 100, "step_ms": 10, "stream": true});
    rig.memory.deliver([task("a", "mine", &body)]);
    rig.memory.settles(1).await;
    let messages = rig.memory.published("mine");
    let (reply, parts) = messages.split_last().unwrap();
    assert_eq!(status(reply), 200);
    let text: String = parts.iter().map(body_text).collect();
    assert_eq!(text, body_text(reply));
    let Places { reply, parts } = &*places.lock().unwrap();
    parts.iter().map(|(place, pieces)| (Some(*place) == *reply, *pieces)).collect()
}

fn body_text(message: &Message) -> String {
    body(message)["text"].as_str().unwrap().to_owned()
}

#[tokio::test(start_paused = true)]
async fn a_few_brief_pieces_are_written_at_once_and_all_other_parts_on_a_reply_thread() {
    here(async {
        let small = written(true, Duration::ZERO).await;
        assert!(
            small.len() > 10 && small.iter().all(|(leaves, pieces)| !leaves && *pieces < 10),
            "{small:?}"
        );
        let piled = written(true, Duration::from_millis(400)).await;
        assert_eq!(piled, [(false, 1), (true, 40), (true, 40), (false, 19)]);
        let slow = written(false, Duration::ZERO).await;
        assert!(slow.len() > 10 && slow.iter().all(|(leaves, _)| *leaves), "{slow:?}");
    })
    .await;
}
