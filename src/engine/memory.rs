//! The memory of prepared inputs, such as pixels or sound, which may be large. Decides when a task may prepare more
//! inputs. Owns the count of their bytes.
//!
//! While half of the limit is free, everybody may prepare. Of the other half, a requester with an eighth of the limit or
//! more gets nothing. So one requester cannot keep the others from preparing.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::oneshot;

/// A requester with this part of the limit gets nothing of the limit's second half.
const SHARE_DIVISOR: usize = 8;

/// Bytes of the inputs that are prepared and not computed yet. Shared by all tasks of a worker.
pub struct Memory {
    /// While at least this many bytes are used, nothing more is prepared.
    limit: usize,
    /// Locked briefly by whoever prepares or drops inputs: at most for one pass over the tasks that wait.
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Bytes of prepared inputs, plus the bytes that slices in preparation will probably take.
    used: usize,
    /// The same for each requester that uses any.
    used_by: BTreeMap<u64, usize>,
    /// Bytes of the largest slice so far. The next slice is expected to take as many.
    largest: usize,
    /// The tasks that wait for room, in the order of their arrival.
    waiting: VecDeque<Waiting>,
}

struct Waiting {
    requester: u64,
    grant: oneshot::Sender<Reservation>,
}

/// Bytes that count as used until this is dropped.
pub struct Reservation {
    memory: Arc<Memory>,
    requester: Option<u64>,
    bytes: usize,
}

impl Memory {
    /// Starts with nothing used. Preparation pauses while `limit` bytes or more are used. Slices that have room already
    /// may exceed the limit.
    pub fn new(limit: u64) -> Arc<Self> {
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        Arc::new(Self { limit, state: Mutex::default() })
    }

    /// Waits until a slice of a requester's inputs may be prepared. The bytes that it will probably take count as used
    /// until the returned value is dropped. A slice may always be prepared while nothing is used. This cannot deadlock:
    /// prepared inputs need only the model to be computed, and then free their bytes.
    pub async fn room(self: &Arc<Self>, requester: u64) -> Reservation {
        let granted = {
            let mut state = self.state.lock();
            if self.has_room(&state, requester) {
                let bytes = state.largest;
                return self.add(&mut state, Some(requester), bytes);
            }
            let (grant, granted) = oneshot::channel();
            state.waiting.push_back(Waiting { requester, grant });
            granted
        };
        match granted.await {
            Ok(reservation) => reservation,
            // Whoever waits holds the memory, so the sender is not dropped unused.
            Err(_) => Reservation { memory: self.clone(), requester: None, bytes: 0 },
        }
    }

    /// Reserves the bytes of inputs that were prepared, until the returned value is dropped. Without a requester they count
    /// towards the total only. None for 0 bytes.
    pub(super) fn reserve(self: &Arc<Self>, requester: Option<u64>, bytes: usize) -> Option<Reservation> {
        (bytes > 0).then(|| self.add(&mut self.state.lock(), requester, bytes))
    }

    /// Later slices are expected to take at least as many bytes.
    pub(super) fn learn_slice(&self, bytes: usize) {
        let mut state = self.state.lock();
        state.largest = state.largest.max(bytes);
    }

    fn has_room(&self, state: &State, requester: u64) -> bool {
        let used_by = state.used_by.get(&requester).copied().unwrap_or(0);
        let limit =
            if used_by < self.limit.div_ceil(SHARE_DIVISOR) { self.limit } else { self.limit.div_ceil(2) };
        state.used < limit
    }

    fn add(self: &Arc<Self>, state: &mut State, requester: Option<u64>, bytes: usize) -> Reservation {
        state.used += bytes;
        if let (Some(requester), 1..) = (requester, bytes) {
            *state.used_by.entry(requester).or_default() += bytes;
        }
        Reservation { memory: self.clone(), requester, bytes }
    }

    /// Grants room to those that wait and may have it. Returns the reservations of tasks that have stopped waiting, which
    /// must be dropped without the lock.
    fn grant(self: &Arc<Self>, state: &mut State) -> Vec<Reservation> {
        let mut unwanted = Vec::new();
        let mut index = 0;
        while let Some(waiting) = state.waiting.get(index) {
            if !self.has_room(state, waiting.requester) {
                index += 1;
                continue;
            }
            let Some(Waiting { requester, grant }) = state.waiting.remove(index) else { break };
            let bytes = state.largest;
            unwanted.extend(grant.send(self.add(state, Some(requester), bytes)).err());
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
        state.used -= self.bytes;
        if let Some(requester) = self.requester
            && let Some(used) = state.used_by.get_mut(&requester)
        {
            *used -= self.bytes;
            if *used == 0 {
                state.used_by.remove(&requester);
            }
        }
        let unwanted = memory.grant(&mut state);
        drop(state);
        drop(unwanted);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    const ONE: u64 = 1;
    const OTHER: u64 = 2;

    #[tokio::test]
    async fn room_is_given_in_order_of_arrival_while_less_than_the_limit_is_used() {
        let memory = Memory::new(10);
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
        let memory = Memory::new(80);
        let half = memory.reserve(Some(ONE), 40);
        let mut more = Box::pin(memory.room(ONE));
        assert!(more.as_mut().now_or_never().is_none());
        assert!(memory.room(OTHER).now_or_never().is_some(), "the second half is for those with little");
        let of_other = memory.reserve(Some(OTHER), 10);
        assert!(memory.room(OTHER).now_or_never().is_none());
        drop(half);
        assert!(more.now_or_never().is_some());
        drop(of_other);
        assert_eq!(memory.state.lock().used, 0);
    }

    #[tokio::test]
    async fn a_task_that_stops_waiting_holds_up_nobody() {
        let memory = Memory::new(10);
        memory.learn_slice(10);
        let first = memory.reserve(Some(ONE), 10);
        let (mut second, mut third) = (Box::pin(memory.room(ONE)), Box::pin(memory.room(ONE)));
        assert!(second.as_mut().now_or_never().is_none() && third.as_mut().now_or_never().is_none());
        drop(second);
        drop(first);
        assert!(third.now_or_never().is_some());
        assert_eq!(memory.state.lock().used, 0);
    }

    #[tokio::test]
    async fn inputs_without_bytes_always_have_room() {
        let memory = Memory::new(1);
        let all = [memory.room(ONE).await, memory.room(ONE).await];
        assert!(memory.reserve(Some(ONE), 0).is_none());
        assert_eq!(all.len(), 2);
    }
}
