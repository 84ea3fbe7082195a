//! Decides what a task waits for before its inputs are prepared (a turn, memory, the end of a group), and on which thread
//! they are. An isolated task waits for nothing that other tasks hold.

use std::future::{pending, poll_fn};
use std::sync::Arc;
use std::time::Duration;

use super::{Run, internal_error};
use crate::engine::{InputSource, Prepared, PreparedJob, now};
use crate::model::{Effort, Files};
use crate::protocol::{Task, TaskError};
use crate::worker::cpu_pool::CpuPool;
use crate::worker::fair_turns::{Turn, Turns};

/// How often a waiting task checks whether it was cancelled or has expired.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// A task with its files.
pub(super) struct Fetched {
    /// The task, with the file of its header `dataref` as its body.
    pub(super) task: Arc<Task>,
    /// The files of the URLs in its body.
    pub(super) files: Files,
}

impl Run<'_> {
    /// Makes the task's inputs, or the first slice of them.
    pub(super) async fn preprocess(
        &self,
        fetched: Fetched,
        effort: Effort,
    ) -> Result<PreparedJob, TaskError> {
        let engine = self.shared.engine.clone();
        let preprocess = move || engine.preprocess(&fetched.task.message, &fetched.files);
        let prepared = if effort == Effort::Long {
            self.in_turn(preprocess).await?
        } else {
            let turn = self.wait_for_preparation(effort).await?;
            let preprocess = move || {
                let _turn = turn;
                preprocess()
            };
            self.prepare(effort, preprocess).await?
        };
        match prepared {
            Prepared::Made(job) => Ok(job),
            Prepared::Later(make) => self.in_turn(make).await,
        }
    }

    /// Prepares the further inputs of a task: one slice each time that few of them wait for the model. Other requesters
    /// have their turn between two slices. Returns only if a slice fails, with its error.
    pub(super) async fn prepare_further_inputs(&self, source: Option<Arc<dyn InputSource>>) -> TaskError {
        if let Some(source) = source {
            while poll_fn(|context| source.poll_wanted(context)).await {
                let source = source.clone();
                let _turn = self.unless_isolated(self.shared.pools.slice_turns.take(self.state.owner)).await;
                if let Err(error) = self.prepare(Effort::Usual, move || source.pull()).await {
                    return error;
                }
            }
        }
        pending().await
    }

    /// Does `work` that may take long on the thread for long preparation, when the task's requester has its turn. The
    /// engine does not expect the task meanwhile.
    async fn in_turn<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, TaskError> + Send + 'static,
    ) -> Result<T, TaskError> {
        let in_turn = async {
            let turn = self.wait_for_turn(&self.shared.turns, None).await?;
            let work = move || {
                // The turn ends with the work, even if the task no longer waits for it.
                let _turn = turn;
                work()
            };
            self.prepare_on(&self.shared.pools.long, false, work).await
        };
        self.expected.paused_for(in_turn).await
    }

    /// Waits until a task of this effort may be prepared. The threads do their work in the order of its arrival, so with
    /// several queues the tasks of one that arrive at once would hold up those of another.
    async fn wait_for_preparation(&self, effort: Effort) -> Result<Option<Turn>, TaskError> {
        if effort == Effort::Brief || self.shared.shares.len() == 1 {
            return Ok(None);
        }
        self.wait_for_turn(&self.shared.pools.slice_turns, None).await
    }

    /// Waits for a turn of the task's requester, at a server if one is named. None: an isolated task needs no turn.
    pub(super) async fn wait_for_turn(
        &self,
        turns: &Turns,
        server: Option<u64>,
    ) -> Result<Option<Turn>, TaskError> {
        tokio::select! {
            biased;
            turn = self.unless_isolated(turns.take_at(server, self.state.owner)) => Ok(turn),
            error = self.wait_until_unwanted() => Err(error),
        }
    }

    /// Returns the task's error once its answer is no longer wanted: the task was cancelled or has expired.
    pub(super) async fn wait_until_unwanted(&self) -> TaskError {
        loop {
            if let Some(error) = self.state.unwanted(now()) {
                return error;
            }
            tokio::time::sleep(CHECK_INTERVAL).await;
        }
    }

    /// Does `work` that prepares inputs of this task on the threads for ordinary preparation.
    pub(super) async fn prepare<T: Send + 'static>(
        &self,
        effort: Effort,
        work: impl FnOnce() -> Result<T, TaskError> + Send + 'static,
    ) -> Result<T, TaskError> {
        self.prepare_on(&self.shared.pools.preprocess, effort == Effort::Brief, work).await
    }

    /// Does `work` that prepares inputs of this task in `pool`, once there is memory for more of them. All work on the
    /// preprocess threads goes through here.
    async fn prepare_on<T: Send + 'static>(
        &self,
        pool: &CpuPool,
        brief: bool,
        work: impl FnOnce() -> Result<T, TaskError> + Send + 'static,
    ) -> Result<T, TaskError> {
        let (reporter, name) = (self.shared.reporter.clone(), self.state.name.clone());
        let work = move || {
            // Brief work runs nothing that a requester could make crash, and a control line would cost more than the
            // work.
            let _reported = (!brief).then(|| reporter.preprocessing(&name));
            work()
        };
        let _memory = self.unless_isolated(self.shared.engine.memory().room(self.state.owner)).await;
        self.without_groups(pool.run(brief, work)).await.map_err(internal_error)?
    }
}
