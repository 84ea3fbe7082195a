//! Tests of a task in the engine: its outputs, its parts, and its inputs on demand. Items are computed by the tests.

use std::mem;
use std::sync::atomic::{AtomicBool, Ordering};

use futures_util::task::noop_waker;

use super::*;
use crate::engine::job::Handle;
use crate::engine::outputs::Outputs;
use crate::engine::queue::InputQueue;
use crate::engine::reply::{BRIEF_PARTS, MAX_PIECES, WRITE_TIME};
use crate::model::{Inputs, Preprocessed, SizedInput, Streaming, TaskErrorKind};

/// Inputs are numbers; a part lists its pieces, or is an output.
struct Numbers;

/// A piece whose part takes long.
const SLOW: u32 = 1_000;
/// A piece whose part cannot be written.
const BAD: u32 = 1_001;

impl Processor for Numbers {
    type Context = Streaming;
    type Input = u32;
    type Piece = u32;
    type Output = u32;

    fn routes(&self) -> &[Route] {
        &[]
    }

    fn preprocess(&self, message: &Message) -> Result<Preprocessed<Self>, TaskError> {
        let inputs: Vec<_> = message.body.iter().map(|byte| SizedInput::new(u32::from(*byte), 2)).collect();
        // One slice for each input. A 0 is an error.
        let mut slices = inputs.into_iter().map(|sized| match sized.input {
            0 => Err(TaskError::bad_input("input", "zero")),
            _ => Ok(vec![sized]),
        });
        let inputs = match message.properties.kind.as_deref() {
            Some("counted") => Inputs::Slices(Box::new(slices)),
            // This iterator does not know its length.
            Some("open") => Inputs::Slices(Box::new(std::iter::from_fn(move || slices.next()))),
            _ => Inputs::All(slices.flatten().flatten().collect()),
        };
        let is_of_outputs = message.properties.user_id.as_deref() == Some("outputs");
        Ok((if is_of_outputs { Streaming::Outputs } else { Streaming::Pieces }, inputs))
    }

    fn streaming(&self, context: &Streaming) -> Streaming {
        *context
    }

    fn are_parts_brief(&self, _: &Streaming) -> bool {
        true
    }

    fn parts(&self, _: &mut Streaming, input: usize, pieces: Vec<u32>) -> Vec<Body> {
        assert_ne!(pieces[0], BAD);
        if pieces[0] == SLOW {
            std::thread::sleep(WRITE_TIME);
        }
        vec![Body::json(format!("{input}: {pieces:?}"))]
    }

    fn output_parts(&self, _: &mut Streaming, input: usize, output: &u32) -> Vec<Body> {
        assert_ne!(*output, BAD);
        vec![Body::json(format!("{input}: {output}"))]
    }

    fn finish(&self, _: Streaming, outputs: Vec<u32>) -> Result<Body, TaskError> {
        Ok(Body::json(format!("{outputs:?}")))
    }
}

/// A queue that keeps its items until a test computes them.
#[derive(Default)]
struct ItemStore(Mutex<Vec<Item<Numbers>>>);

impl Queue for ItemStore {
    fn expect(&self, _: Expect) {}
    fn isolate(&self, _: Option<Group>) {}
    fn depth(&self) -> usize {
        1
    }
    fn sequences(&self) -> Option<usize> {
        None
    }
}

impl InputQueue<Numbers> for ItemStore {
    fn enqueue(&self, items: Vec<Item<Numbers>>, _: Option<Group>) {
        self.0.lock().extend(items);
    }
    fn check(&self, inputs: &[SizedInput<u32>]) -> Result<(), TaskError> {
        let bad = inputs.iter().any(|sized| sized.input == 9);
        if bad { Err(TaskError::bad_input("input", "nine")) } else { Ok(()) }
    }
    fn close(&self) {}
}

fn handle(queue: Arc<ItemStore>) -> Handle<Numbers> {
    Handle::new(Numbers, queue, Memory::new(QueueBytes::new(1, &[])))
}

fn job(message: &Message) -> (Box<dyn Job>, Arc<ItemStore>) {
    let queue = Arc::new(ItemStore::default());
    let prepared = handle(queue.clone()).preprocess(message, &Files::default()).unwrap();
    (prepared.make().unwrap().enqueue(state("t", None), None), queue)
}

fn enqueued(body: &'static [u8]) -> (Box<dyn Job>, Arc<Outputs<Numbers>>) {
    let (job, queue) = job(&Message { body: body.into(), ..Message::default() });
    let outputs = queue.0.lock()[0].outputs.clone();
    (job, outputs)
}

/// A task whose parts are made from outputs.
fn streamed_outputs(kind: &str, body: &'static [u8]) -> (Box<dyn Job>, Arc<ItemStore>) {
    let mut message = Message { body: body.into(), ..Message::default() };
    (message.properties.kind, message.properties.user_id) = (Some(kind.to_owned()), Some("outputs".into()));
    job(&message)
}

/// A task whose inputs are made one by one. `kind`: "counted" if their number is known, "open" if not.
fn on_demand(kind: &str, body: &'static [u8]) -> (Box<dyn Job>, Arc<ItemStore>) {
    let mut message = Message { body: body.into(), ..Message::default() };
    message.properties.kind = Some(kind.to_owned());
    job(&message)
}

fn wanted(source: &Arc<dyn InputSource>) -> Option<bool> {
    match source.poll_wanted(&mut Context::from_waker(&noop_waker())) {
        Poll::Ready(wanted) => Some(wanted),
        Poll::Pending => None,
    }
}

/// Computes the waiting items, each of which is its own output. Returns true if the task has become done.
fn compute(queue: &ItemStore) -> bool {
    let items = mem::take(&mut *queue.0.lock());
    let done = items.into_iter().map(|item| item.outputs.deliver(item.index, Ok(item.input)));
    done.filter(|is_done| *is_done).count() > 0
}

fn poll(job: &mut Box<dyn Job>, parts: bool) -> Option<JobEvent> {
    match job.poll_event(&mut Context::from_waker(&noop_waker()), parts) {
        Poll::Ready(event) => Some(event),
        Poll::Pending => None,
    }
}

fn texts(unwritten: Option<Unwritten>) -> Vec<String> {
    let parts = unwritten.map(Unwritten::write).unwrap_or_default();
    parts.iter().map(|part| String::from_utf8(part.bytes.to_vec()).unwrap()).collect()
}

fn parts(event: Option<JobEvent>) -> Vec<String> {
    match event {
        Some(JobEvent::Parts(unwritten)) => texts(Some(unwritten)),
        Some(JobEvent::Done(_)) => panic!("it is done"),
        None => Vec::new(),
    }
}

#[test]
fn outputs_are_in_input_order_and_the_job_is_done_once_it_is_notified() {
    let (mut job, outputs) = enqueued(&[5, 6, 7]);
    assert_eq!((job.inputs(), job.tokens()), (3, 6));
    let pass = |number, size| Pass { number, size, tokens: 2 * size };
    for index in [2, 0] {
        outputs.record_pass(Instant::now(), Duration::from_millis(3), pass(1, 2));
        assert!(!outputs.deliver(index, Ok(index as u32)));
    }
    outputs.record_pass(Instant::now(), Duration::from_millis(4), pass(2, 1));
    assert!(outputs.deliver(1, Ok(1)));
    assert!(poll(&mut job, true).is_none(), "not before it is notified");
    outputs.notify();
    let Some(JobEvent::Done(computed)) = poll(&mut job, true) else { panic!("it is done") };
    assert_eq!((computed.compute, computed.last), (Duration::from_millis(7), pass(2, 1)));
    assert_eq!(job.finish().unwrap().bytes, "[0, 1, 2]");
}

#[test]
fn the_first_error_ends_a_task_once() {
    let (job, outputs) = enqueued(&[5, 6]);
    let error = |text: &str| Err(TaskError::new(TaskErrorKind::Internal, text));
    assert!(outputs.deliver(0, error("first")));
    assert!(!outputs.deliver(1, error("second")) && !outputs.deliver(1, Ok(6)));
    assert_eq!(job.finish().unwrap_err().message, "first");
}

#[test]
fn pieces_gather_until_a_part_is_wanted_and_the_last_follow_after_the_end() {
    let (mut job, outputs) = enqueued(&[5, 6]);
    let piece = |input, piece| outputs.record_piece(input, piece, Instant::now());
    piece(0, 1);
    piece(1, 2);
    piece(0, 3);
    assert!(poll(&mut job, false).is_none());
    assert_eq!(parts(poll(&mut job, true)), ["0: [1, 3]", "1: [2]"]);
    assert!(poll(&mut job, true).is_none());
    piece(1, 4);
    assert!(!outputs.deliver(0, Ok(5)) && outputs.deliver(1, Ok(6)));
    outputs.notify();
    assert!(matches!(poll(&mut job, true), Some(JobEvent::Done(_))));
    assert_eq!(texts(job.unwritten()), ["1: [4]"]);
    assert!(job.unwritten().is_none());
}

#[test]
fn many_pieces_are_no_brief_work_and_are_written_in_several_parts() {
    let (job, outputs) = enqueued(&[5, 6]);
    let give =
        |input, count: u32| (0..count).for_each(|piece| outputs.record_piece(input, piece, Instant::now()));
    let is_brief = || job.unwritten().unwrap().is_brief();
    let max_brief = BRIEF_PARTS as u32;
    give(0, max_brief - 1);
    give(1, 1);
    assert!(is_brief(), "parts that were not written are still there");
    give(1, 1);
    assert!(!is_brief());
    texts(job.unwritten());
    give(0, 2 * MAX_PIECES as u32 + 1);
    let all = texts(job.unwritten());
    assert_eq!((all.len(), &*all[2]), (3, "0: [512]"));
}

#[test]
fn other_replies_have_their_turn_while_many_parts_are_written() {
    let (job, outputs) = enqueued(&[5]);
    // Each piece's part takes all of `WRITE_TIME` to write.
    (0..2 * MAX_PIECES).for_each(|_| outputs.record_piece(0, SLOW, Instant::now()));
    assert_eq!([job.unwritten(), job.unwritten(), job.unwritten()].map(texts).map(|it| it.len()), [1, 1, 0]);
}

#[test]
fn a_part_that_cannot_be_written_is_left_out_and_the_reply_has_everything() {
    let (mut job, outputs) = enqueued(&[5, 6]);
    outputs.record_piece(0, BAD, Instant::now());
    outputs.record_piece(1, 1, Instant::now());
    // Printing a panic's backtrace may take all of `WRITE_TIME`, so the second part may need another call.
    let written = [parts(poll(&mut job, true)), texts(job.unwritten())].concat();
    assert_eq!(written, ["1: [1]"]);
    assert!(!outputs.deliver(0, Ok(5)) && outputs.deliver(1, Ok(6)));
    assert_eq!(job.finish().unwrap().bytes, "[5, 6]");
}

#[test]
fn parts_have_each_output_once_in_input_order_and_the_reply_has_all() {
    let (mut job, queue) = streamed_outputs("all", &[5, 6, 7, 8]);
    let outputs = queue.0.lock()[0].outputs.clone();
    let deliver = |index: u32| outputs.deliver(index as usize, Ok(10 + index));
    outputs.record_piece(0, 1, Instant::now());
    assert!(!deliver(1) && !deliver(2));
    assert!(poll(&mut job, true).is_none(), "they wait for the first");
    assert!(!deliver(0));
    assert!(poll(&mut job, false).is_none(), "no part is asked for");
    assert_eq!(parts(poll(&mut job, true)), ["0: 10", "1: 11", "2: 12"]);
    assert!(poll(&mut job, true).is_none());
    assert!(deliver(3));
    outputs.notify();
    assert!(matches!(poll(&mut job, true), Some(JobEvent::Done(_))));
    assert_eq!(texts(job.unwritten()), ["3: 13"]);
    assert!(job.unwritten().is_none());
    assert_eq!(job.finish().unwrap().bytes, "[10, 11, 12, 13]");
}

#[test]
fn only_an_output_that_is_next_in_order_wakes_the_job() {
    use futures_util::task::{ArcWake, waker};
    struct Woken(AtomicBool);
    impl ArcWake for Woken {
        fn wake_by_ref(this: &Arc<Self>) {
            this.0.store(true, Ordering::SeqCst);
        }
    }
    let (mut job, queue) = streamed_outputs("all", &[5, 6, 7]);
    let outputs = queue.0.lock()[0].outputs.clone();
    let woken = Arc::new(Woken(AtomicBool::new(false)));
    let waker = waker(woken.clone());
    assert!(job.poll_event(&mut Context::from_waker(&waker), true).is_pending());
    assert!(!outputs.deliver(1, Ok(6)) && !woken.0.swap(false, Ordering::SeqCst));
    assert!(!outputs.deliver(0, Ok(5)) && woken.0.swap(false, Ordering::SeqCst));
    assert_eq!(parts(poll(&mut job, true)).len(), 2);
}

#[test]
fn outputs_on_demand_are_in_parts_before_all_inputs_are_known() {
    let (mut job, queue) = streamed_outputs("open", &[5, 6]);
    let source = job.source().unwrap();
    assert!(!compute(&queue));
    assert_eq!(parts(poll(&mut job, true)), ["0: 5"]);
    source.pull().unwrap();
    assert!(!compute(&queue));
    assert_eq!(parts(poll(&mut job, true)), ["1: 6"]);
    source.pull().unwrap();
    assert!(matches!(poll(&mut job, true), Some(JobEvent::Done(_))));
    assert_eq!(job.finish().unwrap().bytes, "[5, 6]");
}

#[test]
fn after_an_error_outputs_are_in_no_more_parts() {
    let (mut job, queue) = streamed_outputs("all", &[5, 6, 7]);
    let outputs = queue.0.lock()[0].outputs.clone();
    assert!(!outputs.deliver(0, Ok(5)));
    assert!(job.unwritten().is_some(), "it is not written");
    assert!(outputs.deliver(1, Err(TaskError::internal("no"))));
    assert!(job.unwritten().is_none());
    outputs.notify();
    assert!(matches!(poll(&mut job, true), Some(JobEvent::Done(computed)) if computed.failed));
    assert_eq!(job.finish().unwrap_err().message, "no");
}

#[test]
fn many_outputs_are_no_brief_work_and_an_unwritable_one_is_left_out() {
    let (job, queue) = streamed_outputs("all", &[5; BRIEF_PARTS + 2]);
    let outputs = queue.0.lock()[0].outputs.clone();
    (0..BRIEF_PARTS).for_each(|index| assert!(!outputs.deliver(index, Ok(if index == 0 { BAD } else { 5 }))));
    assert!(job.unwritten().unwrap().is_brief());
    assert!(!outputs.deliver(BRIEF_PARTS, Ok(5)));
    assert!(!job.unwritten().unwrap().is_brief());
    let written: Vec<_> = std::iter::from_fn(|| job.unwritten()).flat_map(|it| texts(Some(it))).collect();
    assert_eq!((written.len(), &*written[0]), (BRIEF_PARTS, "1: 5"));
}

#[test]
fn inputs_that_can_never_be_computed_are_refused_before_they_are_enqueued() {
    let body = &[9][..];
    let message = Message { body: body.into(), ..Message::default() };
    assert!(handle(Arc::default()).preprocess(&message, &Files::default()).is_err());
    let (job, queue) = on_demand("counted", &[5, 9]);
    assert!(job.source().unwrap().pull().is_err());
    assert_eq!(queue.0.lock().len(), 1);
}

#[test]
fn a_task_without_inputs_is_done_when_it_is_enqueued() {
    for mut job in [job(&Message::default()).0, on_demand("counted", &[]).0, on_demand("open", &[]).0] {
        assert!(job.source().is_none());
        assert!(matches!(poll(&mut job, false), Some(JobEvent::Done(_))));
        assert_eq!(job.finish().unwrap().bytes, "[]");
    }
}

#[test]
fn inputs_on_demand_are_made_while_few_wait_until_the_source_is_exhausted() {
    let (mut job, queue) = on_demand("open", &[5, 6, 7, 8]);
    let source = job.source().unwrap();
    // `ItemStore` has no sequences: one input may wait.
    assert_eq!((job.inputs(), job.tokens(), wanted(&source)), (1, 2, None));
    for made in [2, 3, 4] {
        assert!(!compute(&queue));
        assert_eq!(wanted(&source), Some(true));
        source.pull().unwrap();
        assert_eq!((job.inputs(), job.tokens(), wanted(&source)), (made, 2 * made, None));
    }
    assert!(poll(&mut job, false).is_none());
    assert!(!compute(&queue), "nobody knows that there are no more");
    assert_eq!(wanted(&source), Some(true));
    source.pull().unwrap();
    assert_eq!(wanted(&source), Some(false));
    assert!(matches!(poll(&mut job, false), Some(JobEvent::Done(_))));
    assert_eq!(job.finish().unwrap().bytes, "[5, 6, 7, 8]");
}

#[test]
fn a_task_is_done_with_its_last_slice_if_that_is_known_to_be_the_last() {
    let (job, queue) = on_demand("counted", &[5]);
    assert!(job.source().is_none() && compute(&queue));
    let (job, queue) = on_demand("counted", &[5, 6]);
    assert!(!compute(&queue));
    job.source().unwrap().pull().unwrap();
    assert_eq!(wanted(&job.source().unwrap()), Some(false));
    assert!(compute(&queue));
}

#[test]
fn what_is_not_wanted_any_more_is_not_prepared() {
    let (job, queue) = on_demand("open", &[5, 6]);
    let (source, outputs) = (job.source().unwrap(), queue.0.lock()[0].outputs.clone());
    outputs.task.cancel();
    assert_eq!(source.pull().unwrap_err().kind, TaskErrorKind::Cancelled);
    drop(job);
    assert!(source.pull().is_ok() && queue.0.lock().len() == 1);
}

#[test]
fn pull_returns_the_error_of_a_later_input() {
    let (job, _) = on_demand("open", &[5, 0, 6]);
    let source = job.source().unwrap();
    assert_eq!(source.pull().unwrap_err().message, "zero");
}

#[test]
fn a_job_that_is_dropped_is_over() {
    let (job, outputs) = enqueued(&[5]);
    assert!(!outputs.is_over());
    drop(job);
    assert!(outputs.is_over());
}
