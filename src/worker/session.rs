//! The parts of a worker that outlive a broker session, and one such session: from the opening of its link to
//! the end of all that came through it. A pause ends a session, and the next begins with a link of its own: a
//! paused worker holds no task and no connection. Owns the link for as long as the session lasts.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, watch};

use super::cpu_pool::CpuPool;
use super::intake::{Ended, Intake, SessionEnd};
use super::isolation::Isolation;
use super::prefetch::{Limits, Live, Prefetch};
use super::report::{Counters, connection};
use super::settle::{Queues, Settlement, Stalled, Waits};
use super::task_run::Shared;
use super::{Control, WorkerError, live_settings};
use crate::batching::Policy;
use crate::broker::BrokerSession;
use crate::config::Assignment;
use crate::engine::Engine;
use crate::protocol::WorkerInfo;
use crate::protocol::control::BatchChange;
use crate::shutdown::Stop;

/// Longest wait for the broker to hear that we leave.
const FAREWELL: Duration = Duration::from_secs(5);

/// The parts of a worker that outlive a broker session.
pub(super) struct Worker {
    pub(super) assignment: Assignment,
    pub(super) policy: Policy,
    pub(super) worker_info: WorkerInfo,
    pub(super) engine: Arc<dyn Engine>,
    pub(super) preprocess: CpuPool,
    pub(super) reply: CpuPool,
    pub(super) isolation: Arc<Isolation>,
    pub(super) counters: Arc<Counters>,
    pub(super) control: Control,
}

impl Worker {
    /// Consumes over `link` until a stop, a pause or a failure.
    ///
    /// # Errors
    /// [`WorkerError`]: this process cannot go on.
    pub(super) async fn consume(
        &self,
        mut link: BrokerSession,
        stop: &Stop,
        fault: &mut mpsc::Receiver<WorkerError>,
    ) -> Result<SessionEnd, WorkerError> {
        let connection = tokio::spawn(connection(link.acker.clone(), self.counters.clone()));
        let shared = Arc::new(self.shared(&link, stop));
        let follower =
            tokio::spawn(follow(self.control.settings.batch(), shared.prefetch.clone(), self.limits()));
        let settings = self.control.settings.clone();
        let intake = Intake::new(shared, &mut *link.consumer, (stop.clone(), settings));
        let ended = intake.run(fault).await;
        for helper in [connection, follower] {
            helper.abort();
        }
        if !matches!(ended, Ok(SessionEnd::Worker(Ended::Aborted))) {
            // Closing tells the broker that what is unsettled is its own again; acks sent before are read.
            let publisher = tokio::time::timeout(FAREWELL, link.publisher.close());
            let _ = tokio::join!(publisher, link.consumer.close());
        }
        self.counters.count(|stats| (stats.now.held, stats.now.connected) = (0, false));
        ended
    }

    fn shared(&self, link: &BrokerSession, stop: &Stop) -> Shared {
        let pool = &self.assignment.pool;
        let settlement = Settlement {
            acker: link.acker.clone(),
            publisher: link.publisher.clone(),
            worker_info: self.worker_info.clone(),
            queues: Queues {
                task: pool.task_queue.clone(),
                reply: pool.reply_queue.clone(),
                dead_letter: pool.dead_letter_queue.clone(),
                reserved: self.assignment.reserved_queues.clone(),
            },
            retry: pool.retry.clone(),
            waits: self.waits(),
            stalled: Stalled::new(self.assignment.first_prefetch(), pool.prefetch_bytes),
            counters: self.counters.clone(),
            stop: stop.clone(),
            lost: AtomicU64::new(0),
        };
        Shared {
            engine: self.engine.clone(),
            preprocess: self.preprocess.clone(),
            reply: self.reply.clone(),
            settlement,
            isolation: self.isolation.clone(),
            crashes: self.control.crashes.clone(),
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
        let limits = self.limits()(*self.control.settings.batch().borrow());
        let (first, usual) = (self.assignment.first_prefetch(), self.assignment.usual_prefetch());
        let first = Prefetch::new(limits, first, usual, Instant::now());
        Live::new(pool.prefetch.is_none().then_some(first))
    }

    /// What bounds it under overrides.
    fn limits(&self) -> impl Fn(BatchChange) -> Limits + Send + 'static {
        // Where the device computes beside the cores, one batch more is being prepared and answered there.
        let batches = self.engine.depth() + usize::from(self.assignment.device != "cpu");
        let (policy, bytes) = (self.policy, self.assignment.pool.prefetch_bytes);
        move |overrides| {
            let policy = live_settings::changed(policy, overrides);
            Limits { batches, tokens: policy.max_tokens, requests: policy.max_requests, bytes }
        }
    }
}

/// Has the prefetch follow the bounds of batches: with too few messages in hand, larger ones could never fill.
async fn follow(
    mut changes: watch::Receiver<BatchChange>,
    prefetch: Live,
    limits: impl Fn(BatchChange) -> Limits + Send,
) {
    while changes.changed().await.is_ok() {
        let overrides = *changes.borrow_and_update();
        prefetch.limit(limits(overrides));
    }
}
