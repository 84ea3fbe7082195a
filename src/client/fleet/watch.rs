//! Watches the fleet: queries all launchers repeatedly, inspects the queues of their pools, and sends orders in
//! between. Owns the connection, and opens another when it is lost.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::sync::mpsc;
use tokio::time::Instant;

use super::control::{AnswerWait, Control, FleetError};
use super::history::{Queues, REMEMBERED, Snapshot};
use super::pools::PoolQueues;
use crate::config::Settings;
use crate::protocol::admin::{ControlRequest, Target};

/// Maximum time for the answers of a round. A round ends earlier once all known launchers have answered.
const ROUND_TIMEOUT: Duration = Duration::from_millis(800);
/// Once in this many rounds, the watch waits the whole [`ROUND_TIMEOUT`], so that new launchers are found.
const ROUNDS_PER_DISCOVERY: u64 = 5;
/// Maximum time for the answer to an order. It is longer than a round, because an order is not sent again.
const ORDER_TIMEOUT: Duration = Duration::from_millis(1_600);
/// Delay before a lost broker is tried again.
const RETRY_DELAY: Duration = Duration::from_secs(2);
/// Interval at which background, retry and dead-letter queues are inspected. It is long because the broker logs each
/// inspection of a missing queue.
const OTHER_QUEUES_INTERVAL: Duration = Duration::from_secs(5);

/// What a watch reports.
pub(crate) enum Update {
    Snapshot(Box<Snapshot>),
    /// The result of an order.
    Done(String),
    /// Why no data could be read.
    Trouble(String),
}

/// A request for the slots of `target`, sent between two rounds.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Order {
    pub(crate) target: Target,
    pub(crate) request: ControlRequest,
}

/// A watch over the fleet.
pub(crate) struct Watch {
    control: Option<Control>,
    settings: Settings,
    pools: Vec<PoolQueues>,
    /// When launchers, by host and process, answered last.
    heard: BTreeMap<(String, u32), Instant>,
    /// When launchers last named each pool and task queue. After [`REMEMBERED`], the queues are no longer inspected.
    pools_heard: BTreeMap<(String, String), Instant>,
    /// The depths of all queues except the task queues, at the time of `other_queues_at`.
    other_queues: Queues,
    other_queues_at: Option<Instant>,
    rounds: u64,
}

impl Watch {
    pub(crate) fn new(first: Control, settings: Settings) -> Self {
        let pools = settings.pools.iter().map(PoolQueues::of).collect();
        Self {
            control: Some(first),
            settings,
            pools,
            heard: BTreeMap::new(),
            pools_heard: BTreeMap::new(),
            other_queues: Queues::new(),
            other_queues_at: None,
            rounds: 0,
        }
    }

    /// Takes a snapshot at this interval, until nobody receives the updates any more.
    pub(crate) async fn run(
        mut self,
        every: Duration,
        updates: mpsc::Sender<Update>,
        mut orders: mpsc::Receiver<Order>,
    ) {
        loop {
            let began = Instant::now();
            let (latest, pause) = match self.snapshot().await {
                Ok(snapshot) => (Update::Snapshot(Box::new(snapshot)), every),
                Err(error) => {
                    (self.control, self.other_queues_at) = (None, None);
                    (Update::Trouble(error.to_string()), RETRY_DELAY)
                }
            };
            if updates.send(latest).await.is_err() {
                return;
            }
            tokio::select! {
                () = tokio::time::sleep_until(began + pause) => {}
                Some(order) = orders.recv() => {
                    let done = self.order(&order).await.unwrap_or_else(|error| error.to_string());
                    let _ = updates.send(Update::Done(done)).await;
                }
            }
        }
    }

    /// Queries all launchers once, and inspects the queues of their pools.
    async fn snapshot(&mut self) -> Result<Snapshot, FleetError> {
        let is_discovery = self.heard.is_empty() || self.rounds.is_multiple_of(ROUNDS_PER_DISCOVERY);
        let expected = if is_discovery { usize::MAX } else { self.heard.len() };
        self.rounds += 1;
        let control = match &mut self.control {
            Some(control) => control,
            None => self.control.insert(Control::open(&self.settings).await?),
        };
        let until = Instant::now() + ROUND_TIMEOUT;
        let answers = control
            .request(&Target::All, &ControlRequest::Stats, until, AnswerWait::Expected(expected))
            .await?;
        let at = Instant::now();
        let wall_ms = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64;
        // A launcher that missed a round is still expected in the next ones. Otherwise the answers of the others would
        // end those rounds before its answer arrives.
        self.heard.extend(answers.iter().map(|answer| ((answer.host.clone(), answer.pid), at)));
        self.heard.retain(|_, heard| at - *heard < REMEMBERED);
        let slots = answers.iter().flat_map(|answer| &answer.slots);
        self.pools_heard.extend(slots.map(|slot| ((slot.pool.clone(), slot.queue.clone()), at)));
        self.pools_heard.retain(|_, heard| at - *heard < REMEMBERED);
        let queues = self.depths().await?;
        Ok(Snapshot { at: at.into_std(), wall_ms, answers, queues })
    }

    /// The depths of all queues of the pools that launchers run.
    async fn depths(&mut self) -> Result<Queues, FleetError> {
        let control = self.control.as_ref().ok_or(FleetError::Lost)?;
        if self.other_queues_at.is_none_or(|at| at.elapsed() >= OTHER_QUEUES_INTERVAL) {
            let has_launcher =
                |it: &&PoolQueues| self.pools_heard.contains_key(&(it.pool.clone(), it.task_queue.clone()));
            let names: BTreeSet<&String> =
                self.pools.iter().filter(has_launcher).flat_map(PoolQueues::other_queues).collect();
            self.other_queues.clear();
            for name in names {
                self.other_queues.insert(name.clone(), control.depth(name).await?);
            }
            self.other_queues_at = Some(Instant::now());
        }
        let mut queues = self.other_queues.clone();
        for (_, task_queue) in self.pools_heard.keys() {
            queues.insert(task_queue.clone(), control.depth(task_queue).await?);
        }
        Ok(queues)
    }

    /// Sends an order. Returns a message with its result.
    async fn order(&mut self, Order { target, request }: &Order) -> Result<String, FleetError> {
        let Some(control) = self.control.as_mut() else {
            return Ok("the broker is not connected now".to_owned());
        };
        let answers =
            control.request(target, request, Instant::now() + ORDER_TIMEOUT, AnswerWait::Expected(1)).await?;
        let key = target.routing_key();
        let Some(answer) = answers.into_iter().next() else {
            return Ok(format!("nobody has answered for {key:?}"));
        };
        // Orders target a single slot.
        let slot = answer.slots.into_iter().next();
        let result = answer.error.or_else(|| slot.and_then(|slot| slot.refused.or(slot.done)));
        Ok(format!("{key}: {}", result.unwrap_or_default()))
    }
}
