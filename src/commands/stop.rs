//! `sconce stop`: publishes sentinels.

use std::io::Write;

use super::{load, pool_named, start_logging};
use crate::broker::Publisher as _;
use crate::broker::amqp::{AmqpPublisher, Connector, consumers_of};
use crate::cli::StopWorkers;
use crate::client::publish;
use crate::protocol::task::SHUTDOWN;
use crate::protocol::{Message, Properties};
use crate::shutdown::Exit;
use crate::telemetry::QUIET;

/// Publishes as many sentinels as workers are to stop.
pub(super) fn run(arguments: &StopWorkers) -> anyhow::Result<Exit> {
    let settings = load(&arguments.settings, &[])?.settings;
    start_logging(Some(QUIET))?;
    let (_, pool) = pool_named(&settings.pools, arguments.pool.as_deref())?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    runtime.block_on(async {
        let connector = || Connector::new(settings.broker.clone(), "sconce stop");
        let queue = pool.task_queue.as_str();
        let count = match arguments.all {
            true => consumers_of(&connector(), queue).await?,
            false => arguments.workers,
        };
        let publisher = AmqpPublisher::new(connector());
        for _ in 0..count {
            let properties = Properties {
                kind: Some(SHUTDOWN.into()),
                delivery_mode: Some(2),
                message_id: Some(uuid::Uuid::new_v4().to_string()),
                expiration: Some(arguments.expires.as_millis().to_string()),
                ..Properties::default()
            };
            let sentinel = Message { properties, body: "null".into() };
            publish(&publisher, queue, sentinel).await?;
        }
        publisher.close().await;
        let workers = if count == 1 { "worker" } else { "workers" };
        writeln!(std::io::stdout(), "asked {count} {workers} of {queue} to stop")?;
        Ok(Exit::Done)
    })
}
