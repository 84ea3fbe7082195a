//! Follows one enqueued job until it is done: prepares its further inputs, sends its parts, and ends it if its requester
//! leaves or if it takes too long.

use std::future::{pending, poll_fn};
use std::pin::pin;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use tokio::sync::watch;
use tokio::time::timeout;

use super::Run;
use crate::engine::{Computed, Job, JobEvent};
use crate::protocol::{TaskError, TaskErrorKind};
use crate::worker::requester;
use crate::worker::settle::{Outcome, Parts};

/// How a task's job ended.
pub(super) struct JobEnd {
    pub(super) computed: Computed,
    /// Whether its requester has left, and nobody had cancelled the task before.
    pub(super) has_left: bool,
}

impl Run<'_> {
    /// Waits until a job that was enqueued is done, prepares more of its inputs meanwhile, and sends its parts.
    pub(super) async fn run_job(
        &self,
        job: &mut dyn Job,
        parts: Option<&mut Parts>,
    ) -> Result<JobEnd, Outcome> {
        let (source, time_limit) = (job.source(), self.shared.settlement.queue_timeouts.pool);
        let prefetch = &self.shared.prefetch[self.accepted.delivery.source.0];
        let is_on_demand = source.is_some();
        if !is_on_demand {
            prefetch.prepared(job.inputs(), job.tokens());
        }
        let has_left = AtomicBool::new(false);
        let computing = async {
            tokio::select! {
                biased;
                end = self.handle_events(job, parts, &has_left) => Ok(end),
                // Once the requester has left, the error is that the task is not wanted any more.
                error = self.prepare_further_inputs(source) => {
                    Err(if has_left.load(Relaxed) { self.requester_left() } else { error.into() })
                }
            }
        };
        let Ok(end) = timeout(time_limit, computing).await else {
            let message =
                format!("not finished within {time_limit:?}, after which the broker takes the task back");
            // A task that is prepared piece by piece is a long one: it would take as long again.
            return Err(if is_on_demand {
                TaskError::new(TaskErrorKind::TooLarge, format!("{message}: send less in a task")).into()
            } else {
                TaskError::new(TaskErrorKind::Fault, message).into()
            });
        };
        if is_on_demand {
            // Only now is it known how large the task was.
            prefetch.prepared(job.inputs(), job.tokens());
        }
        end
    }

    /// Waits until the job is done, and sends its parts. If the requester leaves meanwhile, `has_left` is set, and the
    /// sequences end. Never returns if the device has failed: that is not the task's fault, so the task goes back with the
    /// session.
    async fn handle_events(
        &self,
        job: &mut dyn Job,
        mut parts: Option<&mut Parts>,
        has_left: &AtomicBool,
    ) -> JobEnd {
        // Whether the latest part was returned as unroutable. Written here, read by `requester_leaves`.
        let (unroutable, is_unroutable) = watch::channel(false);
        let mut requester_leaves = pin!(self.requester_leaves(is_unroutable));
        let task_id = &self.accepted.task.id;
        loop {
            let ready = parts.as_ref().is_some_and(|parts| parts.is_ready());
            let progress = async {
                match parts.as_deref_mut() {
                    Some(parts) if !ready => parts.progress().await,
                    _ => pending().await,
                }
            };
            let event = tokio::select! {
                biased;
                event = poll_fn(|context| job.poll_event(context, ready)) => event,
                () = progress => {
                    if let Some(parts) = &parts {
                        let latest = parts.is_unroutable();
                        unroutable.send_if_modified(|before| std::mem::replace(before, latest) != latest);
                    }
                    continue;
                }
                () = &mut requester_leaves, if !has_left.load(Relaxed) && self.state.cancellation().is_none() => {
                    tracing::info!(task.id = task_id, "the task's reply queue does not exist any more; the task ends");
                    has_left.store(true, Relaxed);
                    self.state.cancel();
                    continue;
                }
            };
            match (event, parts.as_deref_mut()) {
                (JobEvent::Done(computed), _) => {
                    return JobEnd { computed, has_left: has_left.load(Relaxed) };
                }
                (JobEvent::Parts(unwritten), Some(parts)) => parts.send(self.write_parts(unwritten).await),
                (JobEvent::Parts(_), None) => {}
            }
        }
    }

    /// What becomes of the task if its requester has left.
    pub(super) fn requester_left(&self) -> Outcome {
        Outcome::RequesterLeft(self.accepted.task.reply_to().unwrap_or_default().to_owned())
    }

    /// Returns once the requester has left.
    async fn requester_leaves(&self, unroutable: watch::Receiver<bool>) {
        let Some(queue) = self.accepted.task.reply_to() else { return pending().await };
        requester::wait_until_gone(&*self.shared.settlement.publisher, queue, unroutable).await;
    }
}
