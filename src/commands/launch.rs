//! `sconce launch`: the service, with metrics, health and remote control.

use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::Context;
use tokio::sync::{Notify, Semaphore};

use super::{Registry, load, log_format, start_logging};
use crate::admin::{self, Place};
use crate::broker::amqp::{AmqpPublisher, Connector, RefusalPolicy, Subscription, subscribe};
use crate::broker::{BrokerError, BrokerSession};
use crate::cli;
use crate::config::{Assignment, Settings, redact_url};
use crate::launcher::order::Handle;
use crate::launcher::{Host, Launching, RawLines, plan};
use crate::shutdown::{Exit, Hangups, Patience, Phase, Stop, listen};
use crate::telemetry::{self, Format};

/// Requests handled at once.
const REQUESTS: u16 = 1;
/// How long the answer to the request that ended the launcher may take.
const LAST_ANSWER: Duration = Duration::from_secs(2);
/// Wait before the control exchange is tried again, when the broker was unreachable for too long.
const RETRY: Duration = Duration::from_secs(60);

/// Runs the service.
pub(super) fn run(arguments: &cli::Settings, registry: &Registry) -> anyhow::Result<Exit> {
    let settings = load(arguments, &[])?.settings;
    start_logging(None)?;
    let host = Host::here();
    let assignments = registry.plan(&settings, &host)?;
    let program = std::env::current_exe().context("cannot find this program's file")?;
    for url in &settings.broker.url {
        tracing::info!(broker = redact_url(url.expose()), pools = settings.pools.len(), "settings read");
    }
    // Only this thread, which lives to the end: the kernel ties workers to the thread that spawned them.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let exit = runtime.block_on(serve(arguments, (&settings, &host), (&program, &assignments)));
    // Threads that wait for a driver or a broker end with the process.
    runtime.shutdown_background();
    exit
}

async fn serve(
    arguments: &cli::Settings,
    (settings, host): (&Settings, &Host),
    (program, assignments): (&Path, &[Assignment]),
) -> anyhow::Result<Exit> {
    let stop = Stop::default();
    listen(stop.clone(), Patience::SecondAborts)?;
    let mut hangups = Hangups::listen()?;
    let raw_lines = (log_format(true)? == Format::Json).then_some(telemetry::write_line as RawLines);
    let launching = Launching::new((program, Some(program)), &settings.launcher, &stop, raw_lines);
    if let Some(address) = settings.admin.listen {
        #[cfg(feature = "http")]
        let served = admin::serve(address, launching.board(), stop.clone()).await;
        #[cfg(feature = "http")]
        served.with_context(|| format!("admin.listen = \"{address}\"")).context(Exit::Config)?;
        #[cfg(not(feature = "http"))]
        tracing::info!(%address, "no metrics and no health: this build is without the feature `http`");
    }
    let place = Arc::new(Place {
        host: host.name.clone(),
        board: launching.board(),
        handle: launching.handle(),
        log_filter: telemetry::set_filter,
        answering: Semaphore::new(1),
    });
    control_apart(settings, &place)?;
    let handle = launching.handle();
    let hangup = Notify::new();
    // Signals are handled also while settings are being applied, because one may report the end of the
    // terminal.
    let listening = async {
        while hangups.next().await {
            hangup.notify_one();
        }
        // The terminal was closed: its user cannot want the service to run for ever.
        stop.advance(Phase::Returning, "SIGHUP, and the terminal is gone");
    };
    let reloading = async {
        loop {
            hangup.notified().await;
            reload(arguments, (settings, host), &handle).await;
        }
    };
    let beside = async { tokio::join!(listening, reloading) };
    let exit = tokio::select! {
        exit = launching.run(assignments) => exit,
        never = async { beside.await; std::future::pending().await } => never,
    };
    // The client that requested the end gets its answer first.
    let _ = tokio::time::timeout(LAST_ANSWER, place.answering.acquire()).await;
    Ok(exit)
}

/// Listens to the control exchange on a separate thread: neither a request nor a slow broker delays the
/// supervision of workers.
fn control_apart(settings: &Settings, place: &Arc<Place>) -> anyhow::Result<()> {
    let (settings, place) = (settings.clone(), place.clone());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let listen = move || runtime.block_on(listen_to_control(&settings, &place));
    thread::Builder::new().name("control".into()).spawn(listen)?;
    Ok(())
}

/// Handles requests from the control exchange, as long as the broker allows it.
async fn listen_to_control(settings: &Settings, place: &Place) {
    let Some(exchange) = settings.admin.control_exchange.clone() else { return };
    if !settings.broker.declare {
        tracing::info!(exchange, "no remote control: with broker.declare = false nothing is made for it");
        return;
    }
    loop {
        let host = &place.host;
        let name = format!("sconce {host} (control)");
        // The set of slots may change, so the target of each request is decided here, by its routing key.
        let keys = ["all", "cancel", &format!("host.{host}"), "pool.#", "slot.#"].map(str::to_owned).to_vec();
        let subscription = Subscription::Topic { exchange: exchange.clone(), keys };
        let connector =
            || Connector::new(settings.broker.clone(), &name).with_refusals(RefusalPolicy::Service);
        let (consumer, acker) = subscribe(connector(), subscription, REQUESTS);
        let publisher = Arc::new(AmqpPublisher::new(connector()));
        let broker_session = BrokerSession {
            consumer: Box::new(consumer),
            background: None,
            acker: Arc::new(acker),
            publisher,
        };
        // Tried again also after a refusal: its cause may pass, and the workers go on meanwhile.
        match admin::control(broker_session, place).await {
            Err(error @ BrokerError::Refused { .. }) => {
                tracing::warn!(exchange, %error, "no remote control; trying again");
            }
            ended => tracing::warn!(exchange, ?ended, "remote control was lost; trying again"),
        }
        tokio::time::sleep(RETRY).await;
    }
}

/// Loads the settings again and applies them; on an error, logs why the current ones stay.
async fn reload(arguments: &cli::Settings, (before, host): (&Settings, &Host), handle: &Handle) {
    tracing::info!("SIGHUP: loading the settings again");
    let loaded = load(arguments, &[]).map_err(anyhow::Error::from);
    // Not `Registry::plan`: the workers that run hold their memory, and a new one reports if it has too little.
    let planned = loaded.and_then(|it| Ok((plan(&it.settings, host)?, it.settings)));
    let refused = match planned {
        Ok((slots, settings)) => {
            if settings.admin != before.admin {
                tracing::warn!("[admin] has changed: restart the launcher to apply it");
            }
            if settings.broker != before.broker {
                tracing::warn!("remote control stays with the broker of the launcher's start");
            }
            handle
                .reload(slots, settings.launcher)
                .await
                .map(|done| tracing::info!("settings in force: {done}"))
        }
        Err(error) => {
            handle.refuse_reload();
            Err(format!("{error:#}"))
        }
    };
    if let Err(reason) = refused {
        tracing::error!("the former settings stay in force: {reason}");
    }
}
