//! A model that computes beside its thread, and what the thread does with it.

use std::io::{self, Read as _};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use super::super::ticket::Computed;
use super::*;
use crate::config::Dtype;
use crate::model::{ForwardError, Prepared, Step, Steps};
use crate::protocol::control::{Event, TaskName, decode};
use crate::protocol::{Message, TaskError};

/// Computes beside us: a batch is what its inputs say. 0 fails, 1 kills the device, 2 finds no memory,
/// 3 panics; a batch with 4 is computed on our thread; others give themselves.
struct Aside(Arc<Mutex<Vec<String>>>);
struct Numbers;

thread_local! {
    static LOG: Arc<Mutex<Vec<String>>> = Arc::default();
}

impl Codec for Numbers {
    type Request = ();
    type Input = u32;
    type Output = u32;

    fn endpoint(&self) -> &'static str {
        "/v1/numbers"
    }

    fn prepare(&self, _: &Message) -> Result<Prepared<Self>, TaskError> {
        unreachable!("inputs are made by the tests")
    }

    fn respond(&self, (): (), _: Vec<u32>) -> Result<Vec<u8>, TaskError> {
        unreachable!("outputs are read by the tests")
    }
}

impl Aside {
    fn say(&self, what: &str, inputs: &[u32]) {
        self.0.lock().unwrap().push(format!("{what} {inputs:?}"));
    }
}

fn result(inputs: &[u32]) -> Result<Steps<Aside>, ForwardError> {
    match inputs {
        _ if inputs.contains(&0) => Err(ForwardError::Failed("no".into())),
        _ if inputs.contains(&1) => Err(ForwardError::Device("gone".into())),
        _ if inputs.contains(&3) => panic!("three"),
        _ => Ok(inputs.iter().map(|input| Ok(Step::Done(*input))).collect()),
    }
}

impl Model for Aside {
    type Codec = Numbers;

    fn load(_: &LoadSpec) -> Result<(Self, Numbers), LoadError> {
        Ok((Self(LOG.with(Arc::clone)), Numbers))
    }

    fn device(&self) -> String {
        "GPU-1".into()
    }

    fn forward(&mut self, inputs: &[&u32]) -> Result<Steps<Self>, ForwardError> {
        let inputs: Vec<u32> = inputs.iter().map(|input| **input).collect();
        self.say("forward", &inputs);
        result(&inputs)
    }

    fn computes_aside(&self) -> bool {
        true
    }

    fn begin(&mut self, inputs: &[&u32]) -> Result<Option<Rest<Self>>, ForwardError> {
        let inputs: Vec<u32> = inputs.iter().map(|input| **input).collect();
        self.say("begin", &inputs);
        if inputs.len() > 1 && inputs.contains(&2) {
            return Err(ForwardError::OutOfMemory("full".into()));
        }
        if inputs.contains(&4) {
            return Ok(None);
        }
        Ok(Some(Box::new(move |model: &mut Self| {
            model.say("wait", &inputs);
            result(&inputs)
        })))
    }
}

struct Ran {
    log: Vec<String>,
    /// What the launcher was told to be on the device, time after time.
    told: Vec<Vec<String>>,
    said: Vec<Done<u32>>,
    /// Tasks that were told together, batch by batch.
    together: Vec<usize>,
    tasks: Vec<Option<Computed<u32>>>,
}

impl Ran {
    /// What each task was answered: its output, an error, or nothing.
    fn answers(&self) -> Vec<Option<Result<u32, String>>> {
        let answer = |it: &Computed<u32>| match &it.outputs {
            Ok(outputs) => Ok(outputs[0]),
            Err(error) => Err(error.message.clone()),
        };
        self.tasks.iter().map(|it| it.as_ref().map(answer)).collect()
    }
}

fn spec() -> LoadSpec {
    LoadSpec {
        source: "aside".into(),
        served_names: Vec::new(),
        device: "cpu".into(),
        max_inputs: 1,
        dtype: Dtype::F32,
    }
}

/// Has all these batches at hand at once, a task to an input.
fn run(batches: &[&[u32]]) -> Ran {
    LOG.with(|log| log.lock().unwrap().clear());
    let (mut lines, out) = io::pipe().unwrap();
    let reporter = Reporter::start(out).unwrap();
    let (forward, loaded) = Forward::<Aside>::load(&spec(), 0.0, reporter).unwrap();
    assert_eq!(loaded.depth, 3);
    let (send, queued) = sync_channel(8);
    let (done, mut said) = mpsc::channel(8);
    let mut waiting = Vec::new();
    for batch in batches {
        let item = |input: &u32| {
            let name = TaskName { id: input.to_string(), fingerprint: input.to_string() };
            let ticket = Arc::new(Ticket::new(name, None));
            waiting.push(ticket.expect(1));
            Item { input: *input, tokens: 1, index: 0, ticket }
        };
        let inputs: Vec<_> = batch.iter().map(item).collect();
        send.try_send(Batch { tokens: inputs.len(), inputs }).unwrap();
    }
    drop(send);
    let traces = Traces::default();
    let mut service = Service { forward, done, traces, number: 0, ahead: None, freed: Instant::now() };
    service.serve(queued);
    service.forward.tell_idle();
    drop(service);
    let mut text = String::new();
    lines.read_to_string(&mut text).unwrap();
    let told = text.lines().map(|line| match decode(line).unwrap() {
        Event::Forward { tasks } => tasks.into_iter().map(|task| task.id).collect(),
        other => panic!("{other:?}"),
    });
    let told = told.collect();
    let (mut all, mut together) = (Vec::new(), Vec::new());
    while let Ok(mut one) = said.try_recv() {
        if let Done::Computed { complete, .. } = &mut one {
            together.push(complete.len());
            complete.drain(..).for_each(Complete::tell);
        }
        all.push(one);
    }
    let log = LOG.with(|log| log.lock().unwrap().clone());
    let tasks = waiting.iter_mut().map(|task| task.try_recv().ok()).collect();
    Ran { log, told, said: all, together, tasks }
}

/// Says when it is given back.
struct Held(&'static AtomicBool);

static GIVEN_BACK: AtomicBool = AtomicBool::new(false);

impl Drop for Held {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

impl Model for Held {
    type Codec = Numbers;

    fn load(_: &LoadSpec) -> Result<(Self, Numbers), LoadError> {
        Ok((Self(&GIVEN_BACK), Numbers))
    }

    fn device(&self) -> String {
        "GPU-1".into()
    }

    fn forward(&mut self, _: &[&u32]) -> Result<Steps<Self>, ForwardError> {
        unreachable!("it is given nothing")
    }
}

#[test]
fn a_model_that_has_worked_is_left_to_the_end_of_the_process() {
    let reporter = Reporter::start(io::sink()).unwrap();
    let mut engine = start::<Held>((spec(), 0.0), reporter, Traces::default()).unwrap();
    assert!(engine.loaded.blocking_recv().unwrap().is_ok());
    drop(engine.batches);
    assert!(engine.done.blocking_recv().is_none(), "the thread has ended");
    assert!(!GIVEN_BACK.load(Ordering::SeqCst));
}

#[test]
fn the_device_has_its_next_batch_before_the_last_is_waited_for() {
    let ran = run(&[&[10, 11], &[20], &[30]]);
    let order = ["begin [10, 11]", "begin [20]", "wait [10, 11]", "begin [30]", "wait [20]", "wait [30]"];
    assert_eq!(ran.log, order);
    assert_eq!(ran.answers(), [10, 11, 20, 30].map(|output| Some(Ok(output))));
    assert!(ran.said.iter().all(|done| matches!(done, Done::Computed { .. })), "{:?}", ran.said);
    let inputs: Vec<_> = ran.tasks.iter().flatten().map(|task| task.last.size).collect();
    assert_eq!(inputs, [2, 2, 1, 1]);
    assert_eq!(ran.together, [2, 1, 1]);
}

#[test]
fn the_launcher_is_told_what_is_on_the_device() {
    let ran = run(&[&[10, 11], &[20], &[30, 4], &[40]]);
    let told: [&[&str]; 5] = [&["10", "11"], &["10", "11", "20"], &["20", "30", "4"], &["40"], &[]];
    assert_eq!(ran.told, told);
    let ran = run(&[&[10], &[20, 2]]);
    let told: [&[&str]; 5] = [&["10"], &["10", "20", "2"], &["20"], &["2"], &[]];
    assert_eq!(ran.told, told);
}

#[test]
fn a_bad_input_and_a_panic_cost_their_batch_mates_nothing() {
    for bad in [0, 3] {
        let ran = run(&[&[10, bad], &[20]]);
        let halves = ["forward [10]".to_owned(), format!("forward [{bad}]")];
        assert_eq!(ran.log[3..5], halves, "{:?}", ran.log);
        let answers = ran.answers();
        assert_eq!((&answers[0], &answers[2]), (&Some(Ok(10)), &Some(Ok(20))));
        assert!(answers[1].as_ref().is_some_and(Result::is_err), "{answers:?}");
    }
}

#[test]
fn a_batch_that_finds_no_memory_waits_for_the_one_before_it_and_is_halved() {
    let ran = run(&[&[10], &[20, 2], &[30]]);
    let order = ["begin [10]", "begin [20, 2]", "wait [10]", "forward [20]", "forward [2]", "begin [30]"];
    assert_eq!(ran.log[..6], order);
    assert_eq!(ran.answers(), [10, 20, 2, 30].map(|output| Some(Ok(output))));
    let limits = ran.said.iter().map(|done| match done {
        Done::Computed { too_large, .. } => *too_large,
        other => panic!("{other:?}"),
    });
    assert_eq!(limits.collect::<Vec<_>>(), [None, Some(2), None]);
    assert_eq!(ran.together, [1, 0, 1], "halves are told as they are done: the next may end the process");
}

#[test]
fn a_device_that_fails_answers_nothing_more() {
    let ran = run(&[&[10], &[1], &[30], &[40]]);
    assert!(matches!(&ran.said[..], [Done::Computed { .. }, Done::Fault(words)] if words == "gone"));
    assert_eq!(ran.answers()[1..], [None, None, None]);
}
