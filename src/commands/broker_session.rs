//! Opens a session with the broker that the settings name: RabbitMQ, or the embedded queue of `run-batch`.

use std::num::NonZeroU16;
use std::path::Path;
use std::sync::Arc;

use futures_util::future::BoxFuture;

use crate::broker::amqp::{AmqpPublisher, Connector, RefusalPolicy, Subscription, Topology, subscribe};
use crate::broker::{Acker, BrokerError, BrokerSession, Consumer, PerSource, Source, embedded};
use crate::config::{Assignment, Broker, Pool};

/// Opens a worker's session with its task queue and, if there is one, its background queue.
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
        let subscribe_to = |queue: &str, source: Source| {
            let (queue, topology) = (queue.to_owned(), topology.clone());
            let name = match source {
                Source::Main => name.clone(),
                Source::Background => format!("{name} (background)"),
            };
            let connector = Connector::new(broker.clone(), name).with_refusals(refusals);
            subscribe(connector, Subscription::Tasks { queue, topology, source }, prefetch)
        };
        let (consumer, acker) = subscribe_to(&pool.task_queue, Source::Main);
        let background = pool.background_queue.as_ref().map(|queue| subscribe_to(queue, Source::Background));
        let mut acker: Arc<dyn Acker> = Arc::new(acker);
        let background = background.map(|(consumer, background_acker)| {
            acker = Arc::new(PerSource {
                main: acker.clone(),
                background: Arc::new(background_acker) as Arc<dyn Acker>,
            });
            Box::new(consumer) as Box<dyn Consumer>
        });
        // The publisher connects only when it sends the first message, after the consumer has a session.
        let connector = Connector::new(broker.clone(), format!("{name} (publisher)"));
        let connector = connector.with_refusals(RefusalPolicy::Reached);
        let large_reply = usize::try_from(pool.large_reply).unwrap_or(usize::MAX);
        let publisher = Arc::new(AmqpPublisher::for_pool(connector, large_reply, topology.clone()));
        Ok(BrokerSession { consumer: Box::new(consumer), background, acker, publisher })
    })
}

/// The path of the embedded queue's socket, if the address names one.
fn embedded_socket(broker: &Broker) -> Option<&str> {
    broker.url.first().and_then(|url| url.expose().strip_prefix("embedded:"))
}

/// The queues to declare for a pool; none with `declare = false`.
pub(super) fn topology(broker: &Broker, pool: &Pool) -> Option<Topology> {
    broker.declare.then(|| Topology {
        task_queue: pool.task_queue.clone(),
        background_queue: pool.background_queue.clone(),
        reply_queue: pool.reply_queue.clone(),
        dead_letter_queue: pool.dead_letter_queue.clone(),
        delivery_limit: broker.delivery_limit,
        retry_ceilings: pool.retry.ceilings(),
    })
}
