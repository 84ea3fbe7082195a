//! New workers in the place of those that run: for other settings, and because they are spent.

use std::time::Duration;

use sconce::config::{Assignment, Replace};
use sconce::launcher::status_board::StatusBoard;
use sconce::protocol::admin::ControlRequest;
use sconce::protocol::admin::{State, Target};
use sconce::shutdown::Exit;

use super::stage::{OBEY, READY, Stage, slot_is};
use crate::support::wait::until;

/// A line in a trace that all slots share, in the order of time.
const SHARED: &str = r#"say() { echo "$slot/$life $1" >> story; }"#;

/// The same slots with another model.
fn with_model(assignments: &[Assignment], model: &str) -> Vec<Assignment> {
    let mut changed = assignments.to_vec();
    changed.iter_mut().for_each(|assignment| assignment.pool.model = model.to_owned());
    changed
}

fn restarts(board: &StatusBoard, slot: &str, reason: &str) -> u64 {
    board.read(|status| status.slots[slot].report.restarts.get(reason).copied().unwrap_or(0))
}

async fn all_ready(board: &StatusBoard, slots: usize) {
    for slot in 0..slots {
        slot_is(board, &format!("embed/{slot}"), State::Ready).await;
    }
}

#[tokio::test]
async fn slots_change_one_by_one_each_new_worker_ready_before_the_old_one_ends() {
    let script = format!(
        "{SHARED}\nsay born; sleep 0.2; say ready; {READY}\n\
         while read -r line; do case $line in *finish*|*drain*) say finishing; sleep 0.2; say gone; exit 0;; esac; done"
    );
    let stage = Stage::new(2, &script);
    let exit = stage.run_asked(async |handle, board| {
        all_ready(&board, 2).await;
        let done = handle.reload(with_model(&stage.assignments, "other"), stage.policy.clone()).await;
        assert_eq!(done.as_deref(), Ok("workers replaced: 2, slots started: 0, slots ended: 0"));
        stage.wait_for_lines("story", 12).await;
        let applied = board.read(|status| (status.reloads_applied, status.reloads_refused));
        assert_eq!((applied, restarts(&board, "embed/1", "reloaded")), ((1, 0), 1));
        assert_eq!(board.read(|status| status.slots["embed/0"].report.model.clone()), "other");
        stage.drain();
    });
    assert_eq!(exit.await, Exit::Done);
    let story = stage.lines("story");
    let roll = |slot: u8| {
        [
            format!("{slot}/2 born"),
            format!("{slot}/2 ready"),
            format!("{slot}/1 finishing"),
            format!("{slot}/1 gone"),
        ]
    };
    assert_eq!(story[4..12], [roll(0), roll(1)].concat());
}

#[tokio::test]
async fn settings_by_which_no_worker_gets_ready_leave_the_old_ones_and_say_why() {
    let script = format!("[ $life = 2 ] && {{ echo 'no such model' >&2; exit 82; }}\n{READY}; {OBEY}");
    let stage = Stage::new(2, &script);
    let exit = stage.run_asked(async |handle, board| {
        all_ready(&board, 2).await;
        let done = handle.reload(with_model(&stage.assignments, "missing"), stage.policy.clone()).await;
        let words = done.unwrap_err();
        assert!(words.contains("embed/0") && words.contains("the model cannot be served"), "{words}");
        assert_eq!(board.read(|status| status.reloads_refused), 1);
        assert_eq!((stage.lines("born-0").len(), stage.lines("born-1").len()), (2, 1));
        all_ready(&board, 2).await;
        assert!(stage.lines("trace-0").is_empty(), "the old worker was told something");
        // Whoever starts from now on starts with the settings that are in force.
        assert_ne!(board.read(|status| status.slots["embed/0"].report.model.clone()), "missing");
        stage.drain();
    });
    assert_eq!(exit.await, Exit::Done);
}

#[tokio::test]
async fn slots_that_are_new_are_started_and_those_that_are_gone_finish() {
    let stage = Stage::new(2, &format!("{READY}; {OBEY}"));
    let exit = stage.run_asked(async |handle, board| {
        all_ready(&board, 2).await;
        let mut slots = stage.assignments.clone();
        let mut third = slots.remove(1);
        (third.slot, third.worker) = ("embed/2".into(), "host/embed/2".into());
        slots.push(third);
        let done = handle.reload(slots, stage.policy.clone()).await;
        assert_eq!(done.as_deref(), Ok("workers replaced: 0, slots started: 1, slots ended: 1"));
        slot_is(&board, "embed/2", State::Ready).await;
        let gone = || async { board.read(|status| !status.slots.contains_key("embed/1")).then_some(()) };
        until("embed/1 is forgotten", gone).await;
        stage.drain();
    });
    assert_eq!(exit.await, Exit::Done);
    assert_eq!(stage.lines("trace-1"), [r#"{"command":"finish"}"#]);
}

#[tokio::test]
async fn a_worker_that_dies_while_its_successor_is_made_ready_is_followed_by_it() {
    let script = format!(
        "[ $life = 1 ] && {{ {READY}; {OBEY}; }}\nwhile [ ! -f on ]; do sleep 0.02; done\n{READY}; {OBEY}"
    );
    let stage = Stage::new(1, &script);
    let exit = stage.run_asked(async |handle, board| {
        all_ready(&board, 1).await;
        let first = stage.lines("pid-0")[0].clone();
        let reload = handle.reload(with_model(&stage.assignments, "other"), stage.policy.clone());
        let meanwhile = async {
            stage.wait_for_lines("start-0", 2).await;
            stage.kill_process(&first);
            slot_is(&board, "embed/0", State::Starting).await;
            std::fs::write(stage.path("on"), "").unwrap();
        };
        assert!(tokio::join!(reload, meanwhile).0.is_ok());
        slot_is(&board, "embed/0", State::Ready).await;
        stage.drain();
    });
    assert_eq!(exit.await, Exit::Done);
    assert_eq!(stage.lines("born-0").len(), 2, "no third one");
}

#[tokio::test]
async fn a_worker_that_has_done_its_share_is_recycled_one_slot_after_the_other() {
    let stats = r#"echo '{"event":"stats","answers":[{"status":"succeeded","reason":"","count":60}]}'"#;
    // The first ones tell of their work again and again, the second ones once.
    let script = format!(
        "{SHARED}\nsay born; {READY}; {stats}\n[ $life = 1 ] || {{ {OBEY}; }}\n\
         while :; do {stats}; sleep 0.1; done & read -r line; kill $!; sleep 0.2; say gone; exit 0"
    );
    let mut stage = Stage::new(2, &script);
    stage.policy.recycle_tasks = Some(100);
    let exit = stage.run_asked(async |_, board| {
        stage.wait_for_lines("story", 6).await;
        all_ready(&board, 2).await;
        assert_eq!(
            (restarts(&board, "embed/0", "recycled"), restarts(&board, "embed/1", "recycled")),
            (1, 1)
        );
        let tasks = board.read(|status| status.slots["embed/0"].report.stats.as_ref().unwrap().tasks());
        assert!(tasks >= 180, "all lives of a slot count: {tasks}");
        stage.drain();
    });
    assert_eq!(exit.await, Exit::Done);
    let story = stage.lines("story");
    let at =
        |line: &str| story.iter().position(|it| it == line).unwrap_or_else(|| panic!("{line}: {story:?}"));
    let (first, second) = ((at("0/2 born"), at("0/1 gone")), (at("1/2 born"), at("1/1 gone")));
    assert!(first.1 < second.0 || second.1 < first.0, "both at once: {story:?}");
}

#[tokio::test]
async fn a_worker_is_recycled_for_its_age_and_for_the_memory_that_it_has_gained() {
    let stats = |resident: u64| format!(r#"echo '{{"event":"stats","now":{{"resident":{resident}}}}}'"#);
    let script = format!("{READY}; {}; {}\n{OBEY}", stats(50 << 20), stats(90 << 20));
    for by_age in [true, false] {
        let mut stage = Stage::new(1, &script);
        if by_age {
            stage.policy.recycle_age = Some(Duration::from_nanos(1));
        } else {
            stage.policy.recycle_memory = Some(40 << 20);
        }
        let exit = stage.run_asked(async |_, board| {
            until("it is recycled", || async { (restarts(&board, "embed/0", "recycled") > 0).then_some(()) })
                .await;
            stage.drain();
        });
        assert_eq!(exit.await, Exit::Done);
    }
}

#[tokio::test]
async fn in_turn_the_old_worker_ends_first_and_bad_settings_are_taken_back() {
    let script = format!(
        "{SHARED}\nsay born; case $start in *'\"missing\"'*) exit 82;; esac; {READY}\n\
         while read -r line; do case $line in *finish*|*drain*) say gone; exit 0;; esac; done"
    );
    let mut stage = Stage::new(2, &script);
    stage.policy.replace = Replace::InTurn;
    let exit = stage.run_asked(async |handle, board| {
        all_ready(&board, 2).await;
        let done = handle.reload(with_model(&stage.assignments, "other"), stage.policy.clone()).await;
        assert_eq!(done.as_deref(), Ok("workers replaced: 2, slots started: 0, slots ended: 0"));
        all_ready(&board, 2).await;
        let refused = handle.reload(with_model(&stage.assignments, "missing"), stage.policy.clone()).await;
        assert!(refused.is_err_and(|words| words.contains("the model cannot be served")));
        all_ready(&board, 2).await;
        let models = |slot: &str| board.read(|status| status.slots[slot].report.model.clone());
        assert_eq!((models("embed/0").as_str(), models("embed/1").as_str()), ("other", "other"));
        assert_eq!(restarts(&board, "embed/0", "reloaded"), 1);
        stage.drain();
    });
    assert_eq!(exit.await, Exit::Done);
    let story = stage.lines("story");
    assert_eq!(story[2..6], ["0/1 gone", "0/2 born", "1/1 gone", "1/2 born"]);
    assert_eq!(story[6..9], ["0/2 gone", "0/3 born", "0/4 born"]);
}

#[tokio::test]
async fn a_sentinel_that_is_taken_while_a_successor_loads_ends_the_slot() {
    let script = format!(
        "[ $life = 1 ] && {{ {READY}; while [ ! -f on ]; do sleep 0.02; done; exit 80; }}\nsleep 100"
    );
    let stage = Stage::new(1, &script);
    let exit = stage.run_asked(async |handle, board| {
        all_ready(&board, 1).await;
        let reload = handle.reload(with_model(&stage.assignments, "other"), stage.policy.clone());
        let meanwhile = async {
            stage.wait_for_lines("start-0", 2).await;
            std::fs::write(stage.path("on"), "").unwrap();
        };
        let _ = tokio::join!(reload, meanwhile);
    });
    assert_eq!(exit.await, Exit::Done);
    assert_eq!(stage.lines("born-0").len(), 2);
}

#[tokio::test]
async fn a_sentinel_obeyed_by_a_worker_being_replaced_ends_the_slot_too() {
    let script =
        format!("[ $life = 1 ] && {{ {READY}; read -r line; sleep 0.2; exit 80; }}\n{READY}\n{OBEY}");
    let stage = Stage::new(1, &script);
    let exit = stage.run_asked(async |handle, board| {
        all_ready(&board, 1).await;
        handle.reload(with_model(&stage.assignments, "other"), stage.policy.clone()).await.unwrap();
    });
    assert_eq!(exit.await, Exit::Done);
    assert_eq!(stage.lines("trace-0"), [r#"{"command":"finish"}"#], "the new one finishes");
}

#[tokio::test]
async fn after_a_roll_is_called_off_the_settings_before_can_be_put_back() {
    let script = format!("case $start in *other*) [ $slot = 1 ] && exit 82;; esac\n{READY}; {OBEY}");
    let stage = Stage::new(2, &script);
    let exit = stage.run_asked(async |handle, board| {
        all_ready(&board, 2).await;
        let models = || {
            board.read(|status| status.slots.values().map(|it| it.report.model.clone()).collect::<Vec<_>>())
        };
        let first = models();
        let refused = handle.reload(with_model(&stage.assignments, "other"), stage.policy.clone()).await;
        assert!(refused.is_err_and(|words| words.contains("embed/1")));
        assert_eq!(models(), ["other", first[1].as_str()]);
        let back = handle.reload(stage.assignments.clone(), stage.policy.clone()).await;
        assert_eq!(back.as_deref(), Ok("workers replaced: 1, slots started: 0, slots ended: 0"));
        assert_eq!(models(), first);
        stage.drain();
    });
    assert_eq!(exit.await, Exit::Done);
}

#[tokio::test]
async fn slots_that_settings_have_no_more_are_forgotten_and_may_come_again() {
    let stage = Stage::new(2, &format!("{READY}; {OBEY}"));
    let exit = stage.run_asked(async |handle, board| {
        all_ready(&board, 2).await;
        for _ in 0..2 {
            handle.reload(stage.assignments[..1].to_vec(), stage.policy.clone()).await.unwrap();
            let gone = || async { board.read(|status| status.slots.len() == 1).then_some(()) };
            until("embed/1 is forgotten", gone).await;
            assert_eq!(handle.order(Target::All, ControlRequest::Resume).await.len(), 1);
            handle.reload(stage.assignments.clone(), stage.policy.clone()).await.unwrap();
            all_ready(&board, 2).await;
        }
        stage.drain();
    });
    assert_eq!(exit.await, Exit::Done);
    assert_eq!((stage.lines("born-0").len(), stage.lines("born-1").len()), (1, 3));
}

#[tokio::test]
async fn a_dead_workers_successor_that_is_never_ready_takes_its_settings_along() {
    let script =
        format!("[ $life = 2 ] && {{ while [ ! -f on ]; do sleep 0.02; done; exit 82; }}\n{READY}; {OBEY}");
    let stage = Stage::new(1, &script);
    let exit = stage.run_asked(async |handle, board| {
        all_ready(&board, 1).await;
        let first = stage.lines("pid-0")[0].clone();
        let before = board.read(|status| status.slots["embed/0"].report.model.clone());
        let reload = handle.reload(with_model(&stage.assignments, "missing"), stage.policy.clone());
        let meanwhile = async {
            stage.wait_for_lines("start-0", 2).await;
            stage.kill_process(&first);
            slot_is(&board, "embed/0", State::Starting).await;
            std::fs::write(stage.path("on"), "").unwrap();
        };
        assert!(tokio::join!(reload, meanwhile).0.is_err_and(|words| words.contains("cannot be served")));
        all_ready(&board, 1).await;
        assert_eq!(board.read(|status| status.slots["embed/0"].report.model.clone()), before);
        stage.drain();
    });
    assert_eq!(exit.await, Exit::Done);
    assert_eq!(stage.lines("born-0").len(), 3);
}
