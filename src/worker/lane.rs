//! A dedicated thread for work that computes but needs no device: preparing tasks, writing replies.
//! Bounded; a panic in one piece of work is its caller's error and the thread goes on.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;

use tokio::sync::{mpsc, oneshot};

use super::forward::panic_words;

/// Work that waits for the thread.
const WAITING: usize = 64;

type Work = Box<dyn FnOnce() + Send>;

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

    /// Runs `work` on the thread.
    ///
    /// # Errors
    /// Its panic, in words.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, String> {
        let (result, received) = oneshot::channel();
        let work = Box::new(move || {
            let caught = catch_unwind(AssertUnwindSafe(work));
            let _ = result.send(caught.map_err(|panic| panic_words(panic.as_ref())));
        });
        let ended = || "the thread has ended".to_owned();
        self.work.send(work).await.map_err(|_| ended())?;
        received.await.map_err(|_| ended())?
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_panic_is_the_callers_error_and_the_next_work_proceeds() {
        let lane = Lane::start("test").unwrap();
        assert_eq!(lane.run(|| -> u8 { panic!("bad {}", 1) }).await, Err("bad 1".into()));
        assert_eq!(lane.run(|| 2).await, Ok(2));
    }
}
