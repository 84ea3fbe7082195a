//! Opens connections. Decides which address is tried next, for how long and with which certificates, and when an
//! outage has lasted too long. Owns the position in the list of addresses and the count of failures; leaves
//! the retry loop to its caller.

use std::fs;
use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use lapin::tcp::{OwnedIdentity, OwnedTLSConfig};
use lapin::uri::AMQPUri;
use lapin::{Connection, ConnectionProperties, Error};
use sconce_broker_stream::{Socket, Strings};

use super::cause::{Cause, message};
use crate::backoff::Backoff;
use crate::broker::BrokerError;
use crate::config::{Broker, Tls, redact_url};

const BACKOFF: Backoff = Backoff { first: Duration::from_millis(250), max: Duration::from_secs(10) };
/// After this many refusals before any success, the settings are taken to be wrong. It is more than one, because a
/// broker that starts refuses its virtual hosts for a moment.
const MAX_REFUSALS: u32 = 3;
/// How long a starting service retries when the broker's refusal is ambiguous: the password is wrong, the
/// authentication service is down, or the user does not exist yet.
const UNCERTAIN_REFUSAL_TIMEOUT: Duration = Duration::from_secs(15);

/// Longest wait for the broker's answer to a cancel or close.
pub(super) const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// Why one attempt failed.
#[derive(Debug)]
pub struct Failure {
    /// The address, without its password.
    pub(super) broker: String,
    /// The message of the broker or of the operating system.
    pub(super) reason: String,
    /// What kind of refusal it was.
    pub(super) refusal: Refusal,
}

impl Failure {
    pub(super) fn of(broker: String, error: &Error) -> Self {
        Self { broker, reason: message(error), refusal: Cause::of(error).into() }
    }

    /// A failure for which the broker has given no reason.
    pub(super) fn without_answer(broker: String, reason: String) -> Self {
        Self { broker, reason, refusal: Refusal::Temporary }
    }
}

/// What a failure says about the settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The settings may be right: the failure is no refusal, or a refusal that may end without a change of our
    /// settings, because a limit is reached or a queue does not exist yet.
    Temporary,
    /// Ambiguous: the settings are wrong, or the cause is temporary. The broker's message is the same for both.
    Uncertain,
    /// The settings are wrong: certificates, or the arguments of a queue.
    Settings,
}

impl From<Cause> for Refusal {
    fn from(cause: Cause) -> Self {
        match cause {
            Cause::AccessRefused | Cause::NotAllowed => Self::Uncertain,
            Cause::InvalidPath | Cause::PreconditionFailed | Cause::Tls => Self::Settings,
            Cause::Missing
            | Cause::Unavailable
            | Cause::Exclusive
            | Cause::LimitReached
            | Cause::ContentTooLarge
            | Cause::BadFrame
            | Cause::NotImplemented
            | Cause::Other
            | Cause::Connection => Self::Temporary,
        }
    }
}

/// How long refusals are retried before the first connection succeeds. Afterwards a refusal counts as an
/// outage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusalPolicy {
    /// A few attempts, because a person waits for the answer.
    Command,
    /// The same, but at least 15 s where the refusal is ambiguous.
    Service,
    /// Refusals never end the attempts early: the same settings have worked for another process or
    /// connection.
    Reached,
}

/// Makes connections to one of several addresses.
pub struct Connector {
    pub(super) settings: Broker,
    /// The connection's name on the broker's management page.
    pub(super) name: String,
    pub(super) refusals: RefusalPolicy,
    /// Failed attempts. Modulo the number of addresses, this is the index of the address to try next.
    failed_attempts: AtomicUsize,
}

impl Connector {
    /// `name` is what the broker's management page shows for the connection.
    pub fn new(settings: Broker, name: impl Into<String>) -> Self {
        Self {
            settings,
            name: name.into(),
            refusals: RefusalPolicy::Command,
            failed_attempts: AtomicUsize::new(0),
        }
    }

    /// This connector with another policy.
    #[must_use]
    pub fn with_refusals(self, refusals: RefusalPolicy) -> Self {
        Self { refusals, ..self }
    }

    /// Tries the current address once. After a failure the next attempt takes the next address; after a success it takes
    /// the same one.
    pub(super) async fn attempt(&self) -> Result<OpenConnection, Failure> {
        let urls = &self.settings.url;
        let index = self.failed_attempts.load(Ordering::Relaxed) % urls.len().max(1);
        let url = urls.get(index).map(|url| url.expose()).unwrap_or_default();
        let broker = redact_url(url);
        let limit = self.settings.connect_timeout;
        let failure = match tokio::time::timeout(limit, self.open(url, &broker)).await {
            Ok(Ok(connection)) => return Ok(connection),
            Ok(Err(failure)) => failure,
            Err(_) => Failure::without_answer(broker, format!("no answer within {limit:?}")),
        };
        self.use_next_address();
        Err(failure)
    }

    /// Makes the next attempt try the next address.
    pub(super) fn use_next_address(&self) {
        self.failed_attempts.fetch_add(1, Ordering::Relaxed);
    }

    async fn open(&self, url: &str, broker: &str) -> Result<OpenConnection, Failure> {
        let wrong_settings =
            |reason| Failure { broker: broker.to_owned(), reason, refusal: Refusal::Settings };
        let mut uri: AMQPUri =
            url.parse().map_err(|reason| wrong_settings(wrong_parameter(url).unwrap_or(reason)))?;
        let heartbeat = u16::try_from(self.settings.heartbeat.as_secs()).unwrap_or(u16::MAX);
        uri.query.heartbeat.get_or_insert(heartbeat);
        let tls = tls_config(&self.settings.tls).map_err(wrong_settings)?;
        let properties = ConnectionProperties::default().with_connection_name(self.name.as_str().into());
        let connected = sconce_broker_stream::connect(uri, tls, properties).await;
        let (connection, socket, strings) =
            connected.map_err(|error| Failure::of(broker.to_owned(), &error))?;
        Ok(OpenConnection { connection, socket: Some(socket), strings, broker: broker.to_owned() })
    }
}

/// What is wrong with a parameter in an address, if one is: the parser does not name it.
fn wrong_parameter(url: &str) -> Option<String> {
    let url = url::Url::parse(url).ok()?;
    url.query_pairs().find_map(|(name, value)| {
        let largest = match &*name {
            "heartbeat" | "channel_max" => u64::from(u16::MAX),
            "frame_max" => u64::from(u32::MAX),
            "connection_timeout" => u64::MAX,
            _ => return None,
        };
        let is_right = value.parse::<u64>().is_ok_and(|number| number <= largest);
        (!is_right)
            .then(|| format!("broker.url: {name} = {value:?}: expected a whole number up to {largest}"))
    })
}

/// A connection that leaves nothing behind when dropped. Lapin alone would close it in the background and
/// wait without limit for the broker's answer.
pub(super) struct OpenConnection {
    connection: Connection,
    /// None only during the drop.
    socket: Option<Socket>,
    /// The short strings of its messages that are not UTF-8.
    pub(super) strings: Arc<Strings>,
    /// The broker's address, without its password.
    pub(super) broker: String,
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
        // After this function lapin drops `connection`, and closes it in the background. A healthy broker answers
        // within CLOSE_TIMEOUT; then the socket is shut down.
        if self.connection.status().connected()
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            runtime.spawn(async move {
                tokio::time::sleep(CLOSE_TIMEOUT).await;
                drop(socket);
            });
        }
    }
}

/// Reads the files of certificates and keys.
fn tls_config(tls: &Tls) -> Result<OwnedTLSConfig, String> {
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

/// Shortest interval between two warnings about the same failure. In between it is logged at debug level.
const LOG_INTERVAL: Duration = Duration::from_secs(60);
/// After a successful connection, at most this many earlier failures count towards the next delay.
const MAX_FAILURES_KEPT: u32 = 3;

/// Counts failures since the last session that worked for a while, and decides when the next attempt follows, or that
/// none follows. The consumer's supervisor and each task that owns a publishing connection have one.
#[derive(Default)]
pub(super) struct ReconnectPolicy {
    failing_since: Option<Instant>,
    failures: u32,
    /// How many failures in a row had a refusal other than [`Refusal::Temporary`].
    refusals: u32,
    refused_since: Option<Instant>,
    /// What was logged last, and when.
    last_logged: Option<(String, Instant)>,
    was_connected: bool,
}

impl ReconnectPolicy {
    /// Counts a failure. Returns the delay before the next attempt, or the error that ends all attempts.
    pub(super) fn failed(
        &mut self,
        failure: Failure,
        connector: &Connector,
    ) -> Result<Duration, BrokerError> {
        let lasted = self.failing_since.get_or_insert_with(Instant::now).elapsed();
        self.failures += 1;
        let Failure { broker, reason, refusal } = failure;
        if self.count_refusal(refusal, connector.refusals) {
            return Err(BrokerError::Refused { broker, reason });
        }
        if lasted >= connector.settings.give_up_after {
            let reason = format!("{broker}: {reason}");
            return Err(BrokerError::Unreachable { seconds: lasted.as_secs(), reason });
        }
        let delay = BACKOFF.delay(self.failures, rand::random());
        let delay_ms = delay.as_millis() as u64;
        let is_logged = self
            .last_logged
            .as_ref()
            .is_some_and(|(logged, at)| *logged == reason && at.elapsed() < LOG_INTERVAL);
        match refusal {
            _ if is_logged => tracing::debug!(broker, reason, delay_ms, "trying again"),
            Refusal::Temporary => tracing::warn!(broker, reason, delay_ms, "no broker; trying again"),
            _ => {
                let retry_limit = self.retry_limit(refusal, connector);
                tracing::warn!(broker, reason, delay_ms, "the broker refuses; trying again, {retry_limit}");
            }
        }
        if !is_logged {
            self.last_logged = Some((reason, Instant::now()));
        }
        Ok(delay)
    }

    /// Describes for the log how long, or how often, a refusal is retried in all.
    fn retry_limit(&self, refusal: Refusal, connector: &Connector) -> String {
        let give_up_after = connector.settings.give_up_after;
        match connector.refusals {
            RefusalPolicy::Reached => format!("for {give_up_after:?}"),
            _ if self.was_connected => format!("for {give_up_after:?}"),
            RefusalPolicy::Service if refusal == Refusal::Uncertain => {
                format!("for {:?}", UNCERTAIN_REFUSAL_TIMEOUT.min(give_up_after))
            }
            RefusalPolicy::Service | RefusalPolicy::Command => format!("{MAX_REFUSALS} times"),
        }
    }

    /// Counts a refusal, and returns whether it ends all attempts because the settings must be wrong.
    fn count_refusal(&mut self, refusal: Refusal, policy: RefusalPolicy) -> bool {
        if refusal == Refusal::Temporary {
            (self.refusals, self.refused_since) = (0, None);
            return false;
        }
        self.refusals += 1;
        let lasted = self.refused_since.get_or_insert_with(Instant::now).elapsed();
        let is_uncertain = refusal == Refusal::Uncertain && policy == RefusalPolicy::Service;
        let tolerated = if is_uncertain { UNCERTAIN_REFUSAL_TIMEOUT } else { Duration::ZERO };
        let was_accepted = self.was_connected || policy == RefusalPolicy::Reached;
        !was_accepted && self.refusals >= MAX_REFUSALS && lasted >= tolerated
    }

    /// Records that a connection was made. The outage lasts until [`ReconnectPolicy::reset`], because the connection
    /// may break at once. If it does, the next delay is computed from at most [`MAX_FAILURES_KEPT`] earlier failures,
    /// not from all those of a long outage.
    pub(super) fn connected(&mut self) {
        (self.was_connected, self.last_logged) = (true, None);
        (self.refusals, self.refused_since) = (0, None);
        self.failures = self.failures.min(MAX_FAILURES_KEPT);
    }

    /// Forgets all failures, because a session has worked for a while.
    pub(super) fn reset(&mut self) {
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

    /// Feeds 50 failures of one kind. Returns the number of failures after which the attempts ended, and the error.
    fn fatal_failure(refusal: Refusal, refusals: RefusalPolicy) -> Option<(usize, BrokerError)> {
        let (mut reconnect, connector) = (ReconnectPolicy::default(), connector(refusals, "1m"));
        (1..=50).find_map(|n| Some((n, reconnect.failed(failure(refusal), &connector).err()?)))
    }

    #[test]
    fn three_refusals_before_any_success_end_the_attempts() {
        for (refusal, refusals) in [
            (Refusal::Settings, RefusalPolicy::Command),
            (Refusal::Settings, RefusalPolicy::Service),
            (Refusal::Uncertain, RefusalPolicy::Command),
        ] {
            let end = fatal_failure(refusal, refusals);
            assert!(
                matches!(end, Some((3, BrokerError::Refused { .. }))),
                "{refusal:?} {refusals:?} {end:?}"
            );
        }
    }

    #[test]
    fn a_wrong_parameter_of_an_address_is_named() {
        let named = wrong_parameter("amqp://guest:guest@b/%2f?heartbeat=10.0");
        assert_eq!(
            named.as_deref(),
            Some("broker.url: heartbeat = \"10.0\": expected a whole number up to 65535")
        );
        assert_eq!(wrong_parameter("amqp://b?heartbeat=10&frame_max=8192"), None);
    }

    #[test]
    fn failures_that_the_policy_tolerates_do_not_end_the_attempts() {
        for (refusal, refusals) in [
            (Refusal::Temporary, RefusalPolicy::Command),
            (Refusal::Temporary, RefusalPolicy::Service),
            (Refusal::Uncertain, RefusalPolicy::Service),
            (Refusal::Uncertain, RefusalPolicy::Reached),
            (Refusal::Settings, RefusalPolicy::Reached),
        ] {
            assert!(fatal_failure(refusal, refusals).is_none(), "{refusal:?} {refusals:?}");
        }
    }

    #[test]
    fn a_service_retries_an_ambiguous_refusal_for_a_bounded_time() {
        let (mut reconnect, connector) =
            (ReconnectPolicy::default(), connector(RefusalPolicy::Service, "1m"));
        for _ in 0..MAX_REFUSALS {
            assert!(reconnect.failed(failure(Refusal::Uncertain), &connector).is_ok());
        }
        reconnect.refused_since = Instant::now().checked_sub(UNCERTAIN_REFUSAL_TIMEOUT);
        let end = reconnect.failed(failure(Refusal::Uncertain), &connector);
        assert!(matches!(end, Err(BrokerError::Refused { .. })), "{end:?}");
    }

    #[test]
    fn the_retry_limit_follows_from_the_refusal_and_the_policy() {
        let limit = |reconnect: &ReconnectPolicy, refusal, refusals| {
            reconnect.retry_limit(refusal, &connector(refusals, "10m"))
        };
        let new = ReconnectPolicy::default();
        assert_eq!(limit(&new, Refusal::Uncertain, RefusalPolicy::Service), "for 15s");
        assert_eq!(limit(&new, Refusal::Settings, RefusalPolicy::Service), "3 times");
        assert_eq!(limit(&new, Refusal::Uncertain, RefusalPolicy::Command), "3 times");
        assert_eq!(limit(&new, Refusal::Uncertain, RefusalPolicy::Reached), "for 600s");
        let connected = ReconnectPolicy { was_connected: true, ..new };
        assert_eq!(limit(&connected, Refusal::Uncertain, RefusalPolicy::Service), "for 600s");
    }

    #[test]
    fn a_connection_that_breaks_right_after_an_outage_is_soon_retried() {
        let (mut reconnect, connector) =
            (ReconnectPolicy::default(), connector(RefusalPolicy::Service, "1m"));
        let mut last = Duration::ZERO;
        for _ in 0..20 {
            last = reconnect.failed(failure(Refusal::Temporary), &connector).expect("more time");
        }
        assert!(last >= BACKOFF.max / 2);
        reconnect.connected();
        let next = reconnect.failed(failure(Refusal::Temporary), &connector).expect("more time");
        assert!(
            next <= BACKOFF.ceiling(MAX_FAILURES_KEPT + 1) && next >= BACKOFF.ceiling(MAX_FAILURES_KEPT) / 2,
            "{next:?}"
        );
    }

    #[test]
    fn after_one_success_refusals_are_retried_until_give_up_after() {
        let (mut reconnect, connector) =
            (ReconnectPolicy::default(), connector(RefusalPolicy::Service, "2s"));
        reconnect.reset();
        for _ in 0..10 {
            assert!(reconnect.failed(failure(Refusal::Settings), &connector).is_ok());
        }
        reconnect.failing_since = Instant::now().checked_sub(Duration::from_secs(2));
        let end = reconnect.failed(failure(Refusal::Temporary), &connector);
        assert!(matches!(end, Err(BrokerError::Unreachable { .. })));
    }
}
