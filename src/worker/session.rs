//! The parts of a worker that outlive a broker session, and one such session: from opening its connection until
//! everything delivered over it is settled. A pause ends the session, so a paused worker holds no task
//! and no connection; the next session opens a new connection. Owns the connection during a session.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tokio::sync::mpsc;

use super::cpu_pool::Pools;
use super::fair_turns::Turns;
use super::intake::{Ended, Intake, SessionEnd};
use super::isolation::Isolation;
use super::prefetch::{Limits, Prefetch, SharedPrefetch};
use super::report::{Counters, watch_connection};
use super::settle::{Breakers, ErrorLog, QueueTimeouts, Queues, Settlement, Stalled};
use super::task_run::Shared;
use super::{Control, WorkerError};
use crate::batching::Policy;
use crate::broker::BrokerSession;
use crate::config::Assignment;
use crate::engine::Engine;
use crate::fetch::Fetcher;
use crate::protocol::WorkerInfo;
use crate::shutdown::Stop;

/// The longest wait for the broker to confirm that the connection closes.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// The parts of a worker that outlive a broker session.
pub(super) struct Worker {
    pub(super) assignment: Assignment,
    /// Whether the prefetch follows the messages: the user has set none.
    pub(super) adapts_prefetch: bool,
    pub(super) policy: Policy,
    pub(super) worker_info: WorkerInfo,
    pub(super) engine: Arc<dyn Engine>,
    pub(super) pools: Pools,
    pub(super) isolation: Arc<Isolation>,
    pub(super) counters: Arc<Counters>,
    pub(super) control: Control,
    /// None if the pool admits no source of files.
    pub(super) fetcher: Option<Arc<Fetcher>>,
}

impl Worker {
    /// Consumes over `session` until a stop, a pause or a failure.
    ///
    /// # Errors
    /// [`WorkerError`]: this process cannot go on.
    pub(super) async fn consume(
        &self,
        mut session: BrokerSession,
        stop: &Stop,
        faults: &mut mpsc::Receiver<WorkerError>,
    ) -> Result<SessionEnd, WorkerError> {
        let connection_watcher = tokio::spawn(watch_connection(session.acker.clone(), self.counters.clone()));
        let shared = Arc::new(self.shared(&session, stop));
        let pause = self.control.pause.clone();
        let cancellations = self.control.cancellations.open();
        let consumers = [&mut session.consumer].into_iter().chain(&mut session.further).map(Some).collect();
        let intake = Intake::new(shared, consumers, stop.clone(), pause, cancellations);
        let ended = intake.run(faults).await;
        connection_watcher.abort();
        if !matches!(ended, Ok(SessionEnd::Worker(Ended::Aborted))) {
            // The broker reads the acks that were sent before the close, and then requeues the unsettled tasks.
            let publisher = tokio::time::timeout(CLOSE_TIMEOUT, session.publisher.close());
            let further = join_all(session.further.iter_mut().map(|consumer| consumer.close()));
            let _ = tokio::join!(publisher, session.consumer.close(), further);
        }
        self.counters.count(|stats| (stats.now.held, stats.now.connected) = (0, false));
        ended
    }

    fn shared(&self, session: &BrokerSession, stop: &Stop) -> Shared {
        let pool = &self.assignment.pool;
        let settlement = Settlement {
            acker: session.acker.clone(),
            publisher: session.publisher.clone(),
            worker_info: self.worker_info.clone(),
            queues: Queues {
                tasks: pool.queues(),
                reply: pool.reply_queue.clone(),
                dead_letter: pool.dead_letter_queue.clone(),
                reserved: self.assignment.reserved_queues.clone(),
            },
            retry: pool.retry.clone(),
            queue_timeouts: self.queue_timeouts(),
            stalled: Stalled::new(self.assignment.first_prefetch(), pool.prefetch_bytes),
            breakers: Breakers::default(),
            error_log: ErrorLog::default(),
            counters: self.counters.clone(),
            stop: stop.clone(),
            lost_sessions: pool.queues().iter().map(|_| AtomicU64::default()).collect(),
        };
        Shared {
            engine: self.engine.clone(),
            pools: self.pools.clone(),
            shares: pool.queue_shares(),
            turns: Turns::new(1),
            fetcher: self.fetcher.clone(),
            fetch_turns: Turns::with_one_for_each_queue(pool.fetch.at_once),
            settlement,
            isolation: self.isolation.clone(),
            reporter: self.control.reporter.clone(),
            crashes: self.control.crashes.clone(),
            withdrawn: self.control.withdrawn.clone(),
            prefetch: pool.queues().iter().map(|_| self.shared_prefetch()).collect(),
            traces: self.control.traces.clone(),
            sentinels: pool.sentinels,
            max_body: pool.max_body,
            max_deliveries: self.assignment.broker.delivery_limit.into(),
        }
    }

    /// The timeouts of publishing to queues: at most three quarters of the broker's delivery timeout.
    fn queue_timeouts(&self) -> QueueTimeouts {
        // At its delivery timeout the broker closes the channel and takes back all deliveries on it.
        let pool = self.assignment.broker.delivery_timeout().map_or(Duration::MAX, |limit| limit / 4 * 3);
        QueueTimeouts { requester: self.assignment.pool.reply_timeout.min(pool), pool }
    }

    /// A prefetch that adapts to the size of messages, unless the user has set one.
    fn shared_prefetch(&self) -> SharedPrefetch {
        let limits = self.limits();
        let (first, usual) = (self.assignment.first_prefetch(), self.assignment.usual_prefetch());
        let adaptive = match self.engine.queue().sequences() {
            Some(_) => Prefetch::of_sequences(limits, first, Instant::now()),
            None => Prefetch::new(limits, first, usual, Instant::now()),
        };
        SharedPrefetch::new(self.adapts_prefetch.then_some(adaptive))
    }

    /// The bounds of the prefetch.
    fn limits(&self) -> Limits {
        // While a GPU computes, the CPU preprocesses or answers one more batch.
        let batches = self.engine.queue().depth() + usize::from(self.assignment.device != "cpu");
        let pool = &self.assignment.pool;
        let Policy { max_tokens, max_requests, .. } = self.policy;
        Limits { batches, tokens: max_tokens, requests: max_requests, bytes: pool.queue_prefetch_bytes() }
    }
}
