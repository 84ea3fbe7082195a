//! Workers that do not move: seen, said, and killed when they do not move again.

use std::time::Duration;

use sconce::launcher::status_board::StatusBoard;
use sconce::protocol::admin::State;
use sconce::shutdown::Exit;

use super::forward;
use super::stage::{OBEY, READY, Stage, slot_is};
use crate::support::wait::until;

fn is_stuck(board: &StatusBoard) -> bool {
    board.read(|status| status.slots["embed/0"].stuck_since.is_some())
}

#[tokio::test]
async fn a_worker_whose_forward_pass_hangs_is_shown_as_stuck_and_then_killed() {
    let mut stage =
        Stage::new(1, &format!("{READY}; [ $life = 1 ] && {{ {}; sleep 100; }}\n{OBEY}", forward(&["a"])));
    stage.assignments[0].pool.batch.timeout = Duration::from_millis(300);
    let exit = stage.run_asked(async |_, board| {
        slot_is(&board, "embed/0", State::Busy).await;
        assert_eq!(
            board.read(|status| status.slots["embed/0"].report().active),
            ["id a"],
            "what `ctl active` shows"
        );
        until("it counts as stuck", || async { is_stuck(&board).then_some(()) }).await;
        assert!(stage.lives(0), "those who watch are to see it");
        stage.wait_for_lines("born-0", 2).await;
        slot_is(&board, "embed/0", State::Ready).await;
        let restarts = board.read(|status| status.slots["embed/0"].report.restarts.clone());
        assert_eq!((restarts.get("stuck"), is_stuck(&board)), (Some(&1), false));
        stage.drain();
    });
    assert_eq!(exit.await, Exit::Done);
    assert!(stage.lines("start-0")[1].contains("\"task\":\"a\""), "what was on its device is remembered");
}

#[tokio::test]
async fn a_worker_that_moves_again_is_left_alone() {
    let script = format!(
        "{READY}; {}; while [ ! -f on ]; do sleep 0.02; done; {}\n{OBEY}",
        forward(&["a"]),
        forward(&[])
    );
    let mut stage = Stage::new(1, &script);
    stage.assignments[0].pool.batch.timeout = Duration::from_millis(300);
    let exit = stage.run_asked(async |_, board| {
        until("it counts as stuck", || async { is_stuck(&board).then_some(()) }).await;
        std::fs::write(stage.path("on"), "").unwrap();
        until("it does no more", || async { (!is_stuck(&board)).then_some(()) }).await;
        slot_is(&board, "embed/0", State::Ready).await;
        stage.drain();
    });
    assert_eq!(exit.await, Exit::Done);
    assert_eq!(stage.lines("born-0").len(), 1);
}
