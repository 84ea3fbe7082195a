//! The account of a storm, as Markdown that can be pasted into benches/RESULTS.md. Pure.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::ledger::{Cause, Incident, Ledger};

/// What the ledger does not know.
pub struct Frame {
    pub seed: u64,
    pub seconds: u64,
    pub sentinels: usize,
    pub largest_worker_kib: u64,
}

/// The whole report.
pub fn report(ledger: &Ledger, frame: &Frame) -> String {
    let mut text = format!("seed {}, {} s\n\n| what | count |\n|---|---:|\n", frame.seed, frame.seconds);
    let confirmed = || ledger.entries().filter(|(_, entry)| entry.confirmed);
    let mut row = |what: &str, count: usize| {
        let _ = writeln!(text, "| {what} | {count} |");
    };
    row("tasks in", confirmed().count());
    row("published without a confirm", ledger.entries().filter(|(_, entry)| !entry.confirmed).count());
    let mut kinds = BTreeMap::<_, usize>::new();
    for (_, entry) in confirmed() {
        *kinds.entry(entry.kind).or_default() += 1;
    }
    for (kind, count) in kinds {
        row(&format!("… {kind:?}"), count);
    }
    let struck = |it: &&Incident| matches!(it.cause, Cause::Struck(_));
    row("faults", ledger.incidents.iter().filter(struck).count());
    row("sentinels, one worker stopped by each", frame.sentinels);
    row("replies", ledger.entries().map(|(_, entry)| entry.replies.len()).sum());
    row("dead letters, as they should be", ledger.entries().map(|(_, entry)| entry.letters.len()).sum());
    row("lost", ledger.lost().len());
    row("wrong", ledger.wrong().len());
    row("duplicates", ledger.duplicates().len());
    row("read again by the reader", ledger.read_again);
    row("largest worker, MiB", (frame.largest_worker_kib / 1024) as usize);
    text.push_str(
        "\n| fault | count | in flight, at most | repeated tasks | further copies | first answer: median | worst \
         | all hit workers back: median | worst |\n|---|---:|---:|---:|---:|---:|---:|---:|---:|\n",
    );
    let mut causes = BTreeMap::<Cause, Vec<&Incident>>::new();
    for incident in &ledger.incidents {
        causes.entry(incident.cause).or_default().push(incident);
    }
    for (cause, incidents) in causes {
        let name = match cause {
            Cause::Struck(fault) => format!("{fault:?}"),
            other => format!("{other:?}"),
        };
        let in_flight: usize = incidents.iter().map(|it| it.in_flight).sum();
        let repeated: usize = incidents.iter().map(|it| it.repeated).sum();
        let further: usize = incidents.iter().map(|it| it.further).sum();
        let first = times(incidents.iter().filter_map(|it| it.recovery).map(|(first, _)| first));
        let all = times(incidents.iter().filter_map(|it| it.recovery).map(|(_, all)| all));
        let count = incidents.len();
        let _ =
            writeln!(text, "| {name} | {count} | {in_flight} | {repeated} | {further} | {first} | {all} |");
    }
    text
}

/// Median and worst, in seconds, as two cells.
fn times(each: impl Iterator<Item = u64>) -> String {
    let mut each: Vec<u64> = each.collect();
    each.sort_unstable();
    let seconds = |ms: u64| format!("{:.2} s", ms as f64 / 1e3);
    match (each.get(each.len() / 2), each.last()) {
        (Some(median), Some(worst)) => format!("{} | {}", seconds(*median), seconds(*worst)),
        _ => "– | –".to_owned(),
    }
}
