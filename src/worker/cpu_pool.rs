//! The threads that preprocess tasks and write replies, so that the caller can handle messages meanwhile. Decides which
//! work runs on them. The caller itself does brief work, which takes about as long as waking another thread: the model
//! says so of each task, by its size and fields. How long the work of other tasks took has no influence, so that no
//! requester can move the work of others. A panic is returned to the caller as an error. Owns the threads.

use std::io;
use std::sync::Arc;

use rayon::{ThreadPool, ThreadPoolBuilder};
use tokio::sync::{Semaphore, oneshot};

use super::fair_turns::Turns;
use crate::engine::caught;

/// The most pieces of work that may wait for a thread.
const MAX_WAITING: usize = 64;

/// Threads that run pieces of work in the order of arrival. Work that rayon divides is shared by all of them.
/// Clones share the threads.
#[derive(Clone)]
pub(super) struct CpuPool {
    threads: Threads,
    /// A permit for each piece of work that runs or waits for a thread. Without one, the caller waits before it hands
    /// work over.
    permits: Arc<Semaphore>,
}

/// The worker's threads for CPU work.
#[derive(Clone)]
pub(super) struct Pools {
    /// Prepares tasks.
    pub(super) preprocess: CpuPool,
    /// Turns of queues and requesters at preparing inputs of their tasks on `preprocess`. There are twice as many turns as
    /// threads: a requester may have half of them, which keeps all threads busy.
    pub(super) slice_turns: Turns,
    /// One thread for long preparation, such as that of a grammar, while `preprocess` continues with other tasks. The
    /// module `fair_turns` decides whose task is next on it.
    pub(super) long: CpuPool,
    /// Writes replies.
    pub(super) reply: CpuPool,
}

impl Pools {
    /// Starts the threads.
    ///
    /// # Errors
    /// As [`CpuPool::start`].
    pub(super) fn start(threads: usize) -> io::Result<Self> {
        Ok(Self {
            preprocess: CpuPool::start("preprocess", threads)?,
            slice_turns: Turns::with_one_for_each_queue(2 * threads),
            long: CpuPool::start("preprocess-long", 1)?,
            reply: CpuPool::start("reply", threads)?,
        })
    }

    /// As [`CpuPool::start_here`].
    #[cfg(test)]
    pub(super) fn start_here() -> Self {
        Self {
            preprocess: CpuPool::start_here(),
            slice_turns: Turns::with_one_for_each_queue(2),
            long: CpuPool::start_here(),
            reply: CpuPool::start_here(),
        }
    }
}

#[derive(Clone)]
enum Threads {
    Pool(Arc<ThreadPool>),
    /// The caller's own thread, for one piece of work after another. Written by callers, read by a task of its runtime.
    #[cfg(test)]
    Caller(tokio::sync::mpsc::Sender<Box<dyn FnOnce() + Send>>),
}

impl Threads {
    fn count(&self) -> usize {
        match self {
            Self::Pool(pool) => pool.current_num_threads(),
            #[cfg(test)]
            Self::Caller(_) => 1,
        }
    }

    fn spawn(&self, work: impl FnOnce() + Send + 'static) {
        match self {
            Self::Pool(pool) => pool.spawn(work),
            #[cfg(test)]
            Self::Caller(queue) => assert!(queue.try_send(Box::new(work)).is_ok(), "its permits are bounded"),
        }
    }
}

impl CpuPool {
    /// Starts the threads, at least one. They end when the last clone is dropped.
    ///
    /// # Errors
    /// The system cannot start a thread.
    pub(super) fn start(name: &'static str, threads: usize) -> io::Result<Self> {
        let threads = threads.max(1);
        let pool = ThreadPoolBuilder::new().num_threads(threads).thread_name(move |_| name.to_owned());
        let pool = pool.build().map_err(io::Error::other)?;
        Ok(Self::new(Threads::Pool(Arc::new(pool)), threads))
    }

    /// A pool that works on the caller's thread, whose time may be paused, as if it had one thread of its own.
    #[cfg(test)]
    pub(super) fn start_here() -> Self {
        let (queue, mut work) = tokio::sync::mpsc::channel::<Box<dyn FnOnce() + Send>>(MAX_WAITING + 1);
        tokio::spawn(async move {
            while let Some(work) = work.recv().await {
                work();
                tokio::task::yield_now().await;
            }
        });
        Self::new(Threads::Caller(queue), 1)
    }

    fn new(threads: Threads, count: usize) -> Self {
        let permits = Arc::new(Semaphore::new(MAX_WAITING + count));
        Self { threads, permits }
    }

    /// Runs `work`. The caller does it itself if it is `brief` and there is only one thread. With several threads the
    /// worker feeds a GPU, and the caller is busy with messages.
    ///
    /// # Errors
    /// The message of the work's panic.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        brief: bool,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, String> {
        if brief && self.threads.count() == 1 {
            return caught(work);
        }
        let ended = || "the thread has ended".to_owned();
        let permit = self.permits.clone().acquire_owned().await.map_err(|_| ended())?;
        let (result, received) = oneshot::channel();
        self.threads.spawn(move || {
            let output = caught(work);
            drop(permit);
            drop(result.send(output));
        });
        received.await.map_err(|_| ended())?
    }
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
            let pool = CpuPool::start("test", threads).unwrap();
            for brief in [true, false] {
                assert_eq!(pool.run(brief, || -> u8 { panic!("bad {}", 1) }).await, Err("bad 1".into()));
                assert_eq!(pool.run(brief, || 2).await, Ok(2));
            }
        }
    }

    #[tokio::test]
    async fn long_work_runs_on_the_pool_and_brief_work_too_with_several_threads() {
        for (threads, brief_leaves) in [(1, false), (2, true)] {
            let pool = CpuPool::start("test", threads).unwrap();
            let left = |brief| pool.run(brief, || thread::current().name() == Some("test"));
            assert_eq!(left(false).await, Ok(true));
            assert_eq!(left(true).await, Ok(brief_leaves), "{threads} threads");
        }
    }

    #[tokio::test]
    async fn slow_work_of_one_requester_moves_the_brief_work_of_no_other() {
        let pool = CpuPool::start("test", 1).unwrap();
        let on_caller = || thread::current().name() != Some("test");
        for _ in 0..3 {
            let slow = || thread::sleep(Duration::from_millis(20));
            pool.run(false, slow).await.unwrap();
            pool.run(true, slow).await.unwrap();
            assert_eq!(pool.run(true, on_caller).await, Ok(true));
        }
        // Nor does brief work bring back what is not brief.
        for _ in 0..100 {
            pool.run(true, || ()).await.unwrap();
        }
        assert_eq!(pool.run(false, on_caller).await, Ok(false));
    }

    #[tokio::test]
    async fn as_many_pieces_run_at_once_as_there_are_threads() {
        let pool = CpuPool::start("test", 3).unwrap();
        let met = Arc::new(Barrier::new(3));
        let meet = || {
            let met = met.clone();
            pool.run(false, move || met.wait().is_leader())
        };
        let all = join_all([meet(), meet(), meet()]);
        let all = tokio::time::timeout(Duration::from_secs(20), all).await.expect("they run at once");
        assert_eq!(all.iter().filter(|leads| **leads == Ok(true)).count(), 1);
    }
}
