//! Tests of the live view, with made-up snapshots of the fleet.

mod pages;
mod state;

use std::time::{Duration, Instant};

use super::screen::Screen;
use crate::client::fleet::Update;
use crate::client::fleet::fixtures::{self, GPU, answer, pool, slot};
use crate::protocol::admin::LauncherAnswer;

fn snapshot(start: Instant, second: u64, answers: Vec<LauncherAnswer>) -> Update {
    Update::Snapshot(Box::new(fixtures::snapshot(start, second, answers)))
}

fn two_hosts(start: Instant, second: u64) -> Update {
    Update::Snapshot(Box::new(fixtures::two_hosts(start, second)))
}

fn screen() -> Screen {
    Screen::new("amqp://sconce@broker:5672".into(), vec![pool()], Duration::from_secs(5))
}
