//! The sending side of RabbitMQ: one task owns the publishing connection and sends in windows: all
//! that is queued, pipelined, then all their confirms, then the next. The window is what makes
//! returns certain: lapin may attach a returned message to another publish's confirm, but never to
//! one of a later window, so once a window is resolved its returns are known, by what they hold.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::{BoxFuture, MaybeDone, join_all, maybe_done};
use futures_util::poll;
use lapin::message::BasicReturnMessage;
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::types::ShortString;
use lapin::{Channel, Connection, Error, ErrorKind, PublisherConfirm};
use tokio::sync::{mpsc, oneshot, watch};

use super::alarm::{unless_stuck, watch_alarms};
use super::connect::{Connector, Failure, Outage, words};
use super::convert::{properties_to, short};
use super::topology::retry_queue;
use crate::broker::{BrokerError, Delay, Published, Publisher};
use crate::protocol::Message;

/// Most messages in a window: enough to hide the confirm's latency, few enough to repeat cheaply
/// when the connection breaks.
const WINDOW: usize = 512;

/// Bytes of bodies that are given to lapin ahead of what it has written: enough that a batch's replies
/// leave in one write, and the broker takes them at once; little beside what they take here already.
const AHEAD: usize = 1 << 20;

/// How RabbitMQ's direct reply-to addresses begin: no queues, at most once, and no way to know
/// whether anybody still listens.
const DIRECT_REPLY_TO: &str = "amq.rabbitmq.reply-to";
/// A message over which the broker has closed the connection so often, when sent alone, is refused.
/// More than once, because a broker in trouble closes connections too.
const OFFENCES: u32 = 3;

/// A channel so old whose message is nacked is replaced. RabbitMQ 3.10 nacks all that a channel sends
/// to a quorum queue, for as long as it lives, when it first did so while the queue had no leader.
const STUBBORN: Duration = Duration::from_secs(1);

type Answer = Result<Published, BrokerError>;

struct Request {
    queue: String,
    message: Arc<Message>,
    offences: u32,
    answer: oneshot::Sender<Answer>,
}

/// See [`Publisher`].
pub struct AmqpPublisher {
    /// Written by every task that publishes, read by the window task. Bound: one window waits while
    /// one is under way; beyond it, publishers wait.
    requests: mpsc::Sender<Request>,
    /// Ends the window task, which answers when the connection is closed.
    close: mpsc::Sender<oneshot::Sender<()>>,
}

impl AmqpPublisher {
    /// Connects in the background.
    pub fn new(connector: Connector) -> Self {
        let (requests, queued) = mpsc::channel(WINDOW);
        let (close, closing) = mpsc::channel(1);
        let windows = Windows { connector, live: None, outage: Outage::default() };
        tokio::spawn(windows.run(queued, closing));
        Self { requests, close }
    }
}

impl Publisher for AmqpPublisher {
    fn publish<'a>(&'a self, queue: &'a str, message: Arc<Message>) -> BoxFuture<'a, Answer> {
        Box::pin(async move {
            let gone = || BrokerError::Unreachable { seconds: 0, reason: "the publisher is closed".into() };
            let (answer, answered) = oneshot::channel();
            let request = Request { queue: queue.to_owned(), message, offences: 0, answer };
            self.requests.send(request).await.map_err(|_| gone())?;
            answered.await.map_err(|_| gone())?
        })
    }

    /// Into a queue beside it, from which the broker moves the message when its time is over.
    fn publish_later<'a>(
        &'a self,
        queue: &'a str,
        delay: Delay,
        mut message: Arc<Message>,
    ) -> BoxFuture<'a, Answer> {
        Arc::make_mut(&mut message).properties.expiration = Some(delay.after.as_millis().to_string());
        Box::pin(async move { self.publish(&retry_queue(queue, delay.ceiling), message).await })
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {
            let (closed_in, closed) = oneshot::channel();
            if self.close.send(closed_in).await.is_ok() {
                let _ = closed.await;
            }
        })
    }
}

struct Live {
    connection: Connection,
    channel: Channel,
    /// When the channel was opened.
    since: Instant,
    broker: String,
    /// See [`watch_alarms`].
    blocked: watch::Receiver<bool>,
}

struct Windows {
    connector: Connector,
    live: Option<Live>,
    outage: Outage,
}

impl Windows {
    async fn run(
        mut self,
        mut queued: mpsc::Receiver<Request>,
        mut closing: mpsc::Receiver<oneshot::Sender<()>>,
    ) {
        loop {
            let mut window = Vec::new();
            let closed = tokio::select! {
                biased;
                taken = queued.recv_many(&mut window, WINDOW) => {
                    if taken == 0 { break }
                    None
                }
                closed = closing.recv() => closed,
            };
            gather(&mut queued, &mut window).await;
            if let Some(closed) = closed {
                self.say_goodbye().await;
                let _ = closed.send(());
                return;
            }
            if let Err(error) = self.deliver(window).await {
                tracing::error!(%error, "cannot publish");
                queued.close();
                while let Some(request) = queued.recv().await {
                    let _ = request.answer.send(Err(error.clone()));
                }
                return;
            }
        }
        self.say_goodbye().await;
    }

    async fn say_goodbye(&mut self) {
        if let Some(live) = self.live.take() {
            let close = live.connection.close(200, "done".into());
            let _ = tokio::time::timeout(self.connector.settings().connect_timeout, close).await;
        }
    }

    /// Sends until every request is answered. After a failure it goes on one by one, so that a
    /// message the broker refuses by closing the channel is told from its neighbours.
    async fn deliver(&mut self, window: Vec<Request>) -> Result<(), BrokerError> {
        let mut left = self.send(window).await?;
        while !left.is_empty() {
            let mut again = Vec::new();
            for request in left {
                again.extend(self.send(vec![request]).await?);
            }
            left = again;
        }
        Ok(())
    }

    /// Sends a window once. Returns the requests that have no answer yet; fails for good with all
    /// of them answered.
    async fn send(&mut self, mut window: Vec<Request>) -> Result<Vec<Request>, BrokerError> {
        if let Err(error) = self.be_connected().await {
            for request in window {
                let _ = request.answer.send(Err(error.clone()));
            }
            return Err(error);
        }
        // Nobody waits for an answer any more: the task's session is over, and it will be answered anew.
        window.retain(|request| !request.answer.is_closed());
        let Some(live) = self.live.as_ref().filter(|_| !window.is_empty()) else { return Ok(window) };
        let limit = self.connector.settings().confirm_timeout;
        let exchange = publish_and_confirm(&live.channel, &window);
        let failure = match unless_stuck(exchange, limit, live.blocked.clone()).await {
            Some(Ok(answers)) => {
                let stubborn = answers.contains(&Published::Nacked) && live.since.elapsed() >= STUBBORN;
                for (request, answer) in window.into_iter().zip(answers) {
                    let _ = request.answer.send(Ok(answer));
                }
                if stubborn {
                    self.reopen().await;
                }
                return Ok(Vec::new());
            }
            Some(Err(error)) => error,
            None => {
                tracing::warn!(broker = live.broker, ?limit, "no confirm; connecting anew");
                self.live = None;
                return Ok(window);
            }
        };
        let reason = words(&failure).0;
        if let [request] = &mut window[..] {
            request.offences += u32::from(may_be_the_messages_fault(&failure));
            // Over a soft error the broker closes the channel alone: it means this very message.
            if failure.is_amqp_soft_error() || request.offences >= OFFENCES {
                self.reopen().await;
                for request in window {
                    let _ = request.answer.send(Ok(Published::Refused(reason.clone())));
                }
                return Ok(Vec::new());
            }
        }
        tracing::warn!(broker = live.broker, reason, messages = window.len(), "publishing again");
        self.reopen().await;
        Ok(window)
    }

    /// A new channel if the connection still stands, else nothing: the next send connects.
    async fn reopen(&mut self) {
        let Some(live) = &mut self.live else { return };
        let opened = confirming_channel(&live.connection);
        match tokio::time::timeout(self.connector.settings().connect_timeout, opened).await {
            Ok(Ok(channel)) => (live.channel, live.since) = (channel, Instant::now()),
            _ => self.live = None,
        }
    }

    async fn be_connected(&mut self) -> Result<(), BrokerError> {
        while self.live.is_none() {
            match self.connect().await {
                Ok(live) => {
                    self.outage.over();
                    self.live = Some(live);
                }
                Err(failure) => {
                    let limit = self.connector.settings().give_up_after;
                    tokio::time::sleep(self.outage.failed(failure, limit)?).await;
                }
            }
        }
        Ok(())
    }

    async fn connect(&self) -> Result<Live, Failure> {
        let (connection, broker) = self.connector.attempt().await?;
        let limit = self.connector.settings().connect_timeout;
        let (reason, refused) = match tokio::time::timeout(limit, confirming_channel(&connection)).await {
            Ok(Ok(channel)) => {
                let blocked = watch_alarms(&connection);
                return Ok(Live { connection, channel, since: Instant::now(), broker, blocked });
            }
            Ok(Err(error)) => words(&error),
            Err(_) => (format!("no channel within {limit:?}"), false),
        };
        self.connector.pass_turn();
        Err(Failure { broker, reason, refused })
    }
}

/// Fills the window with what joins it: the rest of a batch is being published in this very moment. A window
/// costs the broker a write to disk, whatever is in it.
async fn gather(queued: &mut mpsc::Receiver<Request>, window: &mut Vec<Request>) {
    let mut before = usize::MAX;
    while window.len() != before && window.len() < WINDOW {
        before = window.len();
        tokio::task::yield_now().await;
        while window.len() < WINDOW
            && let Ok(request) = queued.try_recv()
        {
            window.push(request);
        }
    }
}

/// Frame and syntax errors, and what a broker says when it fails over something: it closes the
/// connection over, for example, a header with an infinite number.
fn may_be_the_messages_fault(failure: &Error) -> bool {
    matches!(failure.kind(), ErrorKind::ProtocolError(amqp) if matches!(amqp.get_id(), 501..=505 | 540 | 541))
}

async fn confirming_channel(connection: &Connection) -> Result<Channel, Error> {
    let channel = connection.create_channel().await?;
    channel.confirm_select(ConfirmSelectOptions::default()).await?;
    Ok(channel)
}

#[expect(clippy::disallowed_methods, reason = "this is the publisher that all others go through")]
async fn publish_and_confirm(channel: &Channel, window: &[Request]) -> Result<Vec<Published>, Error> {
    let mut confirms: Vec<PublisherConfirm> = Vec::with_capacity(window.len());
    let (mut under_way, mut bytes) = (Vec::new(), 0);
    for request in window {
        let properties = properties_to(&request.message.properties);
        // RabbitMQ 4.0 returns a mandatory message to a direct reply-to even as it delivers it.
        let mandatory = !request.queue.starts_with(DIRECT_REPLY_TO);
        let options = BasicPublishOptions { mandatory, immediate: false };
        let (queue, body) = (short(&request.queue), &request.message.body);
        let mut publish =
            Box::pin(maybe_done(channel.basic_publish("".into(), queue, options, body, properties)));
        // Its first poll puts the message behind the others; what it waits for is that lapin's thread has
        // written it.
        let _ = poll!(&mut publish);
        under_way.push(publish);
        bytes += request.message.body.len();
        if bytes >= AHEAD {
            written(&mut under_way, &mut confirms).await?;
            bytes = 0;
        }
    }
    written(&mut under_way, &mut confirms).await?;
    let mut returned = Vec::new();
    let mut acked = Vec::with_capacity(confirms.len());
    for confirmation in join_all(confirms).await {
        let confirmation = confirmation?;
        acked.push(confirmation.is_ack());
        returned.extend(confirmation.take_message());
    }
    let answer = |(request, acked)| match acked {
        _ if returned.iter().any(|message| is_return_of(message, request)) => Published::Unroutable,
        true => Published::Confirmed,
        false => Published::Nacked,
    };
    Ok(window.iter().zip(acked).map(answer).collect())
}

/// Waits until all of them are written.
async fn written<F>(
    under_way: &mut Vec<Pin<Box<MaybeDone<F>>>>,
    confirms: &mut Vec<PublisherConfirm>,
) -> Result<(), Error>
where
    F: Future<Output = Result<PublisherConfirm, Error>>,
{
    for mut publish in under_way.drain(..) {
        publish.as_mut().await;
        confirms.extend(publish.as_mut().take_output().transpose()?);
    }
    Ok(())
}

/// Two messages that are equal in all this share a queue, hence a fate.
fn is_return_of(returned: &BasicReturnMessage, request: &Request) -> bool {
    let (theirs, ours) = (&returned.delivery.properties, &request.message.properties);
    let same = |theirs: &Option<ShortString>, ours: &Option<String>| {
        theirs.as_ref().map(ShortString::as_str)
            == ours.as_deref().map(short).as_ref().map(ShortString::as_str)
    };
    returned.delivery.routing_key == short(&request.queue)
        && same(theirs.message_id(), &ours.message_id)
        && same(theirs.correlation_id(), &ours.correlation_id)
        && returned.delivery.data == request.message.body
}
