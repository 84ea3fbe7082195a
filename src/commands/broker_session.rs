//! Opens a session with the broker that the settings name: RabbitMQ, or the embedded queue of `run-batch`.

use std::num::NonZeroU16;
use std::path::Path;
use std::sync::Arc;

use futures_util::future::BoxFuture;

use crate::broker::amqp::{
    AmqpPublisher, Connector, Consumed, RefusalPolicy, Subscription, Topology, subscribe_all,
};
use crate::broker::{Acker, BrokerError, BrokerSession, Consumer, Source, embedded};
use crate::config::{Assignment, Broker, Pool};

/// Opens a worker's session with the queues of its pool.
pub(super) fn open(assignment: &Assignment) -> BoxFuture<'_, Result<BrokerSession, BrokerError>> {
    Box::pin(async move {
        let Assignment { broker, pool, worker, .. } = assignment;
        let prefetch = assignment.first_prefetch();
        if let Some(path) = embedded_socket(broker) {
            let prefetch = NonZeroU16::new(prefetch).unwrap_or(NonZeroU16::MIN);
            return embedded::connect(Path::new(path), pool.task_queue.clone(), prefetch).await;
        }
        let topology = topology(broker, pool);
        let name = format!("sconce {worker}");
        let refusals =
            if assignment.broker_reached { RefusalPolicy::Reached } else { RefusalPolicy::Service };
        let subscriptions = pool.queues().into_iter().enumerate().map(|(index, queue)| Subscription::Tasks {
            queue: queue.name,
            topology: topology.clone(),
            source: Source(index),
        });
        let connector = Connector::new(broker.clone(), name.clone()).with_refusals(refusals);
        let (consumers, ackers): (Vec<_>, Vec<_>) =
            subscribe_all(connector, subscriptions, prefetch).into_iter().unzip();
        let mut consumers = consumers.into_iter().map(|it| Box::new(it) as Box<dyn Consumer>);
        let Some(consumer) = consumers.next() else {
            let (broker, reason) = (pool.name.clone(), "the pool has no queue".to_owned());
            return Err(BrokerError::Refused { broker, reason });
        };
        let ackers: Vec<_> = ackers.into_iter().map(|it| Arc::new(it) as Arc<dyn Acker>).collect();
        // The publisher connects only when it sends the first message, after the consumer has a session.
        let connector = Connector::new(broker.clone(), format!("{name} (publisher)"));
        let connector = connector.with_refusals(RefusalPolicy::Reached);
        let large_reply = usize::try_from(pool.large_reply).unwrap_or(usize::MAX);
        let publisher = Arc::new(AmqpPublisher::for_pool(connector, large_reply, topology.clone()));
        Ok(BrokerSession { consumer, further: consumers.collect(), acker: Arc::new(ackers), publisher })
    })
}

/// The path of the embedded queue's socket, if the address names one.
fn embedded_socket(broker: &Broker) -> Option<&str> {
    broker.url.first().and_then(|url| url.expose().strip_prefix("embedded:"))
}

/// The queues to declare for a pool; none with `declare = false`.
pub(super) fn topology(broker: &Broker, pool: &Pool) -> Option<Topology> {
    broker.declare.then(|| Topology {
        consumed: pool
            .queues()
            .into_iter()
            .map(|queue| Consumed { name: queue.name, has_retries: !queue.returns_to_first })
            .collect(),
        reply_queue: pool.reply_queue.clone(),
        dead_letter_queue: pool.dead_letter_queue.clone(),
        delivery_limit: broker.delivery_limit,
        retry_ceilings: pool.retry.ceilings(),
    })
}
