//! A worker's parts that outlive its link to the broker, and one stint of consuming over such a link:
//! from its opening to the end of all that came through it. A pause ends a stint, and the next begins
//! with a link of its own: a paused worker holds no task and no connection. Owns the link for as long
//! as the stint lasts.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, watch};

use super::batches::Submission;
use super::budget::Watched;
use super::intake::{Ended, Intake, StintEnd};
use super::isolation::Isolation;
use super::lane::Lane;
use super::life::Shared;
use super::prefetch::{Limits, Live, Prefetch};
use super::report::{Counters, connection};
use super::settle::{Queues, Settlement, Waits};
use super::stalled::Stalled;
use super::{Control, WorkerError, dials};
use crate::batching::Policy;
use crate::broker::Link;
use crate::config::Assignment;
use crate::model::Codec;
use crate::protocol::Signature;
use crate::protocol::control::BatchChange;
use crate::shutdown::Stop;

/// Longest wait for the broker to hear that we leave.
const FAREWELL: Duration = Duration::from_secs(5);

/// A worker without its link to the broker.
pub(super) struct Station<C: Codec> {
    pub(super) assignment: Assignment,
    pub(super) policy: Policy,
    /// Batches that may be under way.
    pub(super) depth: usize,
    pub(super) signature: Signature,
    pub(super) codec: Arc<C>,
    pub(super) prepare: Lane,
    pub(super) respond: Lane,
    pub(super) submit: mpsc::Sender<Submission<C>>,
    pub(super) preparing: Arc<AtomicUsize>,
    pub(super) isolation: Arc<Isolation>,
    pub(super) counters: Arc<Counters>,
    pub(super) control: Control,
}

impl<C: Codec> Station<C> {
    /// Consumes over `link` until a stop, a pause or a failure.
    ///
    /// # Errors
    /// [`WorkerError`]: this process cannot go on.
    pub(super) async fn consume(
        &self,
        mut link: Link,
        stop: &Stop,
        fault: &mut mpsc::Receiver<WorkerError>,
    ) -> Result<StintEnd, WorkerError> {
        let broker = &self.assignment.broker;
        let budget = Watched::new(self.assignment.first_prefetch(), broker.delivery_timeout());
        let helpers = [
            tokio::spawn(budget.clone().watch()),
            tokio::spawn(connection(link.settler.clone(), self.counters.clone())),
        ];
        let shared = Arc::new(self.shared(&link, stop));
        let follower =
            tokio::spawn(follow(self.control.dials.batch(), shared.prefetch.clone(), self.limits()));
        let dials = self.control.dials.clone();
        let intake = Intake::new(shared, &mut *link.consumer, (stop.clone(), dials), budget);
        let ended = intake.run(fault).await;
        for helper in helpers.into_iter().chain([follower]) {
            helper.abort();
        }
        if !matches!(ended, Ok(StintEnd::Worker(Ended::Aborted))) {
            // Closing tells the broker that what is unsettled is its own again; acks sent before are read.
            let publisher = tokio::time::timeout(FAREWELL, link.publisher.close());
            let _ = tokio::join!(publisher, link.consumer.close());
        }
        self.counters.count(|stats| (stats.now.held, stats.now.connected) = (0, false));
        ended
    }

    fn shared(&self, link: &Link, stop: &Stop) -> Shared<C> {
        let pool = &self.assignment.pool;
        let settlement = Settlement {
            settler: link.settler.clone(),
            publisher: link.publisher.clone(),
            signature: self.signature.clone(),
            queues: Queues {
                task: pool.task_queue.clone(),
                reply: pool.reply_queue.clone(),
                dead_letter: pool.dead_letter_queue.clone(),
                reserved: self.assignment.reserved_queues.clone(),
            },
            retry: pool.retry,
            waits: self.waits(),
            stalled: Stalled::new(self.assignment.first_prefetch(), pool.prefetch_bytes),
            counters: self.counters.clone(),
            stop: stop.clone(),
            lost: AtomicU64::new(0),
        };
        Shared {
            codec: self.codec.clone(),
            prepare: self.prepare.clone(),
            respond: self.respond.clone(),
            submit: self.submit.clone(),
            preparing: self.preparing.clone(),
            settlement,
            isolation: self.isolation.clone(),
            deaths: self.control.deaths.clone(),
            prefetch: self.live_prefetch(),
            traces: self.control.traces.clone(),
            max_body: pool.max_body,
            max_deliveries: self.assignment.broker.delivery_limit.into(),
        }
    }

    /// How long reply queues are waited for.
    fn waits(&self) -> Waits {
        // Before the broker takes back the delivery, and all others of its channel.
        let own = self.assignment.broker.delivery_timeout().map_or(Duration::MAX, |limit| limit / 4 * 3);
        Waits { requesters: self.assignment.pool.reply_timeout.min(own), own }
    }

    /// Follows the messages, where the user has not set it.
    fn live_prefetch(&self) -> Live {
        let pool = &self.assignment.pool;
        let limits = self.limits()(*self.control.dials.batch().borrow());
        let (first, usual) = (self.assignment.first_prefetch(), self.assignment.usual_prefetch());
        let first = Prefetch::new(limits, first, usual, Instant::now());
        Live::new(pool.prefetch.is_none().then_some(first))
    }

    /// What bounds it under a wish.
    fn limits(&self) -> impl Fn(BatchChange) -> Limits + Send + 'static {
        // Where the device computes beside the cores, one batch more is being prepared and answered there.
        let batches = self.depth + usize::from(self.assignment.device != "cpu");
        let (policy, bytes) = (self.policy, self.assignment.pool.prefetch_bytes);
        move |wish| {
            let policy = dials::changed(policy, wish);
            Limits { batches, tokens: policy.max_tokens, requests: policy.max_requests, bytes }
        }
    }
}

/// Has the prefetch follow what is wished of batches: with too few messages in hand, larger ones could
/// never fill.
async fn follow(
    mut wishes: watch::Receiver<BatchChange>,
    prefetch: Live,
    limits: impl Fn(BatchChange) -> Limits + Send,
) {
    while wishes.changed().await.is_ok() {
        let wish = *wishes.borrow_and_update();
        prefetch.limit(limits(wish));
    }
}
