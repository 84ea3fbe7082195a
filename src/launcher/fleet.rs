//! All slots of a launcher: starts them, hands orders to those that are meant, puts other settings in
//! force slot by slot. Owns which slots there are, and how those ended that have.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures_util::StreamExt;
use futures_util::future::{BoxFuture, join_all};
use futures_util::stream::FuturesUnordered;
use tokio::sync::{mpsc, oneshot, watch};

use super::Launch;
use super::order::{Ask, Order, Ordered, Outcome};
use super::slot::{Slot, SlotEnd};
use crate::config::{Assignment, Launcher};
use crate::protocol::admin::Target;
use crate::shutdown::Exit;

/// Orders to one slot that may wait.
const WAITING: usize = 16;

/// See the module.
pub(super) struct Fleet {
    launch: Arc<Launch>,
    policy: watch::Sender<Launcher>,
    host: String,
    slots: BTreeMap<String, Member>,
    living: FuturesUnordered<BoxFuture<'static, (String, SlotEnd)>>,
    reload: Option<Reload>,
}

struct Member {
    assignment: Assignment,
    /// Written here, read by the slot; none once that has ended.
    orders: Option<mpsc::Sender<Ordered>>,
    end: Option<SlotEnd>,
}

/// Settings that are being put in force.
struct Reload {
    /// Which slots' workers have been replaced, or why no more will be.
    rolling: BoxFuture<'static, Result<usize, String>>,
    slots: Vec<Assignment>,
    answer: oneshot::Sender<Result<String, String>>,
}

impl Fleet {
    pub(super) fn new(
        launch: Arc<Launch>,
        policy: watch::Sender<Launcher>,
        assignments: &[Assignment],
    ) -> Self {
        let first = assignments.first();
        let host = first.and_then(|it| it.worker.strip_suffix(&format!("/{}", it.slot)).map(str::to_owned));
        let mut fleet = Self {
            launch,
            policy,
            host: host.unwrap_or_default(),
            slots: BTreeMap::new(),
            living: FuturesUnordered::new(),
            reload: None,
        };
        for assignment in assignments {
            fleet.start(assignment.clone());
        }
        fleet
    }

    fn start(&mut self, assignment: Assignment) {
        let (orders, ordered) = mpsc::channel(WAITING);
        self.launch.board.assign(&assignment);
        let name = assignment.slot.clone();
        let slot = Slot::new(self.launch.clone(), assignment.clone(), ordered);
        let own = name.clone();
        self.living.push(Box::pin(async move { (own, slot.keep().await) }));
        self.slots.insert(name, Member { assignment, orders: Some(orders), end: None });
    }

    /// Runs until every slot has ended.
    pub(super) async fn run(mut self, mut asks: mpsc::Receiver<Ask>) -> Exit {
        let mut answers: FuturesUnordered<BoxFuture<'static, ()>> = FuturesUnordered::new();
        loop {
            tokio::select! {
                Some((name, end)) = self.living.next() => {
                    if let Some(member) = self.slots.get_mut(&name) {
                        (member.orders, member.end) = (None, Some(end));
                    }
                    if self.living.is_empty() {
                        break;
                    }
                }
                Some(ask) = asks.recv() => match ask {
                    Ask::Order { target, order, answer } => answers.push(self.order(&target, &order, answer)),
                    Ask::Reload { slots, policy, answer } => self.reload(slots, *policy, answer),
                },
                rolled = roll_of(&mut self.reload) => self.finish_reload(rolled),
                Some(()) = answers.next() => {}
            }
        }
        self.exit()
    }

    /// What the launcher's end is.
    fn exit(&self) -> Exit {
        let ends = || self.slots.values().filter_map(|member| member.end);
        let given_up = ends().find_map(|end| match end {
            SlotEnd::GivenUp(exit) => Some(exit),
            _ => None,
        });
        match given_up {
            Some(exit) => exit,
            None if ends().any(|end| end == SlotEnd::Aborted) => Exit::Aborted,
            None => Exit::Done,
        }
    }

    /// Hands an order to the slots that are meant; what is returned waits for what became of it.
    fn order(
        &mut self,
        target: &Target,
        order: &Order,
        answer: oneshot::Sender<Vec<(String, Outcome)>>,
    ) -> BoxFuture<'static, ()> {
        let (mut outcomes, mut revived) = (Vec::new(), Vec::new());
        for (name, member) in &self.slots {
            let Assignment { pool, worker, .. } = &member.assignment;
            if !target.means(&self.host, &pool.name, worker) {
                continue;
            }
            let (told, outcome) = oneshot::channel();
            match &member.orders {
                Some(orders) if orders.try_send(Ordered::Order(order.clone(), told)).is_ok() => {
                    outcomes.push((name.clone(), Ok(outcome)));
                }
                Some(_) => {
                    outcomes.push((name.clone(), Err("it has too many orders before this one".to_owned())))
                }
                None if matches!(order, Order::Restart | Order::Resume) => {
                    revived.push(member.assignment.clone())
                }
                None => outcomes.push((name.clone(), Err("it has ended; restart starts it anew".to_owned()))),
            }
        }
        let started: Vec<_> = revived.iter().map(|it| (it.slot.clone(), Ok("starting a worker"))).collect();
        for assignment in revived {
            self.start(assignment);
        }
        Box::pin(async move {
            let heard = outcomes.into_iter().map(|(name, outcome)| async {
                let outcome = match outcome {
                    Ok(outcome) => {
                        outcome.await.unwrap_or_else(|_| Err("it ended before it could obey".to_owned()))
                    }
                    Err(words) => Err(words),
                };
                (name, outcome)
            });
            let mut all = join_all(heard).await;
            all.extend(started);
            let _ = answer.send(all);
        })
    }

    /// Begins to put other settings in force: first in the slots that there are, one after the other.
    fn reload(
        &mut self,
        slots: Vec<Assignment>,
        policy: Launcher,
        answer: oneshot::Sender<Result<String, String>>,
    ) {
        if self.reload.is_some() {
            let _ = answer.send(Err("settings are being reloaded already".to_owned()));
            return;
        }
        self.policy.send_replace(policy);
        let mut changed = Vec::new();
        for new in &slots {
            let Some(member) = self.slots.get(&new.slot).filter(|member| member.assignment != *new) else {
                continue;
            };
            if let Some(orders) = &member.orders {
                changed.push((orders.clone(), new.clone()));
            }
        }
        let turn = self.launch.turn.clone();
        let rolling = Box::pin(async move {
            let count = changed.len();
            for (orders, new) in changed {
                let slot = new.slot.clone();
                let Ok(permit) = turn.clone().acquire_owned().await else { continue };
                let (told, outcome) = oneshot::channel();
                // A slot that has ended meanwhile needs no other worker.
                if orders.send(Ordered::Replace(Box::new(new), permit, told)).await.is_ok()
                    && let Ok(Err(words)) = outcome.await
                {
                    return Err(format!("slot {slot}: {words}"));
                }
            }
            Ok(count)
        });
        self.reload = Some(Reload { rolling, slots, answer });
    }

    /// The slots that there were have taken the settings, or one could not: then the rest stay.
    fn finish_reload(&mut self, rolled: Result<usize, String>) {
        let Some(Reload { slots, answer, .. }) = self.reload.take() else { return };
        let replaced = match rolled {
            Ok(replaced) => replaced,
            Err(words) => {
                self.launch.board.write(|sheet| sheet.reloads_refused += 1);
                let _ = answer.send(Err(words));
                return;
            }
        };
        let (mut started, mut ended) = (0, 0);
        for (name, member) in &self.slots {
            if !slots.iter().any(|slot| slot.slot == *name)
                && let Some(orders) = &member.orders
            {
                let (told, _) = oneshot::channel();
                ended += usize::from(orders.try_send(Ordered::Order(Order::Shutdown, told)).is_ok());
            }
        }
        for slot in slots {
            let before = self.slots.get_mut(&slot.slot);
            match before {
                // One that was given up gets another chance; one that was stopped stays so.
                Some(member) if !matches!(member.end, Some(SlotEnd::GivenUp(_))) => member.assignment = slot,
                _ => {
                    started += 1;
                    self.start(slot);
                }
            }
        }
        self.launch.board.write(|sheet| sheet.reloads_applied += 1);
        let _ =
            answer.send(Ok(format!("{replaced} workers replaced, {started} slots started, {ended} ended")));
    }
}

/// When the reload that is under way has gone through the slots; never, when there is none.
async fn roll_of(reload: &mut Option<Reload>) -> Result<usize, String> {
    match reload {
        Some(reload) => (&mut reload.rolling).await,
        None => std::future::pending().await,
    }
}
