//! `sconce bench-device`: measures a model on one device. It runs the model as a worker of the pool does, but without a
//! queue.

mod measure;
mod report;

use std::io::{self, Write};

use anyhow::Context;

use self::measure::measure;
use self::report::Report;
use super::bench::{Work, bodies};
use super::{Registry, load, pool_named, reexec_with_environment, start_logging};
use crate::cli::BenchDevice;
use crate::commands::exits::ExitsWith as _;
use crate::config::Assignment;
use crate::launcher::{Host, environment};
use crate::shutdown::Exit;
use crate::telemetry::QUIET;

pub(super) fn run(arguments: &BenchDevice, registry: &Registry) -> anyhow::Result<Exit> {
    let slot = slot(arguments, registry)?;
    reexec_with_environment(&environment(&slot))?;
    start_logging(Some(QUIET))?;
    let tasks: Vec<Work> = bodies(&arguments.texts, &slot.pool, registry)
        .exits_with(Exit::Usage)?
        .take(arguments.tasks)
        .collect();
    let measured = measure(&slot, &registry.starter(&slot), &tasks, arguments.time)?;
    let report = Report::new(&slot, tasks.len(), measured);
    if arguments.json {
        writeln!(io::stdout(), "{}", serde_json::to_string(&report)?)?;
    } else {
        write!(io::stdout(), "{report}")?;
    }
    Ok(Exit::Done)
}

/// The first slot of the pool, planned with one worker per device. An error if it does not fit its device.
fn slot(arguments: &BenchDevice, registry: &Registry) -> anyhow::Result<Assignment> {
    let loaded = load(&arguments.settings, &[])?.settings;
    let (index, _) = pool_named(&loaded.pools, arguments.pool.as_deref())?;
    let flags = [
        arguments.model.clone().map(|model| (format!("pool[{index}].model"), model)),
        arguments.device.clone().map(|device| (format!("pool[{index}].devices"), device)),
        Some((format!("pool[{index}].workers_per_device"), "1".to_owned())),
    ];
    let flags: Vec<_> = flags.into_iter().flatten().collect();
    let mut settings = registry.load(&arguments.settings, &flags)?.settings;
    settings.pools = vec![settings.pools.swap_remove(index)];
    let slots = registry.plan(&settings, &Host::here())?;
    slots.into_iter().next().context("the settings have no worker")
}
