//! `sconce launch`: runs the service, which is the launcher, metrics and health over HTTP, and remote control over the
//! broker.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, SystemTime};

use anyhow::{Context, anyhow};
use parking_lot::Mutex;
use tokio::sync::{Notify, Semaphore};

use super::{Registry, log_format, start_logging};
use crate::admin::{self, ControlledLauncher};
use crate::broker::amqp::{
    AmqpPublisher, Connector, RefusalPolicy, Subscription, read_withdrawals, retry_queues, subscribe,
};
use crate::broker::{BrokerError, BrokerSession, Publisher as _, QueueState};
use crate::cli;
use crate::commands::exits::ExitsWith as _;
use crate::config::{Assignment, ConfigError, LoadedSettings, Pool, Settings, TaskQueue, redact_url};
use crate::launcher::order::Handle;
use crate::launcher::{Host, LaunchSpec, LauncherName, PreparedLauncher, RawLines, Withdrawals, plan};
use crate::protocol::admin::Target;
use crate::protocol::control::WITHDRAWN_FOR;
use crate::shutdown::{Exit, Hangups, Phase, SecondSignal, Stop, listen_for_signals};
use crate::telemetry::{self, Format};

/// Prefetch of control requests. They are handled one at a time.
const CONTROL_PREFETCH: u16 = 1;
/// Prefetch of requesters' cancellations. They are handled together.
const CANCELLATIONS_PREFETCH: u16 = 1_000;
/// How many cancellations may wait for this launcher. The broker refuses further ones.
const CANCELLATIONS_LENGTH: i32 = 5_000;
/// How many control requests may wait for this launcher. The broker refuses further ones.
const CONTROL_LENGTH: i32 = 1_000;
/// How many bytes may wait in either queue: 16 MiB.
const REQUESTS_BYTES: i64 = 16 << 20;
/// How long the launcher may take to answer the request that shut it down.
const FINAL_ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
/// Minimum time between two polls of the pools' queues.
const QUEUE_POLL_INTERVAL: Duration = Duration::from_secs(15);
/// How often to check whether the metrics were read since the last poll of the queues.
const SCRAPE_CHECK_INTERVAL: Duration = Duration::from_millis(500);
/// Delay before the control exchange is opened again after it was refused or lost.
const CONTROL_RETRY_DELAY: Duration = Duration::from_secs(60);

/// A function that loads the settings, for the start and for each SIGHUP.
type Load<'a> = dyn Fn() -> Result<LoadedSettings, ConfigError> + 'a;

/// Runs the service.
pub(super) fn run(arguments: &cli::Launch, registry: &Registry) -> anyhow::Result<Exit> {
    let load = || {
        let loaded = registry.load(&arguments.settings, &[])?;
        if arguments.no_python {
            loaded.refuse_python("expected a model that is no class in Python, because of --no-python")?;
        }
        Ok(loaded)
    };
    let loaded = load()?;
    let settings = &loaded.settings;
    start_logging(None)?;
    let mut host = Host::here();
    let mut launcher = LauncherName::claim(settings.launcher.name.as_deref(), &host.name)
        .map_err(|name| anyhow!("launcher.name = {name:?}: another launcher of this host has it"))
        .exits_with(Exit::Config)?;
    if let Some(address) = settings.admin.listen {
        launcher.publish_health_port(address.port());
    }
    host.launcher.clone_from(&launcher.name);
    let assignments = registry.plan(settings, &host)?;
    let program = std::env::current_exe().context("cannot find this program's file")?;
    for url in &settings.broker.url {
        let (broker, launcher) = (redact_url(url.expose()), &launcher.name);
        tracing::info!(broker, launcher, pools = settings.pools.len(), "settings read");
    }
    // A runtime on this thread alone. This thread must outlive the workers, because the kernel signals them when the
    // thread that spawned them ends (PR_SET_PDEATHSIG).
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let exit = runtime.block_on(serve(&load, &loaded, &host, &program, &assignments));
    // Threads that wait for a driver or a broker end with the process.
    runtime.shutdown_background();
    exit
}

async fn serve(
    load: &Load<'_>,
    loaded: &LoadedSettings,
    host: &Host,
    program: &Path,
    assignments: &[Assignment],
) -> anyhow::Result<Exit> {
    let (settings, stop) = (&loaded.settings, Stop::default());
    listen_for_signals(stop.clone(), SecondSignal::Aborts)?;
    let mut hangups = Hangups::listen()?;
    let raw_lines = (log_format(true)? == Format::Json).then_some(telemetry::write_line as RawLines);
    let launching = PreparedLauncher::new(LaunchSpec {
        worker_program: program,
        guard_program: Some(program),
        policy: &settings.launcher,
        stop: &stop,
        raw_lines,
    });
    if let Some(address) = settings.admin.listen {
        #[cfg(feature = "http")]
        let served = admin::serve(address, &host.launcher, launching.board(), stop.clone()).await;
        #[cfg(feature = "http")]
        served.with_context(|| format!("admin.listen = \"{address}\"")).exits_with(Exit::Config)?;
        #[cfg(not(feature = "http"))]
        tracing::info!(%address, "no metrics and no health: this build is without the feature `http`");
    }
    let controlled = Arc::new(ControlledLauncher {
        name: host.launcher.clone(),
        host: host.name.clone(),
        board: launching.board(),
        handle: launching.handle(),
        answer_permit: Semaphore::new(1),
        refusals: Mutex::default(),
    });
    spawn_control(settings, &controlled)?;
    let handle = launching.handle();
    let hangup = Notify::new();
    // SIGHUP is received even during a reload, because it can also mean that the terminal is gone.
    let handle_hangups = async {
        while hangups.next().await {
            hangup.notify_one();
        }
        // The terminal was closed: a service that was started in it ends with it.
        stop.advance(Phase::Returning, "SIGHUP, and the terminal is gone");
    };
    let reload_on_hangups = async {
        let mut in_force = loaded.clone();
        loop {
            hangup.notified().await;
            reload(load, settings, host, &mut in_force, &handle).await;
        }
    };
    // `side_tasks` never completes; it runs beside the launcher.
    let withdrawals = launching.withdrawals();
    let side_tasks = async {
        let read_withdrawals = load_withdrawals(settings, &host.launcher, &withdrawals);
        tokio::join!(handle_hangups, reload_on_hangups, read_withdrawals);
        std::future::pending().await
    };
    let exit = tokio::select! {
        biased;
        // Polled first, so that the reading of withdrawals has begun before any worker is spawned.
        never = side_tasks => never,
        exit = launching.run(assignments) => exit,
    };
    // The client that requested the shutdown gets its answer first.
    let _ = tokio::time::timeout(FINAL_ANSWER_TIMEOUT, controlled.answer_permit.acquire()).await;
    Ok(exit)
}

/// Spawns a thread that handles remote control and polls the pools' queues, so that neither a request nor a slow broker
/// delays the supervision of workers.
fn spawn_control(settings: &Settings, controlled: &Arc<ControlledLauncher>) -> anyhow::Result<()> {
    let (settings, controlled) = (settings.clone(), controlled.clone());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let run_control = move || {
        runtime.block_on(async {
            let watch = async {
                if settings.admin.listen.is_some() {
                    watch_queues(&settings, &controlled).await;
                }
            };
            tokio::join!(serve_control(&settings, &controlled), watch)
        })
    };
    thread::Builder::new().name("control".into()).spawn(run_control)?;
    Ok(())
}

/// Polls the number of ready messages in the pools' queues, as long as somebody reads the metrics. A queue that the
/// broker does not let us inspect is left out.
async fn watch_queues(settings: &Settings, controlled: &ControlledLauncher) {
    let name = format!("sconce {} (queues)", controlled.name);
    let publisher = AmqpPublisher::new(Connector::new(settings.broker.clone(), name));
    let queues_of = |pool: &Pool| {
        let kind = |queue: &TaskQueue| if queue.background { "background" } else { "task" };
        let tasks = pool.queues().into_iter().map(move |queue| (queue.name.clone(), kind(&queue)));
        let retries = retry_queues(pool).into_iter().map(|queue| (queue, "retry"));
        tasks.chain([(pool.dead_letter_queue.clone(), "dead_letter")]).chain(retries)
    };
    let queues: Vec<(String, &str)> = settings.pools.iter().flat_map(queues_of).collect();
    loop {
        while !controlled.board.was_read() {
            tokio::time::sleep(SCRAPE_CHECK_INTERVAL).await;
        }
        let mut ready_counts = BTreeMap::new();
        for (queue, kind) in &queues {
            if let Some(QueueState::Exists { ready, .. }) = publisher.queue_state(queue).await {
                ready_counts.insert((queue.clone(), *kind), ready);
            }
        }
        controlled.board.set_queues(ready_counts);
        tokio::time::sleep(QUEUE_POLL_INTERVAL).await;
    }
}

/// Handles requests from the control exchange: those of operators, and beside them the cancellations of requesters, on a
/// connection of their own.
async fn serve_control(settings: &Settings, controlled: &ControlledLauncher) {
    let Some(exchange) = &settings.admin.control_exchange else { return };
    if !settings.broker.declare {
        tracing::info!(
            exchange,
            "no remote control: its queue cannot be declared with broker.declare = false"
        );
        return;
    }
    let (host, launcher) = (format!("host.{}", controlled.host), format!("launcher.{}", controlled.name));
    // Binds the routing keys of all pools and slots, because those of this launcher may change. The launcher filters each
    // request by its routing key.
    let keys = ["all", &host, &launcher, "pool.#", "slot.#"].map(str::to_owned).to_vec();
    let operators = Listener { settings, exchange, name: "control", keys, max_length: CONTROL_LENGTH };
    let keys = vec![Target::Cancel.routing_key()];
    let max_length = CANCELLATIONS_LENGTH;
    let requesters = Listener { settings, exchange, name: "cancellations", keys, max_length };
    tokio::join!(
        operators.serve(controlled, CONTROL_PREFETCH, admin::control),
        requesters.serve(controlled, CANCELLATIONS_PREFETCH, admin::cancellations),
    );
}

/// A queue of requests to this launcher.
struct Listener<'a> {
    settings: &'a Settings,
    exchange: &'a str,
    /// Part of its connections' name.
    name: &'a str,
    keys: Vec<String>,
    max_length: i32,
}

impl Listener<'_> {
    /// Serves the queue. Opens it again after it was refused or lost.
    async fn serve(
        &self,
        controlled: &ControlledLauncher,
        prefetch: u16,
        serve: impl AsyncFn(BrokerSession, &ControlledLauncher) -> Result<(), BrokerError>,
    ) {
        let Self { settings, exchange, name, keys, max_length } = self;
        loop {
            let subscription = Subscription::Topic {
                exchange: (*exchange).to_owned(),
                keys: keys.clone(),
                max_length: *max_length,
                max_bytes: REQUESTS_BYTES,
            };
            let name = format!("sconce {} ({name})", controlled.name);
            let connector =
                || Connector::new(settings.broker.clone(), &name).with_refusals(RefusalPolicy::Service);
            let (consumer, acker) = subscribe(connector(), subscription, prefetch);
            let publisher = Arc::new(AmqpPublisher::new(connector()));
            let broker_session = BrokerSession {
                consumer: Box::new(consumer),
                further: Vec::new(),
                acker: Arc::new(acker),
                publisher,
            };
            // A refusal is retried too: its cause may pass, and meanwhile the workers go on.
            match serve(broker_session, controlled).await {
                Err(error @ BrokerError::Refused { .. }) => {
                    tracing::warn!(exchange, %error, "no remote control; trying again");
                }
                Err(error) => tracing::warn!(exchange, %error, "remote control was lost; trying again"),
                Ok(()) => tracing::warn!(exchange, "remote control was lost; trying again"),
            }
            tokio::time::sleep(CONTROL_RETRY_DELAY).await;
        }
    }
}

/// Reads the withdrawals of sentinels and jobs of the last [`WITHDRAWN_FOR`], so that workers honour the ones made
/// while no launcher ran. Workers take no tasks before this returns.
async fn load_withdrawals(settings: &Settings, launcher: &str, withdrawals: &Withdrawals) {
    let Some(exchange) = settings.admin.control_exchange.as_ref().filter(|_| settings.broker.declare) else {
        return;
    };
    withdrawals.begin_reading();
    let connector = Connector::new(settings.broker.clone(), format!("sconce {launcher} (withdrawals)"));
    match read_withdrawals(&connector, exchange, WITHDRAWN_FOR).await {
        Ok(entries) => withdrawals.load(&entries, SystemTime::now()),
        Err(reason) => {
            tracing::warn!(exchange, %reason, "cannot read earlier withdrawals; starting without them");
        }
    }
    withdrawals.end_reading();
}

/// Loads the settings again and applies them in the place of `in_force`. On an error, logs it and keeps `in_force`.
/// `initial`: the settings that the launcher started with.
async fn reload(
    load: &Load<'_>,
    initial: &Settings,
    host: &Host,
    in_force: &mut LoadedSettings,
    handle: &Handle,
) {
    tracing::info!("SIGHUP: loading the settings again");
    let loaded = load().map_err(anyhow::Error::from);
    // Not `Registry::plan`, which checks the free memory of devices: the running workers use it. A new worker reports
    // if there is too little.
    let planned = loaded.and_then(|it| Ok((plan(&it.settings, host)?, it)));
    let applied = match planned {
        Ok((slots, loaded)) => {
            let settings = &loaded.settings;
            if settings.admin != initial.admin || settings.launcher.name != initial.launcher.name {
                tracing::warn!("[admin] or launcher.name has changed: restart the launcher to apply it");
            }
            if settings.broker != initial.broker {
                tracing::warn!("remote control keeps the broker that was set when the launcher started");
            }
            let changes = in_force.changes(&loaded).join("; ");
            let changes = if changes.is_empty() { "none".to_owned() } else { changes };
            let done = handle.reload(slots, settings.launcher.clone()).await;
            done.map(|done| {
                tracing::info!(changes, "settings in force: {done}");
                *in_force = loaded;
            })
        }
        Err(error) => {
            handle.record_failed_reload();
            Err(format!("{error:#}"))
        }
    };
    if let Err(reason) = applied {
        tracing::error!("the former settings stay in force: {reason}");
    }
}
