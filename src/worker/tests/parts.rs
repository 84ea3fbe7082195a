//! Tests of parts of replies: on which thread they are written, and parts that are made from outputs. `sequences` tests
//! parts that are made from pieces, and `on_demand` parts of inputs on demand.

use super::*;
use crate::broker::Published;
use crate::broker::memory::Reaction;
use crate::model::testing::script::{Script, ScriptNetwork, ScriptProcessor};
use crate::model::{
    Body, Device, Effort, LoadError, LoadSpec, Preprocessed, Processor, Route, Streaming, TaskError,
};
use crate::protocol::control::Cancellation;
use crate::protocol::reply::is_part;

/// The `script` model, which records where its parts and replies are written.
struct Watched {
    script: ScriptProcessor,
    are_parts_brief: bool,
    writers: Arc<Mutex<Writers>>,
}

#[derive(Default)]
struct Writers {
    /// The tokio task that wrote the reply. It stands for a reply thread.
    reply: Option<tokio::task::Id>,
    /// The tokio task that wrote each part, and the part's number of pieces.
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

    /// Usual, so that replies are written on a reply thread.
    fn effort(&self, _: &Message) -> Effort {
        Effort::Usual
    }

    fn streaming(&self, script: &Script) -> Streaming {
        self.script.streaming(script)
    }

    fn are_parts_brief(&self, _: &Script) -> bool {
        self.are_parts_brief
    }

    fn parts(&self, script: &mut Script, input: usize, pieces: Vec<usize>) -> Vec<Body> {
        self.writers.lock().parts.push((tokio::task::id(), pieces.len()));
        self.script.parts(script, input, pieces)
    }

    fn finish(&self, script: Script, outputs: Vec<usize>) -> Result<Body, TaskError> {
        self.writers.lock().reply = Some(tokio::task::id());
        self.script.finish(script, outputs)
    }
}

/// For each part of a streamed sequence, whether a reply thread wrote it, and its number of pieces.
async fn written(are_parts_brief: bool, confirmed_after: Duration) -> Vec<(bool, usize)> {
    let writers = Arc::new(Mutex::new(Writers::default()));
    let shared = writers.clone();
    let starter = continuous(move |spec: &LoadSpec, device: &Device| {
        let (script, network) = script::load(spec, device)?;
        let watched = Watched { script, are_parts_brief, writers: shared.clone() };
        Ok::<(Watched, ScriptNetwork), LoadError>((watched, network))
    });
    let rig = Rig::start_model(&starter, "script", |_| ());
    rig.memory.set_reaction("mine", Reaction::AnswerAfter(confirmed_after, Published::Confirmed));
    let body = json!({"prompt": 4, "max_tokens": 100, "step_ms": 10, "stream": true});
    rig.memory.deliver([task("a", "mine", &body)]);
    rig.memory.until_settled(1).await;
    let messages = rig.memory.published("mine");
    let (reply, parts) = messages.split_last().unwrap();
    assert_eq!(status(reply), 200);
    let text: String = parts.iter().map(body_text).collect();
    assert_eq!(text, body_text(reply));
    let Writers { reply, parts } = &*writers.lock();
    parts.iter().map(|(writer, pieces)| (Some(*writer) == *reply, *pieces)).collect()
}

fn body_text(message: &Message) -> String {
    body(message)["text"].as_str().unwrap().to_owned()
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn few_brief_pieces_are_written_inline_and_other_parts_on_a_reply_thread() {
    let small = written(true, Duration::ZERO).await;
    assert!(small.len() > 10 && small.iter().all(|(leaves, pieces)| !leaves && *pieces < 10), "{small:?}");
    let piled = written(true, Duration::from_millis(400)).await;
    // A step takes 10 ms, and a confirmation 400 ms.
    assert_eq!(piled, [(false, 1), (true, 39), (true, 40), (false, 20)]);
    let slow = written(false, Duration::ZERO).await;
    assert!(slow.len() > 10 && slow.iter().all(|(leaves, _)| *leaves), "{slow:?}");
}

/// A one-pass task with `count` inputs, each of which takes 100 ms if batches have one input.
fn listed(id: &str, count: usize) -> Message {
    let input: Vec<String> = (0..count).map(|number| format!("{id}{number}")).collect();
    task(id, "mine", &json!({"input": input, "sleep_ms": 100, "stream": true}))
}

/// A worker of `echo` whose batches have one input.
fn echo() -> Rig {
    Rig::start("echo", |assignment| assignment.pool.batch.max_requests = 1)
}

/// The parts of a task's replies, and the replies.
fn received(messages: Vec<Message>, id: &str) -> (Vec<Message>, Vec<Message>) {
    let of_task = messages.into_iter().filter(|it| it.properties.correlation_id.as_deref() == Some(id));
    of_task.partition(is_part)
}

/// The field `field` of each part. Checks that the parts are of one stream, and in the order of their inputs.
fn in_order(parts: &[Message], field: &str) -> Vec<Value> {
    for (number, part) in parts.iter().enumerate() {
        let headers = &part.properties.headers;
        assert_eq!((headers["seq"].as_i64(), &body(part)["index"]), (Some(number as i64), &json!(number)));
        assert_eq!(headers["stream_id"], parts[0].properties.headers["stream_id"]);
    }
    parts.iter().map(|part| body(part)[field].clone()).collect()
}

fn words(count: usize) -> String {
    (0..count).map(|word| format!("{word} ")).collect()
}

/// A task of `script` with a sequence of each of these numbers of tokens, whose steps take 10 ms.
fn sequences(id: &str, counts: &[usize], more: Value) -> Message {
    let mut fields = json!({"prompt": 4, "sequences": counts, "step_ms": 10, "stream": true});
    fields.as_object_mut().unwrap().extend(more.as_object().cloned().unwrap());
    task(id, "mine", &fields)
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn each_finished_input_of_a_one_pass_task_is_a_part_and_the_reply_has_all() {
    let rig = echo();
    let begun = tokio::time::Instant::now();
    let alone = task("alone", "mine", &json!({"input": {"x": 1}, "stream": true}));
    let whole = task("whole", "mine", &json!({"input": ["w"], "stream": false}));
    rig.memory.deliver([listed("a", 5), alone, whole]);
    rig.memory.until_published("mine", 1).await;
    assert!(begun.elapsed() < Duration::from_millis(150), "{:?}", begun.elapsed());
    rig.memory.until_settled(3).await;
    let (parts, replies) = received(rig.memory.published("mine"), "a");
    let inputs = ["a0", "a1", "a2", "a3", "a4"];
    assert_eq!(in_order(&parts, "input"), inputs);
    assert_eq!((replies.len(), status(&replies[0]), &body(&replies[0])["input"]), (1, 200, &json!(inputs)));
    let (parts, replies) = received(rig.memory.published("mine"), "alone");
    assert_eq!((in_order(&parts, "input"), replies.len()), (vec![json!({"x": 1})], 1));
    let (parts, replies) = received(rig.memory.published("mine"), "whole");
    assert_eq!((parts.len(), replies.len()), (0, 1));
    let messages = rig.memory.published("mine");
    let last = |id: &str| messages.iter().rfind(|it| it.properties.correlation_id.as_deref() == Some(id));
    assert!(["a", "alone", "whole"].into_iter().all(|id| !is_part(last(id).unwrap())), "replies come last");
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_finished_sequence_is_a_part_only_after_those_before_it() {
    let rig = Rig::start("script", |_| ());
    let begun = tokio::time::Instant::now();
    rig.memory.deliver([sequences("a", &[30, 10, 50, 20], json!({}))]);
    rig.memory.until_published("mine", 2).await;
    assert!((300..400).contains(&begun.elapsed().as_millis()), "{:?}", begun.elapsed());
    rig.memory.until_settled(1).await;
    let (parts, replies) = received(rig.memory.published("mine"), "a");
    let texts = [30, 10, 50, 20].map(words);
    assert_eq!(in_order(&parts, "text"), texts);
    assert_eq!((replies.len(), body_text(&replies[0])), (1, texts.concat()));
    assert_eq!(body(&replies[0])["usage"], json!({"prompt_tokens": 16, "completion_tokens": 110}));
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_failed_input_ends_the_parts_and_each_attempt_has_its_own_stream() {
    let rig = Rig::start("script?faults", |_| ());
    let mut task = sequences("a", &[10, 30, 10], json!({"fail": "row", "at": 15}));
    let mut streams = Vec::new();
    for attempt in 1.. {
        rig.memory.deliver([task]);
        rig.memory.until_settled(attempt).await;
        let (parts, replies) = received(rig.memory.published("mine"), "a");
        assert_eq!(
            parts.len(),
            attempt,
            "one sequence ended before the error, and the third waits for the second"
        );
        streams.push(parts[attempt - 1].properties.headers["stream_id"].clone());
        let again = rig.memory.published("tasks, later");
        if again.len() < attempt {
            assert_eq!((replies.len(), status(&replies[0])), (1, 500));
            break;
        }
        assert_eq!(replies.len(), 0, "it is tried again");
        task = again[attempt - 1].clone();
    }
    assert!(streams.len() > 1 && streams.windows(2).all(|two| two[0] != two[1]), "{streams:?}");
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_streamed_one_pass_task_can_be_cancelled_and_ends_at_its_deadline() {
    let rig = echo();
    let mut late = listed("late", 50);
    late.properties.expiration = Some("1000".into());
    rig.memory.deliver([listed("cancelled", 50), late]);
    tokio::time::sleep(Duration::from_millis(500)).await;
    let cancellation = Cancellation { task: Some("cancelled".into()), ..Cancellation::default() };
    assert!(rig.control.cancellations.add(vec![cancellation]));
    rig.memory.until_settled(2).await;
    let messages = rig.memory.published("mine");
    for (id, expected) in [("cancelled", 499), ("late", 408)] {
        let (parts, replies) = received(messages.clone(), id);
        assert_eq!((replies.len(), status(&replies[0])), (1, expected), "{id}");
        assert!((2..10).contains(&parts.len()), "{id}: {}", parts.len());
        in_order(&parts, "input");
    }
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(rig.memory.published("mine").len(), messages.len());
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_drain_finishes_a_started_one_pass_stream_and_hands_back_sequences() {
    for phase in [Phase::Returning, Phase::Finishing] {
        let rig = echo();
        rig.memory.deliver([listed("a", 10)]);
        rig.memory.until_published("mine", 2).await;
        rig.stop.advance(phase, "test");
        let memory = rig.memory.clone();
        assert_eq!(rig.join().await.0.unwrap(), Ended::Drained);
        assert_eq!(memory.settled(), [Settled::Acked(1)]);
        let (parts, replies) = received(memory.published("mine"), "a");
        assert_eq!((parts.len(), replies.len()), (10, 1));

        let rig = Rig::start("script", |_| ());
        rig.memory.deliver([sequences("a", &[10, 30, 50], json!({}))]);
        rig.memory.until_published("mine", 1).await;
        rig.stop.advance(phase, "test");
        let memory = rig.memory.clone();
        assert_eq!(rig.join().await.0.unwrap(), Ended::Drained);
        let (parts, replies) = received(memory.published("mine"), "a");
        let (settled, count) = match phase {
            Phase::Finishing => (Settled::Acked(1), (3, 1)),
            _ => (Settled::Requeued(1), (1, 0)),
        };
        assert_eq!((memory.settled(), (parts.len(), replies.len())), (vec![settled], count));
    }
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_burst_of_parts_is_sent_only_as_far_as_its_queue_accepts_it_in_time() {
    let rig = Rig::start("echo", |_| ());
    rig.memory.set_reaction("slow", Reaction::AnswerAfter(Duration::from_millis(10), Published::Confirmed));
    let body = json!({"input": (0..1_000).collect::<Vec<_>>(), "stream": true});
    rig.memory.deliver([task("a", "slow", &body), task("b", "quick", &body)]);
    let begun = tokio::time::Instant::now();
    rig.memory.until_settled(2).await;
    assert!(begun.elapsed() < Duration::from_millis(800), "{:?}", begun.elapsed());
    for (queue, most) in [("slow", 60), ("quick", 1_000)] {
        let (parts, replies): (Vec<_>, Vec<_>) = rig.memory.published(queue).into_iter().partition(is_part);
        let inputs = in_order(&parts, "input");
        assert_eq!((replies.len(), inputs), (1, (0..parts.len()).map(Value::from).collect()));
        assert!((most / 4..=most).contains(&parts.len()), "{queue}: {}", parts.len());
    }
}
