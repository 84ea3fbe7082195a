//! `sconce stop`: publishes sentinels, or withdraws those of an earlier stop.

use std::io::{self, Write};
use std::time::{Duration, SystemTime};

use anyhow::anyhow;
use tokio::time::Instant;

use super::ctl::with_exit;
use super::{load, pool_named, queue_named, start_logging};
use crate::broker::amqp::{AmqpPublisher, Connector, QueueDepth, depth_of};
use crate::broker::{BrokerError, Publisher as _};
use crate::cli::StopWorkers;
use crate::client::fleet::{AnswerWait, Control};
use crate::client::publish;
use crate::commands::exits::ExitsWith as _;
use crate::config::{Pool, Settings};
use crate::protocol::admin::{ControlRequest, Target};
use crate::protocol::control::{Cancellation, new_run_id};
use crate::protocol::task::{SHUTDOWN, STOP};
use crate::protocol::{Headers, Message, Properties};
use crate::shutdown::Exit;
use crate::telemetry::QUIET;

/// How long [`withdraw`] waits for the launchers' confirmations.
const CONFIRM_TIMEOUT: Duration = Duration::from_secs(3);

pub(super) fn run(arguments: &StopWorkers) -> anyhow::Result<Exit> {
    let settings = load(&arguments.settings, &[])?.settings;
    start_logging(Some(QUIET))?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    if let Some(stop) = &arguments.withdraw {
        let cancellation = Cancellation { stop: Some(stop.clone()), ..Cancellation::default() };
        let confirmed = runtime.block_on(withdraw(&settings, cancellation))?;
        writeln!(io::stdout(), "{confirmed}: for one hour, workers ignore the sentinels of stop {stop}")?;
        return Ok(Exit::Done);
    }
    let (_, pool) = pool_named(&settings.pools, arguments.pool.as_deref())?;
    runtime.block_on(stop(arguments, &settings, pool))
}

/// Publishes one sentinel for each worker that is to stop. Prints the stop's id, and warns if there are fewer consumers
/// than sentinels.
async fn stop(arguments: &StopWorkers, settings: &Settings, pool: &Pool) -> anyhow::Result<Exit> {
    let connector = || Connector::new(settings.broker.clone(), "sconce stop");
    let queue = queue_named(pool, arguments.queue.as_deref())?;
    let queue = queue.as_str();
    if arguments.all && !arguments.now {
        refuse_other_work(&connector(), pool, queue).await?;
    }
    // Each worker has one consumer of each queue.
    let consumers = depth_of(&connector(), queue).await.map(|depth| depth.consumers);
    let (count, consumers) = match consumers {
        Ok(consumers) if arguments.all => (consumers, Some(consumers)),
        Err(error @ BrokerError::Missing { .. }) => {
            let message =
                format!("queue {queue:?} does not exist: no launcher has run for pool {:?}", pool.name);
            return Err(anyhow::Error::from(error).context(message));
        }
        // The count is needed only for the warning below, and a user may be allowed to publish but not to inspect.
        Err(BrokerError::Refused { .. }) if !arguments.all => (arguments.workers, None),
        Err(error) => return Err(error.into()),
        Ok(consumers) => (arguments.workers, Some(consumers)),
    };
    if count == 0 {
        writeln!(io::stdout(), "nobody consumes from {queue}, so there is no worker to stop")?;
        return Ok(Exit::Done);
    }
    let id = new_run_id();
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let publisher = AmqpPublisher::new(connector());
    for published in 0..count {
        let properties = Properties {
            kind: Some(SHUTDOWN.into()),
            delivery_mode: Some(2),
            message_id: Some(uuid::Uuid::new_v4().to_string()),
            timestamp: Some(now.as_secs()),
            expiration: Some(arguments.expires.as_millis().to_string()),
            headers: Headers::from([(STOP.to_owned(), id.as_str().into())]),
            ..Properties::default()
        };
        let sentinel = Message { properties, body: "null".into() };
        if let Err(error) = publish(&publisher, queue, sentinel).await {
            if published > 0 {
                writeln!(
                    io::stderr(),
                    "`sconce stop --withdraw {id}` withdraws the {published} sentinels published"
                )?;
            }
            return Err(error.into());
        }
    }
    publisher.close().await;
    let workers = if count == 1 { "worker" } else { "workers" };
    writeln!(io::stdout(), "asked {count} {workers} of {queue} to stop: stop {id}")?;
    if let Some(consumers) = consumers.filter(|consumers| *consumers < count) {
        let (left, expires) = (count - consumers, arguments.expires);
        writeln!(
            io::stderr(),
            "consumers there: {consumers}. Sentinels left: {left}. They stop workers that start within {expires:?}; \
             `sconce stop --withdraw {id}` withdraws them"
        )?;
    }
    Ok(Exit::Done)
}

/// Refuses to stop all workers while messages wait in another queue of the pool: a sentinel follows only those of its own
/// queue, and nobody would be left for the others. The queue of `background_queue` does not count, as before there were
/// several queues.
async fn refuse_other_work(connector: &Connector, pool: &Pool, queue: &str) -> anyhow::Result<()> {
    let mut waiting = Vec::new();
    for other in pool.queues().iter().filter(|it| it.name != queue && !it.returns_to_first) {
        match depth_of(connector, &other.name).await {
            Ok(QueueDepth { ready: 0, .. }) | Err(BrokerError::Missing { .. }) => {}
            Ok(QueueDepth { ready, .. }) => waiting.push(format!("{ready} in {}", other.name)),
            Err(error) => waiting.push(format!("{} cannot be inspected ({error})", other.name)),
        }
    }
    if waiting.is_empty() {
        return Ok(());
    }
    let message = format!(
        "messages wait in other queues of pool {:?}, and no worker would be left for them: {}. Wait until they are done, or \
         give --now",
        pool.name,
        waiting.join(", ")
    );
    Err(anyhow!(message).exits_with(Exit::Refused))
}

/// Sends a withdrawal to all launchers, and stores it at the broker for launchers that start later. Returns a text that
/// says how many have confirmed it. Prints to stderr each refusal, and the error if it could not be stored.
///
/// # Errors
/// The broker is lost, a launcher has refused the withdrawal, or it could not be stored and no launcher has confirmed
/// it.
pub(super) async fn withdraw(settings: &Settings, cancellation: Cancellation) -> anyhow::Result<String> {
    let mut control = Control::open(settings).await.map_err(with_exit)?;
    let stored = control.keep_withdrawal(&cancellation).await;
    if let Err(error) = &stored {
        writeln!(io::stderr(), "the withdrawal is not kept for launchers that start later: {error}")?;
    }
    let (target, request) = (Target::All, ControlRequest::Cancel(cancellation));
    let deadline = Instant::now() + CONFIRM_TIMEOUT;
    let answers =
        control.request(&target, &request, deadline, AnswerWait::UntilQuiet).await.map_err(with_exit);
    control.close().await;
    let (refusals, confirmed): (Vec<_>, Vec<_>) =
        answers?.into_iter().partition(|answer| answer.error.is_some());
    for refusal in &refusals {
        let error = refusal.error.as_deref().unwrap_or_default();
        writeln!(io::stderr(), "{} refuses the withdrawal: {error}", refusal.host)?;
    }
    let confirmed_by = match confirmed.len() {
        0 => "no launcher has answered".to_owned(),
        1 => "1 launcher has confirmed".to_owned(),
        count => format!("{count} launchers have confirmed"),
    };
    if stored.is_err() && confirmed.is_empty() || !refusals.is_empty() {
        let message = format!("the withdrawal is incomplete: {confirmed_by} within {CONFIRM_TIMEOUT:?}");
        return Err(anyhow!(message).exits_with(Exit::Refused));
    }
    let later = if stored.is_ok() { ", and those that start later will know" } else { "" };
    Ok(format!("{confirmed_by}{later}"))
}
