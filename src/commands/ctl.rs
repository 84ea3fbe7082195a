//! `sconce ctl`: sends a request to running launchers over the control exchange, collects answers until the
//! time-out, and prints them.

use std::fmt::Write as _;
use std::io::Write as _;
use std::time::{Duration, SystemTime};

use anyhow::{Context, anyhow};
use tokio::time::Instant;

use super::{load, start_logging};
use crate::broker::amqp::{Connector, ControlClient};
use crate::cli::{Ctl, CtlOrder};
use crate::config::Settings;
use crate::protocol::admin::{Answer, Request, SlotReport, Target};
use crate::protocol::shorten;
use crate::protocol::stats::{SECONDS, Stage};
use crate::shutdown::Exit;
use crate::telemetry::QUIET;

pub(super) fn run(arguments: &Ctl) -> anyhow::Result<Exit> {
    let settings = load(&arguments.settings, &[])?.settings;
    start_logging(Some(QUIET))?;
    let target = arguments.target().map_err(|words| anyhow!(words).context(Exit::Usage))?;
    let request = arguments.order.request();
    if let Request::SetBatch(change) = &request
        && *change == Default::default()
    {
        return Err(
            anyhow!("set-batch needs --max-tokens, --max-requests or --max-delay").context(Exit::Usage)
        );
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let gathered = runtime.block_on(async {
        let mut lines = open(&settings).await?;
        let until = Instant::now() + arguments.timeout;
        // Probably one launcher answers for a host or a slot, but two may have the same name.
        let expected = arguments.expect.or(match target {
            Target::Slot(_) => Some(1),
            _ => None,
        });
        let answers = gather(&mut lines, (&target, &request), until, expected).await;
        lines.close().await;
        answers
    });
    let answers = gathered?;
    print(&answers, arguments)?;
    let enough = answers.len() >= arguments.expect.unwrap_or(1);
    let refused =
        answers.iter().any(|it| it.error.is_some() || it.slots.iter().any(|slot| slot.refused.is_some()));
    if answers.is_empty() {
        let key = target.routing_key();
        return Err(
            anyhow!("nobody has answered for {key:?} within {:?}", arguments.timeout).context(Exit::No)
        );
    }
    Ok(if enough && !refused { Exit::Done } else { Exit::No })
}

/// Connects to the control exchange.
pub(super) async fn open(settings: &Settings) -> anyhow::Result<ControlClient> {
    let exchange = settings.admin.control_exchange.as_deref();
    let exchange = exchange
        .context("admin.control_exchange = \"\": there is no remote control")
        .context(Exit::Config)?;
    let connector = Connector::new(settings.broker.clone(), "sconce ctl");
    Ok(ControlClient::connect(&connector, exchange).await?)
}

/// The answers that come in time, sorted by host; at most `expected`.
pub(super) async fn gather(
    lines: &mut ControlClient,
    (target, request): (&Target, &Request),
    until: Instant,
    expected: Option<usize>,
) -> anyhow::Result<Vec<Answer>> {
    let id = uuid::Uuid::new_v4().to_string();
    let patience = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    let body = serde_json::to_vec(request)?;
    let mut answers: Vec<Answer> = Vec::new();
    if !lines.ask(&target.routing_key(), (body, &id), patience).await? {
        return Ok(answers);
    }
    while answers.len() < expected.unwrap_or(usize::MAX) {
        let Ok(next) = tokio::time::timeout_at(until, lines.next()).await else { break };
        let message = next.context("the broker was lost while answers were awaited")?;
        // Late answers to earlier requests are ignored.
        if message.properties.correlation_id.as_ref() == Some(&id) {
            // An unreadable answer, from a launcher of another version, must not hide the others.
            answers.push(serde_json::from_slice(&message.body).unwrap_or_else(|error| unreadable(&error)));
        }
    }
    answers.sort_by(|one, other| (&one.host, one.pid).cmp(&(&other.host, other.pid)));
    Ok(answers)
}

fn unreadable(error: &serde_json::Error) -> Answer {
    let words = format!("an answer that this version cannot read: {error}");
    Answer { host: "unknown".to_owned(), error: Some(words), ..Answer::default() }
}

fn print(answers: &[Answer], arguments: &Ctl) -> anyhow::Result<()> {
    let mut text = String::new();
    for answer in answers {
        if arguments.json {
            let _ = writeln!(text, "{}", serde_json::to_string(answer)?);
            continue;
        }
        let Answer { host, pid, version, uptime_ms, .. } = answer;
        let _ = writeln!(text, "{host}  process {pid}, sconce {version}, up {}", span(*uptime_ms));
        if let Some(error) = &answer.error {
            let _ = writeln!(text, "  refused: {error}");
        }
        for slot in &answer.slots {
            let _ = writeln!(text, "  {}", line(slot, &arguments.order));
        }
    }
    std::io::stdout().write_all(text.as_bytes())?;
    Ok(())
}

/// The line of one slot, with what was asked for.
fn line(slot: &SlotReport, order: &CtlOrder) -> String {
    let (name, state, since) = (&slot.slot, slot.state.name(), span(slot.state_ms));
    let head = format!("{name:<14} {state:<11} {since:>7}");
    match order {
        CtlOrder::Stats => format!("{head}  {}", counted(slot)),
        CtlOrder::Active => format!("{head}  {}", active(slot)),
        CtlOrder::Ping => {
            let failure = slot.last_failure.as_ref().map(|words| format!("  last failure: {words}"));
            format!("{head}  {}  {}{}", slot.device, slot.model, failure.unwrap_or_default())
        }
        _ => {
            let outcome = slot.refused.as_ref().map(|words| format!("refused: {words}"));
            format!("{head}  {}", outcome.or_else(|| slot.done.clone()).unwrap_or_default())
        }
    }
}

fn active(slot: &SlotReport) -> String {
    let Some(ms) = slot.active_ms else { return "nothing".to_owned() };
    let more = slot.in_flight.saturating_sub(slot.active.len() as u64);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("{} for {ms} ms: {}{more}", slot.in_flight, slot.active.join(" "))
}

fn counted(slot: &SlotReport) -> String {
    let Some(stats) = &slot.stats else { return String::new() };
    let succeeded = stats.of_status("succeeded");
    let milliseconds = |stage: Stage, rank| {
        let value = stats.stages[stage as usize].quantile(&SECONDS, rank);
        value.map_or_else(|| "-".to_owned(), |seconds| format!("{:.1}", seconds * 1e3))
    };
    let dead: u64 = stats.dead_lettered.values().sum();
    let mut text = format!(
        "{succeeded} succeeded, {} not, {} retried, {dead} dead; {} tokens in {} batches; compute p50 {} p99 {} ms, \
         queue p99 {} ms",
        stats.tasks() - succeeded,
        stats.retried,
        stats.tokens,
        stats.batch_seconds.count(),
        milliseconds(Stage::Compute, 0.5),
        milliseconds(Stage::Compute, 0.99),
        milliseconds(Stage::Queue, 0.99),
    );
    let since = slot.ready_at_ms.map(|at| now_ms().saturating_sub(at)).filter(|lived| *lived > 0);
    if let Some(lived) = since {
        let _ = write!(text, "; worker ready for {}, {} tasks in hand", span(lived), stats.now.held);
    }
    match &stats.now.problem {
        Some(problem) => drop(write!(text, "; {}", shorten(problem, 300))),
        None if !stats.now.connected && slot.state.works() => text.push_str("; NO BROKER"),
        None => {}
    }
    text
}

fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    since.as_millis() as u64
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
}
