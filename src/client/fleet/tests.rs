//! Tests of the fleet's rates and totals, and of silent launchers.

use std::time::Instant;

use super::fixtures::{answer, pool, slot, snapshot, two_hosts};
use super::*;
use crate::protocol::admin::LauncherAnswer;

/// The workers in the order of their names, with their states.
fn shown(history: &History) -> Vec<(String, &'static str)> {
    history.slots.values().map(|slot| (slot.report.worker.clone(), slot.state())).collect()
}

#[test]
fn rates_are_means_of_three_seconds_and_zero_for_a_new_slot() {
    let (mut history, start) = (History::default(), Instant::now());
    for (at, tasks) in [(1, 5), (2, 5), (3, 45), (4, 65), (5, 65)] {
        let one = answer("h", at, vec![slot("h/embed/0", "cpu", tasks)]);
        history.add(snapshot(start, at, vec![one]));
        let rates = &history.slots.values().next().unwrap().rates;
        match at {
            1 => assert_eq!((rates.tasks, rates.fill), (0.0, None)),
            4 => assert_eq!((rates.tasks, rates.tokens, rates.fill), (20.0, 10_000.0, Some(0.5))),
            5 => assert_eq!((rates.tasks, (10.0 * rates.busy).round()), (20.0, 4.0)),
            _ => {}
        }
    }
    let again = answer("h", 1, vec![slot("h/embed/0", "cpu", 3)]);
    history.add(snapshot(start, 6, vec![again]));
    let slot = history.slots.values().next().unwrap();
    assert_eq!((slot.rates.tasks, slot.age_ms), (0.0, Some(66_000)));
}

#[test]
fn slots_of_a_silent_launcher_are_marked_and_removed_after_30_s() {
    let (mut history, start) = (History::default(), Instant::now());
    history.add(two_hosts(start, 1));
    let one = |at| snapshot(start, at, vec![answer("gpu1", at, vec![slot("gpu1/embed/0", "cpu", at)])]);
    history.add(one(2));
    // Its launcher has answered without the other two.
    let silent = [("gpu1/embed/0".to_owned(), "busy"), ("gpu2.example.com/generate/0".to_owned(), "silent")];
    assert_eq!(shown(&history), silent);
    history.add(one(31));
    assert_eq!(shown(&history), silent);
    history.add(one(32));
    assert_eq!(shown(&history), silent[..1]);
    // An outage does not count: nobody could answer.
    history.add(two_hosts(start, 40));
    history.add(one(400));
    assert_eq!(shown(&history), silent);
}

#[test]
fn slots_of_a_restarted_launcher_replace_its_silent_slots() {
    let (mut history, start) = (History::default(), Instant::now());
    let with = |pid, at| LauncherAnswer { pid, ..answer("h", at, vec![slot("h/embed/0", "cpu", at)]) };
    history.add(snapshot(start, 1, vec![with(7, 100)]));
    history.add(snapshot(start, 2, vec![with(8, 1)]));
    assert_eq!(shown(&history), [("h/embed/0".to_owned(), "busy")]);
}

#[test]
fn totals_sum_working_slots_and_the_depths_of_known_queues() {
    let (mut history, start) = (History::default(), Instant::now());
    history.add(two_hosts(start, 1));
    history.add(two_hosts(start, 2));
    let [embed, generate] = &totals(&history, &[pool()])[..] else { panic!() };
    assert_eq!((embed.working, embed.slots, embed.held, embed.consumers), (3, 3, 9, Some(2)));
    assert_eq!((embed.tasks.round(), embed.errors), (32.0, 1.0));
    assert_eq!((embed.waiting, embed.background), (Depth::Messages(12), Depth::NoQueue));
    assert_eq!((embed.retry, embed.dead), (Depth::Messages(5), Depth::Messages(2)));
    assert_eq!((generate.working, generate.slots), (0, 1));
    assert_eq!((generate.waiting, generate.dead), (Depth::Unknown, Depth::NoQueue));
}
