//! The memory of prepared inputs, such as pixels or sound, which may be large. Decides when a task may prepare more
//! inputs. Owns the count of their bytes.
//!
//! Of the bytes that a queue may hold (`QueueBytes`), everybody may prepare into the first half. Of the other half, a
//! requester with an eighth of the limit or more gets nothing. So neither a queue nor a requester can keep the others from
//! preparing.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::oneshot;

use crate::batching::{Owner, QueueBytes};

/// A requester with this part of the limit gets nothing of the limit's second half.
const SHARE_DIVISOR: u64 = 8;

/// Bytes of the inputs that are prepared and not computed yet. Shared by all tasks of a worker.
pub struct Memory {
    /// A requester with this many bytes gets nothing of the second half.
    much: u64,
    /// Locked briefly by whoever prepares or drops inputs: at most for one pass over the tasks that wait.
    state: Mutex<State>,
}

struct State {
    /// Bytes of prepared inputs, plus the bytes that slices in preparation will probably take.
    used: QueueBytes,
    /// Bytes of the largest slice so far. The next slice is expected to take as many.
    largest: u64,
    /// The tasks that wait for room, in the order of their arrival.
    waiting: VecDeque<Waiting>,
}

struct Waiting {
    owner: Owner,
    grant: oneshot::Sender<Reservation>,
}

/// Bytes that count as used until this is dropped.
pub struct Reservation {
    memory: Arc<Memory>,
    owner: Option<Owner>,
    bytes: u64,
}

impl Memory {
    /// Starts with nothing used. Preparation pauses while a queue uses as many bytes as it may hold. Slices that have room
    /// already may exceed the limit.
    pub fn new(used: QueueBytes) -> Arc<Self> {
        let much = used.limit().div_ceil(SHARE_DIVISOR);
        let state = State { used, largest: 0, waiting: VecDeque::new() };
        Arc::new(Self { much, state: Mutex::new(state) })
    }

    /// Waits until a slice of a requester's inputs may be prepared. The bytes that it will probably take count as used
    /// until the returned value is dropped. A slice may always be prepared while nothing is used. This cannot deadlock:
    /// prepared inputs need only the model to be computed, and then free their bytes.
    pub async fn room(self: &Arc<Self>, owner: Owner) -> Reservation {
        let granted = {
            let mut state = self.state.lock();
            if self.has_room(&state, owner) {
                let bytes = state.largest;
                return self.add(&mut state, Some(owner), bytes);
            }
            let (grant, granted) = oneshot::channel();
            state.waiting.push_back(Waiting { owner, grant });
            granted
        };
        match granted.await {
            Ok(reservation) => reservation,
            // Whoever waits holds the memory, so the sender is not dropped unused.
            Err(_) => Reservation { memory: self.clone(), owner: None, bytes: 0 },
        }
    }

    /// Reserves the bytes of inputs that were prepared, until the returned value is dropped. Without a requester they count
    /// towards the total only. None for 0 bytes.
    pub(super) fn reserve(self: &Arc<Self>, owner: Option<Owner>, bytes: usize) -> Option<Reservation> {
        (bytes > 0).then(|| self.add(&mut self.state.lock(), owner, bytes as u64))
    }

    /// Later slices are expected to take at least as many bytes.
    pub(super) fn learn_slice(&self, bytes: usize) {
        let mut state = self.state.lock();
        state.largest = state.largest.max(bytes as u64);
    }

    fn has_room(&self, state: &State, owner: Owner) -> bool {
        let most = state.used.most(owner.queue);
        let has_little = state.used.held_by(owner) < self.much;
        state.used.held(owner.queue) < if has_little { most } else { most.div_ceil(2) }
    }

    fn add(self: &Arc<Self>, state: &mut State, owner: Option<Owner>, bytes: u64) -> Reservation {
        state.used.add(owner, bytes);
        Reservation { memory: self.clone(), owner, bytes }
    }

    /// Grants room to those that wait and may have it. Returns the reservations of tasks that have stopped waiting, which
    /// must be dropped without the lock.
    fn grant(self: &Arc<Self>, state: &mut State) -> Vec<Reservation> {
        let mut unwanted = Vec::new();
        let mut index = 0;
        while let Some(waiting) = state.waiting.get(index) {
            if !self.has_room(state, waiting.owner) {
                index += 1;
                continue;
            }
            let Some(Waiting { owner, grant }) = state.waiting.remove(index) else { break };
            let bytes = state.largest;
            unwanted.extend(grant.send(self.add(state, Some(owner), bytes)).err());
        }
        unwanted
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if self.bytes == 0 {
            return;
        }
        let memory = self.memory.clone();
        let mut state = memory.state.lock();
        state.used.remove(self.owner, self.bytes);
        let unwanted = memory.grant(&mut state);
        drop(state);
        drop(unwanted);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;
    use crate::batching::QueueShare;

    const ONE: Owner = Owner { queue: QueueShare::LONE, requester: 1, background: false };
    const OTHER: Owner = Owner { requester: 2, ..ONE };

    fn memory(limit: u64) -> Arc<Memory> {
        Memory::new(QueueBytes::new(limit, &[QueueShare::LONE]))
    }

    #[tokio::test]
    async fn a_queue_of_many_requesters_keeps_no_other_queue_from_preparing() {
        let queues = [0, 1].map(|queue| QueueShare { queue, share: 1_000 });
        let memory = Memory::new(QueueBytes::new(80, &queues));
        let of = |queue: usize, requester| Owner { queue: queues[queue], requester, background: false };
        let flood: Vec<_> = (0..12).map(|requester| memory.reserve(Some(of(0, requester)), 5)).collect();
        assert!(memory.room(of(0, 99)).now_or_never().is_none(), "20 of 80 are kept for the other queue");
        for _ in 0..4 {
            assert!(memory.room(of(1, 1)).now_or_never().is_some());
            std::mem::forget(memory.reserve(Some(of(1, 1)), 2));
        }
        drop(flood);
    }

    #[tokio::test]
    async fn room_is_given_in_order_of_arrival_while_less_than_the_limit_is_used() {
        let memory = memory(10);
        let first = memory.room(ONE).await;
        memory.learn_slice(25);
        let large = memory.reserve(Some(ONE), 25);
        drop(first);
        let (mut second, mut third) = (Box::pin(memory.room(ONE)), Box::pin(memory.room(ONE)));
        assert!(second.as_mut().now_or_never().is_none() && third.as_mut().now_or_never().is_none());
        drop(large);
        assert!(third.as_mut().now_or_never().is_none(), "it arrived later");
        let second = second.now_or_never().expect("nothing is held");
        assert!(third.as_mut().now_or_never().is_none(), "the second may take as much as the largest");
        drop(second);
        assert!(third.now_or_never().is_some());
    }

    #[tokio::test]
    async fn a_requester_with_much_memory_keeps_no_other_from_preparing() {
        let memory = memory(80);
        let half = memory.reserve(Some(ONE), 40);
        let mut more = Box::pin(memory.room(ONE));
        assert!(more.as_mut().now_or_never().is_none());
        assert!(memory.room(OTHER).now_or_never().is_some(), "the second half is for those with little");
        let of_other = memory.reserve(Some(OTHER), 10);
        assert!(memory.room(OTHER).now_or_never().is_none());
        drop(half);
        assert!(more.now_or_never().is_some());
        drop(of_other);
        assert_eq!(memory.state.lock().used.total(), 0);
    }

    #[tokio::test]
    async fn a_task_that_stops_waiting_holds_up_nobody() {
        let memory = memory(10);
        memory.learn_slice(10);
        let first = memory.reserve(Some(ONE), 10);
        let (mut second, mut third) = (Box::pin(memory.room(ONE)), Box::pin(memory.room(ONE)));
        assert!(second.as_mut().now_or_never().is_none() && third.as_mut().now_or_never().is_none());
        drop(second);
        drop(first);
        assert!(third.now_or_never().is_some());
        assert_eq!(memory.state.lock().used.total(), 0);
    }

    #[tokio::test]
    async fn inputs_without_bytes_always_have_room() {
        let memory = memory(1);
        let all = [memory.room(ONE).await, memory.room(ONE).await];
        assert!(memory.reserve(Some(ONE), 0).is_none());
        assert_eq!(all.len(), 2);
    }
}
