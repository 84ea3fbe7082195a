//! Opens connections: which address is tried next, how long, with which certificates; and when an
//! outage has lasted too long. Owns the turn among several addresses and the count of failures;
//! never retries by itself in a loop that its owner cannot leave.

use std::fs;
use std::io;
use std::net::{Shutdown, TcpStream};
use std::ops::Deref;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use lapin::tcp::{OwnedIdentity, OwnedTLSConfig};
use lapin::uri::{AMQPScheme, AMQPUri};
use lapin::{AsyncTcpStream, Connection, ConnectionProperties, Error, ErrorKind};

use crate::backoff::Backoff;
use crate::broker::BrokerError;
use crate::config::{Broker, Tls, redact_url};

const BACKOFF: Backoff = Backoff { first: Duration::from_millis(250), most: Duration::from_secs(10) };
/// A broker that refuses us this often before it ever took us will not change its mind. More than
/// once, because a broker that boots refuses its virtual hosts for a moment.
const REFUSALS: u32 = 3;
/// For so long a service goes on at its start where the broker's words may mean a wrong password as well
/// as an authentication service that is down, or a user that is yet to be made.
const UNCERTAIN: Duration = Duration::from_secs(15);

/// Longest wait for the broker's answer to a cancel or close.
pub(super) const FAREWELL: Duration = Duration::from_secs(5);

/// Why one attempt failed.
#[derive(Debug)]
pub struct Failure {
    /// The address, without its password.
    pub(super) broker: String,
    /// The broker's or the system's words.
    pub(super) reason: String,
    /// What the broker said, where it answered.
    pub(super) refusal: Refusal,
}

/// What a broker's refusal means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// It is none, or one that passes by itself: a limit that is reached, a queue that may yet be made.
    None,
    /// Either the settings are wrong, or something passes by itself: the broker's words are the same.
    Uncertain,
    /// The settings are wrong: certificates, arguments of a queue.
    Settings,
}

/// How long refusals are borne before the broker has ever taken us. Afterwards they are an outage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusalPolicy {
    /// A few attempts: a person waits for the answer.
    Command,
    /// 15 s too, where the words leave a doubt.
    Service,
    /// It has taken another process of ours, or another connection, by the same settings.
    Reached,
}

/// Makes connections to one of several addresses.
pub struct Connector {
    settings: Broker,
    name: String,
    refusals: RefusalPolicy,
    /// Counts attempts; its remainder is the address whose turn it is. Written by each attempt.
    turn: AtomicUsize,
}

impl Connector {
    /// `name` is what the broker's management page shows.
    pub fn new(settings: Broker, name: impl Into<String>) -> Self {
        Self { settings, name: name.into(), refusals: RefusalPolicy::Command, turn: AtomicUsize::new(0) }
    }

    /// The same, with another policy.
    #[must_use]
    pub fn with_refusals(self, refusals: RefusalPolicy) -> Self {
        Self { refusals, ..self }
    }

    /// The same under another name.
    pub(super) fn named(&self, name: String) -> Self {
        Self::new(self.settings.clone(), name).with_refusals(self.refusals)
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
    pub(super) async fn attempt(&self) -> Result<(OpenConnection, String), Failure> {
        let urls = &self.settings.url;
        let turn = self.turn.load(Ordering::Relaxed) % urls.len().max(1);
        let url = urls.get(turn).map(|url| url.expose()).unwrap_or_default();
        let broker = redact_url(url);
        let opened = tokio::time::timeout(self.settings.connect_timeout, self.open(url)).await;
        let reason = match opened {
            Ok(Ok(connection)) => return Ok((connection, broker)),
            Ok(Err(failure)) => failure,
            Err(_) => (format!("no answer within {:?}", self.settings.connect_timeout), Refusal::None),
        };
        self.pass_turn();
        Err(Failure { broker, reason: reason.0, refusal: reason.1 })
    }

    /// The next attempt goes to the next address.
    pub(super) fn pass_turn(&self) {
        self.turn.fetch_add(1, Ordering::Relaxed);
    }

    async fn open(&self, url: &str) -> Result<OpenConnection, (String, Refusal)> {
        let mut uri: AMQPUri = url.parse().map_err(|reason: String| (reason, Refusal::Settings))?;
        let heartbeat = u16::try_from(self.settings.heartbeat.as_secs()).unwrap_or(u16::MAX);
        uri.query.heartbeat.get_or_insert(heartbeat);
        let tls = certificates(&self.settings.tls).map_err(|reason| (reason, Refusal::Settings))?;
        let properties = ConnectionProperties::default().with_connection_name(self.name.as_str().into());
        connect(uri, tls, properties).await.map_err(|error| words(&error))
    }
}

/// As `Connection::connect_uri_with_config`, but an attempt that is given up, because this is dropped, leaves
/// nothing behind. Lapin connects on a thread of its own, which waits for the broker's first words for as
/// long as they do not come, and which nobody can end: so it is given a socket that is connected, and
/// encrypted, and of which we keep hold.
async fn connect(
    uri: AMQPUri,
    tls: OwnedTLSConfig,
    properties: ConnectionProperties,
) -> Result<OpenConnection, Error> {
    let runtime = lapin::runtime::default_runtime()?;
    let host = uri.authority.host.clone();
    let addresses = runtime.to_socket_addrs((host.clone(), uri.authority.port));
    let stream = AsyncTcpStream::connect(&runtime, addresses).await?;
    let AsyncTcpStream::Plain(socket) = &stream else {
        return Err(io::Error::from(io::ErrorKind::Unsupported).into());
    };
    let socket = Socket(socket.get_ref().as_fd().try_clone_to_owned()?.into());
    let stream = match uri.scheme {
        AMQPScheme::AMQP => stream,
        AMQPScheme::AMQPS => stream.into_tls(&host, tls.as_ref()).await?,
    };
    // Lapin asks for it once: it is not to connect again by itself.
    let once = Mutex::new(Some(stream));
    let connection = Connection::connector(
        uri,
        runtime,
        async move |_, _| {
            let stream = once.lock().unwrap_or_else(PoisonError::into_inner).take();
            stream.ok_or_else(|| Error::from(io::Error::from(io::ErrorKind::NotConnected)))
        },
        properties,
    )
    .await?;
    Ok(OpenConnection { connection, socket: Some(socket) })
}

/// Our hold of a connection's socket. When it is dropped the socket is shut down: lapin's thread reads the
/// end of the stream, and ends.
struct Socket(TcpStream);

impl Drop for Socket {
    fn drop(&mut self) {
        let _ = self.0.shutdown(Shutdown::Both);
    }
}

/// A connection that leaves nothing behind. Lapin closes one that is dropped, and waits for the broker's
/// answer to that for as long as it does not come.
pub(super) struct OpenConnection {
    connection: Connection,
    /// None only while it is being dropped.
    socket: Option<Socket>,
}

impl Deref for OpenConnection {
    type Target = Connection;

    fn deref(&self) -> &Connection {
        &self.connection
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        let Some(socket) = self.socket.take() else { return };
        // A broker that is well closes it in order within this time.
        if self.connection.status().connected()
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            runtime.spawn(async move {
                tokio::time::sleep(FAREWELL).await;
                drop(socket);
            });
        }
    }
}

/// A failure in words, and what it means.
pub(super) fn words(error: &Error) -> (String, Refusal) {
    let amqp = match error.kind() {
        ErrorKind::ProtocolError(amqp) => amqp,
        // What rustls says of a certificate, or of an answer that is not TLS.
        ErrorKind::IOError(io) if io.kind() == std::io::ErrorKind::InvalidData => {
            let hint = "check broker.tls (ca_file, cert_file, key_file), and amqp:// or amqps://";
            return (format!("{error}; {hint}"), Refusal::Settings);
        }
        _ => return (error.to_string(), Refusal::None),
    };
    let message = amqp.get_message().to_string();
    let (refusal, hint) = match amqp.get_id() {
        // Connections of a user, a virtual host or a node: others end. And a virtual host that is starting.
        530 if message.contains("is reached") || message.contains("is down") => (Refusal::None, ""),
        403 => (Refusal::Uncertain, "; check user, password and permissions"),
        530 => {
            (Refusal::Uncertain, "; check the virtual host (`/` is written %2f) and the user's access to it")
        }
        402 | 406 => (Refusal::Settings, ""),
        // 404 (a queue that may yet be made) and 405 (locked by another connection) can pass.
        _ => (Refusal::None, ""),
    };
    (format!("{} {message}{hint}", amqp.get_id()), refusal)
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
pub(super) struct ReconnectPolicy {
    since: Option<Instant>,
    failures: u32,
    /// Refusals in a row that may mean wrong settings, and since when.
    refusals: u32,
    refused_since: Option<Instant>,
    was_connected: bool,
}

impl ReconnectPolicy {
    /// Counts a failure of `connector`. The delay before the next attempt, or the end of all attempts.
    pub(super) fn failed(
        &mut self,
        failure: Failure,
        connector: &Connector,
    ) -> Result<Duration, BrokerError> {
        let lasted = self.since.get_or_insert_with(Instant::now).elapsed();
        self.failures += 1;
        let Failure { broker, reason, refusal } = failure;
        if self.is_refused(refusal, connector.refusals) {
            return Err(BrokerError::Refused { broker, reason });
        }
        if lasted >= connector.settings.give_up_after {
            let reason = format!("{broker}: {reason}");
            return Err(BrokerError::Unreachable { seconds: lasted.as_secs(), reason });
        }
        let delay = BACKOFF.delay(self.failures, rand::random());
        tracing::warn!(broker, reason, delay_ms = delay.as_millis() as u64, "no broker; trying again");
        Ok(delay)
    }

    /// Whether to believe that the settings are wrong.
    fn is_refused(&mut self, refusal: Refusal, refusals: RefusalPolicy) -> bool {
        if refusal == Refusal::None {
            (self.refusals, self.refused_since) = (0, None);
            return false;
        }
        self.refusals += 1;
        let lasted = self.refused_since.get_or_insert_with(Instant::now).elapsed();
        let uncertain = refusal == Refusal::Uncertain && refusals == RefusalPolicy::Service;
        let borne = if uncertain { UNCERTAIN } else { Duration::ZERO };
        let was_taken = self.was_connected || refusals == RefusalPolicy::Reached;
        !was_taken && self.refusals >= REFUSALS && lasted >= borne
    }

    /// There is a connection; whether it lasts is another matter. If not, the delays go on from here,
    /// not from where a long outage had brought them.
    pub(super) fn connected(&mut self) {
        self.was_connected = true;
        (self.refusals, self.refused_since) = (0, None);
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
    use crate::config;

    fn failure(refusal: Refusal) -> Failure {
        Failure { broker: "amqp://b".into(), reason: "no".into(), refusal }
    }

    fn connector(refusals: RefusalPolicy, give_up_after: &str) -> Connector {
        let flags = [("broker.give_up_after".to_owned(), give_up_after.to_owned())];
        let settings = config::load(&[], [], &flags).expect("settings").settings;
        Connector::new(settings.broker, "test").with_refusals(refusals)
    }

    /// After how many failures of a kind the attempts end, of 50 that follow each other at once.
    fn ends(refusal: Refusal, refusals: RefusalPolicy) -> Option<(usize, BrokerError)> {
        let (mut reconnect, connector) = (ReconnectPolicy::default(), connector(refusals, "1m"));
        (1..=50).find_map(|n| Some((n, reconnect.failed(failure(refusal), &connector).err()?)))
    }

    #[test]
    fn a_broker_that_refuses_from_the_start_is_believed_after_a_few_times() {
        for (refusal, refusals) in [
            (Refusal::Settings, RefusalPolicy::Command),
            (Refusal::Settings, RefusalPolicy::Service),
            (Refusal::Uncertain, RefusalPolicy::Command),
        ] {
            let end = ends(refusal, refusals);
            assert!(
                matches!(end, Some((3, BrokerError::Refused { .. }))),
                "{refusal:?} {refusals:?} {end:?}"
            );
        }
    }

    #[test]
    fn what_may_pass_by_itself_is_waited_for() {
        for (refusal, refusals) in [
            (Refusal::None, RefusalPolicy::Command),
            (Refusal::None, RefusalPolicy::Service),
            (Refusal::Uncertain, RefusalPolicy::Service),
            (Refusal::Uncertain, RefusalPolicy::Reached),
            (Refusal::Settings, RefusalPolicy::Reached),
        ] {
            assert!(ends(refusal, refusals).is_none(), "{refusal:?} {refusals:?}");
        }
    }

    #[test]
    fn what_a_service_cannot_tell_from_a_wrong_password_is_borne_for_a_bounded_time() {
        let (mut reconnect, connector) =
            (ReconnectPolicy::default(), connector(RefusalPolicy::Service, "1m"));
        for _ in 0..REFUSALS {
            assert!(reconnect.failed(failure(Refusal::Uncertain), &connector).is_ok());
        }
        reconnect.refused_since = Instant::now().checked_sub(UNCERTAIN);
        let end = reconnect.failed(failure(Refusal::Uncertain), &connector);
        assert!(matches!(end, Err(BrokerError::Refused { .. })), "{end:?}");
    }

    #[test]
    fn a_connection_after_a_long_outage_that_breaks_at_once_is_soon_tried_again() {
        let (mut reconnect, connector) =
            (ReconnectPolicy::default(), connector(RefusalPolicy::Service, "1m"));
        let mut last = Duration::ZERO;
        for _ in 0..20 {
            last = reconnect.failed(failure(Refusal::None), &connector).expect("more time");
        }
        assert!(last >= BACKOFF.most / 2);
        reconnect.connected();
        let next = reconnect.failed(failure(Refusal::None), &connector).expect("more time");
        assert!(next <= BACKOFF.ceiling(FLAPPING + 1) && next >= BACKOFF.ceiling(FLAPPING) / 2, "{next:?}");
    }

    #[test]
    fn a_broker_that_took_us_once_may_refuse_for_as_long_as_an_outage_may_last() {
        let (mut reconnect, connector) =
            (ReconnectPolicy::default(), connector(RefusalPolicy::Service, "2s"));
        reconnect.over();
        for _ in 0..10 {
            assert!(reconnect.failed(failure(Refusal::Settings), &connector).is_ok());
        }
        reconnect.since = Instant::now().checked_sub(Duration::from_secs(2));
        let end = reconnect.failed(failure(Refusal::None), &connector);
        assert!(matches!(end, Err(BrokerError::Unreachable { .. })));
    }
}
