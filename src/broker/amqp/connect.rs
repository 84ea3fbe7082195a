//! Opens connections: which address is tried next, how long, with which certificates; and when an
//! outage has lasted too long. Owns the turn among several addresses and the count of failures;
//! never retries by itself in a loop that its owner cannot leave.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use lapin::tcp::{OwnedIdentity, OwnedTLSConfig};
use lapin::uri::AMQPUri;
use lapin::{Connection, ConnectionProperties, Error, ErrorKind};

use crate::backoff::Backoff;
use crate::broker::BrokerError;
use crate::config::{Broker, Tls, redact_url};

const BACKOFF: Backoff = Backoff { first: Duration::from_millis(250), most: Duration::from_secs(10) };
/// A broker that refuses us this often before it ever took us will not change its mind. More than
/// once, because a broker that boots refuses its virtual hosts for a moment.
const REFUSALS: u32 = 3;

/// Why one attempt failed.
#[derive(Debug)]
pub struct Failure {
    /// The address, without its password.
    pub(super) broker: String,
    /// The broker's or the system's words.
    pub(super) reason: String,
    /// The broker answered and said no.
    pub(super) refused: bool,
}

/// Makes connections to one of several addresses.
pub struct Connector {
    settings: Broker,
    name: String,
    /// Counts attempts; its remainder is the address whose turn it is. Written by each attempt.
    turn: AtomicUsize,
}

impl Connector {
    /// `name` is what the broker's management page shows.
    pub fn new(settings: Broker, name: impl Into<String>) -> Self {
        Self { settings, name: name.into(), turn: AtomicUsize::new(0) }
    }

    /// The settings it was made with.
    pub(super) fn settings(&self) -> &Broker {
        &self.settings
    }

    /// What the broker's management page shows.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// One attempt at the address whose turn it is. A failed one passes the turn on; an address that
    /// works is kept.
    pub(super) async fn attempt(&self) -> Result<(Connection, String), Failure> {
        let urls = &self.settings.urls;
        let turn = self.turn.load(Ordering::Relaxed) % urls.len().max(1);
        let url = urls.get(turn).map(|url| url.expose()).unwrap_or_default();
        let broker = redact_url(url);
        let opened = tokio::time::timeout(self.settings.connect_timeout, self.open(url)).await;
        let reason = match opened {
            Ok(Ok(connection)) => return Ok((connection, broker)),
            Ok(Err(failure)) => failure,
            Err(_) => (format!("no answer within {:?}", self.settings.connect_timeout), false),
        };
        self.pass_turn();
        Err(Failure { broker, reason: reason.0, refused: reason.1 })
    }

    /// The next attempt goes to the next address.
    pub(super) fn pass_turn(&self) {
        self.turn.fetch_add(1, Ordering::Relaxed);
    }

    async fn open(&self, url: &str) -> Result<Connection, (String, bool)> {
        let mut uri: AMQPUri = url.parse().map_err(|reason: String| (reason, true))?;
        let heartbeat = u16::try_from(self.settings.heartbeat.as_secs()).unwrap_or(u16::MAX);
        uri.query.heartbeat.get_or_insert(heartbeat);
        let tls = certificates(&self.settings.tls).map_err(|reason| (reason, true))?;
        let properties = ConnectionProperties::default().with_connection_name(self.name.as_str().into());
        let runtime = lapin::runtime::default_runtime().map_err(|error| words(&error))?;
        Connection::connect_uri_with_config(uri, properties, tls, runtime)
            .await
            .map_err(|error| words(&error))
    }
}

/// A failure in words, and whether it is the broker's refusal.
pub(super) fn words(error: &Error) -> (String, bool) {
    let amqp = match error.kind() {
        ErrorKind::ProtocolError(amqp) => amqp,
        // What rustls says of a certificate, or of an answer that is not TLS.
        ErrorKind::IOError(io) if io.kind() == std::io::ErrorKind::InvalidData => {
            let hint = "check broker.tls (ca_file, cert_file, key_file), and amqp:// or amqps://";
            return (format!("{error}; {hint}"), true);
        }
        _ => return (error.to_string(), false),
    };
    let hint = match amqp.get_id() {
        403 => "; check user, password and permissions",
        530 => "; check the virtual host (`/` is written %2f) and the user's access to it",
        _ => "",
    };
    // 404 (a queue that may yet be made) and 405 (locked by another connection) can pass.
    let refused = matches!(amqp.get_id(), 402 | 403 | 406 | 530);
    (format!("{} {}{hint}", amqp.get_id(), amqp.get_message()), refused)
}

fn certificates(tls: &Tls) -> Result<OwnedTLSConfig, String> {
    let read = |path: &Path| fs::read(path).map_err(|error| format!("{}: {error}", path.display()));
    let cert_chain = match &tls.ca_file {
        Some(path) => Some(String::from_utf8_lossy(&read(path)?).into_owned()),
        None => None,
    };
    let identity = match (&tls.cert_file, &tls.key_file) {
        (Some(cert), Some(key)) => Some(OwnedIdentity::PKCS8 { pem: read(cert)?, key: read(key)? }),
        _ => None,
    };
    Ok(OwnedTLSConfig { identity, cert_chain })
}

/// Failures that a connection which does not last counts for, at least.
const FLAPPING: u32 = 3;

/// The time without a working connection. Each supervisor owns one.
#[derive(Default)]
pub(super) struct Outage {
    since: Option<Instant>,
    failures: u32,
    refusals: u32,
    was_connected: bool,
}

impl Outage {
    /// Counts a failure. The delay before the next attempt, or the end of all attempts.
    pub(super) fn failed(&mut self, failure: Failure, limit: Duration) -> Result<Duration, BrokerError> {
        let lasted = self.since.get_or_insert_with(Instant::now).elapsed();
        self.failures += 1;
        self.refusals = if failure.refused { self.refusals + 1 } else { 0 };
        let Failure { broker, reason, .. } = failure;
        if self.refusals >= REFUSALS && !self.was_connected {
            return Err(BrokerError::Refused { broker, reason });
        }
        if lasted >= limit {
            let reason = format!("{broker}: {reason}");
            return Err(BrokerError::Unreachable { seconds: lasted.as_secs(), reason });
        }
        let delay = BACKOFF.delay(self.failures, rand::random());
        tracing::warn!(broker, reason, delay_ms = delay.as_millis() as u64, "no broker; trying again");
        Ok(delay)
    }

    /// There is a connection; whether it lasts is another matter. If not, the delays go on from here,
    /// not from where a long outage had brought them.
    pub(super) fn connected(&mut self) {
        self.was_connected = true;
        self.refusals = 0;
        self.failures = self.failures.min(FLAPPING);
    }

    /// A session has worked for a while.
    pub(super) fn over(&mut self) {
        *self = Self { was_connected: true, ..Self::default() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(refused: bool) -> Failure {
        Failure { broker: "amqp://b".into(), reason: "no".into(), refused }
    }

    #[test]
    fn a_broker_that_refuses_from_the_start_is_believed_after_a_few_times() {
        let mut outage = Outage::default();
        let limit = Duration::from_secs(60);
        assert!(outage.failed(failure(true), limit).is_ok());
        assert!(outage.failed(failure(true), limit).is_ok());
        assert!(matches!(outage.failed(failure(true), limit), Err(BrokerError::Refused { .. })));
    }

    #[test]
    fn a_connection_after_a_long_outage_that_breaks_at_once_is_soon_tried_again() {
        let mut outage = Outage::default();
        let limit = Duration::from_secs(60);
        let mut last = Duration::ZERO;
        for _ in 0..20 {
            last = outage.failed(failure(false), limit).expect("more time");
        }
        assert!(last >= BACKOFF.most / 2);
        outage.connected();
        let next = outage.failed(failure(false), limit).expect("more time");
        assert!(next <= BACKOFF.ceiling(FLAPPING + 1) && next >= BACKOFF.ceiling(FLAPPING) / 2, "{next:?}");
    }

    #[test]
    fn a_broker_that_took_us_once_may_refuse_for_as_long_as_an_outage_may_last() {
        let mut outage = Outage::default();
        outage.over();
        for _ in 0..10 {
            assert!(outage.failed(failure(true), Duration::from_secs(60)).is_ok());
        }
        let end = outage.failed(failure(false), Duration::ZERO);
        assert!(matches!(end, Err(BrokerError::Unreachable { .. })));
    }
}
