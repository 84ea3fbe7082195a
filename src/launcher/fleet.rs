//! All slots of a launcher: starts them, passes orders to the slots that are addressed, applies reloaded
//! settings slot by slot. Owns the set of slots, and how each ended.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::{BoxFuture, join_all};
use futures_util::stream::FuturesUnordered;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::timeout;

use super::Launch;
use super::order::{Ask, Ordered, Outcome};
use super::slot_state::{Slot, SlotEnd};
use super::status_board::{Entry, SlotStatus};
use crate::config::{Assignment, Launcher};
use crate::protocol::admin::{Request, State, Target};
use crate::shutdown::Exit;

/// The most orders that may wait for one slot.
const WAITING: usize = 16;
/// How long a slot may take to answer an order; it takes long if its worker does not read.
const OBEYING: Duration = Duration::from_secs(4);
const ROUNDS: u32 = 3;
/// Of restarts one after the other: how long the next slot waits for the one before, and how often it looks.
const RESTARTING: Duration = Duration::from_secs(10 * 60);
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// All slots of a launcher.
pub(super) struct Fleet {
    launch: Arc<Launch>,
    policy: watch::Sender<Launcher>,
    slots: BTreeMap<String, Member>,
    living: FuturesUnordered<BoxFuture<'static, (String, SlotEnd)>>,
    reload: Option<Reload>,
}

struct Member {
    /// Written here, read by the slot; none once the slot has ended.
    orders: Option<mpsc::Sender<Ordered>>,
    end: Option<SlotEnd>,
    /// What follows the slot's end, if a reload has decided that.
    after: After,
}

/// What follows a slot's end.
enum After {
    /// The slot stays known, and may be started again.
    Known,
    /// The settings do not have the slot any more.
    Gone,
    /// Settings that were loaded while the slot ended have it again.
    Anew(Box<Assignment>),
}

struct Reload {
    /// Resolves to the number of slots whose workers were replaced, or to the reason why the reload stopped.
    rolling: BoxFuture<'static, Result<usize, String>>,
    slots: Vec<Assignment>,
    /// Workers replaced in earlier rounds.
    replaced: usize,
    /// Rounds left: a slot that was ended or started by an order meanwhile may have been missed.
    rounds: u32,
    answer: oneshot::Sender<Result<String, String>>,
}

impl Fleet {
    pub(super) fn new(
        launch: Arc<Launch>,
        policy: watch::Sender<Launcher>,
        assignments: &[Assignment],
    ) -> Self {
        let mut fleet =
            Self { launch, policy, slots: BTreeMap::new(), living: FuturesUnordered::new(), reload: None };
        for assignment in assignments {
            fleet.start(assignment.clone());
        }
        fleet
    }

    fn start(&mut self, assignment: Assignment) {
        let (orders, ordered) = mpsc::channel(WAITING);
        self.launch.board.assign(&assignment);
        let name = assignment.slot.clone();
        let slot = Slot::new(self.launch.clone(), assignment, ordered);
        let own = name.clone();
        self.living.push(Box::pin(async move { (own, slot.keep().await) }));
        self.slots.insert(name, Member { orders: Some(orders), end: None, after: After::Known });
    }

    fn on_exit(&mut self, name: String, end: SlotEnd) {
        let Some(member) = self.slots.get_mut(&name) else { return };
        match std::mem::replace(&mut member.after, After::Known) {
            After::Known => (member.orders, member.end) = (None, Some(end)),
            After::Gone => self.forget(&name),
            After::Anew(assignment) => self.start(*assignment),
        }
    }

    fn forget(&mut self, name: &str) {
        self.slots.remove(name);
        self.launch.board.remove(name);
    }

    pub(super) async fn run(mut self, mut asks: mpsc::Receiver<Ask>) -> Exit {
        let mut answers: FuturesUnordered<BoxFuture<'static, ()>> = FuturesUnordered::new();
        loop {
            tokio::select! {
                Some((name, end)) = self.living.next() => {
                    self.on_exit(name, end);
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
        // Those who ordered the end still get their answers.
        while answers.next().await.is_some() {}
        self.exit()
    }

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

    /// Passes an order to the slots that are addressed; the returned future waits for the outcomes.
    fn order(
        &mut self,
        target: &Target,
        order: &Request,
        answer: oneshot::Sender<Vec<(String, Outcome)>>,
    ) -> BoxFuture<'static, ()> {
        let (mut outcomes, mut revived, mut in_turn) = (Vec::new(), Vec::new(), Vec::new());
        for (name, member) in &self.slots {
            let Some(assignment) = self.launch.board.assignment(name) else { continue };
            if !target.means(&assignment.pool.name, &assignment.worker) {
                continue;
            }
            let (reply, outcome) = oneshot::channel();
            match &member.orders {
                Some(orders) if *order == Request::Restart => in_turn.push((name.clone(), orders.clone())),
                Some(orders) if orders.try_send(Ordered::Order(order.clone(), reply)).is_ok() => {
                    outcomes.push((name.clone(), Ok(outcome)));
                }
                Some(_) => {
                    outcomes.push((name.clone(), Err("it has too many orders before this one".to_owned())))
                }
                None if matches!(order, Request::Restart | Request::Resume) => revived.push(assignment),
                None => outcomes.push((name.clone(), Err("it has ended; restart starts it anew".to_owned()))),
            }
        }
        let mut started: Vec<(String, Outcome)> =
            revived.iter().map(|it| (it.slot.clone(), Ok("starting a worker".into()))).collect();
        let message = if in_turn.len() > 1 { "restarting, one slot after the other" } else { "restarting" };
        started.extend(in_turn.iter().map(|(name, _)| (name.clone(), Ok(message.into()))));
        tokio::spawn(restart_in_turn(self.launch.clone(), in_turn));
        for assignment in revived {
            self.start(assignment);
        }
        Box::pin(async move {
            let heard = outcomes.into_iter().map(|(name, outcome)| async {
                let outcome = match outcome {
                    Ok(outcome) => match timeout(OBEYING, outcome).await {
                        Ok(heard) => {
                            heard.unwrap_or_else(|_| Err("it ended before it could obey".to_owned()))
                        }
                        Err(_) => Err(format!("it has not obeyed within {OBEYING:?}; it may yet")),
                    },
                    Err(message) => Err(message),
                };
                (name, outcome)
            });
            let mut all = join_all(heard).await;
            all.extend(started);
            let _ = answer.send(all);
        })
    }

    /// Begins a reload: first the existing slots take the new settings, one after the other.
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
        self.launch.deaths.set_limit(policy.poison_deaths);
        self.policy.send_replace(policy);
        let rolling = self.roll(&slots);
        self.reload = Some(Reload { rolling, slots, replaced: 0, rounds: ROUNDS, answer });
    }

    /// The slots whose settings differ, with their new ones.
    fn differing(&self, slots: &[Assignment]) -> Vec<(mpsc::Sender<Ordered>, Assignment)> {
        let differing = slots.iter().filter_map(|new| {
            let member = self.slots.get(&new.slot).filter(|member| matches!(member.after, After::Known))?;
            let orders = member.orders.clone()?;
            let differs = self.launch.board.assignment(&new.slot).is_some_and(|now| now != *new);
            differs.then(|| (orders, new.clone()))
        });
        differing.collect()
    }

    /// Gives slots their new settings, one after the other; returns how many took them.
    fn roll(&self, slots: &[Assignment]) -> BoxFuture<'static, Result<usize, String>> {
        let (turn, differing) = (self.launch.turn.clone(), self.differing(slots));
        Box::pin(async move {
            let mut replaced = 0;
            for (orders, new) in differing {
                let slot = new.slot.clone();
                let Ok(permit) = turn.clone().acquire_owned().await else { continue };
                let (reply, outcome) = oneshot::channel();
                let sent = orders.send(Ordered::Replace(Box::new(new), permit, reply)).await;
                match outcome.await {
                    Ok(Err(message)) => return Err(format!("slot {slot}: {message}")),
                    Ok(Ok(())) => replaced += 1,
                    // The slot has ended meanwhile, and needs no new worker.
                    Err(_) => drop(sent),
                }
            }
            Ok(replaced)
        })
    }

    /// All existing slots have taken the settings, or one could not: then the others keep the old ones.
    fn finish_reload(&mut self, rolled: Result<usize, String>) {
        let Some(mut reload) = self.reload.take() else { return };
        match rolled {
            Ok(replaced) => reload.replaced += replaced,
            Err(message) => {
                self.launch.board.write(|status| status.reloads_refused += 1);
                let _ = reload.answer.send(Err(message));
                return;
            }
        }
        reload.rounds -= 1;
        if reload.rounds > 0 && !self.differing(&reload.slots).is_empty() {
            reload.rolling = self.roll(&reload.slots);
            self.reload = Some(reload);
            return;
        }
        let ended = self.end_all_but(&reload.slots);
        let started = self.start_missing(reload.slots);
        self.launch.board.write(|status| status.reloads_applied += 1);
        let done = format!("{} workers replaced, {started} slots started, {ended} ended", reload.replaced);
        let _ = reload.answer.send(Ok(done));
    }

    /// Ends the slots that are not in the settings any more; returns how many.
    fn end_all_but(&mut self, slots: &[Assignment]) -> usize {
        let is_gone = |name: &String| !slots.iter().any(|slot| slot.slot == *name);
        let gone: Vec<String> = self.slots.keys().filter(|name| is_gone(name)).cloned().collect();
        for name in &gone {
            let Some(member) = self.slots.get_mut(name) else { continue };
            match &member.orders {
                Some(orders) => {
                    member.after = After::Gone;
                    let (reply, _) = oneshot::channel();
                    let _ = orders.try_send(Ordered::Order(Request::Shutdown, reply));
                }
                None => self.forget(name),
            }
        }
        gone.len()
    }

    /// Starts the new slots; returns how many. A slot that was given up is started again; one that was stopped
    /// is not.
    fn start_missing(&mut self, slots: Vec<Assignment>) -> usize {
        let mut started = 0;
        for slot in slots {
            match self.slots.get_mut(&slot.slot) {
                Some(member) if member.orders.is_some() => {
                    if !matches!(member.after, After::Known) {
                        member.after = After::Anew(Box::new(slot));
                        started += 1;
                    }
                }
                Some(member) if !matches!(member.end, Some(SlotEnd::GivenUp(_))) => {
                    self.launch.board.assign(&slot)
                }
                _ => {
                    self.start(slot);
                    started += 1;
                }
            }
        }
        started
    }
}

/// Restarts slots one after the other, each when the one before takes tasks again, or will not: a pool never loses all of
/// its workers at once.
async fn restart_in_turn(launch: Arc<Launch>, slots: Vec<(String, mpsc::Sender<Ordered>)>) {
    for (name, orders) in slots {
        let Ok(_turn) = launch.turn.acquire().await else { return };
        let pid = |status: &SlotStatus| status.slots.get(&name).and_then(|entry| entry.report.pid);
        let before = launch.board.read(pid);
        let (reply, outcome) = oneshot::channel();
        // A slot that has ended meanwhile is not restarted.
        if orders.send(Ordered::Order(Request::Restart, reply)).await.is_err() || outcome.await.is_err() {
            continue;
        }
        let is_over = |status: &SlotStatus| {
            let Some(Entry { report, .. }) = status.slots.get(&name) else { return true };
            let has_ended = matches!(report.state, State::Stopped | State::Quarantined | State::Failed);
            has_ended || report.pid != before && (report.state.works() || report.state == State::Paused)
        };
        let restarted = async {
            while !launch.board.read(is_over) {
                tokio::time::sleep(POLL_INTERVAL).await;
            }
        };
        let _ = timeout(RESTARTING, restarted).await;
    }
}

/// Waits for the current round of a reload; for ever if there is no reload.
async fn roll_of(reload: &mut Option<Reload>) -> Result<usize, String> {
    match reload {
        Some(reload) => (&mut reload.rolling).await,
        None => std::future::pending().await,
    }
}
