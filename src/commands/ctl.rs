//! `sconce ctl`: sends a request to running launchers over the control exchange, collects their answers until no
//! more arrive or the time-out is over, and prints them.

use std::fmt::Write as _;
use std::io::Write as _;
use std::time::Duration;

use anyhow::anyhow;
use serde_json::{Map, Value as Json, json};
use tokio::time::Instant;

use super::{load, start_logging, tolerate_broken_pipe};
use crate::cli::{Ctl, CtlCommand};
use crate::client::fleet::{AnswerWait, Control, FleetError};
use crate::commands::exits::ExitsWith as _;
use crate::protocol::admin::{ControlRequest, LauncherAnswer, SlotReport, State, Target};
use crate::protocol::shorten;
use crate::protocol::stats::{Histogram, INPUTS, SECONDS, Stage, TOKENS};
use crate::shutdown::Exit;
use crate::telemetry::QUIET;

/// How long to wait for the first answer without `--timeout`.
const FIRST_ANSWER_TIMEOUT: Duration = Duration::from_secs(1);
/// Time between two pings of `--wait`.
const PING_INTERVAL: Duration = Duration::from_millis(300);
/// How long `--wait` waits for the answers to one ping. It is not shortened when little time is left, because a missing
/// answer is a result: a launcher that does not answer has carried out a shutdown, but no other order.
const PING_TIMEOUT: Duration = Duration::from_secs(1);

pub(super) fn run(arguments: &Ctl) -> anyhow::Result<Exit> {
    let settings = load(&arguments.settings, &[])?.settings;
    start_logging(Some(QUIET))?;
    let target = arguments.target().map_err(|problem| anyhow!(problem).exits_with(Exit::Usage))?;
    if let Target::Slot(slot) = &target
        && slot.split('/').count() != 3
    {
        let message =
            format!("--slot is LAUNCHER/POOL/INDEX, as `sconce ctl ping` shows it, and not {slot:?}");
        return Err(anyhow!(message).exits_with(Exit::Usage));
    }
    let request = arguments.command.request();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let result = runtime.block_on(async {
        let mut control = Control::open(&settings).await.map_err(with_exit)?;
        let deadline = Instant::now() + arguments.timeout.unwrap_or(FIRST_ANSWER_TIMEOUT);
        // A slot belongs to one launcher, so its answer ends the wait. A host may have several launchers.
        let expected = arguments.expect.or(match target {
            Target::Slot(_) => Some(1),
            _ => None,
        });
        let gather = match (arguments.timeout, expected) {
            (None, None) => AnswerWait::UntilQuiet,
            (_, expected) => AnswerWait::Expected(expected.unwrap_or(usize::MAX)),
        };
        let answers = control.request(&target, &request, deadline, gather).await;
        let mut answers = answers.map_err(with_exit)?;
        let waited = match arguments.wait {
            Some(limit) => wait_for(&mut control, &target, &request, &mut answers, limit).await,
            None => Ok(()),
        };
        print_answers(&answers, arguments)?;
        waited?;
        control.close().await;
        anyhow::Ok(answers)
    });
    let answers = result?;
    let refused =
        answers.iter().any(|it| it.error.is_some() || it.slots.iter().any(|slot| slot.refused.is_some()));
    let (routing_key, timeout) = (target.routing_key(), arguments.timeout.unwrap_or(FIRST_ANSWER_TIMEOUT));
    let expected = arguments.expect.unwrap_or(1);
    if answers.len() < expected {
        let message = match answers.len() {
            0 => match &target {
                Target::Pool(name) if !settings.pools.iter().any(|pool| pool.name == *name) => {
                    let names: Vec<&str> = settings.pools.iter().map(|pool| pool.name.as_str()).collect();
                    format!(
                        "no pool is named {name:?} in these settings, which have {}; nobody has answered",
                        names.join(", ")
                    )
                }
                _ => "nobody has answered".to_owned(),
            },
            count => {
                let names: Vec<&str> = answers.iter().map(|answer| answer.launcher.as_str()).collect();
                format!("only {count} of {expected} launchers have answered ({})", names.join(", "))
            }
        };
        return Err(anyhow!("{message} for {routing_key:?} within {timeout:?}").exits_with(Exit::Refused));
    }
    let cancelled = cancelled(&answers);
    if let (CtlCommand::Cancel { task }, Some(0), false) = (&arguments.command, cancelled, refused) {
        let hint =
            "one that was put off is cancelled when it returns, but one that waits in its queue is not";
        return Err(anyhow!("no worker holds a task {task:?}; {hint}").exits_with(Exit::Refused));
    }
    // If a task was cancelled, refusals do not count: a slot without a worker refuses, but cannot hold the task.
    let is_cancelled = cancelled > Some(0);
    Ok(if refused && !is_cancelled { Exit::Refused } else { Exit::Done })
}

/// How many tasks were cancelled. None if no launcher reports it, as in older versions.
fn cancelled(answers: &[LauncherAnswer]) -> Option<u64> {
    let slots = answers.iter().flat_map(|answer| &answer.slots);
    slots.filter_map(|slot| slot.cancelled).reduce(|one, other| one + other)
}

/// Waits until the slots that accepted an order have carried it out. Puts the states after the wait into `answers`.
///
/// # Errors
/// Some slots have not carried it out within `limit`; the error names them.
async fn wait_for(
    control: &mut Control,
    target: &Target,
    order: &ControlRequest,
    answers: &mut [LauncherAnswer],
    limit: Duration,
) -> anyhow::Result<()> {
    let deadline = Instant::now() + limit;
    let has_accepted = |slot: &&SlotReport| slot.refused.is_none();
    let accepted: Vec<&SlotReport> =
        answers.iter().flat_map(|answer| &answer.slots).filter(has_accepted).collect();
    loop {
        let next_ping = deadline.min(Instant::now() + PING_INTERVAL);
        let ping_deadline = Instant::now() + PING_TIMEOUT;
        let pinged = control.request(
            target,
            &ControlRequest::Ping,
            ping_deadline,
            AnswerWait::Expected(answers.len()),
        );
        let current = pinged.await.map_err(with_exit)?;
        let slots: Vec<&SlotReport> = current.iter().flat_map(|answer| &answer.slots).collect();
        let is_done = |before: &SlotReport| {
            let after = slots.iter().find(|slot| slot.worker == before.worker);
            is_carried_out(order, before, after.copied())
        };
        let pending: Vec<String> = accepted
            .iter()
            .filter(|before| !is_done(before))
            .map(|before| match slots.iter().find(|slot| slot.worker == before.worker) {
                Some(slot) => format!("{} ({})", before.worker, state_and_failure(slot)),
                None => format!("{} (no answer)", before.worker),
            })
            .collect();
        if pending.is_empty() {
            set_current_states(answers, &current);
            return Ok(());
        }
        if Instant::now() >= deadline {
            let message = format!("not carried out after {limit:?} by {}", pending.join(", "));
            return Err(anyhow!(message).exits_with(Exit::Refused));
        }
        tokio::time::sleep_until(next_ping).await;
    }
}

/// Replaces the states in `answers` by the current ones. A slot without a report is shown as stopped: its launcher has
/// ended, or does not answer.
fn set_current_states(answers: &mut [LauncherAnswer], current: &[LauncherAnswer]) {
    for slot in answers.iter_mut().flat_map(|answer| &mut answer.slots) {
        // `done` says that the slot has begun to carry out the order. By now it has finished.
        slot.done = None;
        match current.iter().flat_map(|answer| &answer.slots).find(|after| after.worker == slot.worker) {
            Some(after) => (slot.state, slot.state_ms, slot.pid) = (after.state, after.state_ms, after.pid),
            None => (slot.state, slot.state_ms, slot.pid) = (State::Stopped, 0, None),
        }
    }
}

/// Whether a slot has carried out an order. `before` is its report when it accepted the order, `after` its current
/// report; none if its launcher does not answer.
fn is_carried_out(order: &ControlRequest, before: &SlotReport, after: Option<&SlotReport>) -> bool {
    let state = after.map(|slot| slot.state);
    match order {
        ControlRequest::Pause => matches!(state, Some(State::Paused | State::Stopped)),
        ControlRequest::Resume => state.is_some_and(State::is_serving),
        ControlRequest::Restart => {
            state.is_some_and(State::is_serving) && after.is_some_and(|slot| slot.pid != before.pid)
        }
        ControlRequest::Drain => state == Some(State::Stopped),
        // A launcher ends with its last slot, and does not answer after that.
        ControlRequest::Shutdown => state.is_none_or(|state| state == State::Stopped),
        ControlRequest::Ping
        | ControlRequest::Stats
        | ControlRequest::Active
        | ControlRequest::LogLevel { .. }
        | ControlRequest::Cancel(_)
        | ControlRequest::CancelAll(_) => true,
    }
}

/// Adds the exit code to an error of the fleet. The exit code of a broker error follows from its kind.
pub(super) fn with_exit(error: FleetError) -> anyhow::Error {
    match error {
        FleetError::Broker(error) => error.into(),
        FleetError::NoExchange => anyhow::Error::new(error).exits_with(Exit::Config),
        FleetError::Nobody(_) => anyhow::Error::new(error).exits_with(Exit::Refused),
        FleetError::Lost => anyhow::Error::new(error).exits_with(Exit::BrokerLost),
    }
}

fn print_answers(answers: &[LauncherAnswer], arguments: &Ctl) -> anyhow::Result<()> {
    let mut text = String::new();
    for answer in answers {
        if arguments.json {
            let _ = writeln!(text, "{}", json_of(answer)?);
            continue;
        }
        let LauncherAnswer { launcher, host, pid, version, uptime_ms, .. } = answer;
        let host = if launcher == host { String::new() } else { format!(" on {host}") };
        let up = span(*uptime_ms);
        let _ = writeln!(text, "{launcher}{host}  process {pid}, sconce {version}, up {up}");
        if let Some(error) = &answer.error {
            let _ = writeln!(text, "  refused: {error}");
        }
        match arguments.command {
            CtlCommand::Stats => write_stats_table(&mut text, &answer.slots),
            _ => {
                for slot in &answer.slots {
                    let _ = writeln!(text, "  {}", slot_line(slot, &arguments.command));
                }
            }
        }
    }
    tolerate_broken_pipe(std::io::stdout().write_all(text.as_bytes()))?;
    Ok(())
}

/// The line of one slot: its name and state, and the information that belongs to the command.
fn slot_line(slot: &SlotReport, command: &CtlCommand) -> String {
    let (name, state, since) = (&slot.worker, slot.state.name(), span(slot.state_ms));
    let head = format!("{name:<20} {state:<11} {since:>7}");
    match command {
        CtlCommand::Active => format!("{head}  {}", active_tasks(slot)),
        CtlCommand::Ping => {
            // The failure of a slot that works again is shown only with `--json`.
            let failure = slot.last_failure.as_ref().filter(|_| !slot.state.is_serving());
            let failure = failure.map(|failure| format!("  last failure: {failure}")).unwrap_or_default();
            format!("{head}  {}  {}{failure}", slot.device, slot.loaded_model())
        }
        _ => {
            let outcome = slot.refused.as_ref().map(|reason| format!("refused: {reason}"));
            format!("{head}  {}", outcome.or_else(|| slot.done.clone()).unwrap_or_default())
        }
    }
}

fn active_tasks(slot: &SlotReport) -> String {
    let Some(ms) = slot.active_ms else { return "nothing".to_owned() };
    let more = slot.in_flight.saturating_sub(slot.active.len() as u64);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("{} for {ms} ms: {}{more}", slot.in_flight, slot.active.join(" "))
}

/// Writes the statistics of slots as a table with lines of about 100 characters. A slot's problem is on a separate line
/// below.
fn write_stats_table(text: &mut String, slots: &[SlotReport]) {
    let head = [
        "slot",
        "dtype",
        "done",
        "errors",
        "retried",
        "dead",
        "tokens",
        "batches",
        "p50 ms",
        "p99 ms",
        "queue p99",
    ];
    let row = |cells: [String; 11]| {
        let [slot, rest @ ..] = cells;
        let widths = [7, 9, 8, 8, 6, 12, 9, 8, 8, 11];
        let rest: Vec<String> =
            rest.iter().zip(widths).map(|(cell, width)| format!("{cell:>width$}")).collect();
        format!("  {slot:<17}{}\n", rest.join(""))
    };
    text.push_str(&row(head.map(str::to_owned)));
    for slot in slots {
        let Some(stats) = &slot.stats else {
            let _ = writeln!(text, "  {:<17}{}", slot.slot, state_and_failure(slot));
            continue;
        };
        let succeeded = stats.of_status("succeeded");
        let milliseconds = |stage: Stage, rank| {
            let value = stats.stages[stage as usize].quantile(&SECONDS, rank);
            value.map_or_else(|| "-".to_owned(), |seconds| format!("{:.1}", seconds * 1e3))
        };
        text.push_str(&row([
            slot.slot.clone(),
            slot.dtype.clone().unwrap_or_else(|| "-".to_owned()),
            succeeded.to_string(),
            (stats.tasks() - succeeded).to_string(),
            stats.retried.to_string(),
            stats.dead_lettered.values().sum::<u64>().to_string(),
            stats.tokens.to_string(),
            stats.batch_seconds.count().to_string(),
            milliseconds(Stage::Compute, 0.5),
            milliseconds(Stage::Compute, 0.99),
            milliseconds(Stage::Queue, 0.99),
        ]));
        let problem = stats.now.problem.as_ref().map(|problem| shorten(problem, 300));
        let no_broker = || (!stats.now.connected && slot.state.is_serving()).then(|| "no broker".to_owned());
        let has_failed = matches!(slot.state, State::Failed | State::Quarantined);
        let failure = has_failed.then(|| state_and_failure(slot));
        if let Some(problem) = problem.or_else(no_broker).or(failure) {
            let _ = writeln!(text, "    {problem}");
        }
        for assumed in &slot.assumptions {
            let _ = writeln!(text, "    assumed: {assumed}");
        }
    }
}

/// A slot's state, and why its last worker failed.
fn state_and_failure(slot: &SlotReport) -> String {
    let failure =
        slot.last_failure.as_ref().map(|failure| format!(", last failure: {}", shorten(failure, 300)));
    format!("{}{}", slot.state.name(), failure.unwrap_or_default())
}

/// An answer as JSON, in which histograms have names and bounds, and durations are in seconds.
fn json_of(answer: &LauncherAnswer) -> anyhow::Result<Json> {
    let mut json = serde_json::to_value(answer)?;
    let reports = json.get_mut("slots").and_then(Json::as_array_mut).into_iter().flatten();
    for (report, slot) in reports.zip(&answer.slots) {
        let (Some(stats), Some(counts)) = (report.get_mut("stats"), &slot.stats) else { continue };
        let Json::Object(stats) = stats else { continue };
        let to_json = |histogram: &Histogram, bounds: &[f64]| json!({"upper_bounds": bounds, "counts": histogram.counts(bounds), "sum": histogram.sum(), "count": histogram.count()});
        let stages = Stage::ALL
            .iter()
            .map(|(stage, name)| ((*name).to_owned(), to_json(&counts.stages[*stage as usize], &SECONDS)));
        stats.insert("stage_seconds".to_owned(), stages.collect::<Map<String, Json>>().into());
        for (name, histogram, bounds) in [
            ("first_token_seconds", &counts.first_token, &SECONDS[..]),
            ("output_token_seconds", &counts.output_token, &SECONDS),
            ("batch_seconds", &counts.batch_seconds, &SECONDS),
            ("batch_inputs", &counts.batch_inputs, &INPUTS),
            ("batch_tokens", &counts.batch_tokens, &TOKENS),
        ] {
            stats.insert(name.to_owned(), to_json(histogram, bounds));
        }
        stats.insert("busy_seconds".to_owned(), json!(counts.busy_us as f64 / 1e6));
        stats.insert("span_seconds".to_owned(), json!(counts.span_ms as f64 / 1e3));
        for replaced in ["stages", "first_token", "output_token", "busy_us", "span_ms"] {
            stats.remove(replaced);
        }
    }
    Ok(json)
}

/// A duration in its two largest units.
pub(super) fn span(ms: u64) -> String {
    let seconds = ms / 1_000;
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3_600 => format!("{}m{:02}s", seconds / 60, seconds % 60),
        3_600..86_400 => format!("{}h{:02}m", seconds / 3_600, seconds / 60 % 60),
        _ => format!("{}d{:02}h", seconds / 86_400, seconds / 3_600 % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_shows_its_two_largest_units() {
        let spans = [999, 61_000, 3_700_000, 90_000_000].map(span);
        assert_eq!(spans, ["0s", "1m01s", "1h01m", "1d01h"]);
    }

    #[test]
    fn answers_get_the_states_after_the_wait() {
        let slot = |worker: &str, state, pid| SlotReport {
            worker: worker.to_owned(),
            state,
            pid,
            done: Some("restarting".to_owned()),
            ..SlotReport::default()
        };
        let answer = |slots| LauncherAnswer { slots, ..LauncherAnswer::default() };
        let mut answers =
            [answer(vec![slot("a/x/0", State::Ready, Some(1)), slot("a/x/1", State::Ready, Some(2))])];
        let current = [answer(vec![slot("a/x/0", State::Busy, Some(3))])];
        set_current_states(&mut answers, &current);
        let states: Vec<_> =
            answers[0].slots.iter().map(|it| (it.state, it.pid, it.done.is_some())).collect();
        assert_eq!(states, [(State::Busy, Some(3), false), (State::Stopped, None, false)]);
    }

    #[test]
    fn cancelled_tasks_are_counted_if_any_launcher_reports_them() {
        let answer = |cancelled| {
            let slot = SlotReport { cancelled, ..SlotReport::default() };
            LauncherAnswer { slots: vec![slot], ..LauncherAnswer::default() }
        };
        assert_eq!(cancelled(&[answer(Some(0)), answer(Some(1)), answer(None)]), Some(1));
        assert_eq!(cancelled(&[answer(Some(0)), answer(None)]), Some(0));
        assert_eq!(cancelled(&[answer(None)]), None);
    }
}
