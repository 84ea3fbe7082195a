//! The batch former: gives the model thread the next batch when it is full, due, or wanted by an
//! idle device. Owns the inputs that wait and the count of batches under way. Decides which inputs
//! of a batch are still wanted, which the model thread asks at the last moment.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::SyncSender;
use std::time::{Instant, SystemTime};

use tokio::sync::{mpsc, watch};

use super::WorkerError;
use super::dials::changed;
use super::engine::{Done, Item};
use super::isolation::Isolation;
use super::report::Counters;
use super::ticket::Complete;
use crate::batching::{Batch, Batcher, Device, Policy};
use crate::model::Codec;
use crate::protocol::control::BatchChange;
use crate::protocol::{TaskError, TaskErrorKind};

/// Batches of a reduced size until a larger one is tried.
const TRIED: u32 = 256;

/// Inputs of one task, ready for a batch.
pub(super) struct Submission<C: Codec> {
    pub(super) items: Vec<Item<C>>,
    /// It may have killed a worker, and goes through the device with the others of its group alone.
    pub(super) isolated: bool,
}

/// The inputs that wait for a batch, and how many batches are under way.
pub(super) struct BatchFormer<C: Codec> {
    pub(super) batcher: Batcher<Item<C>>,
    /// What limits the batches' size, beside the policy.
    pub(super) sizing: Sizing,
    /// The settings' bounds, which wishes change.
    pub(super) policy: Policy,
    /// Other bounds of batches. Written by who reads the launcher's commands.
    pub(super) wishes: watch::Receiver<BatchChange>,
    /// Inputs of the group that is isolated now.
    pub(super) isolated: Batcher<Item<C>>,
    /// While it is occupied, no other batch begins.
    pub(super) isolation: Arc<Isolation>,
    /// Written by task futures, read here. Bound: beyond it, tasks wait where they are.
    pub(super) submissions: mpsc::Receiver<Submission<C>>,
    pub(super) batches: SyncSender<Batch<Item<C>>>,
    /// So many may be under way.
    pub(super) depth: usize,
    pub(super) done: mpsc::Receiver<Done<C::Output>>,
    /// Tasks accepted but not yet submitted. Written by their futures, read here: an idle device
    /// waits (up to `max_delay`) only while it is above 0.
    pub(super) preparing: Arc<AtomicUsize>,
    pub(super) counters: Arc<Counters>,
    /// Written here, once; read by the intake. The device is gone.
    pub(super) fault: mpsc::Sender<WorkerError>,
}

impl<C: Codec> BatchFormer<C> {
    /// Runs until no task can submit any more and the device is idle, or the device is gone.
    pub(super) async fn run(mut self) {
        let mut under_way = 0;
        let mut submitting = true;
        while submitting || under_way > 0 || !self.batcher.is_empty() || !self.isolated.is_empty() {
            under_way += self.hand_over(under_way, submitting);
            let waits = under_way > 0 || self.isolation.is_occupied();
            let due = if waits { None } else { self.batcher.due() };
            let mut submitted = Vec::new();
            tokio::select! {
                taken = self.submissions.recv_many(&mut submitted, 64), if submitting => {
                    submitting = taken > 0;
                    let now = Instant::now();
                    for submission in submitted {
                        self.accept(submission, now);
                    }
                }
                done = self.done.recv() => match done {
                    Some(Done::Computed { complete, inputs, tokens, took, too_large }) => {
                        under_way -= 1;
                        complete.into_iter().for_each(Complete::tell);
                        self.counters.count(|stats| stats.batch(inputs, tokens, took.as_secs_f64()));
                        if let Some(most) = self.sizing.learn(too_large) {
                            self.batcher.limit_tokens(most);
                            self.isolated.limit_tokens(most);
                        }
                    }
                    Some(Done::Unwanted) => under_way -= 1,
                    fault => {
                        let words = match fault {
                            Some(Done::Fault(words)) => words,
                            _ => "the model thread ended".to_owned(),
                        };
                        self.isolation.close();
                        let _ = self.fault.send(WorkerError::Device(words)).await;
                        return;
                    }
                },
                () = self.isolation.left() => {}
                Ok(()) = self.wishes.changed() => self.grant(),
                () = tokio::time::sleep_until(due.unwrap_or_else(Instant::now).into()), if due.is_some() => {}
            }
        }
    }

    /// Goes by the bounds that are wished, for what waits too.
    fn grant(&mut self) {
        let wish = *self.wishes.borrow_and_update();
        let policy = changed(self.policy, wish);
        let Policy { max_tokens, max_requests, max_delay } = policy;
        tracing::info!(max_tokens, max_requests, ?max_delay, "batches have other bounds from now on");
        self.sizing = Sizing::new(max_tokens);
        self.batcher.set_policy(policy);
        self.isolated.set_policy(policy);
    }

    fn accept(&mut self, submission: Submission<C>, now: Instant) {
        let batcher = if submission.isolated { &mut self.isolated } else { &mut self.batcher };
        for item in submission.items {
            let tokens = item.tokens;
            batcher.push(item, tokens, now);
        }
    }

    /// Fills the model thread's places, or one of them with inputs that are isolated. Returns how many
    /// batches were handed over.
    fn hand_over(&mut self, under_way: usize, submitting: bool) -> usize {
        if !self.isolated.is_empty() {
            // Nothing beside them: a death is to have its cause among few.
            if under_way > 0 {
                return 0;
            }
            let batch = self.isolated.take(Instant::now(), Device::Idle, false);
            return usize::from(batch.is_some_and(|batch| self.batches.try_send(batch).is_ok()));
        }
        if self.isolation.is_occupied() {
            return 0;
        }
        let mut handed = 0;
        while under_way + handed < self.depth {
            let device = if under_way + handed == 0 { Device::Idle } else { Device::Busy };
            let expecting = submitting && self.preparing.load(Ordering::Relaxed) > 0;
            let Some(batch) = self.batcher.take(Instant::now(), device, expecting) else { break };
            if self.batches.try_send(batch).is_err() {
                // The thread's last word, a fault, is in `done`.
                break;
            }
            handed += 1;
        }
        handed
    }
}

/// What the device's memory takes, as batches show it: half of what did not fit, and twice as much
/// again after every [`TRIED`] batches that did, since others may use the device too.
pub(super) struct Sizing {
    /// The policy's.
    most: usize,
    now: usize,
    fitted: u32,
}

impl Sizing {
    pub(super) fn new(most: usize) -> Self {
        Self { most, now: most, fitted: 0 }
    }

    /// After a batch, of which so many tokens found no memory: the new limit, if there is one.
    fn learn(&mut self, too_large: Option<usize>) -> Option<usize> {
        let before = self.now;
        if let Some(tokens) = too_large {
            (self.now, self.fitted) = ((tokens / 2).clamp(1, before), 0);
            let max_tokens = self.now;
            tracing::warn!(tokens, max_tokens, "out of device memory; smaller batches from now on");
        } else if self.now < self.most {
            self.fitted += 1;
            if self.fitted >= TRIED {
                (self.now, self.fitted) = (self.most.min(2 * before), 0);
                tracing::info!(max_tokens = self.now, "trying larger batches again");
            }
        }
        (self.now != before).then_some(self.now)
    }
}

/// The batch without what nobody waits for any more; none when nothing is left.
pub(super) fn still_wanted<C: Codec>(mut batch: Batch<Item<C>>) -> Option<Batch<Item<C>>> {
    let now = SystemTime::now();
    batch.inputs.retain(|item| is_wanted(item, now));
    batch.tokens = batch.inputs.iter().map(|item| item.tokens).sum();
    (!batch.inputs.is_empty()).then_some(batch)
}

/// Whether the input goes to the device; from then on its task can no longer be handed back.
fn is_wanted<C: Codec>(item: &Item<C>, now: SystemTime) -> bool {
    if item.ticket.is_over() || !item.ticket.commit() {
        return false;
    }
    let expired = item.ticket.deadline.is_some_and(|deadline| deadline <= now);
    if expired {
        item.ticket.fail(expiry());
    }
    !expired
}

/// The error of a task that nobody waits for any more.
pub(super) fn expiry() -> TaskError {
    TaskError::new(TaskErrorKind::Expired, "the task's deadline passed before it was computed")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_size_that_fits_is_remembered_and_a_larger_one_tried_now_and_then() {
        let mut sizing = Sizing::new(100);
        assert_eq!(
            (sizing.learn(None), sizing.learn(Some(80)), sizing.learn(Some(4))),
            (None, Some(40), Some(2))
        );
        let mut limits = Vec::new();
        for _ in 0..6 * TRIED {
            limits.extend(sizing.learn(None));
        }
        assert_eq!(limits, [4, 8, 16, 32, 64, 100]);
        assert_eq!((sizing.learn(Some(1)), sizing.learn(Some(1))), (Some(1), None), "one input is the least");
    }
}
