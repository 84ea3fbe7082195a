//! One connection for the consumers of a worker's queues, each of which has a channel of its own on it. The first
//! consumer that needs a connection opens it, and the last one closes it. A channel that the broker closes costs its own
//! consumer alone.

use std::ops::Deref;
use std::sync::{Arc, Weak};

use futures_util::StreamExt as _;
use tokio::sync::{Mutex, watch};

use super::cause::message;
use super::connect::{Connector, Failure, OpenConnection};

/// Makes the connection.
pub(super) struct SharedConnector {
    connector: Connector,
    /// Locked while a connection is being opened, so that the other consumers wait for it.
    current: Mutex<Weak<SharedConnection>>,
}

/// An open connection.
pub(super) struct SharedConnection {
    connection: OpenConnection,
    /// Why a channel or the connection failed last. Written by the task that listens to the connection's events: lapin
    /// gives each event to one listener only.
    failures: watch::Receiver<Option<String>>,
}

impl SharedConnector {
    pub(super) fn new(connector: Connector) -> Self {
        Self { connector, current: Mutex::default() }
    }

    /// The open connection, or a new one.
    pub(super) async fn connect(&self) -> Result<Arc<SharedConnection>, Failure> {
        let mut current = self.current.lock().await;
        if let Some(open) = current.upgrade().filter(|open| open.status().connected()) {
            return Ok(open);
        }
        let connection = self.connector.attempt().await?;
        let failures = watch_failures(&connection);
        let shared = Arc::new(SharedConnection { connection, failures });
        *current = Arc::downgrade(&shared);
        Ok(shared)
    }
}

impl Deref for SharedConnector {
    type Target = Connector;

    fn deref(&self) -> &Connector {
        &self.connector
    }
}

impl SharedConnection {
    /// Changes whenever a channel or the connection fails; ends with the connection.
    pub(super) fn failures(&self) -> watch::Receiver<Option<String>> {
        let mut failures = self.failures.clone();
        failures.mark_unchanged();
        failures
    }

    /// Closes the connection, if this is its last consumer.
    pub(super) async fn close(self: Arc<Self>) {
        if let Some(last) = Arc::into_inner(self) {
            let _ = last.connection.close(200, "done".into()).await;
        }
    }
}

impl Deref for SharedConnection {
    type Target = OpenConnection;

    fn deref(&self) -> &OpenConnection {
        &self.connection
    }
}

fn watch_failures(connection: &OpenConnection) -> watch::Receiver<Option<String>> {
    let (sender, failures) = watch::channel(None);
    let events = connection.events_listener();
    tokio::spawn(async move {
        let mut events = std::pin::pin!(events);
        while let Some(event) = events.next().await {
            if let lapin::Event::Error(error) = event {
                sender.send_replace(Some(message(&error)));
            }
        }
    });
    failures
}
