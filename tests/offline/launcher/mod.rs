//! The launcher with workers that are shell scripts: they read and write control lines, and die, hang
//! or fail as each test wants. No broker, no model.

#![allow(clippy::unwrap_used, reason = "what is missing in a helper fails its test")]

use std::fs;
use std::time::{Duration, Instant};

use sconce::config::Drain;
use sconce::launcher::gpus::{Gpu, Gpus};
use sconce::launcher::{Cuda, Host};
use sconce::protocol::admin::State;
use sconce::shutdown::{Exit, Phase};
use serde_json::{Value, json};

mod fitness;
mod orders;
mod replace;
mod stage;
mod stuck;

use stage::{PATIENCE, READY, Stage, slot_is};

/// Works on until the first slot has had as many workers as it may have.
const UNTIL_FOUR_FIRST: &str = "while [ $(wc -l < born-0) -lt 4 ]; do sleep 0.02; done; exit 80";

#[tokio::test]
async fn workers_stopped_on_request_stay_stopped_and_the_last_ends_the_launcher() {
    let stage = Stage::new(3, &format!("{READY}; exit 80"));
    assert_eq!(stage.run().await, Exit::Done);
    for slot in 0..3 {
        assert_eq!(stage.lines(&format!("born-{slot}")).len(), 1);
    }
}

#[tokio::test]
async fn a_worker_that_dies_after_a_stop_on_request_has_stopped_on_request() {
    let said = r#"echo '{"event":"stopped","cause":"sentinel","exit":80}'"#;
    let stage = Stage::new(1, &format!("{READY}; {said}; kill -SEGV $$"));
    assert_eq!(stage.run().await, Exit::Done);
    assert_eq!(stage.lines("born-0").len(), 1);
}

#[tokio::test]
async fn growing_delays_give_up_a_slot_whose_device_never_opens_and_no_other() {
    let script = format!("[ $slot = 0 ] && exit 83\n{READY}\n{UNTIL_FOUR_FIRST}");
    let stage = Stage::new(2, &script);
    // It ends by itself, so no slot is tried again.
    assert_eq!(stage.run().await, Exit::DeviceFailed);
    assert_eq!((stage.lines("born-0").len(), stage.lines("born-1").len()), (4, 1));
    let born: Vec<u128> = stage.lines("born-0").iter().map(|line| line.parse().unwrap()).collect();
    let gaps: Vec<_> = born.windows(2).map(|pair| (pair[1] - pair[0]) / 1_000_000).collect();
    // 100, 200, 400 ms, each with jitter that takes up to a half.
    assert!(gaps[0] >= 50 && gaps[1] >= 100 && gaps[2] >= 200, "{gaps:?}");
}

/// A host with two GPUs, and a launcher that was built for them.
fn host_with_gpus() -> Host {
    let gpu = |uuid: &str| Gpu { uuid: uuid.into(), ..Gpu::default() };
    let gpus = Gpus { gpus: vec![gpu("GPU-a"), gpu("GPU-b")], ..Gpus::default() };
    let cuda = Some(Cuda { version: (13, 0), compute_capability: (8, 0) });
    Host { name: "host".into(), launcher: "host".into(), cores: 2, gpus, visible: None, cuda }
}

#[tokio::test]
async fn a_worker_is_shown_its_own_device_alone() {
    let ready = r#"echo "{\"event\":\"ready\",\"device\":\"${CUDA_VISIBLE_DEVICES:-cpu}\",\"load_ms\":1}""#;
    let script = format!("trace \"<$CUDA_VISIBLE_DEVICES> $CUDA_DEVICE_ORDER\"\n{ready}\nexit 80");
    let stage = Stage::on(&host_with_gpus(), &["cuda:1", "GPU-a", "cpu"], &script);
    assert_eq!(stage.run().await, Exit::Done);
    let shown: Vec<_> = (0..3).flat_map(|slot| stage.lines(&format!("trace-{slot}"))).collect();
    assert_eq!(shown, ["<GPU-b> PCI_BUS_ID", "<GPU-a> PCI_BUS_ID", "<> PCI_BUS_ID"]);
}

#[tokio::test]
async fn a_worker_that_holds_another_device_is_killed_while_the_others_work_on() {
    let ready = r#"echo '{"event":"ready","device":"GPU-b","load_ms":1}'"#;
    let script = format!(
        "{ready}\n[ $slot = 1 ] && {{ {UNTIL_FOUR_FIRST}; }}\nwhile read -r line; do trace \"$line\"; done"
    );
    let stage = Stage::on(&host_with_gpus(), &["GPU-a", "GPU-b"], &script);
    assert_eq!(stage.run().await, Exit::DeviceFailed);
    assert_eq!((stage.lines("born-0").len(), stage.lines("born-1").len()), (4, 1));
    assert!(stage.lines("trace-0").is_empty(), "it was told something, and not killed");
}

#[tokio::test]
async fn the_launchers_exit_is_the_code_of_the_slot_that_was_given_up() {
    for (code, exit, lives) in [
        (82, Exit::ModelFailed, 1),
        (86, Exit::ModelUnavailable, 25),
        (83, Exit::DeviceFailed, 4),
        (78, Exit::Config, 1),
    ] {
        let stage = Stage::new(1, &format!("exit {code}"));
        assert_eq!(stage.run().await, exit);
        assert_eq!(stage.lines("born-0").len(), lives, "lives of a worker that exits with {code}");
    }
}

#[tokio::test]
async fn a_killed_worker_is_started_again_with_the_same_assignment() {
    let stage = Stage::new(1, &format!("{READY}\n[ $life = 1 ] && kill -9 $$\nexit 80"));
    assert_eq!(stage.run().await, Exit::Done);
    let starts = stage.lines("start-0");
    assert_eq!(starts.len(), 2);
    assert_eq!(starts[0], starts[1]);
    let start: Value = serde_json::from_str(&starts[0]).unwrap();
    assert_eq!((&start["command"], &start["assignment"]["slot"]), (&"start".into(), &"embed/0".into()));
    assert!(starts[0].contains("s3cr3t"), "the broker's password travels here");
    let arguments = stage.lines("arguments-0").join(" ");
    assert!(!arguments.contains("s3cr3t") && arguments.starts_with("worker --launched-by"), "{arguments}");
}

#[tokio::test]
async fn a_worker_that_drains_in_time_is_left_to_it() {
    let script =
        format!("{READY}\ntrace ready\nread -r line; trace \"$line\"; sleep 1; trace drained; exit 0");
    let stage = Stage::new(1, &script);
    let meanwhile = async {
        stage.wait_for_lines("trace-0", 1).await;
        stage.drain();
    };
    assert_eq!(stage.run_and(meanwhile).await, Exit::Done);
    assert_eq!(stage.lines("trace-0"), ["ready", r#"{"command":"drain"}"#, "drained"]);
}

#[tokio::test]
async fn a_stop_lets_the_workers_of_a_pool_finish_if_it_is_so_set() {
    let mut stage = Stage::new(1, &format!("{READY}\ntrace ready\nread -r line; trace \"$line\"; exit 0"));
    stage.assignments[0].pool.drain = Drain::Finish;
    let meanwhile = async {
        stage.wait_for_lines("trace-0", 1).await;
        stage.drain();
    };
    assert_eq!(stage.run_and(meanwhile).await, Exit::Done);
    assert_eq!(stage.lines("trace-0"), ["ready", r#"{"command":"finish"}"#]);
}

#[tokio::test]
async fn past_the_grace_a_worker_is_told_to_abort_and_then_killed() {
    let script = format!("{READY}\ntrace ready\nwhile :; do read -r line && trace \"$line\"; done");
    let mut stage = Stage::new(2, &script);
    stage.policy.shutdown_grace = Duration::from_millis(500);
    let begun = Instant::now();
    let meanwhile = async {
        stage.wait_for_lines("trace-0", 1).await;
        stage.wait_for_lines("trace-1", 1).await;
        stage.drain();
    };
    assert_eq!(stage.run_and(meanwhile).await, Exit::Aborted);
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    for slot in 0..2 {
        let told = stage.lines(&format!("trace-{slot}"));
        assert_eq!(told, ["ready", r#"{"command":"drain"}"#, r#"{"command":"abort"}"#]);
        assert!(!stage.lives(slot));
    }
}

#[tokio::test]
async fn an_abort_does_not_wait_for_the_grace() {
    let script = format!(
        "{READY}\ntrace ready\nwhile read -r line; do trace \"$line\"; [ \"$line\" = '{{\"command\":\"abort\"}}' ] && exit 84; done"
    );
    let mut stage = Stage::new(1, &script);
    stage.policy.shutdown_grace = Duration::from_secs(600);
    let meanwhile = async {
        stage.wait_for_lines("trace-0", 1).await;
        stage.drain();
        stage.wait_for_lines("trace-0", 2).await;
        stage.stop.advance(Phase::Aborting, "second signal");
    };
    assert_eq!(stage.run_and(meanwhile).await, Exit::Aborted);
}

#[tokio::test]
async fn a_stop_between_two_lives_of_a_worker_ends_the_slot_at_once() {
    let mut stage = Stage::new(1, "exit 7");
    (stage.policy.restart_delay, stage.policy.restart_delay_max) = (PATIENCE * 4, PATIENCE * 4);
    let exit = stage.run_asked(async |_, board| {
        slot_is(&board, "embed/0", State::Failed).await;
        stage.drain();
    });
    assert_eq!(exit.await, Exit::Done);
    assert_eq!(stage.lines("born-0").len(), 1);
}

#[tokio::test]
async fn a_stop_before_a_worker_is_ready_drains_it_too() {
    let stage = Stage::new(1, "trace loading\nread -r line; trace \"$line\"; exit 0");
    let meanwhile = async {
        stage.wait_for_lines("trace-0", 1).await;
        stage.drain();
    };
    assert_eq!(stage.run_and(meanwhile).await, Exit::Done);
}

/// A shell command that announces a forward pass with these tasks.
fn forward(fingerprints: &[&str]) -> String {
    let tasks: Vec<_> =
        fingerprints.iter().map(|it| json!({"id": format!("id {it}"), "fingerprint": it})).collect();
    format!("echo '{}'", json!({"event": "forward", "tasks": tasks}))
}

/// A shell command that says which tasks are worked on apart from others; none: they are through.
fn isolated(fingerprints: &[&str]) -> String {
    let task = |it: &&str| json!({"id": format!("id {it}"), "fingerprint": it});
    let tasks: Vec<_> = fingerprints.iter().map(task).collect();
    format!("echo '{}'", json!({"event": "isolated", "tasks": tasks}))
}

/// A shell command that says that they have come to their ends.
fn through(fingerprints: &[&str]) -> String {
    let task = |it: &&str| json!({"id": format!("id {it}"), "fingerprint": it});
    let tasks: Vec<_> = fingerprints.iter().map(task).collect();
    format!("echo '{}'", json!({"event": "isolated", "tasks": [], "through": tasks}))
}

/// What a `start` line says of deaths: of each task, how many, and whether it is poison.
fn deaths(start: &str) -> Vec<(String, u64, bool)> {
    let start: Value = serde_json::from_str(start).unwrap();
    let told = start["crashes"].as_array().unwrap().iter();
    told.map(|it| {
        (it["task"].as_str().unwrap().to_owned(), it["count"].as_u64().unwrap(), !it["poison"].is_null())
    })
    .collect()
}

#[tokio::test]
async fn a_task_alone_on_the_device_at_three_deaths_is_told_to_all_as_poison() {
    let script = format!(
        "{READY}\n[ $slot = 1 ] && {{ while read -r line; do trace \"$line\"; done; exit 80; }}\n\
         [ $life = 4 ] && exit 80\n{}; {}; {}; {}\necho 'last words of life '$life >&2; kill -6 $$",
        isolated(&["innocent"]),
        through(&["innocent"]),
        isolated(&["culprit"]),
        forward(&["culprit"]),
    );
    let stage = Stage::new(2, &script);
    let meanwhile = async {
        stage.wait_for_lines("trace-1", 3).await;
        stage.wait_for_lines("start-0", 4).await;
        stage.drain();
    };
    stage.run_and(meanwhile).await;
    let told: Vec<_> = stage.lines("start-0").iter().map(|start| deaths(start)).collect();
    let culprit = |count, poison| vec![("culprit".to_owned(), count, poison)];
    assert_eq!(told, [vec![], culprit(1, false), culprit(2, false), culprit(3, true)]);
    let last = &stage.lines("trace-1")[2];
    let last: Value = serde_json::from_str(last).unwrap();
    let poison = &last["tasks"][0]["poison"];
    assert_eq!((&last["command"], &poison["exit"]), (&json!("crash_records"), &json!("signal: 6 (SIGABRT)")));
    assert!(poison["log"].as_str().unwrap().ends_with("last words of life 3"), "{poison}");
}

#[tokio::test]
async fn those_who_were_with_others_are_counted_but_are_no_poison() {
    // One is isolated while the batch before it is still on the device.
    let (batch, one) = (forward(&["a"]), isolated(&["b"]));
    let script = format!("{READY}\n[ $life = 4 ] && exit 80\n{batch}; {one}; kill -11 $$");
    let stage = Stage::new(1, &script);
    assert_eq!(stage.run().await, Exit::Done);
    let told = deaths(&stage.lines("start-0")[3]);
    assert_eq!(told, [("a".to_owned(), 3, false), ("b".to_owned(), 3, false)]);
}

#[tokio::test]
async fn tasks_that_are_preprocessed_when_their_worker_dies_are_counted_too() {
    let preprocessing = |fingerprints: &[&str]| forward(fingerprints).replace("forward", "preprocessing");
    let (begun, ended) = (preprocessing(&["a", "b"]), preprocessing(&["b"]));
    let script = format!("{READY}\n[ $life = 2 ] && exit 80\n{begun}; {ended}; kill -11 $$");
    let stage = Stage::new(1, &script);
    assert_eq!(stage.run().await, Exit::Done);
    assert_eq!(deaths(&stage.lines("start-0")[1]), [("b".to_owned(), 1, false)]);
}

#[tokio::test]
async fn deaths_of_grouped_suspects_give_up_no_slot_and_count_as_no_attempts() {
    let script = format!("{READY}\n[ $life = 9 ] && exit 80\n{}; kill -11 $$", isolated(&["a", "b"]));
    let stage = Stage::new(1, &script);
    assert_eq!(stage.run().await, Exit::Done);
    let last: Value = serde_json::from_str(&stage.lines("start-0")[8]).unwrap();
    let told: Vec<_> = last["crashes"].as_array().unwrap().iter().collect();
    assert!(told.len() == 2 && told.iter().all(|it| it["count"] == 0 && it["among"] == 2), "{told:?}");
}

#[tokio::test]
async fn a_device_fault_is_the_tasks_once_the_next_worker_finds_the_device_well() {
    let script = format!("{READY}\n{}; exit 83", isolated(&["culprit"]));
    let stage = Stage::new(1, &script);
    assert_eq!(stage.run().await, Exit::DeviceFailed);
    let told: Vec<_> = stage.lines("start-0").iter().map(|start| deaths(start)).collect();
    let culprit = |count, poison| vec![("culprit".to_owned(), count, poison)];
    assert_eq!(told[..5], [vec![], vec![], culprit(1, false), culprit(2, false), culprit(3, true)]);
}

#[tokio::test]
async fn a_device_that_does_not_come_back_is_no_tasks_fault() {
    let script = format!("[ $life = 1 ] || exit 83\n{READY}\n{}; exit 83", forward(&["innocent"]));
    let stage = Stage::new(1, &script);
    assert_eq!(stage.run().await, Exit::DeviceFailed);
    assert!(stage.lines("start-0").iter().all(|start| deaths(start).is_empty()));
}

#[tokio::test]
async fn a_worker_that_says_why_it_ends_puts_the_blame_on_no_task() {
    let script = format!("{READY}\n[ $life = 3 ] && exit 80\n{}; exit 81", forward(&["innocent"]));
    let stage = Stage::new(1, &script);
    assert_eq!(stage.run().await, Exit::Done);
    assert!(stage.lines("start-0").iter().all(|start| deaths(start).is_empty()));
}

#[tokio::test]
async fn where_every_task_seems_to_be_poison_the_slot_is_given_up() {
    let task = "{\"id\":\"x\",\"fingerprint\":\"'$(((life - 1) / 3))'\"}";
    let event = format!("{{\"event\":\"isolated\",\"tasks\":[{task}]}}");
    let script = format!("{READY}\necho '{event}'; kill -11 $$");
    let mut stage = Stage::new(1, &script);
    (stage.policy.restart_delay, stage.policy.restart_delay_max) =
        (Duration::from_millis(1), Duration::from_millis(2));
    assert_eq!(stage.run().await, Exit::SlotGivenUp);
    let lives = stage.lines("born-0").len();
    assert!((5..=20).contains(&lives), "{lives}");
}

#[tokio::test]
async fn lines_that_are_no_events_are_passed_over() {
    let script =
        format!("echo nonsense\necho '{{\"event\":\"new in 2.0\"}}'\necho panic >&2\n{READY}\nexit 80");
    let stage = Stage::new(1, &script);
    assert_eq!(stage.run().await, Exit::Done);
}

#[tokio::test]
async fn a_workers_end_is_seen_though_a_process_it_started_holds_its_pipes() {
    let stage = Stage::new(1, &format!("{READY}\nsleep 50 &\necho $! > sleeper\nexit 80"));
    let begun = Instant::now();
    assert_eq!(stage.run().await, Exit::Done);
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    let sleeper = stage.lines("sleeper")[0].parse().unwrap();
    let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(sleeper), nix::sys::signal::Signal::SIGKILL);
}

#[tokio::test]
async fn a_program_that_cannot_be_started_gives_every_slot_up() {
    let mut stage = Stage::new(2, "");
    fs::remove_file(stage.path("worker.sh")).unwrap();
    (stage.policy.restart_delay, stage.policy.restart_delay_max) =
        (Duration::from_millis(1), Duration::from_millis(2));
    assert_eq!(stage.run().await, Exit::SlotGivenUp);
}
