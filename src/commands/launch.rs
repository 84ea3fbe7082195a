//! `sconce launch`: the service, with what operators see of it and ask of it.

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
use crate::launcher::{Host, Launching, RawLines};
use crate::shutdown::{Exit, Hangups, Patience, Phase, Stop, listen};
use crate::telemetry::{self, Format};

/// Requests in hand at once.
const REQUESTS: u16 = 1;
/// How long the answer to the request that ended the launcher may take.
const LAST_ANSWER: Duration = Duration::from_secs(2);
/// Before the control exchange is tried again, after a broker that was gone for too long.
const RETRY: Duration = Duration::from_secs(60);

/// Runs the service.
pub(super) fn run(arguments: &cli::Settings, registry: &Registry) -> anyhow::Result<Exit> {
    let settings = load(arguments, &[])?.settings;
    start_logging(None);
    let host = Host::here();
    let assignments = registry.plan(&settings, &host)?;
    let program = std::env::current_exe().context("where is this program?")?;
    for url in &settings.broker.url {
        tracing::info!(broker = redact_url(url.expose()), pools = settings.pools.len(), "settings read");
    }
    // One thread, this one, which lives to the end: workers are tied by the kernel to the thread that
    // spawned them.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let exit = runtime.block_on(serve(arguments, registry, (&settings, &host), (&program, &assignments)));
    // Whatever waits for a driver or a broker ends with the process.
    runtime.shutdown_background();
    exit
}

async fn serve(
    arguments: &cli::Settings,
    registry: &Registry,
    (settings, host): (&Settings, &Host),
    (program, assignments): (&Path, &[Assignment]),
) -> anyhow::Result<Exit> {
    let stop = Stop::default();
    listen(stop.clone(), Patience::SecondAborts)?;
    let mut hangups = Hangups::listen()?;
    let raw_lines = (log_format(true) == Format::Json).then_some(telemetry::write_line as RawLines);
    let launching = Launching::guarded(program, &settings.launcher, &stop, raw_lines);
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
    // Signals are heard while settings are being put in force: the end of the terminal is one of them.
    let listening = async {
        while hangups.next().await {
            hangup.notify_one();
        }
        // The terminal is gone: whoever sat there does not want what they started to stay for ever.
        stop.advance(Phase::Returning, "SIGHUP, and the terminal is gone");
    };
    let reloading = async {
        loop {
            hangup.notified().await;
            reload(arguments, registry, (settings, host), &handle).await;
        }
    };
    let beside = async { tokio::join!(listening, reloading) };
    let exit = tokio::select! {
        exit = launching.run(assignments) => exit,
        never = async { beside.await; std::future::pending().await } => never,
    };
    // Whoever ordered the end is to be answered.
    let _ = tokio::time::timeout(LAST_ANSWER, place.answering.acquire()).await;
    Ok(exit)
}

/// Listens to the control exchange on a thread of its own: whatever anybody sends there, or a broker that
/// is slow to be reached, holds up nobody who watches workers.
fn control_apart(settings: &Settings, place: &Arc<Place>) -> anyhow::Result<()> {
    let (settings, place) = (settings.clone(), place.clone());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let listen = move || runtime.block_on(listen_to_control(&settings, &place));
    thread::Builder::new().name("control".into()).spawn(listen)?;
    Ok(())
}

/// Obeys what comes over the control exchange, as long as the broker lets us.
async fn listen_to_control(settings: &Settings, place: &Place) {
    let Some(exchange) = settings.admin.control_exchange.clone() else { return };
    if !settings.broker.declare {
        tracing::info!(exchange, "no remote control: with broker.declare = false nothing is made for it");
        return;
    }
    loop {
        let host = &place.host;
        let name = format!("sconce {host} (control)");
        // Which slots there are may change: who is meant is decided here, by the key of each request.
        let keys = vec!["all".to_owned(), format!("host.{host}"), "pool.#".to_owned(), "slot.#".to_owned()];
        let subscription = Subscription::Topic { exchange: exchange.clone(), keys };
        let connector =
            || Connector::new(settings.broker.clone(), &name).with_refusals(RefusalPolicy::Service);
        let (consumer, acker) = subscribe(connector(), subscription, REQUESTS);
        let publisher = Arc::new(AmqpPublisher::new(connector()));
        let broker_session =
            BrokerSession { consumer: Box::new(consumer), acker: Arc::new(acker), publisher };
        // Also after a refusal: what refuses may pass, and the workers go on meanwhile.
        match admin::control(broker_session, place).await {
            Err(error @ BrokerError::Refused { .. }) => {
                tracing::warn!(exchange, %error, "no remote control; trying again");
            }
            ended => tracing::warn!(exchange, ?ended, "remote control was lost; trying again"),
        }
        tokio::time::sleep(RETRY).await;
    }
}

/// Loads the settings again and puts them in force, or says why those that are stay.
async fn reload(
    arguments: &cli::Settings,
    registry: &Registry,
    (before, host): (&Settings, &Host),
    handle: &Handle,
) {
    tracing::info!("SIGHUP: loading the settings again");
    let loaded = load(arguments, &[]).map_err(anyhow::Error::from);
    let planned = loaded.and_then(|it| Ok((registry.slots(&it.settings, host)?, it.settings)));
    let refused = match planned {
        Ok((slots, settings)) => {
            if settings.admin != before.admin {
                tracing::warn!("[admin] has changed: that needs a new start of the launcher");
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
        tracing::error!("the settings before stay in force: {reason}");
    }
}
