//! Tests of the one-pass loop with a model that computes asynchronously or synchronously.

use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker as StdWaker};

use super::super::batch::Network;
use super::super::job::Handle;
use super::super::one_pass::{OnePass, WaitingInputs};
use super::super::run_loop::{Loop as _, Next};
use super::*;
use crate::batching::{Group, QueueBytes};
use crate::model::{
    Dtype, Forward, ForwardError, Inputs, Preprocessed, Processor, SizedInput, TaskErrorKind, Unfit,
};

/// A network whose inputs decide what happens to the batch: 0 fails, 1 breaks the device, 2 runs out of memory unless
/// it is alone, 3 panics, and 4 runs out of memory also if it is alone. Every other input is its own output. Calls are
/// recorded in `log`.
struct Scripted {
    log: Arc<Mutex<Vec<String>>>,
    asynchronous: bool,
}

struct Numbers;

impl Processor for Numbers {
    type Context = ();
    type Input = u32;
    type Piece = ();
    type Output = u32;

    fn routes(&self) -> &[Route] {
        &[]
    }

    fn preprocess(&self, message: &Message) -> Result<Preprocessed<Self>, TaskError> {
        let inputs = message.body.iter().map(|byte| SizedInput::new(u32::from(*byte), 1));
        Ok(((), Inputs::All(inputs.collect())))
    }

    fn finish(&self, (): (), outputs: Vec<u32>) -> Result<Body, TaskError> {
        Ok(Body::json(outputs.into_iter().map(|output| output as u8).collect::<Vec<u8>>()))
    }
}

impl Scripted {
    fn record(&self, what: &str, inputs: &[u32]) {
        self.log.lock().push(format!("{what} {inputs:?}"));
    }
}

impl Forward for Scripted {
    type Input = u32;
    type Output = u32;
    type Pending = Vec<u32>;

    fn submit(&mut self, inputs: &[&u32]) -> Result<Vec<u32>, ForwardError> {
        let inputs: Vec<u32> = inputs.iter().map(|input| **input).collect();
        self.record("submit", &inputs);
        if (inputs.len() > 1 && inputs.contains(&2)) || inputs.contains(&4) {
            return Err(ForwardError::OutOfMemory("full".into()));
        }
        Ok(inputs)
    }

    fn wait(&mut self, inputs: Vec<u32>) -> Result<Vec<Result<u32, TaskError>>, ForwardError> {
        self.record("wait", &inputs);
        match &inputs[..] {
            _ if inputs.contains(&0) => Err(ForwardError::Failed("no".into())),
            _ if inputs.contains(&1) => Err(ForwardError::Device("gone".into())),
            _ if inputs.contains(&3) => panic!("three"),
            _ => Ok(inputs.into_iter().map(Ok).collect()),
        }
    }

    fn is_asynchronous(&self) -> bool {
        self.asynchronous
    }
}

/// An engine whose loop is run turn by turn. A batch holds four inputs.
struct Rig {
    engine: Arc<dyn Engine>,
    waiting: Arc<WaitingInputs<Numbers>>,
    model_loop: OnePass<Numbers, Scripted>,
    notices: mpsc::Receiver<Notice>,
    calls: Arc<Mutex<Vec<String>>>,
    log: Log,
    jobs: Vec<(Arc<TaskState>, Box<dyn Job>)>,
    /// The number of tasks in each `Done` notice.
    done_per_notice: Vec<usize>,
    fault: Option<String>,
    woken: Arc<AtomicBool>,
}

impl Rig {
    fn new(asynchronous: bool) -> Self {
        let (calls, log, woken) = (Arc::default(), Log::default(), Arc::new(AtomicBool::new(false)));
        let (sender, notices) = Notices::new();
        let wake = woken.clone();
        let waker = Box::new(move || wake.store(true, Ordering::SeqCst));
        let waiting = Arc::new(WaitingInputs::new(policy(4), asynchronous, waker));
        let scripted = Scripted { log: Arc::clone(&calls), asynchronous };
        let network = Network::new(scripted, Box::new(log.clone()), sender);
        let model_loop = OnePass::new(network, waiting.clone());
        let engine = Arc::new(Handle::new(Numbers, waiting.clone(), Memory::new(QueueBytes::new(1, &[]))));
        let (jobs, done_per_notice) = (Vec::new(), Vec::new());
        Self { engine, waiting, model_loop, notices, calls, log, jobs, done_per_notice, fault: None, woken }
    }

    fn enqueue(&mut self, inputs: &[u8], group: Option<Group>) {
        let message = Message { body: inputs.to_vec().into(), ..Message::default() };
        let job = self.engine.preprocess(&message, &Files::default()).unwrap().make().unwrap();
        let task = state(&inputs[0].to_string(), None);
        self.jobs.push((task.clone(), job.enqueue(task, group)));
    }

    fn turn(&mut self) -> Next {
        let next = self.model_loop.turn();
        while let Ok(notice) = self.notices.try_recv() {
            match notice {
                Notice::Done(tasks) => {
                    self.done_per_notice.push(tasks.len());
                    tasks.iter().for_each(|task| task.notify());
                }
                Notice::Fault(fault) => self.fault = Some(fault),
            }
        }
        next
    }

    fn run(&mut self) -> Next {
        loop {
            match self.turn() {
                Next::Again => {}
                next => return next,
            }
        }
    }

    /// Enqueues a task for each input of these batches, and then runs the loop until it sleeps.
    fn after(asynchronous: bool, batches: &[&[u8]]) -> Self {
        let mut rig = Self::new(asynchronous);
        // One task counts as on its way, so that the loop sees no partial batch before all are enqueued.
        rig.engine.queue().expect(Expect::More);
        for batch in batches {
            for input in *batch {
                rig.enqueue(&[*input], None);
            }
        }
        rig.engine.queue().expect(Expect::Less);
        rig.run();
        rig
    }

    fn calls(&self) -> Vec<String> {
        std::mem::take(&mut self.calls.lock())
    }

    /// Each task's answer: its bytes, or an error; none if it has no answer.
    fn answers(&mut self) -> Vec<Option<Result<Vec<u8>, TaskError>>> {
        let mut context = Context::from_waker(StdWaker::noop());
        let answer = |(_, mut job): (_, Box<dyn Job>)| match job.poll_event(&mut context, false) {
            Poll::Ready(JobEvent::Done(_)) => Some(job.finish().map(|body| body.bytes.to_vec())),
            _ => None,
        };
        std::mem::take(&mut self.jobs).into_iter().map(answer).collect()
    }
}

const FULL: &[u8] = &[10, 11, 12, 13];
const NEXT: &[u8] = &[20, 21, 22, 23];

#[test]
fn the_next_batch_is_submitted_before_the_last_is_waited_for() {
    let mut rig = Rig::after(true, &[FULL, NEXT, &[30]]);
    let order = [
        "submit [10, 11, 12, 13]",
        "submit [20, 21, 22, 23]",
        "wait [10, 11, 12, 13]",
        "wait [20, 21, 22, 23]",
        "submit [30]",
        "wait [30]",
    ];
    assert_eq!(rig.calls(), order, "a partial batch may still grow while the device computes");
    assert_eq!(rig.done_per_notice, [4, 4, 1]);
    let on_device = rig.log.on_device();
    assert_eq!(on_device[1].len(), 8, "both batches are on the device: {on_device:?}");
    assert!(rig.answers().iter().all(|answer| matches!(answer, Some(Ok(_)))));
}

#[test]
fn a_synchronous_model_is_given_one_batch_at_a_time() {
    let rig = Rig::after(false, &[FULL, NEXT]);
    let order = [
        "submit [10, 11, 12, 13]",
        "wait [10, 11, 12, 13]",
        "submit [20, 21, 22, 23]",
        "wait [20, 21, 22, 23]",
    ];
    assert_eq!(rig.calls(), order);
}

#[test]
fn a_bad_input_and_a_panic_cost_their_batch_mates_nothing() {
    for asynchronous in [false, true] {
        for bad in [0, 3] {
            let mut rig = Rig::after(asynchronous, &[&[10, 11, bad, 12], NEXT]);
            let answers = rig.answers();
            let good: Vec<_> = answers.iter().filter(|answer| matches!(answer, Some(Ok(_)))).collect();
            assert_eq!(good.len(), 7, "{answers:?}");
            assert!(answers[2].as_ref().is_some_and(Result::is_err), "{answers:?}");
            assert_eq!(rig.fault, None);
        }
    }
}

#[test]
fn the_other_bad_inputs_of_a_task_that_has_failed_are_not_computed() {
    let mut rig = Rig::new(false);
    rig.engine.queue().expect(Expect::More);
    rig.enqueue(&[0, 0, 0], None);
    rig.enqueue(&[10], None);
    rig.engine.queue().expect(Expect::Less);
    rig.run();
    let submitted: Vec<_> = rig.calls().into_iter().filter(|call| call.starts_with("submit")).collect();
    assert_eq!(submitted, ["submit [0, 0, 0, 10]", "submit [0, 0]", "submit [0]", "submit [10]"]);
    let answers = rig.answers();
    assert!(matches!(&answers[..], [Some(Err(_)), Some(Ok(_))]), "{answers:?}");
}

#[test]
fn a_batch_out_of_memory_is_halved_after_the_one_before_it() {
    let mut rig = Rig::after(true, &[FULL, &[20, 2, 21, 22], &[30, 31, 32, 33]]);
    let calls = rig.calls();
    let order = [
        "submit [10, 11, 12, 13]",
        "submit [20, 2, 21, 22]",
        "wait [10, 11, 12, 13]",
        "submit [20, 2]",
        "submit [20]",
        "wait [20]",
        "submit [2]",
        "wait [2]",
        "submit [21, 22]",
    ];
    assert_eq!(calls[..order.len()], order);
    assert!(
        calls.contains(&"submit [30]".to_owned()),
        "half of the two inputs that did not fit is the new bound: {calls:?}"
    );
    assert!(rig.answers().iter().all(|answer| matches!(answer, Some(Ok(_)))));
    assert_eq!(
        rig.done_per_notice[..3],
        [4, 1, 1],
        "each half is reported when it is done: the next may end the process"
    );
}

#[test]
fn later_batches_are_smaller_only_if_the_memory_is_too_small_for_a_batch_and_not_for_one_input() {
    for (first, second) in [([10, 4, 11, 12], "submit [20, 21, 22, 23]"), ([4, 4, 4, 4], "submit [20]")] {
        let mut rig = Rig::after(false, &[&first, NEXT]);
        let calls = rig.calls();
        assert!(calls.contains(&second.to_owned()), "{first:?}: {calls:?}");
        let kinds: Vec<_> =
            rig.answers().into_iter().map(|answer| answer.unwrap().err().map(|it| it.kind)).collect();
        let expected = first.iter().chain(NEXT).map(|it| (*it == 4).then_some(TaskErrorKind::OutOfMemory));
        assert_eq!(kinds, expected.collect::<Vec<_>>());
    }
}

#[test]
fn after_a_device_failure_nothing_is_answered() {
    let mut rig = Rig::after(true, &[FULL, &[1, 21, 22, 23], &[30, 31, 32, 33]]);
    assert_eq!(rig.fault.as_deref(), Some("gone"));
    assert!(rig.answers()[4..].iter().all(Option::is_none));
    let failed = Report::PassEnded { inputs: 4, tokens: 4, fault: true };
    let reports = rig.log.take();
    assert!(reports.contains(&failed), "{reports:?}");
    let last = reports
        .iter()
        .rev()
        .find_map(|report| if let Report::OnDevice(it) = report { Some(it) } else { None });
    assert_eq!(last.map(|tasks| &*tasks[0]), Some("1"), "the launcher knows the tasks on the device");
}

#[test]
fn withdrawn_and_cancelled_inputs_are_not_computed() {
    let mut rig = Rig::new(false);
    rig.engine.queue().expect(Expect::More);
    for input in [10, 11, 12] {
        rig.enqueue(&[input], None);
    }
    assert!(rig.jobs[0].0.withdraw());
    rig.jobs[1].0.cancel();
    rig.engine.queue().expect(Expect::Less);
    rig.run();
    assert_eq!(rig.calls(), ["submit [12]", "wait [12]"]);
    assert!(!rig.jobs[2].0.withdraw(), "it was on the device");
    let answers = rig.answers();
    assert_eq!(answers[0], None);
    let error = answers[1].as_ref().unwrap().as_ref().unwrap_err();
    assert_eq!(error.kind, TaskErrorKind::Cancelled);
}

#[test]
fn an_idle_device_waits_for_expected_tasks_and_wakes_after_the_last() {
    let mut rig = Rig::new(false);
    assert_eq!(rig.run(), Next::Sleep(None));
    rig.engine.queue().expect(Expect::More);
    rig.engine.queue().expect(Expect::More);
    rig.enqueue(&[10], None);
    assert!(rig.woken.swap(false, Ordering::SeqCst), "it must learn when this one is due");
    rig.engine.queue().expect(Expect::Less);
    assert!(matches!(rig.run(), Next::Sleep(Some(_))));
    rig.enqueue(&[11], None);
    assert!(!rig.woken.load(Ordering::SeqCst), "a second task makes nothing due earlier");
    rig.engine.queue().expect(Expect::Less);
    assert!(rig.woken.load(Ordering::SeqCst));
    rig.run();
    assert_eq!(rig.calls(), ["submit [10, 11]", "wait [10, 11]"]);
}

#[test]
fn a_task_enqueued_just_before_the_sleep_is_noticed() {
    let mut rig = Rig::new(false);
    rig.engine.queue().expect(Expect::More);
    rig.engine.queue().expect(Expect::More);
    rig.enqueue(&[10], None);
    rig.engine.queue().expect(Expect::Less);
    // As if the loop had read the queue before this task was enqueued: it has no time at which to wake.
    assert!(!rig.waiting.sleep(None, now()), "10 is due in 2 ms, whether another task arrives or not");
    assert!(matches!(rig.run(), Next::Sleep(Some(_))));
}

#[test]
fn isolated_tasks_run_first_and_alone_and_the_others_wait() {
    let mut rig = Rig::new(true);
    rig.engine.queue().expect(Expect::More);
    rig.enqueue(&[10], None);
    rig.engine.queue().isolate(Some(1));
    rig.enqueue(&[20], Some(1));
    rig.enqueue(&[21], Some(1));
    rig.engine.queue().expect(Expect::Less);
    rig.run();
    assert_eq!(rig.calls(), ["submit [20, 21]", "wait [20, 21]"]);
    rig.woken.store(false, Ordering::SeqCst);
    rig.engine.queue().isolate(None);
    assert!(rig.woken.load(Ordering::SeqCst));
    rig.run();
    assert_eq!(rig.calls(), ["submit [10]", "wait [10]"]);
}

#[test]
fn tasks_of_an_earlier_group_are_computed_with_all_others() {
    let mut rig = Rig::new(true);
    rig.engine.queue().isolate(Some(1));
    rig.enqueue(&[20], Some(1));
    rig.engine.queue().isolate(None);
    rig.enqueue(&[10], None);
    rig.enqueue(&[21], Some(1));
    rig.run();
    assert_eq!(rig.calls(), ["submit [20, 10, 21]", "wait [20, 10, 21]"]);
    rig.engine.queue().isolate(Some(2));
    rig.enqueue(&[22], Some(1));
    rig.enqueue(&[30], Some(2));
    rig.run();
    assert_eq!(rig.calls(), ["submit [30]", "wait [30]"]);
}

#[tokio::test(start_paused = true)]
async fn idleness_is_reported_after_a_delay() {
    let mut rig = Rig::after(false, &[FULL]);
    assert!(!rig.log.take().contains(&Report::IdleReported));
    tokio::time::advance(Duration::from_millis(10)).await;
    assert_eq!(rig.run(), Next::Sleep(None));
    assert_eq!(rig.log.take(), [Report::IdleReported]);
}

/// Sets the flag when it is dropped.
struct Dropped(&'static AtomicBool);

static DROPPED: AtomicBool = AtomicBool::new(false);

impl Drop for Dropped {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

impl Forward for Dropped {
    type Input = u32;
    type Output = u32;
    type Pending = ();

    fn submit(&mut self, _: &[&u32]) -> Result<(), ForwardError> {
        unreachable!("it is given nothing")
    }

    fn wait(&mut self, (): ()) -> Result<Vec<Result<u32, TaskError>>, ForwardError> {
        unreachable!("it is given nothing")
    }
}

#[test]
fn a_model_that_has_worked_is_never_dropped() {
    let starter = crate::engine::one_pass(|_, _| Ok((Numbers, Dropped(&DROPPED))));
    let (thread, loading) = starter.start_joined(setup("held", 4, &Log::default()));
    let loaded = loading.blocking_recv().unwrap().ok().unwrap();
    drop(loaded.engine);
    thread.join().unwrap();
    assert!(!DROPPED.load(Ordering::SeqCst));
}

/// The number formats in which a model is loaded, and the one that it has in the end. It refuses the first, and computes
/// something else than in f32 in the second.
fn tried(spec: LoadSpec) -> (Vec<Dtype>, Result<Dtype, LoadError>) {
    let tried: Arc<Mutex<Vec<Dtype>>> = Arc::default();
    let record = tried.clone();
    let starter = crate::engine::one_pass(move |spec, _| {
        let mut tried = record.lock();
        tried.push(spec.dtype);
        let (reason, device, model) = ("no".to_owned(), spec.device.clone(), spec.source.clone());
        match tried.len() {
            1 => Err(LoadError::Unsupported { model, reason }),
            2 => Err(LoadError::Unfit { device, why: Unfit::WrongResult, reason }),
            _ => Ok((Numbers, Dropped(&DROPPED))),
        }
    });
    let setup = Setup { spec, ..setup("own", 4, &Log::default()) };
    let (thread, loading) = starter.start_joined(setup);
    let loaded = loading.blocking_recv().unwrap().map(|loaded| loaded.dtype);
    thread.join().unwrap();
    (std::mem::take(&mut *tried.lock()), loaded)
}

#[test]
fn the_first_number_format_is_chosen_that_a_model_can_have_and_computes_well_enough() {
    let chosen = LoadSpec { is_dtype_auto: true, ..LoadSpec::new("own") };
    let candidates: Vec<Dtype> = chosen.candidates().iter().map(|spec| spec.dtype).collect();
    let (all, loaded) = tried(chosen);
    assert_eq!(all, candidates[..3.min(candidates.len())]);
    match candidates.get(2) {
        Some(third) => assert_eq!(loaded.unwrap(), *third),
        // This CPU has fewer that are worth trying.
        None => assert!(loaded.is_err()),
    }
    let (all, loaded) = tried(LoadSpec { dtype: Dtype::Bf16, ..LoadSpec::new("own") });
    assert!(all == [Dtype::Bf16] && matches!(loaded, Err(LoadError::Unsupported { .. })), "{all:?}");
}
