//! Tests of tasks whose inputs are made on demand: tasks take turns, few inputs wait, and unwanted inputs are not made.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::broker::Published;
use crate::broker::memory::Reaction;
use crate::model::{
    Body, Device, Forward, ForwardError, Inputs, LoadSpec, Preprocessed, Processor, Route, SizedInput,
    Streaming, TaskError, clock,
};
use crate::protocol::control::Cancellation;
use crate::protocol::reply::is_part;

/// The record of what a model has done.
#[derive(Clone, Default)]
pub(super) struct Record {
    /// What was made and computed, in order.
    log: Arc<Mutex<Vec<String>>>,
    /// Bytes of the windows that exist now, and the most that existed at once.
    bytes: Arc<AtomicUsize>,
    most_bytes: Arc<AtomicUsize>,
}

impl Record {
    fn push(&self, line: String) {
        self.log.lock().push(line);
    }

    /// The task of each window that was made, in order.
    fn made(&self) -> Vec<String> {
        let log = self.log.lock();
        log.iter().filter_map(|line| line.strip_prefix("made ")).map(str::to_owned).collect()
    }
}

/// A window of a recording; its output is its number.
struct Window {
    task: String,
    number: usize,
    bytes: usize,
    record: Record,
}

impl Drop for Window {
    fn drop(&mut self) {
        self.record.bytes.fetch_sub(self.bytes, Ordering::SeqCst);
    }
}

struct Windows(Record);

impl Processor for Windows {
    /// Whether each window is a part of the reply.
    type Context = bool;
    type Input = Window;
    type Piece = ();
    type Output = usize;

    fn routes(&self) -> &[Route] {
        &[Route { url: Route::ANY, media_types: &["application/json"] }]
    }

    /// Makes the `windows` of a body one by one, with `bytes` bytes each. The one with the number `bad` fails.
    fn preprocess(&self, message: &Message) -> Result<Preprocessed<Self>, TaskError> {
        let fields = body(message);
        let number = |name: &str| fields[name].as_u64().map(|number| number as usize);
        let task = message.properties.correlation_id.clone().unwrap_or_default();
        let (bytes, bad, record) = (number("bytes").unwrap_or(0), number("bad"), self.0.clone());
        let window = move |number| {
            record.push(format!("made {task}"));
            if Some(number) == bad {
                return Err(TaskError::bad_input("windows", "a bad window"));
            }
            let total = record.bytes.fetch_add(bytes, Ordering::SeqCst) + bytes;
            record.most_bytes.fetch_max(total, Ordering::SeqCst);
            let window = Window { task: task.clone(), number, bytes, record: record.clone() };
            Ok(vec![SizedInput::new(window, 1)])
        };
        let stream = fields["stream"] == true;
        Ok((stream, Inputs::Slices(Box::new((0..number("windows").unwrap_or(1)).map(window)))))
    }

    fn bytes(&self, window: &Window) -> usize {
        window.bytes
    }

    fn streaming(&self, stream: &bool) -> Streaming {
        Streaming::Outputs.if_requested(*stream)
    }

    fn output_parts(&self, _: &mut bool, _: usize, number: &usize) -> Vec<Body> {
        self.0.push("wrote a part".to_owned());
        vec![Body::json(number.to_string())]
    }

    fn finish(&self, _: bool, outputs: Vec<usize>) -> Result<Body, TaskError> {
        Ok(Body::json(json!(outputs).to_string()))
    }
}

/// A batch takes 10 ms.
struct Network(Record);

impl Forward for Network {
    type Input = Window;
    type Output = usize;
    type Pending = Vec<usize>;

    fn submit(&mut self, batch: &[&Window]) -> Result<Vec<usize>, ForwardError> {
        batch.iter().for_each(|window| self.0.push(format!("computed {}", window.task)));
        clock::pass(Duration::from_millis(10));
        Ok(batch.iter().map(|window| window.number).collect())
    }

    fn wait(&mut self, outputs: Vec<usize>) -> Result<Vec<Result<usize, TaskError>>, ForwardError> {
        Ok(outputs.into_iter().map(Ok).collect())
    }
}

/// A worker whose batches have two windows.
pub(super) fn start(change: impl FnOnce(&mut Assignment)) -> (Rig, Record) {
    let record = Record::default();
    let shared = record.clone();
    let starter =
        one_pass(move |_: &LoadSpec, _: &Device| Ok((Windows(shared.clone()), Network(shared.clone()))));
    let rig = Rig::start_model(&starter, "windows", |assignment| {
        assignment.pool.batch.max_tokens = Some(2);
        change(assignment);
    });
    (rig, record)
}

pub(super) fn windows(id: &str, count: usize) -> Message {
    task(id, "mine", &json!({ "windows": count }))
}

/// Waits until `count` windows are made.
async fn until_made(record: &Record, count: usize) {
    while record.made().len() < count {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

fn statuses(replies: &[Message]) -> Vec<(&str, i64)> {
    replies.iter().map(|reply| (reply.properties.correlation_id.as_deref().unwrap(), status(reply))).collect()
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_task_of_many_inputs_makes_few_ahead_and_its_reply_has_all_in_order() {
    let (rig, record) = start(|_| ());
    rig.memory.deliver([windows("a", 50)]);
    let reply = rig.memory.until_published("mine", 1).await.remove(0);
    assert_eq!(body(&reply), json!((0..50).collect::<Vec<_>>()));
    let (mut waiting, mut most): (i32, i32) = (0, 0);
    for line in &*record.log.lock() {
        waiting += if line.starts_with("made") { 1 } else { -1 };
        most = most.max(waiting);
    }
    assert!((2..=4).contains(&most), "one batch is computed and one waits: {most}");
    assert_eq!(rig.memory.until_settled(1).await, [Settled::Acked(1)]);
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_task_of_many_inputs_delays_others_by_a_slice_and_a_batch_at_most() {
    let (rig, record) = start(|_| ());
    rig.memory.deliver([windows("giant", 1_000), windows("first", 1)]);
    rig.memory.until_published("mine", 1).await;
    until_made(&record, 100).await;
    let before = record.made().len();
    rig.memory.deliver([windows("second", 1), windows("third", 3)]);
    let replies = rig.memory.until_published("mine", 4).await;
    let ids = statuses(&replies).into_iter().map(|(id, _)| id).collect::<Vec<_>>();
    assert_eq!(ids, ["first", "second", "third", "giant"]);
    let made = record.made();
    assert!(made[..4].contains(&"first".to_owned()), "{:?}", &made[..4]);
    assert!(made[before..before + 6].contains(&"second".to_owned()), "{:?}", &made[before..before + 6]);
    let third = made[before..].iter().rposition(|task| task == "third").unwrap();
    assert!(third < 20, "they take turns: {third}");
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn requesters_take_turns_at_inputs_however_many_tasks_each_has() {
    let (rig, record) = start(|_| ());
    let many = |id: usize| task(&format!("many-{id}"), "theirs", &json!({ "windows": 20 }));
    rig.memory.deliver((0..60).map(many).chain([windows("one", 12)]));
    rig.memory.until_published("mine", 1).await;
    let made = record.made();
    let indices: Vec<usize> = (0..made.len()).filter(|index| made[*index] == "one").collect();
    assert!(indices[1] - indices[0] < 8, "{indices:?}");
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_task_without_inputs_is_answered() {
    let (rig, _) = start(|_| ());
    rig.memory.deliver([windows("none", 0), windows("one", 1)]);
    let replies = rig.memory.until_published("mine", 2).await;
    assert_eq!(statuses(&replies), [("none", 200), ("one", 200)]);
    assert_eq!(body(&replies[0]), json!([]));
    assert_eq!(rig.memory.until_settled(2).await, [Settled::Acked(1), Settled::Acked(2)]);
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn an_input_that_cannot_be_made_ends_its_task_and_its_neighbours_go_on() {
    let (rig, record) = start(|_| ());
    let bad = task("bad", "mine", &json!({"windows": 100, "bad": 20}));
    rig.memory.deliver([bad, windows("good", 30)]);
    let replies = rig.memory.until_published("mine", 2).await;
    assert_eq!(statuses(&replies), [("bad", 400), ("good", 200)]);
    assert_eq!(record.made().iter().filter(|task| *task == "bad").count(), 21);
    assert_eq!(rig.memory.until_settled(2).await, [Settled::Acked(1), Settled::Acked(2)]);
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn no_more_inputs_are_made_of_a_task_that_is_cancelled_or_late() {
    let (rig, record) = start(|_| ());
    let mut late = windows("late", 1_000);
    late.properties.expiration = Some("200".into());
    rig.memory.deliver([windows("cancelled", 1_000), late]);
    until_made(&record, 10).await;
    let cancellation = Cancellation { task: Some("cancelled".into()), ..Cancellation::default() };
    assert!(rig.control.cancellations.add(vec![cancellation]));
    let replies = rig.memory.until_published("mine", 2).await;
    assert_eq!(statuses(&replies), [("cancelled", 499), ("late", 408)]);
    let made = record.made().len();
    assert!(made < 100, "{made}");
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!(record.made().len(), made);
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_drain_hands_back_a_task_whose_inputs_are_not_all_made() {
    let (rig, record) = start(|_| ());
    rig.memory.deliver([windows("a", 1_000), windows("b", 1_000)]);
    until_made(&record, 30).await;
    rig.stop.advance(Phase::Returning, "test");
    let memory = rig.memory.clone();
    assert_eq!(rig.join().await.0.unwrap(), Ended::Drained);
    assert_eq!(memory.settled(), [Settled::Requeued(1), Settled::Requeued(2)]);
    assert!(record.made().len() < 60);
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn bytes_of_waiting_inputs_are_bounded_while_a_suspect_task_runs_alone() {
    let (rig, record) = start(|assignment| assignment.pool.prepared_bytes = 250);
    let large = |id: &str| task(id, "mine", &json!({"windows": 10, "bytes": 100}));
    let ids: Vec<String> = (0..20).map(|number| number.to_string()).collect();
    // The size of inputs is unknown until the first is made.
    rig.memory.deliver([large("known")]);
    rig.memory.until_published("mine", 1).await;
    rig.memory.deliver(ids[..10].iter().map(|id| large(id)));
    until_made(&record, 15).await;
    rig.memory.deliver_again(large("suspect"), 2);
    rig.memory.deliver(ids[10..].iter().map(|id| large(id)));
    let replies = rig.memory.until_published("mine", 22).await;
    assert!(statuses(&replies).iter().all(|(_, status)| *status == 200));
    let most = record.most_bytes.load(Ordering::SeqCst);
    // The inputs of the suspect task come on top: it does not wait for memory, since the tasks that hold it are
    // computed only after the suspect one.
    assert!((300..=700).contains(&most), "{most}");
    assert_eq!(record.bytes.load(Ordering::SeqCst), 0);
}

fn streamed(id: &str, to: &str, count: usize) -> Message {
    task(id, to, &json!({"windows": count, "stream": true}))
}

/// The messages in a requester's queue: the numbers of the windows in its parts, and the replies.
fn received(rig: &Rig, queue: &str) -> (Vec<Value>, Vec<Message>) {
    let (parts, replies): (Vec<_>, Vec<_>) = rig.memory.published(queue).into_iter().partition(is_part);
    (parts.iter().map(body).collect(), replies)
}

fn numbers(count: usize) -> Vec<Value> {
    (0..count).map(Value::from).collect()
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn each_window_is_a_part_in_time_order_while_later_ones_are_not_made_yet() {
    let (rig, record) = start(|_| ());
    rig.memory.deliver([streamed("a", "mine", 100), streamed("none", "other", 0)]);
    rig.memory.until_published("mine", 10).await;
    assert!(record.made().len() < 30, "{}", record.made().len());
    rig.memory.until_settled(2).await;
    let (parts, replies) = received(&rig, "mine");
    assert_eq!((parts, replies.len(), body(&replies[0])), (numbers(100), 1, json!(numbers(100))));
    let (parts, replies) = received(&rig, "other");
    assert_eq!((parts, replies.len(), body(&replies[0])), (Vec::new(), 1, json!([])));
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn windows_that_are_finished_are_parts_before_the_error_of_a_later_one() {
    let (rig, _) = start(|_| ());
    let bad = json!({"windows": 100, "bad": 40, "stream": true});
    rig.memory.deliver([task("bad", "mine", &bad), streamed("good", "other", 50)]);
    rig.memory.until_settled(2).await;
    let (parts, replies) = received(&rig, "mine");
    assert_eq!(statuses(&replies), [("bad", 400)]);
    assert!((10..40).contains(&parts.len()) && parts == numbers(parts.len()), "{parts:?}");
    assert_eq!(received(&rig, "other").0, numbers(50));
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_cancelled_or_late_streamed_task_is_answered_behind_its_last_part() {
    let (rig, _) = start(|_| ());
    let slow = Duration::from_millis(600);
    for queue in ["mine", "other"] {
        rig.memory.set_reaction(queue, Reaction::AnswerAfter(slow, Published::Confirmed));
    }
    let begun = tokio::time::Instant::now();
    let mut late = streamed("late", "other", 1_000);
    late.properties.expiration = Some("200".into());
    rig.memory.deliver([streamed("cancelled", "mine", 1_000), late]);
    rig.memory.until_published("other", 1).await;
    let cancellation = Cancellation { task: Some("cancelled".into()), ..Cancellation::default() };
    assert!(rig.control.cancellations.add(vec![cancellation]));
    for (queue, answered) in [("mine", [("cancelled", 499)]), ("other", [("late", 408)])] {
        rig.memory.until_published(queue, 2).await;
        assert!(begun.elapsed() >= slow, "{queue}: {:?}", begun.elapsed());
        let (parts, replies) = received(&rig, queue);
        assert_eq!((parts, statuses(&replies)), (numbers(1), answered.to_vec()));
    }
    tokio::time::sleep(slow * 2).await;
    assert_eq!(rig.memory.published("mine").len() + rig.memory.published("other").len(), 4);
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_streamed_task_handed_back_gets_its_parts_again_in_another_stream() {
    let (rig, _) = start(|_| ());
    rig.memory.deliver([streamed("a", "mine", 200)]);
    rig.memory.until_published("mine", 5).await;
    rig.stop.advance(Phase::Returning, "test");
    let memory = rig.memory.clone();
    assert_eq!(rig.join().await.0.unwrap(), Ended::Drained);
    assert_eq!(memory.settled(), [Settled::Requeued(1)]);
    assert!(memory.published("mine").iter().all(is_part), "no reply");

    let (rig, _) = start(|_| ());
    rig.memory.deliver([streamed("a", "mine", 200)]);
    let first = rig.memory.until_published("mine", 5).await;
    rig.memory.lose_session();
    rig.memory.deliver_again(streamed("a", "mine", 20), 1);
    rig.memory.until_settled(1).await;
    let stream = |part: &Message| part.properties.headers["stream_id"].clone();
    let (parts, replies): (Vec<_>, Vec<_>) = rig.memory.published("mine").into_iter().partition(is_part);
    let again: Vec<_> = parts.iter().filter(|part| stream(part) != stream(&first[0])).collect();
    assert_eq!(again.iter().map(|part| body(part)).collect::<Vec<_>>(), numbers(20));
    let seqs = again.iter().map(|part| part.properties.headers["seq"].as_i64());
    assert!(seqs.eq((0..20).map(Some)));
    assert_eq!(replies.len(), 1);
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn only_the_first_part_is_written_for_a_reader_that_stops_reading() {
    let (rig, record) = start(|_| ());
    rig.memory.set_reaction("stuck", Reaction::Nothing);
    rig.memory.deliver([streamed("stuck", "stuck", 100), streamed("a", "mine", 100)]);
    assert_eq!(rig.memory.until_settled(1).await, [Settled::Acked(2)]);
    assert_eq!(received(&rig, "mine").0, numbers(100));
    let letter = rig.memory.until_published(DEAD, 1).await.remove(0);
    assert_eq!(letter.properties.headers["reason"].as_str(), Some("unconfirmed"));
    let (parts, replies) = received(&rig, "stuck");
    assert_eq!((parts.len(), replies.len()), (1, 0));
    let log = record.log.lock();
    let written = log.iter().filter(|line| *line == "wrote a part").count();
    assert_eq!(written, 101);
}
