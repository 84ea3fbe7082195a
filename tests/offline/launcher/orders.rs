//! Orders to slots: what their workers are told, and what stays when these end.

use sconce::protocol::admin::ControlRequest;
use sconce::protocol::admin::{State, Target};
use sconce::shutdown::Exit;
use serde_json::Value;

use super::stage::{OBEY, READY, Stage, slot_is};
use crate::support::wait::until;

fn slot(index: usize) -> Target {
    Target::Slot(format!("host/embed/{index}"))
}

#[tokio::test]
async fn an_order_goes_to_the_slots_that_are_meant_and_to_no_other() {
    let stage = Stage::new(2, &format!("{READY}; {OBEY}"));
    let exit = stage.run_asked(async |handle, board| {
        slot_is(&board, "embed/0", State::Ready).await;
        slot_is(&board, "embed/1", State::Ready).await;
        let told = handle.order(slot(1), ControlRequest::Pause).await;
        let [(slot, Ok(done))] = &told[..] else { panic!("{told:?}") };
        assert_eq!((slot.as_str(), done.what), ("embed/1", "pausing"));
        assert_eq!(handle.order(Target::Host("other".into()), ControlRequest::Shutdown).await, []);
        assert_eq!(handle.order(Target::Pool("embed".into()), ControlRequest::Resume).await.len(), 2);
        stage.wait_for_lines("trace-1", 2).await;
        stage.wait_for_lines("trace-0", 1).await;
        stage.drain();
    });
    assert_eq!(exit.await, Exit::Done);
    let commands = [r#"{"command":"pause"}"#, r#"{"command":"resume"}"#, r#"{"command":"drain"}"#];
    assert_eq!(stage.lines("trace-1"), commands);
    assert_eq!(stage.lines("trace-0"), commands[1..]);
}

#[tokio::test]
async fn the_failure_of_a_worker_that_somebody_killed_says_whether_memory_ran_out() {
    let stage = Stage::new(1, &format!("{READY}; {OBEY}"));
    let exit = stage.run_asked(async |_, board| {
        slot_is(&board, "embed/0", State::Ready).await;
        stage.wait_for_lines("pid-0", 1).await;
        stage.kill(0);
        let failure = || board.read(|status| status.slots["embed/0"].report.last_failure.clone());
        let failure = until("the failure is shown", || async { failure() }).await;
        assert!(
            failure.starts_with("signal: 9 (SIGKILL): ") && failure.contains("out-of-memory"),
            "{failure}"
        );
        stage.drain();
    });
    assert_eq!(exit.await, Exit::Done);
}

#[tokio::test]
async fn what_was_ordered_holds_for_the_worker_that_comes_after_a_death() {
    let stage = Stage::new(1, &format!("{READY}; {OBEY}"));
    let exit = stage.run_asked(async |handle, board| {
        slot_is(&board, "embed/0", State::Ready).await;
        for order in [ControlRequest::Pause, ControlRequest::LogLevel { filter: "debug".into() }] {
            assert!(handle.order(Target::All, order).await[0].1.is_ok());
        }
        stage.wait_for_lines("trace-0", 2).await;
        stage.kill(0);
        stage.wait_for_lines("trace-0", 3).await;
        stage.drain();
    });
    assert_eq!(exit.await, Exit::Done);
    let told = stage.lines("trace-0");
    let filter = r#"{"command":"log_level","filter":"debug"}"#;
    assert_eq!(told[1..3], [filter, filter]);
    let paused: Vec<Value> =
        stage.lines("start-0").iter().map(|it| serde_json::from_str(it).unwrap()).collect();
    assert_eq!((&paused[0]["paused"], &paused[1]["paused"]), (&false.into(), &true.into()));
}

#[tokio::test]
async fn a_drained_slot_stays_empty_until_resumed_and_the_launcher_stays_too() {
    let stage = Stage::new(1, &format!("{READY}; {OBEY}"));
    let exit = stage.run_asked(async |handle, board| {
        slot_is(&board, "embed/0", State::Ready).await;
        handle.order(Target::All, ControlRequest::Drain).await;
        slot_is(&board, "embed/0", State::Stopped).await;
        assert_eq!(stage.lines("trace-0"), [r#"{"command":"finish"}"#]);
        handle.order(Target::All, ControlRequest::Resume).await;
        slot_is(&board, "embed/0", State::Ready).await;
        assert_eq!(stage.lines("born-0").len(), 2);
        handle.order(Target::All, ControlRequest::Shutdown).await;
    });
    assert_eq!(exit.await, Exit::Done);
    assert_eq!(stage.lines("born-0").len(), 2);
}

#[tokio::test]
async fn a_worker_that_finishes_too_late_is_drained_then_aborted_then_killed() {
    let mut stage = Stage::new(1, &format!("{READY}\nwhile :; do read -r line && trace \"$line\"; done"));
    stage.policy.shutdown_grace = std::time::Duration::from_millis(200);
    let exit = stage.run_asked(async |handle, board| {
        slot_is(&board, "embed/0", State::Ready).await;
        handle.order(Target::All, ControlRequest::Shutdown).await;
    });
    assert_eq!(exit.await, Exit::Done);
    let told = stage.lines("trace-0");
    assert_eq!(told, [r#"{"command":"finish"}"#, r#"{"command":"drain"}"#, r#"{"command":"abort"}"#]);
}

#[tokio::test]
async fn a_slot_that_was_given_up_is_quarantined_until_it_is_restarted() {
    let script = format!("[ $slot = 0 ] && [ ! -f mended ] && exit 83\n{READY}; {OBEY}");
    let mut stage = Stage::new(2, &script);
    stage.policy.max_quick_failures = 1;
    let exit = stage.run_asked(async |handle, board| {
        slot_is(&board, "embed/0", State::Quarantined).await;
        let refused = handle.order(slot(0), ControlRequest::Pause).await;
        assert!(refused[0].1.as_ref().is_err_and(|words| words.contains("restart")), "{refused:?}");
        std::fs::write(stage.path("mended"), "").unwrap();
        handle.order(slot(0), ControlRequest::Restart).await;
        slot_is(&board, "embed/0", State::Ready).await;
        stage.drain();
    });
    assert_eq!(exit.await, Exit::Done, "the end of its second life counts");
}

#[tokio::test]
async fn restarts_are_counted_by_their_reason() {
    let stage = Stage::new(1, &format!("{READY}; [ $life = 1 ] && exit 81\n{OBEY}"));
    let exit = stage.run_asked(async |handle, board| {
        stage.wait_for_lines("born-0", 2).await;
        slot_is(&board, "embed/0", State::Ready).await;
        handle.order(Target::All, ControlRequest::Restart).await;
        stage.wait_for_lines("born-0", 3).await;
        slot_is(&board, "embed/0", State::Ready).await;
        stage.kill(0);
        stage.wait_for_lines("born-0", 4).await;
        slot_is(&board, "embed/0", State::Ready).await;
        let report = board.read(|status| status.slots["embed/0"].report());
        let counted: Vec<_> =
            report.restarts.iter().map(|(reason, count)| (reason.as_str(), *count)).collect();
        assert_eq!(counted, [("broker_lost", 1), ("killed", 1), ("requested", 1)]);
        assert!(report.last_failure.is_some_and(|failure| failure.starts_with("signal: 9 (SIGKILL)")));
        stage.drain();
    });
    assert_eq!(exit.await, Exit::Done);
}

#[tokio::test]
async fn a_resume_while_a_slot_drains_has_a_worker_started_behind_it() {
    let script = format!(
        "{READY}; [ $life = 1 ] && {{ read -r line; while [ ! -f on ]; do sleep 0.02; done; exit 0; }}\n{OBEY}"
    );
    let stage = Stage::new(1, &script);
    let exit = stage.run_asked(async |handle, board| {
        slot_is(&board, "embed/0", State::Ready).await;
        handle.order(Target::All, ControlRequest::Drain).await;
        slot_is(&board, "embed/0", State::Draining).await;
        handle.order(Target::All, ControlRequest::Resume).await;
        std::fs::write(stage.path("on"), "").unwrap();
        stage.wait_for_lines("born-0", 2).await;
        slot_is(&board, "embed/0", State::Ready).await;
        stage.drain();
    });
    assert_eq!(exit.await, Exit::Done);
}
