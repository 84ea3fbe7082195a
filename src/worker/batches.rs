//! The batch former: gives the model thread the next batch when it is full, due, or wanted by an
//! idle device. Owns the inputs that wait and the count of batches under way. Decides which inputs
//! of a batch are still wanted, which the model thread asks at the last moment.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Instant, SystemTime};

use tokio::sync::mpsc;

use super::WorkerError;
use super::engine::{Done, Item};
use super::report::Counters;
use super::suspects::Suspects;
use crate::batching::{Batch, Batcher, Device};
use crate::model::Codec;
use crate::protocol::{TaskError, TaskErrorKind};

/// Inputs of one task, ready for a batch.
pub(super) struct Submission<C: Codec> {
    pub(super) items: Vec<Item<C>>,
    /// It was delivered before: it may have killed a worker, and goes through the device without
    /// batch-mates.
    pub(super) suspect: bool,
}

/// See the module.
pub(super) struct BatchFormer<C: Codec> {
    pub(super) batcher: Batcher<Item<C>>,
    /// Tasks that go alone; see there. They go first: most came first.
    pub(super) suspects: Suspects<C>,
    /// Written by task futures, read here. Bound: the prefetch, as each task submits once.
    pub(super) submissions: mpsc::Receiver<Submission<C>>,
    pub(super) batches: mpsc::Sender<Batch<Item<C>>>,
    pub(super) done: mpsc::Receiver<Done>,
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
        while submitting || under_way > 0 || !self.batcher.is_empty() || self.suspects.any() {
            under_way += self.hand_over(under_way, submitting).await;
            let due = if under_way == 0 { self.batcher.due() } else { None };
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
                    Some(Done::Computed { inputs, tokens, took, too_large }) => {
                        under_way -= 1;
                        self.counters.batch(inputs, tokens, took);
                        self.learn_size(too_large);
                    }
                    Some(Done::Unwanted) => under_way -= 1,
                    fault => {
                        let words = match fault {
                            Some(Done::Fault(words)) => words,
                            _ => "the model thread ended".to_owned(),
                        };
                        let _ = self.fault.send(WorkerError::Device(words)).await;
                        return;
                    }
                },
                () = tokio::time::sleep_until(due.unwrap_or_else(Instant::now).into()), if due.is_some() => {}
            }
        }
    }

    /// After a batch that found no memory: from now on, of the size that its halves had.
    fn learn_size(&mut self, too_large: Option<usize>) {
        let Some(tokens) = too_large else { return };
        let most = (tokens / 2).max(1);
        tracing::warn!(tokens, max_tokens = most, "out of device memory; smaller batches from now on");
        self.batcher.limit_tokens(most);
        self.suspects.limit_tokens(most);
    }

    fn accept(&mut self, submission: Submission<C>, now: Instant) {
        if submission.suspect {
            return self.suspects.push(submission);
        }
        for item in submission.items {
            let tokens = item.tokens;
            self.batcher.push(item, tokens, now);
        }
    }

    /// Fills the model thread's two places, or one of them with a suspect. Returns how many batches
    /// were handed over.
    async fn hand_over(&mut self, under_way: usize, submitting: bool) -> usize {
        if self.suspects.any() {
            // Nothing beside a suspect: a death must have one cause.
            if under_way > 0 {
                return 0;
            }
            if let Some(batch) = self.suspects.next() {
                return usize::from(self.batches.send(batch).await.is_ok());
            }
        }
        let mut handed = 0;
        while under_way + handed < 2 {
            let device = if under_way + handed == 0 { Device::Idle } else { Device::Busy };
            let expecting = submitting && self.preparing.load(Ordering::Relaxed) > 0;
            let Some(batch) = self.batcher.take(Instant::now(), device, expecting) else { break };
            if self.batches.send(batch).await.is_err() {
                // The thread's last word, a fault, is in `done`.
                break;
            }
            handed += 1;
        }
        handed
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
