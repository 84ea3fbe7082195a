//! Tests of what the tally counts.

use std::time::Duration;

use super::Tally;
use crate::client::answer::{Answer, ForwardPass};

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// A successful reply of `worker`, from a batch of two inputs that took 10 ms.
fn good(worker: &str) -> Answer<'_> {
    Answer {
        status_code: Some(200),
        worker: Some(worker),
        device: "cpu",
        dtype: "f32",
        model: "m",
        // Queue, prepare, wait, compute.
        stages_ms: Some([1.0, 2.0, 3.0, 10.0]),
        batch: Some(ForwardPass { inputs: 2.0, tokens: 20.0 }),
        tokens: Some(10),
        generated: None,
        audio_ms: None,
        truncated: 0,
    }
}

fn bad(status_code: Option<i64>) -> Answer<'static> {
    let (device, model) = ("cpu", "m");
    Answer {
        status_code,
        worker: None,
        device,
        dtype: "f32",
        model,
        stages_ms: None,
        batch: None,
        tokens: None,
        generated: None,
        audio_ms: None,
        truncated: 0,
    }
}

/// Numbers of tasks.
#[derive(Clone, Copy)]
struct Load {
    warmup: usize,
    measured: usize,
    published: u64,
}

/// The tally of a load. Each task has one input; task n is due at n * 10 ms.
fn tally(load: Load) -> Tally {
    let mut tally = Tally::new(load.warmup, load.measured);
    (0..load.published).for_each(|number| tally.published(ms(10 * number), 1));
    tally
}

#[test]
fn rates_cover_the_first_replies_after_warm_up_one_per_measured_task() {
    let mut tally = tally(Load { warmup: 2, measured: 4, published: 8 });
    for number in 0..8 {
        tally.reply(number, ms(100 + 50 * number as u64), &good("w"));
    }
    let measured = tally.measured();
    // From the second reply, at 150 ms, to the sixth, at 350 ms.
    assert_eq!((measured.seconds, measured.tasks_per_second), (0.2, 20.0));
    assert_eq!((measured.inputs_per_second, measured.tokens_per_second), (20.0, Some(200.0)));
    assert_eq!((measured.succeeded, measured.workers[0].tasks), (4, 4));
}

#[test]
fn without_a_warm_up_the_measured_time_starts_with_the_first_task() {
    let mut tally = Tally::new(0, 1);
    tally.published(ms(30), 1);
    tally.reply(0, ms(130), &good("w"));
    assert_eq!(tally.measured().seconds, 0.1);
}

#[test]
fn latency_counts_from_the_due_time_and_includes_stragglers() {
    let mut tally = tally(Load { warmup: 1, measured: 2, published: 4 });
    for (number, at) in [(0, 100), (1, 110), (3, 120), (2, 1_020)] {
        tally.reply(number, ms(at), &good("w"));
    }
    let latency = tally.measured().latency_ms.unwrap();
    assert_eq!((latency.p50, latency.max), (100.0, 1_000.0));
}

#[test]
fn the_busy_time_of_a_batch_is_shared_among_its_tasks() {
    let mut tally = tally(Load { warmup: 0, measured: 4, published: 4 });
    for (number, worker) in ["a", "a", "b", "a"].into_iter().enumerate() {
        tally.reply(number, ms(100), &good(worker));
    }
    let measured = tally.measured();
    // Each task has half of 10 ms, in 100 ms. The device's share is the mean of its workers' shares.
    let shares: Vec<_> = measured.workers.iter().map(|it| (it.worker.as_str(), it.busy_percent)).collect();
    assert_eq!(shares, [("a", 15.0), ("b", 5.0)]);
    assert_eq!(measured.device_busy_percent, Some(10.0));
    assert_eq!(measured.batch.inputs.unwrap().mean, 2.0);
}

#[test]
fn errors_count_by_code_and_not_in_rates_latencies_or_batches() {
    let mut tally = tally(Load { warmup: 0, measured: 4, published: 4 });
    tally.reply(0, ms(100), &good("w"));
    for (number, code) in [(1, Some(400)), (2, Some(400)), (3, None)] {
        tally.reply(number, ms(100), &bad(code));
    }
    let measured = tally.measured();
    let errors: Vec<_> = measured.errors.iter().map(|(code, count)| (code.as_str(), *count)).collect();
    assert_eq!(errors, [("400", 2), ("none", 1)]);
    assert_eq!((measured.succeeded, measured.tasks_per_second), (1, 10.0));
    assert_eq!(measured.latency_ms.unwrap().max, 100.0);
}

#[test]
fn duplicates_and_missing_replies_are_counted_separately() {
    let mut tally = tally(Load { warmup: 0, measured: 2, published: 2 });
    tally.reply(0, ms(1), &good("w"));
    tally.duplicates(1);
    let measured = tally.measured();
    assert_eq!((measured.duplicates, measured.succeeded, measured.unanswered), (1, 1, 1));
}

#[test]
fn a_load_that_only_fails_has_neither_latencies_nor_rates() {
    let mut tally = tally(Load { warmup: 0, measured: 1, published: 1 });
    tally.reply(0, ms(1), &bad(Some(500)));
    let measured = tally.measured();
    assert_eq!((measured.latency_ms, measured.tasks_per_second), (None, 0.0));
    assert_eq!((measured.tokens_per_second, measured.device_busy_percent), (None, None));
}

#[test]
fn the_achieved_rate_is_that_of_the_confirms_of_measured_tasks() {
    let mut tally = tally(Load { warmup: 1, measured: 3, published: 5 });
    for (number, at) in [(0, 0), (1, 500), (3, 1_000), (2, 700), (4, 9_000)] {
        tally.confirmed(number, ms(at));
    }
    // Tasks 1 to 3: two intervals between 500 ms and 1,000 ms.
    assert_eq!(tally.measured().achieved_rate, Some(4.0));
}
