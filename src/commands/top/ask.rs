//! The asking task: asks all launchers repeatedly, looks at the queues of their pools, and sends orders in between.
//! Owns the connection; opens another when it is lost.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::history::{Look, Queues, REMEMBERED};
use super::pools::PoolQueues;
use super::screen::News;
use crate::broker::amqp::{ControlClient, retry_queue};
use crate::commands::ctl::{gather, open};
use crate::config::{Pool, Settings};
use crate::protocol::admin::{Request, Target};

/// How long to wait for answers while the number of launchers is unknown.
const PATIENCE: Duration = Duration::from_millis(800);
/// Every this many rounds, it waits for new launchers too.
const NEWCOMERS: u64 = 5;
/// Wait before a lost broker is tried again.
const AGAIN: Duration = Duration::from_secs(2);
/// How often background, retry and dead-letter queues are looked at. A broker logs each look at a missing queue.
const BESIDE: Duration = Duration::from_secs(5);

/// The queues of a pool of the settings.
pub(super) fn queues_of(pool: &Pool) -> PoolQueues {
    let retries = pool.retry.ceilings().into_iter().map(|ceiling| retry_queue(&pool.task_queue, ceiling));
    PoolQueues {
        pool: pool.name.clone(),
        task: pool.task_queue.clone(),
        background: pool.background_queue.clone(),
        retries: retries.collect(),
        dead: pool.dead_letter_queue.clone(),
    }
}

/// The state of the asking task.
pub(super) struct Asker {
    lines: Option<ControlClient>,
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

impl Asker {
    pub(super) fn new(first: ControlClient, settings: Settings) -> Self {
        let pools = settings.pools.iter().map(queues_of).collect();
        let (heard, pools_heard, beside) = Default::default();
        Self { lines: Some(first), settings, pools, heard, pools_heard, beside, beside_at: None, looks: 0 }
    }

    /// Asks until nobody listens to the news any more.
    pub(super) async fn watch(
        mut self,
        every: Duration,
        (news, mut ordered): (mpsc::Sender<News>, mpsc::Receiver<(Target, Request)>),
    ) {
        loop {
            let began = Instant::now();
            let (told, pause) = match self.look().await {
                Ok(look) => (News::Look(Box::new(look)), every),
                Err(error) => {
                    (self.lines, self.beside_at) = (None, None);
                    (News::Trouble(format!("{error:#}")), AGAIN)
                }
            };
            if news.send(told).await.is_err() {
                return;
            }
            tokio::select! {
                () = tokio::time::sleep_until(began + pause) => {}
                Some((target, request)) = ordered.recv() => {
                    let done = self.order(&target, &request).await.unwrap_or_else(|error| format!("{error:#}"));
                    let _ = news.send(News::Done(done)).await;
                }
            }
        }
    }

    async fn look(&mut self) -> anyhow::Result<Look> {
        let expected =
            Some(self.heard.len()).filter(|heard| *heard > 0 && !self.looks.is_multiple_of(NEWCOMERS));
        self.looks += 1;
        let lines = match &mut self.lines {
            Some(lines) => lines,
            None => self.lines.insert(open(&self.settings).await?),
        };
        let until = Instant::now() + PATIENCE;
        let answers = gather(lines, (&Target::All, &Request::Stats), until, expected).await?;
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
    async fn depths(&mut self) -> anyhow::Result<Queues> {
        let lines = self.lines.as_ref().context("there is no broker now")?;
        if self.beside_at.is_none_or(|at| at.elapsed() >= BESIDE) {
            let is_run =
                |it: &&PoolQueues| self.pools_heard.contains_key(&(it.pool.clone(), it.task.clone()));
            let names: BTreeSet<&String> =
                self.pools.iter().filter(is_run).flat_map(PoolQueues::beside).collect();
            self.beside.clear();
            for name in names {
                self.beside.insert(name.clone(), lines.depth(name).await?);
            }
            self.beside_at = Some(Instant::now());
        }
        let mut queues = self.beside.clone();
        for (_, task) in self.pools_heard.keys() {
            queues.insert(task.clone(), lines.depth(task).await?);
        }
        Ok(queues)
    }

    async fn order(&mut self, target: &Target, request: &Request) -> anyhow::Result<String> {
        let lines = self.lines.as_mut().context("there is no broker now")?;
        let answers = gather(lines, (target, request), Instant::now() + 2 * PATIENCE, Some(1)).await?;
        let key = target.routing_key();
        let answer =
            answers.into_iter().next().with_context(|| format!("nobody has answered for {key:?}"))?;
        let slot = answer.slots.into_iter().next();
        let said = answer.error.or_else(|| slot.and_then(|slot| slot.refused.or(slot.done)));
        Ok(format!("{key}: {}", said.unwrap_or_default()))
    }
}
