//! Watches the fleet: asks all launchers repeatedly, looks at the queues of their pools, and sends orders in between.
//! Owns the connection; opens another when it is lost.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::sync::mpsc;
use tokio::time::Instant;

use super::control::{Control, FleetError};
use super::history::{Look, Queues, REMEMBERED};
use super::pools::PoolQueues;
use crate::config::Settings;
use crate::protocol::admin::{Request, Target};

/// How long to wait for answers while the number of launchers is unknown.
const PATIENCE: Duration = Duration::from_millis(800);
/// Every this many rounds, it waits for new launchers too.
const NEWCOMERS: u64 = 5;
/// Wait before a lost broker is tried again.
const AGAIN: Duration = Duration::from_secs(2);
/// How often background, retry and dead-letter queues are looked at. A broker logs each look at a missing queue.
const BESIDE: Duration = Duration::from_secs(5);

/// What a watch tells.
pub(crate) enum News {
    Look(Box<Look>),
    /// The result of an order.
    Done(String),
    /// Why no data could be read.
    Trouble(String),
}

/// An order for these slots, between two looks.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Order {
    pub(crate) target: Target,
    pub(crate) request: Request,
}

/// A watch over the fleet.
pub(crate) struct Watch {
    control: Option<Control>,
    settings: Settings,
    pools: Vec<PoolQueues>,
    /// When launchers, by host and process, answered last.
    heard: BTreeMap<(String, u32), Instant>,
    /// When launchers named these pools and task queues last. The queues are looked at while their slots are shown.
    pools_heard: BTreeMap<(String, String), Instant>,
    /// The queues beside the task queues, as seen at the time of `beside_at`.
    beside: Queues,
    beside_at: Option<Instant>,
    looks: u64,
}

impl Watch {
    pub(crate) fn new(first: Control, settings: Settings) -> Self {
        let pools = settings.pools.iter().map(PoolQueues::of).collect();
        let (heard, pools_heard, beside) = Default::default();
        Self { control: Some(first), settings, pools, heard, pools_heard, beside, beside_at: None, looks: 0 }
    }

    /// Looks as often, until nobody listens to the news any more.
    pub(crate) async fn run(
        mut self,
        every: Duration,
        news: mpsc::Sender<News>,
        mut orders: mpsc::Receiver<Order>,
    ) {
        loop {
            let began = Instant::now();
            let (told, pause) = match self.look().await {
                Ok(look) => (News::Look(Box::new(look)), every),
                Err(error) => {
                    (self.control, self.beside_at) = (None, None);
                    (News::Trouble(error.to_string()), AGAIN)
                }
            };
            if news.send(told).await.is_err() {
                return;
            }
            tokio::select! {
                () = tokio::time::sleep_until(began + pause) => {}
                Some(order) = orders.recv() => {
                    let done = self.order(&order).await.unwrap_or_else(|error| error.to_string());
                    let _ = news.send(News::Done(done)).await;
                }
            }
        }
    }

    async fn look(&mut self) -> Result<Look, FleetError> {
        let expected =
            Some(self.heard.len()).filter(|heard| *heard > 0 && !self.looks.is_multiple_of(NEWCOMERS));
        self.looks += 1;
        let control = match &mut self.control {
            Some(control) => control,
            None => self.control.insert(Control::open(&self.settings).await?),
        };
        let until = Instant::now() + PATIENCE;
        let answers = control.ask(&Target::All, &Request::Stats, until, expected).await?;
        let at = Instant::now();
        let wall_ms = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64;
        // One that has missed a round is waited for in the next ones too: else the others' answers would end them.
        self.heard.extend(answers.iter().map(|answer| ((answer.host.clone(), answer.pid), at)));
        self.heard.retain(|_, heard| at - *heard < REMEMBERED);
        let slots = answers.iter().flat_map(|answer| &answer.slots);
        self.pools_heard.extend(slots.map(|slot| ((slot.pool.clone(), slot.queue.clone()), at)));
        self.pools_heard.retain(|_, heard| at - *heard < REMEMBERED);
        let queues = self.depths().await?;
        Ok(Look { at: at.into_std(), wall_ms, answers, queues })
    }

    /// The depths of all queues of the pools that launchers run.
    async fn depths(&mut self) -> Result<Queues, FleetError> {
        let control = self.control.as_ref().ok_or(FleetError::Lost)?;
        if self.beside_at.is_none_or(|at| at.elapsed() >= BESIDE) {
            let is_run =
                |it: &&PoolQueues| self.pools_heard.contains_key(&(it.pool.clone(), it.task.clone()));
            let names: BTreeSet<&String> =
                self.pools.iter().filter(is_run).flat_map(PoolQueues::beside).collect();
            self.beside.clear();
            for name in names {
                self.beside.insert(name.clone(), control.depth(name).await?);
            }
            self.beside_at = Some(Instant::now());
        }
        let mut queues = self.beside.clone();
        for (_, task) in self.pools_heard.keys() {
            queues.insert(task.clone(), control.depth(task).await?);
        }
        Ok(queues)
    }

    /// What became of an order, in words.
    async fn order(&mut self, Order { target, request }: &Order) -> Result<String, FleetError> {
        let Some(control) = self.control.as_mut() else { return Ok("there is no broker now".to_owned()) };
        let answers = control.ask(target, request, Instant::now() + 2 * PATIENCE, Some(1)).await?;
        let key = target.routing_key();
        let Some(answer) = answers.into_iter().next() else {
            return Ok(format!("nobody has answered for {key:?}"));
        };
        let slot = answer.slots.into_iter().next();
        let said = answer.error.or_else(|| slot.and_then(|slot| slot.refused.or(slot.done)));
        Ok(format!("{key}: {}", said.unwrap_or_default()))
    }
}
