//! Tests of the loop of tasks that run side by side, in paused time, with a model that gives a part each 10 ms.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde_json::{Value, json};

use super::continuous::Rig;
use super::*;
use crate::engine::{Foreign, ForeignProcess, ForeignWork, StreamEvent, StreamId, Streams, foreign};
use crate::model::{
    Dtype, Forward, ForwardError, Inputs, Preprocessed, SizedInput, Streaming, TaskErrorKind,
};

/// How long after a cancellation a task says that it has ended.
const ENDING: Duration = Duration::from_millis(100);

/// `{"name", "parts"}`, or `{"fault"}` at its start.
struct Plain;

impl Processor for Plain {
    type Context = ();
    type Input = Value;
    type Piece = Body;
    type Output = Body;

    fn routes(&self) -> &[Route] {
        &[Route { url: Route::ANY, media_types: &["application/json"] }]
    }

    fn preprocess(&self, message: &Message) -> Result<Preprocessed<Self>, TaskError> {
        let input = serde_json::from_slice(&message.body).unwrap();
        Ok(((), Inputs::All(vec![SizedInput::new(input, 1)])))
    }

    fn streaming(&self, (): &()) -> Streaming {
        Streaming::Pieces
    }

    fn parts(&self, (): &mut (), _: usize, pieces: Vec<Body>) -> Vec<Body> {
        pieces
    }

    fn finish(&self, (): (), mut outputs: Vec<Body>) -> Result<Body, TaskError> {
        Ok(outputs.remove(0))
    }
}

/// What the model was told, with the time in milliseconds.
type Told = Arc<Mutex<Vec<(u64, String)>>>;

struct Timed {
    running: BTreeMap<StreamId, (Value, u64, Instant)>,
    ending: BTreeMap<StreamId, Instant>,
    told: Told,
    begun: Instant,
}

impl Timed {
    fn note(&self, what: String) {
        self.told.lock().push(((now() - self.begun).as_millis() as u64, what));
    }
}

impl Streams for Timed {
    type Input = Value;
    type Piece = Body;
    type Output = Body;

    fn concurrency(&self) -> usize {
        2
    }

    fn start(&mut self, id: StreamId, input: &Value) -> Result<(), ForwardError> {
        self.note(format!("start {}", input["name"].as_str().unwrap()));
        if input["fault"] == true {
            return Err(ForwardError::Device("the process is lost".to_owned()));
        }
        self.running.insert(id, (input.clone(), 0, now()));
        Ok(())
    }

    fn cancel(&mut self, id: StreamId, is_late: bool) -> Result<(), ForwardError> {
        let (input, ..) = self.running.remove(&id).unwrap();
        self.note(format!("cancel {} {is_late}", input["name"].as_str().unwrap()));
        self.ending.insert(id, now() + ENDING);
        Ok(())
    }

    fn take_events(&mut self) -> Result<Vec<(StreamId, StreamEvent<Body, Body>)>, ForwardError> {
        let mut events = Vec::new();
        for (id, (input, given, since)) in &mut self.running {
            let parts = input["parts"].as_u64().unwrap();
            while *given < parts && now() >= *since + Duration::from_millis(10 * (*given + 1)) {
                *given += 1;
                events.push((*id, StreamEvent::Piece(Body::json(given.to_string()))));
            }
            if *given == parts {
                events.push((*id, StreamEvent::Ended(Ok(Body::json(input["name"].to_string())))));
            }
        }
        let ended: Vec<StreamId> =
            self.ending.iter().filter(|(_, at)| **at <= now()).map(|(id, _)| *id).collect();
        for id in ended {
            self.ending.remove(&id);
            events.push((id, StreamEvent::Ended(Err(TaskError::internal("cancelled")))));
        }
        for (id, event) in &events {
            if matches!(event, StreamEvent::Ended(_)) {
                self.running.remove(id);
            }
        }
        Ok(events)
    }
}

/// No model of these tests computes batches.
enum Never {}

impl Forward for Never {
    type Input = Value;
    type Output = Body;
    type Pending = ();

    fn submit(&mut self, _: &[&Value]) -> Result<(), ForwardError> {
        match *self {}
    }

    fn wait(&mut self, (): ()) -> Result<Vec<Result<Body, TaskError>>, ForwardError> {
        match *self {}
    }
}

fn rig() -> (Rig, Told) {
    let told = Told::default();
    let shared = told.clone();
    let starter = foreign(move |_, _| {
        let streams =
            Timed { running: BTreeMap::new(), ending: BTreeMap::new(), told: shared.clone(), begun: now() };
        let process =
            ForeignProcess { lost: tokio::sync::oneshot::channel().1, memory: Arc::new(AtomicU64::new(0)) };
        let work: ForeignWork<Never, Timed> = ForeignWork::Streams(streams);
        Ok(Foreign { processor: Plain, work, dtype: Dtype::F32, process })
    });
    (Rig::of(&starter, |log| setup("echo", 64, log)), told)
}

fn task(name: &str, parts: u64) -> Value {
    json!({"name": name, "parts": parts})
}

fn told(told: &Told) -> Vec<String> {
    told.lock().iter().map(|(_, what)| what.clone()).collect()
}

#[tokio::test(start_paused = true, flavor = "local")]
async fn tasks_run_side_by_side_up_to_the_limit_and_give_their_parts() {
    let (rig, told) = rig();
    let (a, b, c) =
        tokio::join!(rig.run("a", task("a", 10)), rig.run("b", task("b", 20)), rig.run("c", task("c", 10)),);
    assert_eq!((a.body(), b.body(), c.body()), (&json!("a"), &json!("b"), &json!("c")));
    assert_eq!(b.parts.len(), 20);
    assert!(c.at > a.at && c.at < b.at + 50, "{} {} {}", a.at, b.at, c.at);
    assert_eq!(self::told(&told), ["start a", "start b", "start c"]);
}

#[tokio::test(start_paused = true, flavor = "local")]
async fn a_cancelled_task_keeps_its_place_until_the_model_says_that_it_has_ended() {
    let (rig, told) = rig();
    let cancelled = state("a", None);
    let late = state("b", Some(Duration::from_millis(500)));
    let cancel = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        cancelled.cancel();
    };
    let (a, b, c, ()) = tokio::join!(
        rig.run_as(cancelled.clone(), task("a", 10_000), None),
        rig.run_as(late, task("b", 10_000), None),
        rig.run("c", task("c", 1)),
        cancel,
    );
    assert_eq!((a.error(), b.error()), (TaskErrorKind::Cancelled, TaskErrorKind::Expired));
    assert_eq!(c.body(), &json!("c"));
    assert!(a.at < 200, "it is answered at once: {}", a.at);
    assert_eq!(self::told(&told), ["start a", "start b", "cancel a false", "start c", "cancel b true"]);
    let times: Vec<u64> = told.lock().iter().map(|(at, _)| *at).collect();
    assert!(times[3] >= times[2] + ENDING.as_millis() as u64, "{times:?}");
}

#[tokio::test(start_paused = true, flavor = "local")]
async fn an_isolated_task_starts_when_the_others_have_ended_and_runs_alone() {
    let (rig, told) = rig();
    let isolate = async {
        tokio::time::sleep(Duration::from_millis(20)).await;
        rig.engine.queue().isolate(Some(7));
        let suspect = rig.run_as(state("s", None), task("s", 10), Some(7)).await;
        rig.engine.queue().isolate(None);
        suspect
    };
    let later = async {
        tokio::time::sleep(Duration::from_millis(40)).await;
        rig.run("b", task("b", 1)).await
    };
    let (a, s, b) = tokio::join!(rig.run("a", task("a", 20)), isolate, later);
    assert!(a.at <= s.at && s.at <= b.at, "{} {} {}", a.at, s.at, b.at);
    assert!(s.at >= a.at + 100, "it started after the other had ended: {} {}", a.at, s.at);
    assert_eq!(self::told(&told), ["start a", "start s", "start b"]);
}

#[tokio::test(start_paused = true, flavor = "local")]
async fn the_loss_of_the_process_is_a_fault_and_its_tasks_were_reported_before() {
    let (rig, _) = rig();
    let message =
        Message { body: json!({"name": "a", "fault": true}).to_string().into(), ..Message::default() };
    let prepared = rig.engine.preprocess(&message, &Files::default()).unwrap();
    let _job = prepared.make().unwrap().enqueue(state("a", None), None);
    while rig.fault.lock().is_none() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(rig.fault.lock().as_deref(), Some("device fault: the process is lost"));
    assert_eq!(rig.log.on_device(), [["a"]]);
}
