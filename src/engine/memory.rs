//! The memory of prepared inputs, such as pixels or sound, which may be large. Decides when a task may prepare more
//! inputs. Owns the count of their bytes.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::{Mutex, Notify};

/// Bytes of the inputs that are prepared and not computed yet. Shared by all tasks of a worker.
pub struct Memory {
    /// While at least this many bytes are used, nothing more is prepared.
    limit: usize,
    /// Bytes of prepared inputs, plus the bytes that slices in preparation will probably take. Written by whoever
    /// prepares or drops inputs.
    used: AtomicUsize,
    /// Bytes of the largest slice so far. The next slice is expected to take as many.
    largest: AtomicUsize,
    /// Locked by the task that waits for room. The others wait for the lock, in the order of their arrival.
    turn: Mutex<()>,
    /// Notified when bytes become free. Awaited by the task that holds `turn`.
    freed: Notify,
}

/// Bytes that count as used until this is dropped.
pub struct Reservation {
    memory: Arc<Memory>,
    bytes: usize,
}

impl Memory {
    /// Starts with nothing used. Preparation pauses while `limit` bytes or more are used. Slices that have room already
    /// may exceed the limit.
    pub fn new(limit: u64) -> Arc<Self> {
        Arc::new(Self {
            limit: usize::try_from(limit).unwrap_or(usize::MAX),
            used: AtomicUsize::new(0),
            largest: AtomicUsize::new(0),
            turn: Mutex::new(()),
            freed: Notify::new(),
        })
    }

    /// Waits until a slice of inputs may be prepared. The bytes that it will probably take count as used until the
    /// returned value is dropped. A slice may always be prepared while nothing is used. This cannot deadlock:
    /// prepared inputs need only the model to be computed, and then free their bytes.
    pub async fn room(self: &Arc<Self>) -> Reservation {
        let _turn = self.turn.lock().await;
        while self.used.load(Ordering::Acquire) >= self.limit {
            self.freed.notified().await;
        }
        self.reserve(self.largest.load(Ordering::Relaxed))
    }

    /// Reserves the bytes of a slice that was prepared, until the returned value is dropped; None for 0 bytes. Later
    /// slices are expected to take at least as many.
    pub(super) fn reserve_slice(self: &Arc<Self>, bytes: usize) -> Option<Arc<Reservation>> {
        self.largest.fetch_max(bytes, Ordering::Relaxed);
        (bytes > 0).then(|| Arc::new(self.reserve(bytes)))
    }

    fn reserve(self: &Arc<Self>, bytes: usize) -> Reservation {
        self.used.fetch_add(bytes, Ordering::AcqRel);
        Reservation { memory: self.clone(), bytes }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if self.bytes > 0 {
            self.memory.used.fetch_sub(self.bytes, Ordering::AcqRel);
            // If no task waits now, `Notify` keeps the notification for the next task that waits.
            self.memory.freed.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn room_is_given_in_order_of_arrival_while_less_than_the_limit_is_used() {
        let memory = Memory::new(10);
        let first = memory.room().await;
        let large = memory.reserve_slice(25);
        drop(first);
        let (mut second, mut third) = (Box::pin(memory.room()), Box::pin(memory.room()));
        assert!(second.as_mut().now_or_never().is_none() && third.as_mut().now_or_never().is_none());
        drop(large);
        assert!(third.as_mut().now_or_never().is_none(), "it arrived later");
        let second = second.now_or_never().expect("nothing is held");
        assert!(third.as_mut().now_or_never().is_none(), "the second may take as much as the largest");
        drop(second);
        assert!(third.now_or_never().is_some());
    }

    #[tokio::test]
    async fn inputs_without_bytes_always_have_room() {
        let memory = Memory::new(1);
        let all = [memory.room().await, memory.room().await];
        assert!(memory.reserve_slice(0).is_none());
        assert_eq!(all.len(), 2);
    }
}
