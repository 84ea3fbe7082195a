//! A semaphore that is fair to queues and requesters: decides whose waiting task gets the next turn. There is one for the
//! thread for long preparation (such as that of a grammar), one for preparing further inputs, and one for fetching files.
//! Queues have turns by their shares, counted in the time that turns take. The requesters of a queue take turns, however
//! many tasks each has. Owns the waiting tasks. Does no I/O.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::batching::{Owner, Shares};

/// The turns of one kind of work, and the tasks that wait for one. Clones share the state.
#[derive(Clone)]
pub(super) struct Turns(Arc<Mutex<TurnState>>);

#[derive(Default)]
struct TurnState {
    /// The turns that are under way. Bound: `max_turns`, and one more for each queue.
    current: Vec<CurrentTurn>,
    /// The most turns at once. A requester has at most half of them, and so has a server from which files are fetched.
    max_turns: usize,
    /// Whether a queue without a turn may have one although there are `max_turns`: turns that last until a server answers,
    /// or until there is memory, are not given back soon.
    has_one_for_each_queue: bool,
    /// The time that queues have had, in microseconds.
    shares: Shares,
    /// The waiting tasks, in the order of arrival. A task that no longer waits has dropped its receiver.
    waiting: Vec<WaitingTask>,
    /// The rank of each requester that waits or has a turn; the lowest rank of a queue is next. After n turns in all, a
    /// requester that arrives gets the rank 2n, and the requester of the n-th turn gets 2n + 1. So a newcomer goes after
    /// the requesters that were waiting when it arrived, and before the requester of the latest turn.
    ranks: HashMap<Owner, u64>,
    /// The number of turns so far.
    turns: u64,
}

struct CurrentTurn {
    owner: Owner,
    server: Option<u64>,
    began: Instant,
}

/// A task that waits for its turn.
struct WaitingTask {
    owner: Owner,
    /// The hash of the server's name. None: turns at this server are not limited.
    server: Option<u64>,
    /// Written once, by whoever begins its turn; read by the task.
    begin: oneshot::Sender<Turn>,
}

/// While this exists, a task has a turn.
pub(super) struct Turn {
    turns: Turns,
    owner: Owner,
    server: Option<u64>,
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.turns.0.lock().end(self.owner, self.server, Instant::now());
        self.turns.begin();
    }
}

impl Turns {
    /// At most `max_turns` turns at once.
    pub(super) fn new(max_turns: usize) -> Self {
        Self(Arc::new(Mutex::new(TurnState { max_turns, ..TurnState::default() })))
    }

    /// At most `max_turns` turns at once; beyond them, a queue that has no turn may have one.
    pub(super) fn with_one_for_each_queue(max_turns: usize) -> Self {
        let state = TurnState { max_turns, has_one_for_each_queue: true, ..TurnState::default() };
        Self(Arc::new(Mutex::new(state)))
    }

    /// Waits until a task of `owner` has its turn. Safe to cancel.
    pub(super) async fn take(&self, owner: Owner) -> Turn {
        self.take_at(None, owner).await
    }

    /// As [`Turns::take`], for a turn at a server from which files are fetched.
    pub(super) async fn take_at(&self, server: Option<u64>, owner: Owner) -> Turn {
        let (begin, begun) = oneshot::channel();
        {
            let mut state = self.0.lock();
            let rank = 2 * state.turns;
            state.ranks.entry(owner).or_insert(rank);
            state.waiting.push(WaitingTask { owner, server, begin });
        }
        self.begin();
        match begun.await {
            Ok(turn) => turn,
            // The state keeps the sender until it has begun the turn, and this task keeps the state.
            Err(_) => std::future::pending().await,
        }
    }

    /// Begins the turns of all tasks that may have one: the end of one turn can make room for two, one at the server and
    /// one of the requester. If a task no longer waits, its turn is dropped.
    fn begin(&self) {
        loop {
            let next = self.0.lock().next(Instant::now());
            let Some(WaitingTask { begin, owner, server }) = next else { return };
            let _ = begin.send(Turn { turns: self.clone(), owner, server });
        }
    }
}

impl TurnState {
    /// Ends a turn of this requester at this server, and counts its time for the requester's queue.
    fn end(&mut self, owner: Owner, server: Option<u64>, now: Instant) {
        let has_ended = |current: &CurrentTurn| current.owner == owner && current.server == server;
        if let Some(index) = self.current.iter().position(has_ended) {
            let took = now.saturating_duration_since(self.current.remove(index).began);
            self.shares.serve(owner.queue, u64::try_from(took.as_micros()).unwrap_or(u64::MAX));
        }
    }

    /// Begins the turn of the next task that may have one, and returns that task.
    fn next(&mut self, now: Instant) -> Option<WaitingTask> {
        self.remove_departed();
        let of_queue =
            |task: &WaitingTask| self.current.iter().filter(|it| it.owner.queue == task.owner.queue).count();
        let may_begin = |(_, task): &(usize, &WaitingTask)| {
            let is_full = self.current.len() >= self.max_turns;
            let is_first_of_queue = self.has_one_for_each_queue && of_queue(task) == 0;
            if is_full && !is_first_of_queue {
                return false;
            }
            let of_requester = self.current.iter().filter(|current| current.owner == task.owner);
            let at_server = self.current.iter().filter(|current| current.server == task.server);
            let half = self.max_turns.div_ceil(2);
            of_requester.count() < half
                && (task.server.is_none() || at_server.count() < half || is_first_of_queue)
        };
        let rank = |(_, task): &(usize, &WaitingTask)| {
            // The time of a turn is known at its end, so of queues with equal starts the one with fewer turns is next.
            let queue = (self.shares.start(task.owner.queue), of_queue(task));
            (queue, self.ranks.get(&task.owner).copied())
        };
        // Of tasks with the same rank, `min_by_key` returns the first, which arrived first.
        let (index, _) = self.waiting.iter().enumerate().filter(may_begin).min_by_key(rank)?;
        let task = self.waiting.remove(index);
        self.turns += 1;
        self.ranks.insert(task.owner, 2 * self.turns + 1);
        self.current.push(CurrentTurn { owner: task.owner, server: task.server, began: now });
        Some(task)
    }

    /// Forgets tasks that no longer wait, and requesters without a task.
    fn remove_departed(&mut self) {
        self.waiting.retain(|task| !task.begin.is_closed());
        let current = self.current.iter().map(|current| current.owner);
        let present: HashSet<Owner> = current.chain(self.waiting.iter().map(|task| task.owner)).collect();
        self.ranks.retain(|owner, _| present.contains(owner));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures_util::FutureExt as _;
    use tokio::task::JoinHandle;

    use super::*;
    use crate::batching::QueueShare;

    fn of(requester: u64) -> Owner {
        Owner { requester, ..Owner::default() }
    }

    /// Starts a task that waits for its turn.
    async fn waits(turns: &Turns, requester: u64) -> JoinHandle<Turn> {
        let turns = turns.clone();
        let task = tokio::spawn(async move { turns.take(of(requester)).await });
        tokio::task::yield_now().await;
        task
    }

    #[tokio::test]
    async fn a_newcomer_waits_for_the_current_turn_and_one_more_at_most() {
        let turns = Turns::new(1);
        let mut turn = turns.take(of(1)).await;
        let mut waiting = Vec::new();
        for requester in [1, 1, 1, 2, 3, 2] {
            waiting.push((requester, waits(&turns, requester).await));
        }
        let mut order = Vec::new();
        while !waiting.is_empty() {
            drop(turn);
            tokio::task::yield_now().await;
            let index = waiting.iter().position(|(_, task)| task.is_finished()).expect("one has a turn");
            let (requester, task) = waiting.remove(index);
            turn = task.await.unwrap();
            order.push(requester);
        }
        assert_eq!(order, [2, 3, 1, 2, 1, 1]);
    }

    #[tokio::test]
    async fn a_requester_has_at_most_half_of_several_turns_at_once() {
        let turns = Turns::new(4);
        let mut first = Vec::new();
        for _ in 0..4 {
            first.push(waits(&turns, 1).await);
        }
        let begun: Vec<bool> = first.iter().map(|task| task.is_finished()).collect();
        assert_eq!(begun, [true, true, false, false]);
        let (second, third) = (waits(&turns, 2).await, waits(&turns, 3).await);
        let fourth = waits(&turns, 4).await;
        assert!(second.is_finished() && third.is_finished() && !fourth.is_finished());
        drop(second.await.unwrap());
        tokio::task::yield_now().await;
        assert!(fourth.is_finished() && !first[2].is_finished(), "the first requester has its half");
    }

    #[tokio::test]
    async fn a_server_has_at_most_half_of_several_turns_whoever_asks() {
        let turns = Turns::new(4);
        let mut slow = Vec::new();
        for requester in 0..4 {
            let turns = turns.clone();
            slow.push(tokio::spawn(async move { turns.take_at(Some(7), of(requester)).await }));
            tokio::task::yield_now().await;
        }
        let begun: Vec<bool> = slow.iter().map(|task| task.is_finished()).collect();
        assert_eq!(begun, [true, true, false, false]);
        let other = turns.take_at(Some(8), of(9)).now_or_never();
        assert!(other.is_some(), "the other half is for other servers");
        drop(slow.remove(0).await.unwrap());
        tokio::task::yield_now().await;
        assert!(slow[1].is_finished() && !slow[2].is_finished());
    }

    #[tokio::test]
    async fn the_end_of_one_turn_makes_room_for_two() {
        let turns = Turns::new(4);
        let hostile = [turns.take_at(Some(7), of(1)).await, turns.take_at(Some(7), of(1)).await];
        let wait = |server, requester| {
            let turns = turns.clone();
            tokio::spawn(async move { turns.take_at(Some(server), of(requester)).await })
        };
        let (third, innocent) = (wait(8, 1), wait(7, 2));
        tokio::task::yield_now().await;
        assert!(!third.is_finished() && !innocent.is_finished());
        let [first, _second] = hostile;
        drop(first);
        tokio::task::yield_now().await;
        assert!(third.is_finished() && innocent.is_finished());
    }

    #[tokio::test]
    async fn a_task_that_stopped_waiting_gets_no_turn() {
        let turns = Turns::new(1);
        let turn = turns.take(of(1)).await;
        let gone = waits(&turns, 2).await;
        let stays = waits(&turns, 3).await;
        gone.abort();
        tokio::task::yield_now().await;
        drop(turn);
        drop(stays.await.unwrap());
        assert!(turns.take(of(4)).now_or_never().is_some(), "nobody has the turn");
        assert!(turns.0.lock().ranks.len() <= 1);
    }

    #[tokio::test(start_paused = true)]
    async fn queues_have_turns_by_their_shares_whatever_the_number_of_their_requesters() {
        let turns = Turns::new(1);
        let mut turn = turns.take(of(99)).await;
        let mut waiting = Vec::new();
        for requester in 0..40 {
            let other =
                Owner { queue: QueueShare { queue: 1, share: 3_000 }, requester: 1, background: false };
            for owner in [of(requester), other] {
                let turns = turns.clone();
                waiting.push((owner, tokio::spawn(async move { turns.take(owner).await })));
                tokio::task::yield_now().await;
            }
        }
        let mut of_other = 0;
        for _ in 0..40 {
            tokio::time::sleep(Duration::from_millis(10)).await;
            drop(turn);
            tokio::task::yield_now().await;
            let index = waiting.iter().position(|(_, task)| task.is_finished()).expect("one has a turn");
            let (owner, task) = waiting.remove(index);
            turn = task.await.unwrap();
            of_other += owner.queue.queue;
        }
        assert!((29..=31).contains(&of_other), "{of_other} of 40 turns");
    }

    #[tokio::test]
    async fn a_queue_without_a_turn_has_one_though_all_are_taken() {
        let turns = Turns::with_one_for_each_queue(2);
        let held = [turns.take(of(1)).await, turns.take(of(2)).await];
        assert!(turns.take(of(3)).now_or_never().is_none());
        let other = Owner { queue: QueueShare { queue: 1, share: 1 }, requester: 1, background: false };
        let _one = turns.take(other).now_or_never().expect("the queue has none");
        assert!(turns.take(Owner { requester: 2, ..other }).now_or_never().is_none());
        drop(held);
    }
}
