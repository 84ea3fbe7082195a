//! The task that owns a publishing connection: sends the messages that `channel_choice` releases, reports the outcome
//! of each, and reconnects. Decides when a connection counts as dead, and which message is refused.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::{BoxFuture, FutureExt};
use futures_util::stream::{FuturesUnordered, StreamExt};
use lapin::{Channel, Connection, Error, ErrorKind};
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::cause::{Cause, message};
use super::channel_choice::{ChannelKind, Messages};
use super::confirmed_publish::{
    DIRECT_REPLY_TO, PublishAttempt, QueuedMessage, Returned, publish_confirmed, send_ping, take_return,
};
use super::connect::{Connector, Failure, OpenConnection, ReconnectPolicy};
use crate::broker::{BrokerError, Published};

/// Bound of the channel of messages to the task. The task reads all that wait at once.
pub(super) const MAX_QUEUED: usize = 512;
/// Maximum number of unused channels that are kept for reuse.
const MAX_SPARE_CHANNELS: usize = 4;
/// When the broker has sent nothing for this long while messages are under way, it is asked whether it still answers (a
/// ping). After the same time again without an answer it counts as not taking messages.
const PING_AFTER: Duration = Duration::from_millis(500);
/// A connection that breaks sooner counts as a failed attempt: the next attempt waits, longer each time.
const STABLE_AFTER: Duration = Duration::from_secs(10);
/// Interval of the checks of a connection while messages are under way.
const CHECK_INTERVAL: Duration = Duration::from_millis(250);
/// Assumed speed of a slow link in bytes per second: the time to send what is under way is added to the confirm
/// timeout.
const MIN_BYTES_PER_SECOND: usize = 64 << 10;
/// How long an answer is held back for a returned message that lapin may have attached to another answer. The two
/// answers arrive within microseconds of each other.
const RETURN_WAIT: Duration = Duration::from_millis(100);

/// A message is refused when the broker has closed the connection this many times while the message was under way.
/// After the first time the message is sent alone. The limit is more than one, because a broker in trouble closes
/// connections too.
const MAX_SUSPICIONS: u32 = 3;
/// Delay before such a message is sent again; multiplied by the square of the number of closed connections.
const SUSPICION_DELAY: Duration = Duration::from_millis(500);
/// Delay before a message is sent again when its channel could not be opened, or was closed.
const REOPEN_DELAY: Duration = Duration::from_millis(100);

/// A shared channel older than this is given up when a message on it is nacked. If a quorum queue has no leader when a
/// channel sends it the first message, RabbitMQ 3.10 nacks all messages that this channel sends to it.
const RETIRE_ON_NACK_AFTER: Duration = Duration::from_secs(1);

/// The open connection and its channels.
struct LiveConnection {
    connection: Arc<OpenConnection>,
    /// The shared channel, and since when it is shared. None: the channel of the next message that is confirmed alone
    /// becomes the shared one.
    shared: Option<(Channel, Instant)>,
    /// Channels for messages that go alone, free now.
    spare: Vec<Channel>,
    /// True while an alarm of the broker holds up publishing. Written by [`watch_alarms`].
    blocked: watch::Receiver<bool>,
    /// The channel on which pings are sent.
    ping_channel: Option<Channel>,
    /// When the broker last answered a message or a ping.
    silent_since: Instant,
    /// The time for which a queue has been slow is counted from here at the earliest: the opening of the connection, or
    /// the end of an alarm.
    slow_since: Instant,
    opened: Instant,
}

/// The broker's confirm or nack of a message.
struct BrokerAnswer {
    id: u64,
    channel: Option<Channel>,
    /// Whether it is a confirm.
    confirmed: bool,
    /// Whether a returned message came with it, which may be this message or another.
    with_return: bool,
}

/// An answer that is held back, because the message may still turn out to have been returned.
struct HeldAnswer {
    queued: QueuedMessage,
    confirmed: bool,
    until: Instant,
}

/// A question to the broker whether it still answers.
struct Ping {
    answer: BoxFuture<'static, Result<Channel, Error>>,
    sent: Instant,
}

/// The state of the task that owns a connection.
pub(super) struct SendTask {
    connector: Arc<Connector>,
    live: Option<LiveConnection>,
    reconnect: ReconnectPolicy,
    messages: Messages<QueuedMessage>,
    under_way: FuturesUnordered<BoxFuture<'static, PublishAttempt>>,
    /// Answers that came with the returned message of another publish; see [`RETURN_WAIT`].
    held_answers: Vec<HeldAnswer>,
    /// Returned messages not yet matched with one that was sent.
    unmatched_returns: Vec<Returned>,
    /// The ping that the broker has not answered yet.
    ping: Option<Ping>,
    /// Whether the broker takes messages. Written here, read by [`super::publisher::AmqpPublisher`].
    takes_messages: Arc<AtomicBool>,
    /// Set when the connection broke soon after it was made: the next attempt has to wait.
    early_failure: Option<Failure>,
}

impl SendTask {
    /// The state without a connection; the task connects when the first message comes. `max_shared_body` is as in
    /// [`Messages::new`].
    pub(super) fn new(
        connector: Arc<Connector>,
        max_shared_body: Option<usize>,
        takes_messages: Arc<AtomicBool>,
    ) -> Self {
        Self {
            connector,
            live: None,
            reconnect: ReconnectPolicy::default(),
            messages: Messages::new(max_shared_body),
            under_way: FuturesUnordered::new(),
            held_answers: Vec::new(),
            unmatched_returns: Vec::new(),
            ping: None,
            takes_messages,
            early_failure: None,
        }
    }

    pub(super) async fn run(mut self, mut receiver: mpsc::Receiver<QueuedMessage>, close: CancellationToken) {
        let mut next_check = tokio::time::Instant::now();
        loop {
            let mut queued = Vec::new();
            let needs_check = !self.messages.is_idle() || !self.held_answers.is_empty();
            tokio::select! {
                biased;
                // First in the list, so that a busy task does not skip the checks.
                () = tokio::time::sleep_until(next_check), if needs_check => {
                    self.check();
                    next_check = tokio::time::Instant::now() + CHECK_INTERVAL;
                }
                Some(sent) = self.under_way.next(), if !self.under_way.is_empty() => self.handle_answers(sent),
                answer = ping_answer(&mut self.ping) => self.ping_answered(answer),
                received = receiver.recv_many(&mut queued, MAX_QUEUED) => {
                    if received == 0 { break }
                    gather(&mut receiver, &mut queued).await;
                    self.enqueue(queued);
                }
                () = close.cancelled() => break,
            }
            if let Err(error) = self.send().await {
                tracing::error!(%error, "cannot publish");
                receiver.close();
                let mut unsent = self.messages.take_all();
                while let Some(queued) = receiver.recv().await {
                    unsent.push(queued);
                }
                unsent.into_iter().for_each(|it| drop(it.result_sender.send(Err(error.clone()))));
                return;
            }
        }
        self.close_connection().await;
    }

    /// Closes the connection gracefully, unless a message is under way: no caller waits for it any more, and a
    /// broker that is busy with it would not answer.
    async fn close_connection(&mut self) {
        if let Some(live) = self.live.take().filter(|_| self.messages.is_idle()) {
            let close = live.connection.close(200, "done".into());
            let _ = timeout(self.connector.settings.connect_timeout, close).await;
        }
    }

    /// Hands the messages to `channel_choice`. All direct reply-to addresses count as one queue.
    fn enqueue(&mut self, queued: Vec<QueuedMessage>) {
        let now = Instant::now();
        for message in queued {
            let is_direct = message.queue.starts_with(DIRECT_REPLY_TO);
            let queue = if is_direct { DIRECT_REPLY_TO.into() } else { message.queue.clone() };
            self.messages.push(queue, message, now);
        }
    }

    /// Sends all waiting messages that may be sent now. Connects first if there is no connection.
    async fn send(&mut self) -> Result<(), BrokerError> {
        if !self.messages.has_waiting() {
            return Ok(());
        }
        self.ensure_connected().await?;
        let Some(live) = &mut self.live else { return Ok(()) };
        while let Some((id, kind)) = self.messages.next(Instant::now()) {
            let Some((queued, _)) = self.messages.get(id) else { continue };
            let channel = match kind {
                ChannelKind::Alone => live.spare.pop(),
                ChannelKind::Shared | ChannelKind::Retired => {
                    live.shared.as_ref().map(|(channel, _)| channel.clone())
                }
            };
            let (queue, message) = (queued.queue.clone(), queued.message.clone());
            self.under_way.push(publish_confirmed(id, channel, live.connection.clone(), queue, message));
        }
        Ok(())
    }

    /// The periodic check: timeouts, alarms, slow queues.
    fn check(&mut self) {
        let now = Instant::now();
        self.messages.clean(now);
        self.release_held_answers(now);
        let settings = &self.connector.settings;
        let is_choked = self.messages.is_choked(now, settings.confirm_timeout);
        let wanted = self.messages.wanted();
        let Some(live) = &mut self.live else { return };
        if *live.blocked.borrow() {
            (live.silent_since, live.slow_since) = (now, now);
            (self.ping, live.ping_channel) = (None, None);
            return self.takes_messages.store(false, Ordering::Relaxed);
        }
        if let Some(ping) = &self.ping {
            let bytes = wanted.map_or(0, |wanted| wanted.bytes);
            let limit = settings.confirm_timeout
                + Duration::from_secs_f64(bytes as f64 / MIN_BYTES_PER_SECOND as f64);
            if now >= ping.sent + limit {
                let limit_ms = limit.as_millis() as u64;
                tracing::warn!(broker = live.connection.broker, limit_ms, "no confirm; reconnecting");
                self.drop_connection(now);
                return;
            }
        } else if wanted.is_some_and(|it| now >= it.oldest_sent.max(live.silent_since) + PING_AFTER) {
            let answer = send_ping(live.ping_channel.take(), live.connection.clone());
            self.ping = Some(Ping { answer, sent: now });
        }
        let is_answering = self.ping.as_ref().is_none_or(|ping| now < ping.sent + PING_AFTER);
        self.takes_messages.store(is_answering, Ordering::Relaxed);
        if is_choked {
            tracing::warn!(
                broker = live.connection.broker,
                "queues that confirm nothing hold all channels; reconnecting"
            );
            self.drop_connection(now);
        } else if is_answering && self.messages.is_held_up_since(live.slow_since, now) {
            tracing::info!(
                broker = live.connection.broker,
                "a queue is slow to confirm; others get a new channel"
            );
            live.shared = None;
            self.messages.retire();
        }
    }

    /// Handles the end of a ping: the broker has answered, or the connection is lost. The loss is not handled here,
    /// because the messages under way report it too.
    fn ping_answered(&mut self, answer: Result<Channel, Error>) {
        self.ping = None;
        if let Some(live) = &mut self.live
            && live.connection.status().connected()
        {
            live.silent_since = Instant::now();
            live.ping_channel = answer.ok();
            self.takes_messages.store(true, Ordering::Relaxed);
        }
    }

    /// Handles the answer to one message together with all other answers that have come by now, because a returned
    /// message may have come with the answer to another message.
    fn handle_answers(&mut self, first: PublishAttempt) {
        let mut answers = vec![first];
        while let Some(Some(more)) = self.under_way.next().now_or_never() {
            answers.push(more);
        }
        let now = Instant::now();
        let (mut answered, mut failed) = (Vec::new(), Vec::new());
        for PublishAttempt { id, channel, result } in answers {
            match result {
                Ok(confirmation) => {
                    let confirmed = confirmation.is_ack();
                    let returned = confirmation.take_message();
                    answered.push(BrokerAnswer { id, channel, confirmed, with_return: returned.is_some() });
                    self.unmatched_returns
                        .extend(returned.map(|message| Returned { message, received: now }));
                }
                Err(error) => failed.push((id, error)),
            }
        }
        for answer in answered {
            self.handle_confirmation(answer, now);
        }
        self.release_held_answers(now);
        for (id, error) in failed {
            self.handle_failure(id, &error, now);
        }
    }

    fn handle_confirmation(&mut self, answer: BrokerAnswer, now: Instant) {
        let BrokerAnswer { id, channel, confirmed, with_return } = answer;
        let kind = self.messages.kind_of(id);
        let returned =
            self.messages.get(id).is_some_and(|(queued, _)| take_return(&mut self.unmatched_returns, queued));
        if let Some(live) = &mut self.live {
            live.silent_since = now;
            let is_old = |since: &Instant| now >= *since + RETIRE_ON_NACK_AFTER;
            match (kind, confirmed) {
                (Some(ChannelKind::Alone), true) if !returned && live.shared.is_none() => {
                    live.shared = channel.map(|channel| (channel, now));
                    self.messages.share(id);
                }
                (Some(ChannelKind::Alone), true) => {
                    channel.into_iter().for_each(|channel| live.keep_spare(channel));
                }
                (Some(ChannelKind::Shared), false)
                    if live.shared.as_ref().is_some_and(|(_, it)| is_old(it)) =>
                {
                    live.shared = None;
                    self.messages.retire();
                }
                _ => {}
            }
        }
        let Some(queued) = self.messages.answered(id, confirmed && !returned, now) else { return };
        if returned {
            let _ = queued.result_sender.send(Ok(Published::Unroutable));
        } else if with_return && kind != Some(ChannelKind::Alone) {
            self.held_answers.push(HeldAnswer { queued, confirmed, until: now + RETURN_WAIT });
        } else {
            let _ = queued.result_sender.send(Ok(outcome(confirmed)));
        }
    }

    /// Passes on the held answers whose returned message has come, or whose wait is over.
    fn release_held_answers(&mut self, now: Instant) {
        for held in std::mem::take(&mut self.held_answers) {
            if take_return(&mut self.unmatched_returns, &held.queued) {
                let _ = held.queued.result_sender.send(Ok(Published::Unroutable));
            } else if now >= held.until {
                let _ = held.queued.result_sender.send(Ok(outcome(held.confirmed)));
            } else {
                self.held_answers.push(held);
            }
        }
        self.unmatched_returns.retain(|returned| now < returned.received + 2 * RETURN_WAIT);
    }

    /// Handles the failure of a publish: drops the connection, reports that the message is refused, or sends it again.
    fn handle_failure(&mut self, id: u64, error: &Error, now: Instant) {
        // None when an earlier failure of this round lost the connection: this message will be sent again.
        let Some(kind) = self.messages.kind_of(id) else { return };
        let Some(live) = &mut self.live else { return };
        let only_its_channel = error.is_amqp_soft_error()
            || matches!(error.kind(), ErrorKind::InvalidChannelState(..) | ErrorKind::ChannelsLimitReached);
        if !only_its_channel || !live.connection.status().connected() {
            // One of the messages under way may have caused it.
            if Cause::of(error) == Cause::BadFrame {
                self.messages.change_all(|queued| {
                    queued.suspicions += u32::from(!queued.message.properties.is_plain())
                });
            }
            return self.drop_connection_after(error, now);
        }
        match kind {
            // The message was alone on the channel, so the broker refused this one.
            ChannelKind::Alone if error.is_amqp_soft_error() => {
                let reason = message(error);
                let answer = match Cause::of(error) {
                    Cause::ContentTooLarge | Cause::PreconditionFailed => Published::Refused(reason),
                    _ => Published::Forbidden(reason),
                };
                let queued = self.messages.answered(id, false, now);
                queued.map(|queued| queued.result_sender.send(Ok(answer)));
            }
            ChannelKind::Alone | ChannelKind::Retired => self.messages.retry(id, now, REOPEN_DELAY),
            ChannelKind::Shared => {
                tracing::warn!(broker = live.connection.broker, reason = message(error), "publishing again");
                live.shared = None;
                self.messages.retire();
                self.messages.retry(id, now, Duration::ZERO);
            }
        }
    }

    /// Drops the connection because of this error.
    fn drop_connection_after(&mut self, error: &Error, now: Instant) {
        let broker = self.live.as_ref().map(|live| live.connection.broker.clone());
        let reason = message(error);
        if matches!(Cause::of(error), Cause::NotAllowed | Cause::LimitReached) {
            // Most likely the limit of channels was reached.
            self.messages.allow_fewer();
        }
        if self.live.as_ref().is_some_and(|live| now < live.opened + STABLE_AFTER) {
            self.early_failure = Some(Failure::of(broker.clone().unwrap_or_default(), error));
        }
        for queued in self.messages.take_if(|queued| queued.suspicions >= MAX_SUSPICIONS) {
            let _ = queued.result_sender.send(Ok(Published::Refused(reason.clone())));
        }
        let messages = self.drop_connection(now);
        tracing::warn!(broker, reason, messages, "the connection was lost; publishing again");
    }

    /// Drops the connection, so that the messages under way are sent again. Returns their number.
    fn drop_connection(&mut self, now: Instant) -> usize {
        (self.live, self.ping) = (None, None);
        self.takes_messages.store(false, Ordering::Relaxed);
        self.under_way.clear();
        self.unmatched_returns.clear();
        self.messages.connection_lost(now, |queued| {
            SUSPICION_DELAY * queued.suspicions.saturating_mul(queued.suspicions)
        })
    }

    async fn ensure_connected(&mut self) -> Result<(), BrokerError> {
        while self.live.is_none() {
            let failure = match self.early_failure.take() {
                Some(failure) => failure,
                None => match self.connector.attempt().await {
                    Ok(connection) => {
                        self.reconnect.connected();
                        self.live = Some(LiveConnection::new(connection));
                        self.takes_messages.store(true, Ordering::Relaxed);
                        return Ok(());
                    }
                    Err(failure) => failure,
                },
            };
            let delay = self.reconnect.failed(failure, &self.connector)?;
            tokio::time::sleep(delay).await;
        }
        if self.live.as_ref().is_some_and(|live| live.opened.elapsed() >= STABLE_AFTER) {
            self.reconnect.reset();
        }
        Ok(())
    }
}

impl LiveConnection {
    fn new(connection: OpenConnection) -> Self {
        let (blocked, now) = (watch_alarms(&connection), Instant::now());
        let connection = Arc::new(connection);
        Self {
            connection,
            shared: None,
            spare: Vec::new(),
            blocked,
            ping_channel: None,
            silent_since: now,
            slow_since: now,
            opened: now,
        }
    }

    fn keep_spare(&mut self, channel: Channel) {
        if self.spare.len() < MAX_SPARE_CHANNELS {
            self.spare.push(channel);
        }
    }
}

/// Adds the messages that arrive at the same moment, such as the other replies of a batch. Messages that are sent
/// together cost the broker only one write to disk.
async fn gather(receiver: &mut mpsc::Receiver<QueuedMessage>, queued: &mut Vec<QueuedMessage>) {
    loop {
        tokio::task::yield_now().await;
        // When `queued` is full, the limit is 0 and this returns 0 too.
        if receiver.recv_many(queued, MAX_QUEUED - queued.len()).now_or_never().unwrap_or(0) == 0 {
            return;
        }
    }
}

/// Returns a flag that is true while the broker takes no messages from this connection: when it is short of memory or
/// disk, it stops reading from connections that publish, and notifies them. It reads the messages sent meanwhile only
/// after the alarm, so no queue is judged slow during an alarm. The flag is updated until the connection ends.
fn watch_alarms(connection: &Connection) -> watch::Receiver<bool> {
    let (sender, blocked) = watch::channel(false);
    let events = connection.events_listener();
    tokio::spawn(async move {
        let mut events = std::pin::pin!(events);
        while let Some(event) = events.next().await {
            match event {
                lapin::Event::ConnectionBlocked(reason) => {
                    tracing::warn!(reason = reason.as_str(), "the broker takes no messages for now");
                    sender.send_replace(true);
                }
                lapin::Event::ConnectionUnblocked => {
                    tracing::info!("the broker takes messages again");
                    sender.send_replace(false);
                }
                _ => {}
            }
        }
        // The connection is closed, so the broker cannot report the alarm's end.
        sender.send_replace(false);
    });
    blocked
}

/// The answer to the open ping; pending forever when none is open.
async fn ping_answer(ping: &mut Option<Ping>) -> Result<Channel, Error> {
    match ping {
        Some(ping) => (&mut ping.answer).await,
        None => std::future::pending().await,
    }
}

fn outcome(confirmed: bool) -> Published {
    if confirmed { Published::Confirmed } else { Published::Nacked }
}
