//! `sconce launch`.

use anyhow::Context;

use super::{Registry, load, start_logging};
use crate::cli::Settings;
use crate::config::redact_url;
use crate::launcher::{self, Host};
use crate::shutdown::{Exit, Patience, Stop, listen};

/// Runs the service.
pub(super) fn run(arguments: &Settings, registry: &Registry) -> anyhow::Result<Exit> {
    let settings = load(arguments, &[])?.settings;
    start_logging(None);
    let assignments = registry.plan(&settings, &Host::here())?;
    let program = std::env::current_exe().context("where is this program?")?;
    for url in &settings.broker.urls {
        tracing::info!(broker = redact_url(url.expose()), pools = settings.pools.len(), "settings read");
    }
    // One thread, the main one: workers are tied by the kernel to the thread that spawned them.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let stop = Stop::default();
        listen(stop.clone(), Patience::SecondAborts)?;
        Ok(launcher::run(&program, &assignments, &settings.launcher, &stop).await)
    })
}
