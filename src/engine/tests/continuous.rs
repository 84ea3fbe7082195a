//! Tests of the loop of sequences with the `script` model, in paused time: sequences join, leave, fail, and are
//! cancelled between steps.

use std::future::poll_fn;

use serde_json::{Value, json};
use tokio::time::Instant;

use super::*;
use crate::batching::Group;
use crate::model::TaskErrorKind;
use crate::model::testing::script;

pub(super) struct Rig {
    pub(super) engine: Arc<dyn Engine>,
    pub(super) log: Log,
    pub(super) fault: Arc<Mutex<Option<String>>>,
    begun: Instant,
}

/// The outcome of a task. Times are in milliseconds since the start of the rig.
#[derive(Debug)]
pub(super) struct Ended {
    result: Result<Value, TaskError>,
    pub(super) parts: Vec<(u64, String)>,
    pub(super) at: u64,
    pub(super) computed: Computed,
}

impl Ended {
    pub(super) fn body(&self) -> &Value {
        self.result.as_ref().unwrap()
    }

    pub(super) fn text(&self) -> &str {
        self.body()["text"].as_str().unwrap()
    }

    pub(super) fn error(&self) -> TaskErrorKind {
        self.result.as_ref().unwrap_err().kind
    }
}

impl Rig {
    pub(super) fn new(source: &str, max_tokens: usize) -> Self {
        let starter = crate::engine::continuous(script::load);
        Self::of(&starter, |log| setup(source, max_tokens, log))
    }

    pub(super) fn of(starter: &Starter, setup: impl Fn(&Log) -> Setup) -> Self {
        let (log, fault) = (Log::default(), Arc::new(Mutex::new(None)));
        let Loaded { engine, mut notices, .. } =
            starter.start_here(setup(&log)).unwrap_or_else(|error| panic!("{error}"));
        let received = fault.clone();
        tokio::task::spawn_local(async move {
            while let Some(notice) = notices.recv().await {
                match notice {
                    Notice::Done(tasks) => tasks.iter().for_each(|task| task.notify()),
                    Notice::Fault(error) => *received.lock() = Some(error),
                }
            }
        });
        Self { engine, log, fault, begun: Instant::now() }
    }

    pub(super) fn ms(&self) -> u64 {
        self.begun.elapsed().as_millis() as u64
    }

    pub(super) async fn run(&self, id: &str, script: Value) -> Ended {
        self.run_as(state(id, None), script, None).await
    }

    /// Runs a task, and takes its parts every 50 ms, as a worker does.
    pub(super) async fn run_as(&self, task: Arc<TaskState>, script: Value, group: Option<Group>) -> Ended {
        let message = Message { body: script.to_string().into(), ..Message::default() };
        self.run_message(message, task, group).await
    }

    pub(super) async fn run_message(
        &self,
        message: Message,
        task: Arc<TaskState>,
        group: Option<Group>,
    ) -> Ended {
        let prepared = self.engine.preprocess(&message, &Files::default()).and_then(Prepared::make);
        let mut job = match prepared {
            Ok(job) => job.enqueue(task, group),
            Err(error) => return self.ended(Err(error), Vec::new(), Computed::default()),
        };
        let (mut parts, mut next) = (Vec::new(), Instant::now());
        let mut write = |unwritten: Unwritten| {
            let text = |body: Body| String::from_utf8(body.bytes.to_vec()).unwrap();
            parts.extend(unwritten.write().into_iter().map(|body| (self.ms(), text(body))));
        };
        let computed = loop {
            let ready = next <= Instant::now();
            let event = tokio::select! {
                event = poll_fn(|context| job.poll_event(context, ready)) => event,
                () = tokio::time::sleep_until(next), if !ready => continue,
            };
            match event {
                JobEvent::Done(computed) => break computed,
                JobEvent::Parts(unwritten) => {
                    next = Instant::now() + Duration::from_millis(50);
                    write(unwritten);
                }
            }
        };
        while let Some(unwritten) = job.unwritten() {
            write(unwritten);
        }
        let result = job.finish().map(|body| serde_json::from_slice(&body.bytes).unwrap());
        self.ended(result, parts, computed)
    }

    fn ended(
        &self,
        result: Result<Value, TaskError>,
        parts: Vec<(u64, String)>,
        computed: Computed,
    ) -> Ended {
        Ended { result, parts, at: self.ms(), computed }
    }
}

/// A sequence of `prompt` and `max_tokens` tokens, whose steps take 10 ms.
pub(super) fn sequence(prompt: usize, max_tokens: usize) -> Value {
    json!({"prompt": prompt, "max_tokens": max_tokens, "step_ms": 10})
}

pub(super) fn with(mut script: Value, more: Value) -> Value {
    let (Some(script_fields), Value::Object(more)) = (script.as_object_mut(), more) else {
        panic!("objects")
    };
    script_fields.extend(more);
    script
}

pub(super) fn words(count: usize) -> String {
    (0..count).map(|word| format!("{word} ")).collect()
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_sequence_joins_a_running_batch_and_leaves_without_the_others() {
    let rig = Rig::new("script", 64);
    let late = async {
        rig.log.passes(4).await;
        rig.run("late", sequence(8, 2)).await
    };
    let (long, late) = tokio::join!(rig.run("long", sequence(8, 20)), late);
    assert_eq!((long.text(), late.text()), (&*words(20), &*words(2)));
    assert_eq!(long.at, 200, "it did not wait for the late one");
    assert!(late.at < 90, "{}", late.at);
    assert_eq!(rig.log.on_device(), [vec!["long"], vec!["long", "late"], vec!["long"]]);
    assert_eq!((long.computed.compute, late.computed.last.size), (Duration::from_millis(200), 2));
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_long_prompt_goes_in_chunks_and_holds_up_no_answer() {
    let rig = Rig::new("script", 16);
    let (answer, prompt) = tokio::join!(rig.run("a", sequence(4, 12)), rig.run("b", sequence(90, 3)));
    assert_eq!((answer.at, answer.text()), (120, &*words(12)));
    // 12 tokens fit beside a's prompt, then 15 beside each token of its answer: 6 more steps.
    assert_eq!((prompt.at, prompt.text()), (90, &*words(3)));
    for report in rig.log.take() {
        assert!(!matches!(report, Report::PassEnded { tokens: 17.., .. }), "{report:?}");
    }
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn the_first_part_is_immediate_and_later_ones_follow_every_50_ms() {
    let rig = Rig::new("script", 64);
    let ended = rig.run("a", with(sequence(4, 17), json!({"stream": true}))).await;
    let times: Vec<u64> = ended.parts.iter().map(|(at, _)| *at).collect();
    assert_eq!(times, [10, 60, 110, 160, 170]);
    let text: String = ended
        .parts
        .iter()
        .map(|(_, part)| {
            let part: Value = serde_json::from_str(part).unwrap();
            part["text"].as_str().unwrap().to_owned()
        })
        .collect();
    assert_eq!(text, ended.text());
    assert!(ended.computed.first_piece.is_some());
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn unwanted_sequences_end_between_two_steps_and_free_their_slots() {
    let rig = Rig::new("script?sequences=3", 64);
    let (cancelled, withdrawn) = (state("cancelled", None), state("withdrawn", None));
    let deadline = Some(Duration::from_millis(55));
    let end = async {
        rig.log.passes(3).await;
        cancelled.cancel();
        assert!(withdrawn.withdraw(), "it is handed back though it runs");
        // These two run in the slots that became free.
        tokio::join!(rig.run("x", sequence(1, 1)), rig.run("y", sequence(1, 1)))
    };
    let (gone, late, (x, y), ()) = tokio::join!(
        rig.run_as(cancelled.clone(), sequence(4, 100), None),
        rig.run_as(state("late", deadline), sequence(4, 100), None),
        end,
        async {
            let run = rig.run_as(withdrawn.clone(), sequence(4, 100), None);
            let _ = tokio::time::timeout(Duration::from_secs(5), run).await.expect_err("it is not answered");
        },
    );
    assert_eq!((gone.error(), gone.at), (TaskErrorKind::Cancelled, 40));
    assert_eq!((late.error(), late.at), (TaskErrorKind::Expired, 60));
    assert_eq!((x.at, y.at), (50, 50));
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_sequence_waits_for_room_and_one_that_never_fits_is_refused() {
    let rig = Rig::new("script?tokens=104&context=104", 64);
    let (first, second) = tokio::join!(rig.run("a", sequence(30, 30)), rig.run("b", sequence(30, 30)));
    assert_eq!((first.at, second.at), (300, 600), "not both at once: they have 120 tokens together");
    let refused = rig.run("never", sequence(99, 2)).await;
    assert_eq!(refused.error(), TaskErrorKind::BadInput, "it would fit only without the probe");
    let refused = rig.run("c", sequence(90, 14)).await;
    let error = refused.result.unwrap_err();
    assert_eq!(error.kind, TaskErrorKind::BadInput);
    assert!(["90", "14", "100"].iter().all(|number| error.message.contains(number)));
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_failing_sequence_costs_the_others_nothing() {
    for (how, kind) in
        [("error", TaskErrorKind::Fault), ("row", TaskErrorKind::Fault), ("panic", TaskErrorKind::Fault)]
    {
        let rig = Rig::new("script?faults", 64);
        let bad = with(sequence(4, 20), json!({"fail": how, "at": 5}));
        let (a, bad, b) =
            tokio::join!(rig.run("a", sequence(4, 10)), rig.run("bad", bad), rig.run("b", sequence(4, 10)));
        assert_eq!(bad.error(), kind, "{how}");
        assert_eq!((a.text(), b.text()), (&*words(10), &*words(10)), "{how}");
        assert_eq!(*rig.fault.lock(), None);
    }
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_step_out_of_memory_is_halved_and_later_steps_are_smaller() {
    let rig = Rig::new("script?faults", 64);
    let bad = with(sequence(40, 4), json!({"fail": "oom", "fits": 12}));
    let (a, bad) = tokio::join!(rig.run("a", sequence(4, 10)), rig.run("bad", bad));
    assert_eq!((a.text(), bad.text()), (&*words(10), &*words(4)));
    let tight = rig.run("tight", with(sequence(4, 4), json!({"fail": "oom", "fits": 0}))).await;
    assert_eq!(tight.error(), TaskErrorKind::OutOfMemory);
    assert_eq!(*rig.fault.lock(), None);
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn after_a_device_failure_nothing_is_answered_and_tasks_stay_announced() {
    let rig = Rig::new("script?faults", 64);
    let bad = with(sequence(4, 20), json!({"fail": "device", "at": 3}));
    let both = async { tokio::join!(rig.run("a", sequence(4, 10)), rig.run("bad", bad)) };
    assert!(tokio::time::timeout(Duration::from_secs(60), both).await.is_err());
    assert_eq!(rig.fault.lock().as_deref(), Some("as the task asked for"));
    let reports = rig.log.take();
    let both = vec!["a".to_owned(), "bad".to_owned()];
    assert!(reports.contains(&Report::OnDevice(both)) && !reports.contains(&Report::Idle), "{reports:?}");
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn isolated_sequences_run_alone_and_interrupted_ones_give_the_same_text() {
    let rig = Rig::new("script?sequences=2", 64);
    let ordinary = |id: &'static str| rig.run(id, with(sequence(4, 10), json!({"stream": true})));
    let isolated = async {
        rig.log.passes(3).await;
        rig.engine.queue().isolate(Some(1));
        let ended = rig.run_as(state("suspect", None), sequence(4, 5), Some(1)).await;
        rig.engine.queue().isolate(None);
        ended
    };
    let (a, b, suspect) = tokio::join!(ordinary("a"), ordinary("b"), isolated);
    assert_eq!(suspect.at, 90);
    for ended in [&a, &b] {
        let parts: String = ended.parts.iter().map(|(_, part)| part.as_str()).collect();
        let words_once = (0..10).filter(|word| parts.matches(&format!("{word} ")).count() == 1).count();
        assert_eq!((ended.text(), words_once), (&*words(10), 10), "no piece twice: {parts}");
    }
    let on_device = rig.log.on_device();
    assert!(on_device.contains(&vec!["suspect".to_owned()]), "{on_device:?}");
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn sixteen_run_at_once_and_the_seventeenth_joins_when_one_leaves() {
    let rig = Rig::new("script", 64);
    let names: Vec<String> = (0..17).map(|n| n.to_string()).collect();
    let runs = names.iter().enumerate().map(|(n, id)| rig.run(id, sequence(2, 10 + n)));
    let ended = futures_util::future::join_all(runs).await;
    let at: Vec<u64> = ended.iter().map(|ended| ended.at).collect();
    assert_eq!(at[0], 100);
    assert_eq!(at[15], 250, "each runs as if it were alone");
    assert_eq!(at[16], 360, "after the first has left");
    assert_eq!(rig.log.on_device()[0].len(), 16);
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn the_highest_priority_is_next() {
    let rig = Rig::new("script?sequences=1", 64);
    let urgent = {
        let name = TaskName { id: "urgent".into(), fingerprint: String::new() };
        let mut state = TaskState::new(name, None);
        state.priority = 5;
        Arc::new(state)
    };
    let (a, b, urgent) = tokio::join!(
        rig.run("a", sequence(1, 2)),
        rig.run("b", sequence(1, 2)),
        rig.run_as(urgent, sequence(1, 2), None)
    );
    assert_eq!((urgent.at, a.at, b.at), (20, 40, 60));
}

pub(super) fn state_of(id: &str, requester: u64) -> Arc<TaskState> {
    let name = TaskName { id: id.into(), fingerprint: id.into() };
    let mut state = TaskState::new(name, None);
    state.owner.requester = requester;
    Arc::new(state)
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_short_prompt_does_not_wait_for_long_ones_that_came_before() {
    for requester in [1, 2] {
        let rig = Rig::new("script?tokens=32768&context=8192", 512);
        let long = ["a", "b", "c"].map(|id| rig.run_as(state_of(id, 1), sequence(4_000, 1), None));
        let short = async {
            rig.log.passes(1).await;
            rig.run_as(state_of("short", requester), sequence(1, 1), None).await
        };
        let (long, short) = tokio::join!(futures_util::future::join_all(long), short);
        assert!(short.at <= 30, "requester {requester}: {} ms", short.at);
        // 12,001 tokens would be 24 steps of 512 tokens, however they are divided. The first steps have fewer,
        // until it is known how long steps take, so there are 31.
        let last = long.iter().map(|ended| ended.at).max();
        assert_eq!(last, Some(310));
    }
}

/// Eight answers of 3,900 tokens, of which four find room at once.
async fn eight_long(rig: &Rig) -> Vec<Ended> {
    let names: Vec<String> = (0..8).map(|n| n.to_string()).collect();
    let streamed = with(sequence(40, 3_900), json!({"stream": true}));
    let runs = names.iter().map(|id| rig.run_as(state_of(id, 1), streamed.clone(), None));
    futures_util::future::join_all(runs).await
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn preemption_makes_room_for_another_requester_and_repeats_no_part() {
    let rig = Rig::new("script?tokens=16384&context=4096", 1_024);
    let other = async {
        rig.log.passes(1_200).await;
        let arrived_at = rig.ms();
        let ended = rig.run_as(state_of("other", 2), sequence(600, 1), None).await;
        ended.at - arrived_at
    };
    let (long, waited) = tokio::join!(eight_long(&rig), other);
    assert!(waited <= 120, "{waited} ms");
    for ended in long {
        let parts = ended.parts.iter().map(|(_, part)| {
            let part: Value = serde_json::from_str(part).unwrap();
            part["text"].as_str().unwrap().to_owned()
        });
        assert_eq!(parts.collect::<String>(), words(3_900));
        assert_eq!(ended.text(), words(3_900));
    }
}
