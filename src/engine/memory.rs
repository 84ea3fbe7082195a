//! The memory of prepared inputs, which may be large: pixels, sound. Decides when a task may prepare more of them.
//! Owns the number of their bytes.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::{Mutex, Notify};

/// Bytes of the inputs that are prepared and not computed yet. Shared by all tasks of a worker.
pub struct Memory {
    /// While so many bytes are held, nothing more is prepared.
    most: usize,
    /// Bytes of prepared inputs, and those that slices under way will probably take. Written by whoever prepares
    /// or drops inputs.
    used: AtomicUsize,
    /// Bytes of the largest slice so far: what a further one is expected to take.
    largest: AtomicUsize,
    /// Locked by the task that waits for room; the others wait behind it, in the order of their arrival.
    turn: Mutex<()>,
    /// Told when bytes become free. Read by the task whose turn it is.
    freed: Notify,
}

/// Bytes that count as used until this is dropped.
pub struct Held {
    memory: Arc<Memory>,
    bytes: usize,
}

impl Memory {
    /// Nothing is held yet. Preparing pauses while `most` bytes or more are held; slices already admitted may exceed it.
    pub fn new(most: u64) -> Arc<Self> {
        Arc::new(Self {
            most: usize::try_from(most).unwrap_or(usize::MAX),
            used: AtomicUsize::new(0),
            largest: AtomicUsize::new(0),
            turn: Mutex::new(()),
            freed: Notify::new(),
        })
    }

    /// Waits until a slice of inputs may be prepared. What it will probably take is held until the returned value
    /// is dropped. A slice may always be prepared while nothing is held. No deadlock: prepared inputs need nothing but the
    /// model to be computed, and then free their bytes.
    pub async fn room(self: &Arc<Self>) -> Held {
        let _turn = self.turn.lock().await;
        while self.used.load(Ordering::Acquire) >= self.most {
            self.freed.notified().await;
        }
        self.hold(self.largest.load(Ordering::Relaxed))
    }

    /// Holds the bytes of a slice that was prepared, until the returned value is dropped; None for 0 bytes. Later slices are
    /// expected to take at least as much.
    pub(super) fn slice(self: &Arc<Self>, bytes: usize) -> Option<Arc<Held>> {
        self.largest.fetch_max(bytes, Ordering::Relaxed);
        (bytes > 0).then(|| Arc::new(self.hold(bytes)))
    }

    fn hold(self: &Arc<Self>, bytes: usize) -> Held {
        self.used.fetch_add(bytes, Ordering::AcqRel);
        Held { memory: self.clone(), bytes }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if self.bytes > 0 {
            self.memory.used.fetch_sub(self.bytes, Ordering::AcqRel);
            // Kept for the next that waits, if none does now.
            self.memory.freed.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn there_is_room_while_less_than_the_most_is_held_and_in_the_order_of_arrival() {
        let memory = Memory::new(10);
        let first = memory.room().await;
        let large = memory.slice(25);
        drop(first);
        let (mut second, mut third) = (Box::pin(memory.room()), Box::pin(memory.room()));
        assert!(second.as_mut().now_or_never().is_none() && third.as_mut().now_or_never().is_none());
        drop(large);
        assert!(third.as_mut().now_or_never().is_none(), "it came later");
        let second = second.now_or_never().expect("nothing is held");
        assert!(third.as_mut().now_or_never().is_none(), "the second may take as much as the largest");
        drop(second);
        assert!(third.now_or_never().is_some());
    }

    #[tokio::test]
    async fn inputs_without_bytes_always_have_room() {
        let memory = Memory::new(1);
        let all = [memory.room().await, memory.room().await];
        assert!(memory.slice(0).is_none());
        assert_eq!(all.len(), 2);
    }
}
