//! Writes a task's reply and its parts, and decides on which thread.

use std::pin::pin;

use futures_util::FutureExt as _;

use super::{Run, internal_error};
use crate::engine::{Job, Unwritten};
use crate::model::Effort;
use crate::protocol::{Body, TaskError};
use crate::worker::settle::Parts;

/// The most inputs whose reply counts as brief work: writing an embedding of 384 numbers takes 10 µs.
const MAX_BRIEF_INPUTS: usize = 4;

impl Run<'_> {
    /// Writes the reply of a job that is done. Sends the last parts meanwhile.
    pub(super) async fn write_reply(
        &self,
        mut job: Box<dyn Job>,
        effort: Effort,
        has_failed: bool,
        mut parts: Option<&mut Parts>,
    ) -> Result<Body, TaskError> {
        if let Some(parts) = &mut parts {
            self.write_last_parts(&mut *job, parts).await;
        }
        // The error reply of a failed task is short.
        let brief = has_failed || effort == Effort::Brief && job.inputs() <= MAX_BRIEF_INPUTS;
        let is_slow = !has_failed && job.is_finish_slow();
        let Self { shared, state, .. } = self;
        let reply = async {
            // The turn comes before the exclusion of groups, as in preparation: otherwise the tasks that hold the one could
            // wait for those that hold the other, while a group waits between them.
            let turn = match is_slow {
                true => self.unless_isolated(shared.turns.take(state.owner)).await,
                false => None,
            };
            let (pool, brief) =
                if turn.is_some() { (&shared.pools.long, false) } else { (&shared.pools.reply, brief) };
            let write = move || {
                let _turn = turn;
                job.finish()
            };
            self.without_groups(pool.run(brief, write)).await
        };
        let reply = match parts {
            Some(parts) => run_alongside(reply, async { _ = parts.send_last().await }).await,
            None => reply.await,
        };
        match state.cancellation() {
            Some(error) => Err(error),
            None => reply.map_err(internal_error)?,
        }
    }

    /// Writes and sends the parts that are left of a job that is done. While some are being sent, no further ones are
    /// written, so that a queue that accepts them slowly causes no wasted work.
    async fn write_last_parts(&self, job: &mut dyn Job, parts: &mut Parts) {
        let mut next = job.unwritten();
        while let Some(unwritten) = next
            && parts.send_last().await
        {
            parts.send(self.write_parts(unwritten).await);
            next = job.unwritten();
        }
    }

    /// Writes parts: here if that is brief, and otherwise on the reply threads.
    pub(super) async fn write_parts(&self, unwritten: Unwritten) -> Vec<Body> {
        if unwritten.is_brief() {
            return unwritten.write();
        }
        let bodies = self.shared.pools.reply.run(false, move || unwritten.write());
        self.without_groups(bodies).await.unwrap_or_else(|error| {
            tracing::error!(task.id = self.accepted.task.id, error, "parts of a reply are left out");
            Vec::new()
        })
    }
}

/// Returns the result of `work`. Runs `aside` meanwhile, and drops it when `work` is done.
async fn run_alongside<T>(work: impl Future<Output = T>, aside: impl Future<Output = ()>) -> T {
    let mut aside = pin!(aside.fuse());
    let mut work = pin!(work);
    loop {
        tokio::select! {
            biased;
            done = &mut work => return done,
            () = &mut aside => {}
        }
    }
}
