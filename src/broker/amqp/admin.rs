//! Single requests to the broker, for commands. Each uses its own connection, and tries each address once.

use std::time::{Duration, Instant};

use lapin::options::BasicGetOptions;
use lapin::{Connection, Error};
use tokio::time::timeout;

use super::cause::{Cause, refused};
use super::connect::{Connector, OpenConnection, Refusal};
use super::convert::short;
use super::topology::{Topology, declare_reply_queue, inspect};
use crate::broker::BrokerError;

/// How many messages and consumers a queue has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueDepth {
    /// Messages that wait for a consumer.
    pub ready: u32,
    /// Consumers, on all hosts.
    pub consumers: u32,
}

/// Declares the missing queues.
///
/// # Errors
/// No address could be reached, or the broker refuses.
pub async fn declare(connector: &Connector, topology: &Topology) -> Result<(), BrokerError> {
    let connection = connect(connector).await?;
    topology.declare(&connection).await.map_err(|error| refused(&connection.broker, &error))?;
    let _ = connection.close(200, "done".into()).await;
    Ok(())
}

/// Declares `reply_queue`, the queue of a job's replies, if `task_queue` exists. The broker deletes it after `keep`
/// without a consumer.
///
/// # Errors
/// As [`declare`]; a task queue that does not exist is refused.
pub async fn declare_job(
    connector: &Connector,
    task_queue: &str,
    reply_queue: &str,
    keep: Duration,
) -> Result<(), BrokerError> {
    let connection = connect(connector).await?;
    let declared = async {
        inspect(&connection, task_queue).await?;
        declare_reply_queue(&connection, reply_queue, keep).await
    };
    declared.await.map_err(|error| refused(&connection.broker, &error))?;
    let _ = connection.close(200, "done".into()).await;
    Ok(())
}

/// The messages that wait in a queue, and its consumers on all hosts.
///
/// # Errors
/// As [`declare`]; a queue that does not exist is refused.
pub async fn depth_of(connector: &Connector, queue: &str) -> Result<QueueDepth, BrokerError> {
    let connection = connect(connector).await?;
    let state = inspect(&connection, queue).await.map_err(|error| refused(&connection.broker, &error))?;
    let _ = connection.close(200, "done".into()).await;
    Ok(QueueDepth { ready: state.message_count(), consumers: state.consumer_count() })
}

/// Whether a queue is a stream: only streams refuse `basic.get` with 540. A message that another queue gives is returned
/// at once. False if the broker does not answer.
pub(super) async fn is_stream(connector: &Connector, queue: &str) -> bool {
    let get = async {
        let connection = connect(connector).await.ok()?;
        let channel = connection.create_channel().await.ok()?;
        let got = channel.basic_get(short(queue), BasicGetOptions::default()).await;
        let _ = connection.close(200, "done".into()).await;
        got.err()
    };
    let error = timeout(connector.settings.connect_timeout, get).await.ok().flatten();
    error.is_some_and(|error| Cause::of(&error) == Cause::NotImplemented)
}

/// The number of ready messages of a queue.
pub(super) async fn ready_count(connection: &Connection, queue: &str) -> Result<u32, Error> {
    Ok(inspect(connection, queue).await?.message_count())
}

/// Connects to the first address that accepts.
pub(super) async fn connect(connector: &Connector) -> Result<OpenConnection, BrokerError> {
    let (mut last_failure, start) = (None, Instant::now());
    for _ in &connector.settings.url {
        match connector.attempt().await {
            Ok(connected) => return Ok(connected),
            Err(failure) => last_failure = Some(failure),
        }
    }
    Err(match last_failure {
        Some(failure) if failure.refusal != Refusal::Temporary => {
            BrokerError::Refused { broker: failure.broker, reason: failure.reason }
        }
        Some(failure) => BrokerError::Unreachable {
            seconds: start.elapsed().as_secs(),
            reason: format!("{}: {}", failure.broker, failure.reason),
        },
        None => BrokerError::Refused { broker: "broker.url".into(), reason: "it is empty".into() },
    })
}
