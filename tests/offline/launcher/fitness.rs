//! Devices that are out of order: what the driver says of them while the launcher runs, what a worker says
//! of its own, and that the others work on. The driver is a library that tells what a test has it tell.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use sconce::launcher::gpus::Gpus;
use sconce::launcher::status_board::StatusBoard;
use sconce::launcher::{Cuda, Host};
use sconce::protocol::admin::ControlRequest;
use sconce::protocol::admin::{State, Target};
use sconce::shutdown::{Exit, Stop};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::stage::{OBEY, READY, Stage, slot_is};
use crate::support::nvml::{DIVIDED, PARTS, WHOLE, driver};
use crate::support::wait::until;

/// Ready on the device that it is shown.
const READY_THERE: &str =
    r#"echo "{\"event\":\"ready\",\"device\":\"$CUDA_VISIBLE_DEVICES\",\"load_ms\":1}""#;

/// What the driver tells.
struct Driver {
    story: PathBuf,
}

impl Driver {
    /// Runs the test of this name once more, in a process that finds the driver's library, and there gives
    /// the driver: libraries are looked for where the environment said so when the process began. None: that
    /// is done, and was well.
    fn of(test: &str) -> Option<Self> {
        if let Some(story) = std::env::var_os("NVML_STORY") {
            return Some(Self { story: story.into() });
        }
        let folder = driver();
        let story = folder.path().join("story");
        fs::write(&story, "").unwrap();
        let mut again = Command::new(std::env::current_exe().unwrap());
        again.args(["--exact", test, "--nocapture"]);
        again.env("LD_LIBRARY_PATH", folder.path()).env("NVML_STORY", &story);
        let output = again.output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && said.contains("1 passed"), "{said}\n{errors}");
        None
    }

    /// Has it tell something more.
    fn tells(&self, line: &str) {
        let mut story = OpenOptions::new().append(true).open(&self.story).unwrap();
        story.write_all(format!("{line}\n").as_bytes()).unwrap();
    }

    /// A slot on a whole GPU and one on each part of another. They may fail as often as they like.
    fn stage(script: &str) -> Stage {
        let cuda = Some(Cuda { version: (13, 0), compute_capability: (8, 0) });
        let host = Host {
            name: "host".into(),
            launcher: "host".into(),
            cores: 1,
            gpus: Gpus::here(),
            visible: None,
            cuda,
        };
        let mut stage = Stage::on(&host, &[WHOLE, PARTS[0], PARTS[1]], script);
        stage.policy.max_quick_failures = 1_000;
        stage
    }
}

fn restarts(board: &StatusBoard, slot: usize) -> Vec<(String, u64)> {
    let of = |slot: &str| board.read(|status| status.slots[slot].report.restarts.clone());
    of(&format!("embed/{slot}")).into_iter().collect()
}

fn counted(board: &StatusBoard, slot: usize, reason: &str) -> u64 {
    restarts(board, slot).iter().find(|(name, _)| name == reason).map_or(0, |(_, count)| *count)
}

async fn is_counted(board: &StatusBoard, slot: usize, reason: &str, least: u64) {
    let what = format!("slot {slot} was restarted {least} times for {reason}");
    until(&what, || async { (counted(board, slot, reason) >= least).then_some(()) }).await;
}

fn last_failure(board: &StatusBoard, slot: usize) -> String {
    let slot = format!("embed/{slot}");
    board.read(|status| status.slots[&slot].report.last_failure.clone()).unwrap_or_default()
}

async fn all_ready(board: &StatusBoard) {
    for slot in 0..3 {
        slot_is(board, &format!("embed/{slot}"), State::Ready).await;
    }
}

/// The page that Prometheus reads of this board.
async fn metrics(board: Arc<StatusBoard>) -> String {
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    sconce::admin::serve(address, "here", board, Stop::default()).await.unwrap();
    let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: test\r\n\r\n").await.unwrap();
    let mut page = String::new();
    stream.read_to_string(&mut page).await.unwrap();
    page
}

#[tokio::test]
async fn a_gpu_off_the_bus_loses_its_worker_and_gets_another_once_it_is_back() {
    const NAME: &str =
        "launcher::fitness::a_gpu_off_the_bus_loses_its_worker_and_gets_another_once_it_is_back";
    let Some(driver) = Driver::of(NAME) else { return };
    let stage = Driver::stage(&format!("{READY_THERE}; {OBEY}"));
    let exit = stage.run_asked(async |_, board| {
        all_ready(&board).await;
        driver.tells(&format!("lost {WHOLE} 1"));
        // Once for the worker that was there, then for each that was not even started.
        is_counted(&board, 0, "off_the_bus", 3).await;
        assert_eq!(stage.lines("born-0").len(), 1);
        assert!(last_failure(&board, 0).contains("the driver says"), "{}", last_failure(&board, 0));
        let page = metrics(board.clone()).await;
        let line = r#"worker_restarts_total{pool="embed",slot="embed/0",reason="off_the_bus"}"#;
        let count = page.lines().find_map(|it| it.split_once(line)).map(|(_, count)| count.trim());
        assert!(count.is_some_and(|count| count.parse::<f64>().unwrap() >= 3.0), "{page}");
        driver.tells(&format!("lost {WHOLE} 0"));
        slot_is(&board, "embed/0", State::Ready).await;
        assert_eq!(stage.lines("born-0").len(), 2);
        assert_eq!((restarts(&board, 1), restarts(&board, 2)), (vec![], vec![]), "the others work on");
        stage.drain();
    });
    assert_eq!(exit.await, Exit::Done);
    assert_eq!(stage.lines("trace-1"), [r#"{"command":"drain"}"#]);
}

#[tokio::test]
async fn a_gpu_that_is_divided_loses_the_workers_of_all_its_parts() {
    const NAME: &str = "launcher::fitness::a_gpu_that_is_divided_loses_the_workers_of_all_its_parts";
    let Some(driver) = Driver::of(NAME) else { return };
    let stage = Driver::stage(&format!("{READY_THERE}; {OBEY}"));
    let exit = stage.run_asked(async |_, board| {
        all_ready(&board).await;
        driver.tells(&format!("lost {} 1", PARTS[1]));
        is_counted(&board, 2, "off_the_bus", 1).await;
        assert_eq!(restarts(&board, 1), []);
        driver.tells(&format!("lost {} 0", PARTS[1]));
        all_ready(&board).await;
        let before = counted(&board, 2, "off_the_bus");
        driver.tells(&format!("lost {DIVIDED} 1"));
        is_counted(&board, 1, "off_the_bus", 1).await;
        is_counted(&board, 2, "off_the_bus", before + 1).await;
        driver.tells(&format!("lost {DIVIDED} 0"));
        all_ready(&board).await;
        assert_eq!(restarts(&board, 0), []);
        stage.drain();
    });
    assert_eq!(exit.await, Exit::Done);
}

#[tokio::test]
async fn a_slot_whose_gpu_is_to_be_reset_is_given_up_and_tried_again_on_order() {
    const NAME: &str =
        "launcher::fitness::a_slot_whose_gpu_is_to_be_reset_is_given_up_and_tried_again_on_order";
    let Some(driver) = Driver::of(NAME) else { return };
    let mut stage = Driver::stage(&format!("{READY_THERE}; {OBEY}"));
    stage.policy.max_quick_failures = 3;
    let exit = stage.run_asked(async |handle, board| {
        all_ready(&board).await;
        driver.tells(&format!("wants {WHOLE} 1"));
        slot_is(&board, "embed/0", State::Quarantined).await;
        assert_eq!((counted(&board, 0, "xid"), stage.lines("born-0").len()), (2, 1));
        let words = last_failure(&board, 0);
        assert!(words.starts_with("the driver wants the GPU reset"), "{words}");
        driver.tells(&format!("wants {WHOLE} 0"));
        let slot = || Target::Slot("host/embed/0".into());
        until("another worker is started", || async {
            let state = board.read(|status| status.slots["embed/0"].report.state);
            if state == State::Quarantined {
                handle.order(slot(), ControlRequest::Restart).await;
            }
            (state == State::Ready).then_some(())
        })
        .await;
        assert_eq!((restarts(&board, 1), restarts(&board, 2)), (vec![], vec![]));
        stage.drain();
    });
    assert_eq!(exit.await, Exit::Done);
}

#[tokio::test]
async fn a_worker_stopped_on_request_has_stopped_though_its_device_is_lost() {
    const NAME: &str = "launcher::fitness::a_worker_stopped_on_request_has_stopped_though_its_device_is_lost";
    let Some(driver) = Driver::of(NAME) else { return };
    let said = r#"echo '{"event":"stopped","cause":"sentinel","exit":80}'"#;
    let lasts = format!("[ $slot = 0 ] && {{ {said}; trace stopped; exec sleep 100; }}");
    let stage = Driver::stage(&format!("{READY_THERE}\n{lasts}\n{OBEY}"));
    let exit = stage.run_asked(async |_, board| {
        all_ready(&board).await;
        stage.wait_for_lines("trace-0", 1).await;
        driver.tells(&format!("lost {WHOLE} 1"));
        slot_is(&board, "embed/0", State::Stopped).await;
        assert_eq!((restarts(&board, 0), stage.lines("born-0").len()), (vec![], 1));
        stage.drain();
    });
    assert_eq!(exit.await, Exit::Done);
}

#[tokio::test]
async fn a_worker_on_a_wrong_or_slow_device_is_counted_so_and_others_work_on() {
    for why in ["wrong_result", "too_slow"] {
        let unfit = format!(r#"{{"event":"unfit","why":"{why}","words":"off by 7"}}"#);
        let script = format!("[ $slot$life = 01 ] && {{ echo '{unfit}'; exit 83; }}\n{READY}; {OBEY}");
        let stage = Stage::new(2, &script);
        let exit = stage.run_asked(async |_, board| {
            is_counted(&board, 0, why, 1).await;
            assert_eq!(last_failure(&board, 0), "off by 7");
            slot_is(&board, "embed/0", State::Ready).await;
            slot_is(&board, "embed/1", State::Ready).await;
            assert_eq!(restarts(&board, 1), []);
            stage.drain();
        });
        assert_eq!(exit.await, Exit::Done);
        assert!(stage.lines("trace-0").len() <= 1, "the unfit one was told nothing");
    }
}

#[tokio::test]
async fn a_worker_is_told_how_many_may_compute_on_its_device_at_once() {
    let stage = Stage::new(2, &format!("{READY}; {OBEY}"));
    let exit = stage.run_asked(async |handle, board| {
        slot_is(&board, "embed/0", State::Ready).await;
        slot_is(&board, "embed/1", State::Ready).await;
        let mut other = stage.assignments.clone();
        other.iter_mut().for_each(|assignment| assignment.pool.model = "other".into());
        handle.reload(other, stage.policy.clone()).await.unwrap();
        stage.drain();
    });
    assert_eq!(exit.await, Exit::Done);
    let sharers = |start: &String| {
        let start: Value = serde_json::from_str(start).unwrap();
        start["assignment"]["sharers"].as_u64().unwrap()
    };
    let told: Vec<_> = stage.lines("start-0").iter().map(sharers).collect();
    assert_eq!(told, [2, 3], "a successor computes beside the one before it");
}
