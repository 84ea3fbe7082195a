//! Decides whose task is prepared next on the thread for long preparation (such as that of a grammar), whose further
//! inputs are prepared next, and whose files are fetched next. Requesters take turns, however many tasks each has. Owns
//! the list of waiting tasks. Does no I/O.

use parking_lot::Mutex;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use tokio::sync::oneshot;

/// The tasks that wait for a turn. Clones share the list.
#[derive(Clone)]
pub(super) struct Turns(Arc<Mutex<Lane>>);

#[derive(Default)]
struct Lane {
    /// The turns that are under way. Bound: `max_turns`.
    current: Vec<Current>,
    /// The most turns at once. A requester has at most half of them, and so has a server from which files are fetched.
    max_turns: usize,
    /// The waiting tasks, in the order of arrival. A task that no longer waits has dropped its receiver.
    waiting: Vec<WaitingTask>,
    /// The rank of each requester that waits or has a turn; the lowest rank is next. After n turns in all, a requester
    /// that arrives gets the rank 2n, and the requester of the n-th turn gets 2n + 1. So a newcomer goes after the
    /// requesters that were waiting when it arrived, and before the requester of the latest turn.
    ranks: HashMap<u64, u64>,
    /// The number of turns so far.
    turns: u64,
}

struct Current {
    requester: u64,
    server: Option<u64>,
}

/// A task that waits for its turn.
struct WaitingTask {
    requester: u64,
    /// The hash of the server's name. None: turns at this server are not limited.
    server: Option<u64>,
    /// Written once, by whoever begins its turn; read by the task.
    begin: oneshot::Sender<Turn>,
}

/// While this exists, a task has a turn.
pub(super) struct Turn {
    turns: Turns,
    requester: u64,
    server: Option<u64>,
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.turns.0.lock().end(self.requester, self.server);
        self.turns.begin();
    }
}

impl Turns {
    /// Creates an empty list, for at most `max_turns` turns at once.
    pub(super) fn new(max_turns: usize) -> Self {
        Self(Arc::new(Mutex::new(Lane { max_turns, ..Lane::default() })))
    }

    /// Waits until a task of `requester` has its turn. Safe to cancel.
    pub(super) async fn take(&self, requester: u64) -> Turn {
        self.take_at(None, requester).await
    }

    /// As [`Turns::take`], for a turn at a server from which files are fetched.
    pub(super) async fn take_at(&self, server: Option<u64>, requester: u64) -> Turn {
        let (begin, begun) = oneshot::channel();
        {
            let mut lane = self.0.lock();
            let rank = 2 * lane.turns;
            lane.ranks.entry(requester).or_insert(rank);
            lane.waiting.push(WaitingTask { requester, server, begin });
        }
        self.begin();
        match begun.await {
            Ok(turn) => turn,
            // The lane keeps the sender until it has begun the turn, and this task holds the lane.
            Err(_) => std::future::pending().await,
        }
    }

    /// Begins the turns of all tasks that may have one: the end of one turn can make room for two, one at the server and
    /// one of the requester. If a task no longer waits, its turn is dropped.
    fn begin(&self) {
        loop {
            let next = self.0.lock().next();
            let Some(WaitingTask { begin, requester, server }) = next else { return };
            let _ = begin.send(Turn { turns: self.clone(), requester, server });
        }
    }
}

impl Lane {
    /// Ends a turn of this requester at this server.
    fn end(&mut self, requester: u64, server: Option<u64>) {
        let is_it = |current: &Current| current.requester == requester && current.server == server;
        if let Some(index) = self.current.iter().position(is_it) {
            self.current.remove(index);
        }
    }

    /// Begins the turn of the next task that may have one, and returns that task.
    fn next(&mut self) -> Option<WaitingTask> {
        self.remove_departed();
        if self.current.len() >= self.max_turns {
            return None;
        }
        let may_begin = |(_, task): &(usize, &WaitingTask)| {
            let of_requester = self.current.iter().filter(|current| current.requester == task.requester);
            let at_server = self.current.iter().filter(|current| current.server == task.server);
            let half = self.max_turns.div_ceil(2);
            of_requester.count() < half && (task.server.is_none() || at_server.count() < half)
        };
        let rank = |(_, task): &(usize, &WaitingTask)| self.ranks.get(&task.requester);
        // Of tasks with the same rank, `min_by_key` returns the first, which arrived first.
        let (index, _) = self.waiting.iter().enumerate().filter(may_begin).min_by_key(rank)?;
        let task = self.waiting.remove(index);
        self.turns += 1;
        self.ranks.insert(task.requester, 2 * self.turns + 1);
        self.current.push(Current { requester: task.requester, server: task.server });
        Some(task)
    }

    /// Forgets tasks that no longer wait, and requesters without a task.
    fn remove_departed(&mut self) {
        self.waiting.retain(|task| !task.begin.is_closed());
        let current = self.current.iter().map(|current| current.requester);
        let present: HashSet<u64> = current.chain(self.waiting.iter().map(|task| task.requester)).collect();
        self.ranks.retain(|requester, _| present.contains(requester));
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use tokio::task::JoinHandle;

    use super::*;

    /// Starts a task that waits for its turn.
    async fn waits(turns: &Turns, requester: u64) -> JoinHandle<Turn> {
        let turns = turns.clone();
        let task = tokio::spawn(async move { turns.take(requester).await });
        tokio::task::yield_now().await;
        task
    }

    #[tokio::test]
    async fn a_newcomer_waits_for_the_current_turn_and_one_more_at_most() {
        let turns = Turns::new(1);
        let mut turn = turns.take(1).await;
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
            slow.push(tokio::spawn(async move { turns.take_at(Some(7), requester).await }));
            tokio::task::yield_now().await;
        }
        let begun: Vec<bool> = slow.iter().map(|task| task.is_finished()).collect();
        assert_eq!(begun, [true, true, false, false]);
        let other = turns.take_at(Some(8), 9).now_or_never();
        assert!(other.is_some(), "the other half is for other servers");
        drop(slow.remove(0).await.unwrap());
        tokio::task::yield_now().await;
        assert!(slow[1].is_finished() && !slow[2].is_finished());
    }

    #[tokio::test]
    async fn the_end_of_one_turn_makes_room_for_two() {
        let turns = Turns::new(4);
        let hostile = [turns.take_at(Some(7), 1).await, turns.take_at(Some(7), 1).await];
        let wait = |server, requester| {
            let turns = turns.clone();
            tokio::spawn(async move { turns.take_at(Some(server), requester).await })
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
        let turn = turns.take(1).await;
        let gone = waits(&turns, 2).await;
        let stays = waits(&turns, 3).await;
        gone.abort();
        tokio::task::yield_now().await;
        drop(turn);
        drop(stays.await.unwrap());
        assert!(turns.take(4).now_or_never().is_some(), "nobody has the turn");
        assert!(turns.0.lock().ranks.len() <= 1);
    }
}
