//! All slots of a launcher: starts them, passes orders to the addressed slots, and applies reloaded settings slot by
//! slot. Owns the set of slots, and how each of them ended.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::{BoxFuture, join_all};
use futures_util::stream::FuturesUnordered;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::timeout;

use super::LauncherContext;
use super::order::{LauncherRequest, Outcome, Replacement, SlotCommand};
use super::restart::RestartReason;
use super::slot_state::{Slot, SlotEnd};
use super::status_board::{Entry, SlotStatus};
use crate::config::{Assignment, Launcher};
use crate::protocol::admin::{ControlRequest, State, Target};
use crate::shutdown::Exit;

/// The maximum number of orders that may wait for one slot.
const MAX_WAITING_ORDERS: usize = 16;
/// How long a slot may take to answer an order. It takes long if its worker does not read commands.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(4);
/// The maximum number of rounds of a reload. A later round reaches slots that the round before has missed.
const MAX_RELOAD_ROUNDS: u32 = 3;
/// The maximum wait for one slot when several are restarted in turn.
const RESTART_TIMEOUT: Duration = Duration::from_secs(10 * 60);
/// The time between two checks of whether such a slot has restarted.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// All slots of a launcher.
pub(super) struct Fleet {
    context: Arc<LauncherContext>,
    policy: watch::Sender<Launcher>,
    slots: BTreeMap<String, Member>,
    /// The slots that have not ended.
    running: FuturesUnordered<BoxFuture<'static, (String, SlotEnd)>>,
    reload: Option<Reload>,
}

/// What the fleet knows about one slot.
struct Member {
    /// Written here, read by the slot; none once the slot has ended.
    orders: Option<mpsc::Sender<SlotCommand>>,
    end: Option<SlotEnd>,
    /// What follows the slot's end.
    after_end: AfterEnd,
}

/// What follows a slot's end.
enum AfterEnd {
    /// The slot remains known, and may be started again.
    Keep,
    /// The slot is removed: the settings do not contain it any more.
    Remove,
    /// The slot is started again: settings that were loaded while it ended contain it again.
    Start(Box<Assignment>),
}

struct Reload {
    /// Resolves to the number of slots whose workers were replaced, or to the reason for which the reload stopped.
    round: BoxFuture<'static, Result<usize, String>>,
    slots: Vec<Assignment>,
    /// Workers replaced in earlier rounds.
    replaced: usize,
    /// The number of rounds left. A round may miss a slot that an order ends or starts meanwhile.
    rounds_left: u32,
    answer: oneshot::Sender<Result<String, String>>,
}

impl Fleet {
    pub(super) fn new(
        context: Arc<LauncherContext>,
        policy: watch::Sender<Launcher>,
        assignments: &[Assignment],
    ) -> Self {
        let mut fleet =
            Self { context, policy, slots: BTreeMap::new(), running: FuturesUnordered::new(), reload: None };
        for assignment in assignments {
            fleet.start(assignment.clone());
        }
        fleet
    }

    fn start(&mut self, assignment: Assignment) {
        let (orders, receiver) = mpsc::channel(MAX_WAITING_ORDERS);
        self.context.board.assign(&assignment);
        let name = assignment.slot.clone();
        let slot = Slot::new(self.context.clone(), assignment, receiver);
        let ended_slot = name.clone();
        self.running.push(Box::pin(async move { (ended_slot, slot.run().await) }));
        self.slots.insert(name, Member { orders: Some(orders), end: None, after_end: AfterEnd::Keep });
    }

    fn on_exit(&mut self, name: String, end: SlotEnd) {
        let Some(member) = self.slots.get_mut(&name) else { return };
        match std::mem::replace(&mut member.after_end, AfterEnd::Keep) {
            AfterEnd::Keep => (member.orders, member.end) = (None, Some(end)),
            AfterEnd::Remove => self.forget(&name),
            AfterEnd::Start(assignment) => self.start(*assignment),
        }
    }

    fn forget(&mut self, name: &str) {
        self.slots.remove(name);
        self.context.board.remove(name);
    }

    pub(super) async fn run(mut self, mut requests: mpsc::Receiver<LauncherRequest>) -> Exit {
        let mut answers: FuturesUnordered<BoxFuture<'static, ()>> = FuturesUnordered::new();
        loop {
            tokio::select! {
                Some((name, end)) = self.running.next() => {
                    self.on_exit(name, end);
                    if self.running.is_empty() {
                        break;
                    }
                }
                Some(request) = requests.recv() => match request {
                    LauncherRequest::Order { target, order, answer } => answers.push(self.order(&target, &order, answer)),
                    LauncherRequest::Reload { slots, policy, answer } => self.reload(slots, *policy, answer),
                },
                result = round_result(&mut self.reload) => self.finish_round(result),
                Some(()) = answers.next() => {}
            }
        }
        // Orders that ended the last slots still get their answers.
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

    /// Passes an order to the addressed slots. The returned future waits for the outcomes.
    fn order(
        &mut self,
        target: &Target,
        order: &ControlRequest,
        answer: oneshot::Sender<Vec<(String, Outcome)>>,
    ) -> BoxFuture<'static, ()> {
        let (mut outcomes, mut to_start, mut in_turn) = (Vec::new(), Vec::new(), Vec::new());
        for (name, member) in &self.slots {
            let Some(assignment) = self.context.board.assignment(name) else { continue };
            if !target.matches(&assignment.pool.name, &assignment.worker) {
                continue;
            }
            let (reply, outcome) = oneshot::channel();
            match &member.orders {
                Some(orders) if *order == ControlRequest::Restart => {
                    in_turn.push((name.clone(), orders.clone()))
                }
                Some(orders) if orders.try_send(SlotCommand::Order(order.clone(), reply)).is_ok() => {
                    outcomes.push((name.clone(), Ok(outcome)));
                }
                Some(_) => {
                    outcomes.push((name.clone(), Err("too many orders wait before this one".to_owned())))
                }
                None if matches!(order, ControlRequest::Restart | ControlRequest::Resume) => {
                    to_start.push(assignment)
                }
                None => {
                    outcomes.push((name.clone(), Err("it has ended; `restart` starts it again".to_owned())))
                }
            }
        }
        let mut started: Vec<(String, Outcome)> =
            to_start.iter().map(|it| (it.slot.clone(), Ok("starting a worker".into()))).collect();
        let message = if in_turn.len() > 1 { "restarting, one slot after the other" } else { "restarting" };
        started.extend(in_turn.iter().map(|(name, _)| (name.clone(), Ok(message.into()))));
        tokio::spawn(restart_in_turn(self.context.clone(), in_turn));
        for assignment in to_start {
            self.start(assignment);
        }
        Box::pin(async move {
            let answers = outcomes.into_iter().map(|(name, outcome)| async {
                let outcome = match outcome {
                    Ok(outcome) => match timeout(ANSWER_TIMEOUT, outcome).await {
                        Ok(answered) => answered.unwrap_or_else(|_| {
                            Err("it ended before it could carry out the order".to_owned())
                        }),
                        Err(_) => Err(format!(
                            "it has not carried out the order within {ANSWER_TIMEOUT:?}; it may still do so"
                        )),
                    },
                    Err(message) => Err(message),
                };
                (name, outcome)
            });
            let mut all = join_all(answers).await;
            all.extend(started);
            let _ = answer.send(all);
        })
    }

    /// Begins a reload. The existing slots get the new settings first, one after the other.
    fn reload(
        &mut self,
        slots: Vec<Assignment>,
        policy: Launcher,
        answer: oneshot::Sender<Result<String, String>>,
    ) {
        if self.reload.is_some() {
            let _ = answer.send(Err("a reload is already in progress".to_owned()));
            return;
        }
        self.context.crash_records.set_poison_deaths(policy.poison_deaths);
        self.policy.send_replace(policy);
        let round = self.replace_differing(&slots);
        self.reload = Some(Reload { round, slots, replaced: 0, rounds_left: MAX_RELOAD_ROUNDS, answer });
    }

    /// The slots whose settings differ from `slots`, with their new settings.
    fn differing(&self, slots: &[Assignment]) -> Vec<(mpsc::Sender<SlotCommand>, Assignment)> {
        let differing = slots.iter().filter_map(|new| {
            let member =
                self.slots.get(&new.slot).filter(|member| matches!(member.after_end, AfterEnd::Keep))?;
            let orders = member.orders.clone()?;
            let differs = self.context.board.assignment(&new.slot).is_some_and(|current| current != *new);
            differs.then(|| (orders, new.clone()))
        });
        differing.collect()
    }

    /// Gives differing slots their new settings, one after the other. Returns how many slots took them.
    fn replace_differing(&self, slots: &[Assignment]) -> BoxFuture<'static, Result<usize, String>> {
        let (turn, differing) = (self.context.replacement_turn.clone(), self.differing(slots));
        Box::pin(async move {
            let mut replaced = 0;
            for (orders, new) in differing {
                let slot = new.slot.clone();
                let Ok(permit) = turn.clone().acquire_owned().await else { continue };
                let (reply, outcome) = oneshot::channel();
                let replacement =
                    Replacement { reason: RestartReason::Reloaded, permit, answer: Some(reply) };
                let sent = orders.send(SlotCommand::Replace(Box::new(new), replacement)).await;
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

    /// Ends a round. If a slot could not take the new settings, the slots after it keep the old ones, and the reload
    /// fails. Otherwise the next round begins, or slots are ended and started.
    fn finish_round(&mut self, result: Result<usize, String>) {
        let Some(mut reload) = self.reload.take() else { return };
        match result {
            Ok(replaced) => reload.replaced += replaced,
            Err(message) => {
                self.context.board.write(|status| status.reloads_refused += 1);
                let _ = reload.answer.send(Err(message));
                return;
            }
        }
        reload.rounds_left -= 1;
        if reload.rounds_left > 0 && !self.differing(&reload.slots).is_empty() {
            reload.round = self.replace_differing(&reload.slots);
            self.reload = Some(reload);
            return;
        }
        let ended = self.end_all_but(&reload.slots);
        let started = self.start_missing(reload.slots);
        self.context.board.write(|status| status.reloads_applied += 1);
        let done =
            format!("workers replaced: {}, slots started: {started}, slots ended: {ended}", reload.replaced);
        let _ = reload.answer.send(Ok(done));
    }

    /// Ends the slots that are no longer in the settings. Returns their number.
    fn end_all_but(&mut self, slots: &[Assignment]) -> usize {
        let is_gone = |name: &String| !slots.iter().any(|slot| slot.slot == *name);
        let gone: Vec<String> = self.slots.keys().filter(|name| is_gone(name)).cloned().collect();
        for name in &gone {
            let Some(member) = self.slots.get_mut(name) else { continue };
            match &member.orders {
                Some(orders) => {
                    member.after_end = AfterEnd::Remove;
                    let (reply, _) = oneshot::channel();
                    let orders = orders.clone();
                    // The slot may have as many orders as it takes. It must get this one, too.
                    tokio::spawn(async move {
                        orders.send(SlotCommand::Order(ControlRequest::Shutdown, reply)).await
                    });
                }
                None => self.forget(name),
            }
        }
        gone.len()
    }

    /// Starts the new slots, and returns their number. A slot that was given up is started again; one that was stopped
    /// is not.
    fn start_missing(&mut self, slots: Vec<Assignment>) -> usize {
        let mut started = 0;
        for slot in slots {
            match self.slots.get_mut(&slot.slot) {
                Some(member) if member.orders.is_some() => {
                    if !matches!(member.after_end, AfterEnd::Keep) {
                        member.after_end = AfterEnd::Start(Box::new(slot));
                        started += 1;
                    }
                }
                Some(member) if !matches!(member.end, Some(SlotEnd::GivenUp(_))) => {
                    self.context.board.assign(&slot)
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

/// Restarts slots one after the other, so that a pool never loses all of its workers at once. A slot is restarted when
/// the one before it takes tasks again, or has ended or failed.
async fn restart_in_turn(context: Arc<LauncherContext>, slots: Vec<(String, mpsc::Sender<SlotCommand>)>) {
    for (name, orders) in slots {
        let Ok(_turn) = context.replacement_turn.acquire().await else { return };
        let pid = |status: &SlotStatus| status.slots.get(&name).and_then(|entry| entry.report.pid);
        let old_pid = context.board.read(pid);
        let (reply, outcome) = oneshot::channel();
        // A slot that has ended meanwhile is not restarted.
        if orders.send(SlotCommand::Order(ControlRequest::Restart, reply)).await.is_err()
            || outcome.await.is_err()
        {
            continue;
        }
        let is_finished = |status: &SlotStatus| {
            let Some(Entry { report, .. }) = status.slots.get(&name) else { return true };
            let has_ended = matches!(report.state, State::Stopped | State::Quarantined | State::Failed);
            has_ended || report.pid != old_pid && (report.state.is_serving() || report.state == State::Paused)
        };
        let restarted = async {
            while !context.board.read(is_finished) {
                tokio::time::sleep(POLL_INTERVAL).await;
            }
        };
        let _ = timeout(RESTART_TIMEOUT, restarted).await;
    }
}

/// The result of the current round of a reload; waits for ever if there is no reload.
async fn round_result(reload: &mut Option<Reload>) -> Result<usize, String> {
    match reload {
        Some(reload) => (&mut reload.round).await,
        None => std::future::pending().await,
    }
}
