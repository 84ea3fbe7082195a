//! Computes rates from two snapshots of the same slots. Pure: time is passed in.

use std::collections::BTreeMap;

use crate::protocol::admin::{Answer, SlotReport};
use crate::protocol::stats::{SECONDS, Stage, Stats};

/// A snapshot of all launchers that answered, and of the queues of their pools.
#[derive(Clone, Debug, Default)]
pub(super) struct Look {
    pub(super) answers: Vec<Answer>,
    /// Numbers of ready messages and consumers by queue; none where the queue cannot be inspected.
    pub(super) queues: BTreeMap<String, Option<(u32, u32)>>,
}

/// One slot in the time between two snapshots.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Row {
    pub(super) report: SlotReport,
    pub(super) tasks_per_second: f64,
    pub(super) tokens_per_second: f64,
    /// Share of the time that the device computed.
    pub(super) busy: f64,
    /// Mean tokens of a batch divided by the allowed maximum.
    pub(super) fill: Option<f64>,
    /// Median and 99th percentile of the time on the device, in seconds.
    pub(super) compute: Option<(f64, f64)>,
    /// Median of the time in the queue, in seconds.
    pub(super) queued: Option<f64>,
    /// Tasks answered with an error, a second.
    pub(super) errors_per_second: f64,
}

/// The rows of all slots. For a slot that is new in the second snapshot, only its state is known.
pub(super) fn rows(before: &Look, now: &Look) -> Vec<Row> {
    let slots = now.answers.iter().flat_map(|answer| answer.slots.iter().map(move |slot| (answer, slot)));
    slots
        .map(|(answer, slot)| {
            // Compares uptimes: a launcher that was restarted, perhaps with the same process id, counts from
            // zero.
            let is_earlier = |it: &&Answer| {
                (&it.launcher, it.pid) == (&answer.launcher, answer.pid) && it.uptime_ms < answer.uptime_ms
            };
            let earlier = before.answers.iter().find(is_earlier);
            let seconds = earlier.map_or(1.0, |it| (answer.uptime_ms - it.uptime_ms) as f64 / 1e3);
            let earlier = earlier.and_then(|it| it.slots.iter().find(|it| it.slot == slot.slot));
            row(earlier.and_then(|it| it.stats.as_deref()), slot, seconds)
        })
        .collect()
}

fn row(before: Option<&Stats>, slot: &SlotReport, seconds: f64) -> Row {
    let none = Stats::default();
    let now = slot.stats.as_deref().unwrap_or(&none);
    let before = before.unwrap_or(now);
    let rate = |now: u64, before: u64| now.saturating_sub(before) as f64 / seconds;
    let errors = |stats: &Stats| stats.tasks() - stats.of_status("succeeded");
    let stage = |stage: Stage| now.stages[stage as usize].since(&before.stages[stage as usize]);
    let (compute, queued) = (stage(Stage::Compute), stage(Stage::Queue));
    let tokens = now.batch_tokens.since(&before.batch_tokens);
    let most = slot.batch.max_tokens.filter(|_| tokens.count() > 0);
    Row {
        tasks_per_second: rate(now.tasks(), before.tasks()),
        tokens_per_second: rate(now.tokens, before.tokens),
        busy: (rate(now.busy_us, before.busy_us) / 1e6).min(1.0),
        fill: most.map(|most| tokens.sum() / tokens.count() as f64 / most as f64),
        compute: compute.quantile(&SECONDS, 0.5).zip(compute.quantile(&SECONDS, 0.99)),
        queued: queued.quantile(&SECONDS, 0.5),
        errors_per_second: rate(errors(now), errors(before)),
        report: slot.clone(),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::protocol::admin::State;
    use crate::protocol::control::BatchChange;

    /// A snapshot of one slot that has answered this many tasks, each alone in a batch of 500 tokens that took
    /// 20 ms.
    pub(in super::super) fn look(at: f64, tasks: u64) -> Look {
        let mut stats = Stats::default();
        stats.answered("succeeded", "", tasks);
        for _ in 0..tasks {
            stats.took(Stage::Compute, 0.02);
            stats.batch(1, 500, 0.02);
        }
        let slot = SlotReport {
            slot: "embed/0".into(),
            worker: "h/embed/0".into(),
            pool: "embed".into(),
            queue: "tasks".into(),
            device: "cpu".into(),
            state: State::Busy,
            batch: BatchChange { max_tokens: Some(1_000), ..BatchChange::default() },
            stats: Some(Box::new(stats)),
            ..SlotReport::default()
        };
        let uptime_ms = (1e3 * at) as u64;
        let answers =
            vec![Answer { launcher: "h".into(), pid: 1, uptime_ms, slots: vec![slot], ..Answer::default() }];
        Look { answers, queues: [("tasks".to_owned(), Some((7, 1)))].into() }
    }

    #[test]
    fn what_went_on_between_two_looks_is_told_a_second() {
        let row = &rows(&look(1.0, 5), &look(3.0, 45))[0];
        assert_eq!(
            (row.tasks_per_second, row.tokens_per_second, row.errors_per_second),
            (20.0, 10_000.0, 0.0)
        );
        assert!((row.busy - 0.4).abs() < 1e-3 && row.fill == Some(0.5), "{row:?}");
        let (median, _) = row.compute.unwrap();
        assert!((0.01..=0.025).contains(&median), "{median}");
    }

    #[test]
    fn of_a_slot_that_is_new_only_where_it_stands_is_known() {
        for before in [Look::default(), look(9.0, 100)] {
            let row = &rows(&before, &look(3.0, 45))[0];
            assert_eq!((row.tasks_per_second, row.fill, row.compute), (0.0, None, None));
            assert_eq!(row.report.state, State::Busy);
        }
    }
}
