//! Opens the broker that an address names.

use std::num::NonZeroU16;
use std::path::Path;
use std::sync::Arc;

use futures_util::future::BoxFuture;

use crate::broker::amqp::{AmqpPublisher, Connector, RefusalPolicy, Subscription, Topology, subscribe};
use crate::broker::{BrokerError, BrokerSession, embedded};
use crate::config::{Assignment, Broker, Pool};

/// Opens a worker's session with its task queue.
pub(super) fn open(assignment: &Assignment) -> BoxFuture<'_, Result<BrokerSession, BrokerError>> {
    Box::pin(async move {
        let Assignment { broker, pool, worker, .. } = assignment;
        let prefetch = assignment.first_prefetch();
        if let Some(path) = socket(broker) {
            let prefetch = NonZeroU16::new(prefetch).unwrap_or(NonZeroU16::MIN);
            return embedded::connect(Path::new(path), pool.task_queue.clone(), prefetch).await;
        }
        let topology = topology(broker, pool);
        let subscription = Subscription::Tasks { queue: pool.task_queue.clone(), topology: topology.clone() };
        let name = format!("sconce {worker}");
        let refusals =
            if assignment.broker_reached { RefusalPolicy::Reached } else { RefusalPolicy::Service };
        let consuming = Connector::new(broker.clone(), &name).with_refusals(refusals);
        let (consumer, acker) = subscribe(consuming, subscription, prefetch);
        // This connects only with the first message, after the consumer has a session.
        let publishing = Connector::new(broker.clone(), format!("{name} (publisher)"));
        let publishing = publishing.with_refusals(RefusalPolicy::Reached);
        let large = usize::try_from(pool.large_reply).unwrap_or(usize::MAX);
        let publisher = AmqpPublisher::for_pool(publishing, large, topology);
        Ok(BrokerSession {
            consumer: Box::new(consumer),
            acker: Arc::new(acker),
            publisher: Arc::new(publisher),
        })
    })
}

/// The path of the embedded queue, if the address names one.
fn socket(broker: &Broker) -> Option<&str> {
    broker.url.first().and_then(|url| url.expose().strip_prefix("embedded:"))
}

/// The queues to make for a pool; none with `declare = false`.
pub(super) fn topology(broker: &Broker, pool: &Pool) -> Option<Topology> {
    broker.declare.then(|| Topology {
        task_queue: pool.task_queue.clone(),
        reply_queue: pool.reply_queue.clone(),
        dead_letter_queue: pool.dead_letter_queue.clone(),
        delivery_limit: broker.delivery_limit,
        retry_ceilings: pool.retry.ceilings(),
    })
}
