//! Single requests of the command line: each on its own connection, each address tried once.

use std::time::Duration;

use lapin::{Connection, Error};

use super::cause::refused;
use super::connect::{Connector, OpenConnection, Refusal};
use super::topology::{Topology, look, make_replies};
use crate::broker::BrokerError;

/// Makes the missing queues.
///
/// # Errors
/// No address could be reached, or the broker refuses.
pub async fn declare(connector: &Connector, topology: &Topology) -> Result<(), BrokerError> {
    let (connection, broker) = connect(connector).await?;
    topology.declare(&connection).await.map_err(|error| refused(broker, &error))?;
    let _ = connection.close(200, "done".into()).await;
    Ok(())
}

/// Makes the queue of a job's replies, if the job's task queue exists.
///
/// # Errors
/// As [`declare`]; a task queue that does not exist is refused.
pub async fn declare_job(
    connector: &Connector,
    task_queue: &str,
    replies: &str,
    keep: Duration,
) -> Result<(), BrokerError> {
    let (connection, broker) = connect(connector).await?;
    let made = async {
        look(&connection, task_queue).await?;
        make_replies(&connection, replies, keep).await
    };
    made.await.map_err(|error| refused(broker, &error))?;
    let _ = connection.close(200, "done".into()).await;
    Ok(())
}

/// The number of consumers of a queue now, on all hosts.
///
/// # Errors
/// As [`declare`]; a queue that does not exist is refused.
pub async fn consumers_of(connector: &Connector, queue: &str) -> Result<u32, BrokerError> {
    let (connection, broker) = connect(connector).await?;
    let looked = look(&connection, queue).await.map_err(|error| refused(broker, &error))?;
    let _ = connection.close(200, "done".into()).await;
    Ok(looked.consumer_count())
}

/// The number of ready messages of a queue.
pub(super) async fn ready_in(connection: &Connection, queue: &str) -> Result<u32, Error> {
    Ok(look(connection, queue).await?.message_count())
}

pub(super) async fn connect(connector: &Connector) -> Result<(OpenConnection, String), BrokerError> {
    let mut last = None;
    for _ in &connector.settings.url {
        match connector.attempt().await {
            Ok(connected) => return Ok(connected),
            Err(failure) => last = Some(failure),
        }
    }
    Err(match last {
        Some(failure) if failure.refusal != Refusal::None => {
            BrokerError::Refused { broker: failure.broker, reason: failure.reason }
        }
        Some(failure) => BrokerError::Unreachable {
            seconds: connector.settings.connect_timeout.as_secs(),
            reason: format!("{}: {}", failure.broker, failure.reason),
        },
        None => BrokerError::Refused { broker: "broker.url".into(), reason: "it is empty".into() },
    })
}
