//! Work that computes but needs no device: preparing tasks, writing replies. What may take long has a
//! thread for it, so that the connections' tasks go on meanwhile; what is over before another thread
//! would have woken is done by the caller. A panic in one piece of work is its caller's error.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;

use tokio::sync::{mpsc, oneshot};

use super::forward::panic_words;

/// Work that waits for the thread.
const WAITING: usize = 64;

type Work = Box<dyn FnOnce() + Send>;

/// How long a piece of work takes; [`Codec::is_brief`](crate::model::Codec::is_brief) says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Effort {
    Brief,
    Long,
}

/// A thread that does one thing after the other.
#[derive(Clone)]
pub(super) struct Lane {
    /// Written by tasks, read by the thread. Bound: beyond it, tasks wait where they are.
    work: mpsc::Sender<Work>,
}

impl Lane {
    /// Starts the thread; it ends when the last clone is gone.
    ///
    /// # Errors
    /// The system has no thread for us.
    pub(super) fn start(name: &str) -> io::Result<Self> {
        let (work, mut queued) = mpsc::channel::<Work>(WAITING);
        thread::Builder::new().name(name.to_owned()).spawn(move || {
            while let Some(work) = queued.blocking_recv() {
                work();
            }
        })?;
        Ok(Self { work })
    }

    /// Runs `work`, on the thread unless it is brief.
    ///
    /// # Errors
    /// Its panic, in words.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        effort: Effort,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, String> {
        if effort == Effort::Brief {
            return attempt(work);
        }
        let (result, received) = oneshot::channel();
        let work = Box::new(move || drop(result.send(attempt(work))));
        let ended = || "the thread has ended".to_owned();
        self.work.send(work).await.map_err(|_| ended())?;
        received.await.map_err(|_| ended())?
    }
}

fn attempt<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|panic| panic_words(panic.as_ref()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_panic_is_the_callers_error_and_the_next_work_proceeds() {
        let lane = Lane::start("test").unwrap();
        for effort in [Effort::Brief, Effort::Long] {
            assert_eq!(lane.run(effort, || -> u8 { panic!("bad {}", 1) }).await, Err("bad 1".into()));
            assert_eq!(lane.run(effort, || 2).await, Ok(2));
        }
    }

    #[tokio::test]
    async fn what_may_take_long_leaves_the_callers_thread() {
        let lane = Lane::start("test").unwrap();
        let thread_of = |effort| lane.run(effort, || thread::current().name().map(str::to_owned));
        assert_eq!(thread_of(Effort::Long).await, Ok(Some("test".into())));
        assert_ne!(thread_of(Effort::Brief).await, Ok(Some("test".into())));
    }
}
