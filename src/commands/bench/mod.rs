//! `sconce bench`: publishes a seeded load to a running pool and reports the results. Connects the load, the
//! broker and the report.

mod drive;
mod load;
mod report;
mod summary;
mod tally;

use std::io::{self, Write};
use std::path::Path;

use anyhow::Context;

use self::drive::{Pace, Plan, drive};
use self::load::Arrivals;
use self::report::{Load, Measured, Report};
use super::requests::requests_in;
use super::{
    Registry, broker_session, pool_named, progress, queue_named, start_logging, tolerate_broken_pipe,
};
use crate::cli::{Bench, Texts};
use crate::client::Client;
use crate::commands::exits::ExitsWith as _;
use crate::config::{Pool, Settings};
use crate::shutdown::Exit;
use crate::telemetry::QUIET;

pub(super) use self::load::{Bodies, Work};
pub(super) use self::summary::{Sizes, Summary, Weighted};

/// The number of warm-up tasks without `--warmup`, but no more than are measured. A closed loop with more tasks in flight uses their number instead.
const WARMUP: usize = 200;
/// Unacked replies that the broker may send ahead.
const PREFETCH: u16 = 2_048;

pub(super) fn run(arguments: &Bench, registry: &Registry) -> anyhow::Result<Exit> {
    let mut loaded = super::load(&arguments.settings, &[])?;
    registry.resolve_folders(&mut loaded);
    let settings = loaded.settings;
    start_logging(Some(QUIET))?;
    let (_, pool) = pool_named(&settings.pools, arguments.pool.as_deref())?;
    let queue = queue_named(pool, arguments.queue.as_deref())?;
    let bodies = bodies(&arguments.texts, pool, registry).exits_with(Exit::Usage)?;
    let plan = plan(arguments);
    // One thread, which is woken less often than several: the client should take as little CPU time as possible from
    // the measured service.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (measured, unanswered) =
        runtime.block_on(measure(arguments, &settings, (pool, &queue), plan, bodies))?;
    let load = match arguments.rate {
        Some(rate) => Load::Open { rate, achieved_rate: measured.achieved_rate },
        None => Load::Closed { in_flight: arguments.in_flight },
    };
    let models: Vec<&str> = measured.model.iter().map(String::as_str).collect();
    let report = Report {
        pool: pool.name.clone(),
        queue,
        model: if models.is_empty() { pool.model.clone() } else { models.join(", ") },
        seed: arguments.texts.seed,
        tasks: plan.tasks,
        warmup: plan.warmup,
        load,
        measured,
    };
    let printed = if arguments.json {
        writeln!(io::stdout(), "{}", serde_json::to_string(&report)?)
    } else {
        write!(io::stdout(), "{report}")
    };
    tolerate_broken_pipe(printed)?;
    match unanswered {
        Some(error) => Err(error),
        // A rate of refusals is no result.
        None if report.measured.succeeded == 0 => Ok(Exit::DoneWithErrors),
        None => Ok(Exit::Done),
    }
}

/// Runs the load through a queue of the pool. Returns what [`drive`] returns.
async fn measure(
    arguments: &Bench,
    settings: &Settings,
    (pool, queue): (&Pool, &str),
    plan: Plan,
    bodies: Bodies,
) -> anyhow::Result<(Measured, Option<anyhow::Error>)> {
    let topology = broker_session::topology(&settings.broker, pool);
    let mut client =
        Client::connect(&settings.broker, "sconce bench", queue, topology.as_ref(), Some(PREFETCH)).await?;
    let bar = progress::bar(Some(plan.total() as u64), 0, "tasks");
    let pace = match arguments.rate {
        Some(rate) => Pace::Open(Arrivals::new(arguments.texts.seed, rate)),
        None => Pace::Closed(arguments.in_flight),
    };
    let measured = drive(&mut client, plan, bodies, pace, arguments.timeout, &bar).await;
    bar.finish_and_clear();
    client.close().await;
    measured
}

/// Plans the numbers of tasks, so that a closed loop is full before and during the whole measurement.
fn plan(arguments: &Bench) -> Plan {
    let in_flight = if arguments.rate.is_some() { 1 } else { arguments.in_flight };
    let warmup = arguments.warmup.unwrap_or(WARMUP.min(arguments.tasks).max(in_flight));
    Plan { warmup, tasks: arguments.tasks, trailing: in_flight - 1 }
}

/// The tasks of `--input`, or tasks for a pool from random texts.
pub(super) fn bodies(texts: &Texts, pool: &Pool, registry: &Registry) -> anyhow::Result<Bodies> {
    let Texts { seed, words, inputs, input, url } = texts;
    let Some(path) = input else {
        let sample = registry.for_tasks(pool, url.as_deref())?.sample(pool, url.as_deref());
        return Ok(Bodies::texts(*seed, words.clone(), *inputs, sample));
    };
    let name = || if path == Path::new("-") { "stdin".to_owned() } else { path.display().to_string() };
    let requests = requests_in(path)?.collect::<anyhow::Result<_>>().with_context(name)?;
    Bodies::of_file(*seed, requests).with_context(|| format!("{}: holds no task", name()))
}
