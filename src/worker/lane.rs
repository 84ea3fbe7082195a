//! Work that computes but needs no device: preparing tasks, writing replies. What may take long has
//! threads for it, so that the connections' tasks go on meanwhile. What is over before another thread
//! would have woken is done by the caller, unless there are several: then the worker is there to feed a
//! card, and the caller's thread has enough to do with the messages themselves. A panic in one piece of
//! work is its caller's error.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use rayon::{ThreadPool, ThreadPoolBuilder};
use tokio::sync::{Semaphore, oneshot};

use super::forward::panic_words;

/// Work that waits for a thread.
const WAITING: usize = 64;

/// How long a piece of work takes, as its [`Codec`](crate::model::Codec) says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Effort {
    Brief,
    Long,
}

impl Effort {
    pub(super) fn of(is_brief: bool) -> Self {
        if is_brief { Self::Brief } else { Self::Long }
    }
}

/// Threads that take up one thing after the other, in the order of their coming. A piece of work that
/// rayon divides is done by all of them.
#[derive(Clone)]
pub(super) struct Lane {
    threads: Arc<ThreadPool>,
    /// A permit for each piece of work on the threads or before them. Beyond it, tasks wait where they are.
    places: Arc<Semaphore>,
}

impl Lane {
    /// Starts the threads, one at least; they end when the last clone is gone.
    ///
    /// # Errors
    /// The system has no thread for us.
    pub(super) fn start(name: &'static str, threads: usize) -> io::Result<Self> {
        let threads = threads.max(1);
        let pool = ThreadPoolBuilder::new().num_threads(threads).thread_name(move |_| name.to_owned());
        let pool = pool.build().map_err(io::Error::other)?;
        Ok(Self { threads: Arc::new(pool), places: Arc::new(Semaphore::new(WAITING + threads)) })
    }

    /// Runs `work`, on a thread of the lane unless it is brief and there is but one.
    ///
    /// # Errors
    /// Its panic, in words.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        effort: Effort,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, String> {
        if effort == Effort::Brief && self.threads.current_num_threads() == 1 {
            return attempt(work);
        }
        let ended = || "the thread has ended".to_owned();
        let place = self.places.clone().acquire_owned().await.map_err(|_| ended())?;
        let (result, received) = oneshot::channel();
        self.threads.spawn(move || {
            let done = attempt(work);
            drop(place);
            drop(result.send(done));
        });
        received.await.map_err(|_| ended())?
    }
}

fn attempt<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|panic| panic_words(panic.as_ref()))
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::thread;
    use std::time::Duration;

    use futures_util::future::join_all;

    use super::*;

    #[tokio::test]
    async fn a_panic_is_the_callers_error_and_the_next_work_proceeds() {
        for threads in [1, 2] {
            let lane = Lane::start("test", threads).unwrap();
            for effort in [Effort::Brief, Effort::Long] {
                assert_eq!(lane.run(effort, || -> u8 { panic!("bad {}", 1) }).await, Err("bad 1".into()));
                assert_eq!(lane.run(effort, || 2).await, Ok(2));
            }
        }
    }

    #[tokio::test]
    async fn what_may_take_long_leaves_the_callers_thread_and_the_rest_too_where_there_are_several() {
        for (threads, brief_leaves) in [(1, false), (2, true)] {
            let lane = Lane::start("test", threads).unwrap();
            let left = |effort| lane.run(effort, || thread::current().name() == Some("test"));
            assert_eq!(left(Effort::Long).await, Ok(true));
            assert_eq!(left(Effort::Brief).await, Ok(brief_leaves), "{threads} threads");
        }
    }

    #[tokio::test]
    async fn as_many_pieces_run_at_once_as_there_are_threads() {
        let lane = Lane::start("test", 3).unwrap();
        let met = Arc::new(Barrier::new(3));
        let meet = || {
            let met = met.clone();
            lane.run(Effort::Long, move || met.wait().is_leader())
        };
        let all = join_all([meet(), meet(), meet()]);
        let all = tokio::time::timeout(Duration::from_secs(20), all).await.expect("they run at once");
        assert_eq!(all.iter().filter(|leads| **leads == Ok(true)).count(), 1);
    }
}
