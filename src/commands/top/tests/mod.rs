//! Tests of the live view, with slots from two polls of the fleet.

mod pages;
mod state;

use std::time::{Duration, Instant};

use super::screen::Screen;
use crate::client::fleet::News;
use crate::client::fleet::fixtures::{self, GPU, answer, pool, slot};
use crate::protocol::admin::Answer;

fn look(start: Instant, at: u64, answers: Vec<Answer>) -> News {
    News::Look(Box::new(fixtures::look(start, at, answers)))
}

fn two_hosts(start: Instant, at: u64) -> News {
    News::Look(Box::new(fixtures::two_hosts(start, at)))
}

fn screen() -> Screen {
    Screen::new("amqp://sconce@broker:5672".into(), vec![pool()], Duration::from_secs(5))
}
