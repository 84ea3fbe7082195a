//! Whether the engine expects a task: from its acceptance until it is enqueued, except while the task waits for something
//! that may take long. While tasks are expected, an idle device waits for them before it computes an incomplete batch.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::engine::{Expect, Queue};

/// One task of which the engine is told whether it expects it. Once this is dropped, the engine does not.
pub(in crate::worker) struct Expected {
    queue: Arc<dyn Queue>,
    /// Only the task's run changes it.
    is_on: AtomicBool,
}

impl Expected {
    /// Makes the engine expect one more task.
    pub(in crate::worker) fn new(queue: &Arc<dyn Queue>) -> Self {
        let expected = Self { queue: queue.clone(), is_on: AtomicBool::new(false) };
        expected.resume();
        expected
    }

    /// From now on the engine does not expect the task. Does nothing if it does not now.
    pub(super) fn pause(&self) {
        if self.is_on.swap(false, Ordering::Relaxed) {
            self.queue.expect(Expect::Less);
        }
    }

    /// From now on the engine expects the task. Does nothing if it does already.
    pub(super) fn resume(&self) {
        if !self.is_on.swap(true, Ordering::Relaxed) {
            self.queue.expect(Expect::More);
        }
    }

    /// Does `work`, during which the engine does not expect the task. It does again only if `work` succeeds.
    pub(super) async fn paused_for<T, E>(&self, work: impl Future<Output = Result<T, E>>) -> Result<T, E> {
        self.pause();
        let done = work.await?;
        self.resume();
        Ok(done)
    }
}

impl Drop for Expected {
    fn drop(&mut self) {
        self.pause();
    }
}
