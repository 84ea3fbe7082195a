//! Decides whose task is prepared next on the thread for long preparation (such as that of a grammar), whose further
//! inputs are prepared next, whose files are fetched next, and which tasks are put off instead. Requesters take turns,
//! however many tasks each has. A waiting task holds one of the messages that the broker grants. So when too many
//! wait, tasks of the requester that has the most are put off: they wait in a retry queue. Owns the list of waiting
//! tasks. Does no I/O.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout};

/// How often each waiting task checks whether too many tasks wait.
const REVIEW_INTERVAL: Duration = Duration::from_millis(100);
/// All waiting tasks may go on waiting if their turns together are expected to take less than this.
const SHORT_WAIT: Duration = Duration::from_secs(1);
/// The weight of the latest turn in the average of how long turns take.
const LATEST_WEIGHT: f64 = 0.25;

/// The tasks that wait for a turn. Clones share the list.
#[derive(Clone)]
pub(super) struct Turns(Arc<Mutex<Lane>>);

#[derive(Default)]
struct Lane {
    /// The turns that are under way. Bound: `max_turns`.
    current: Vec<Current>,
    /// The most turns at once. A requester has at most half of them, and so has a server from which files are fetched.
    max_turns: usize,
    /// How long turns take, on average.
    average_turn: Duration,
    /// The waiting tasks, in the order of arrival. A task that no longer waits has dropped its receiver.
    waiting: Vec<WaitingTask>,
    /// The rank of each requester that waits or has a turn; the lowest rank is next. After n turns in all, a requester
    /// that arrives gets the rank 2n, and the requester of the n-th turn gets 2n + 1. So a newcomer goes after the
    /// requesters that were waiting when it arrived, and before the requester of the latest turn.
    ranks: HashMap<u64, u64>,
    /// The number of turns so far.
    turns: u64,
    /// The most tasks that may wait, unless all of them are expected to be done within [`SHORT_WAIT`].
    max_waiting: usize,
}

struct Current {
    requester: u64,
    server: Option<u64>,
    began: Instant,
}

/// A task that waits for its turn.
struct WaitingTask {
    requester: u64,
    /// The hash of the server's name. None: turns at this server are not limited.
    server: Option<u64>,
    /// Whether it may be sent to wait in a retry queue.
    may_leave: bool,
    /// Written once, by whoever ends a turn or reviews the lane; read by the task.
    decision: oneshot::Sender<Decision>,
}

enum Decision {
    Begin(Turn),
    PutOff,
}

/// While this exists, a task has a turn.
pub(super) struct Turn {
    turns: Turns,
    requester: u64,
    server: Option<u64>,
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.turns.0.lock().end(self.requester, self.server, Instant::now());
        self.turns.begin();
    }
}

/// Too many tasks wait, and this task's requester has the most of them: the task is to wait in a retry queue.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Crowded;

impl Turns {
    /// Creates an empty list, for at most `max_turns` turns at once. [`Turns::set_granted`] explains `granted`.
    pub(super) fn new(granted: u16, max_turns: usize) -> Self {
        let turns = Self(Arc::default());
        turns.0.lock().max_turns = max_turns;
        turns.set_granted(granted);
        turns
    }

    /// Sets how many unsettled messages the broker may send now. At most half of them may be tasks that wait for a
    /// turn.
    pub(super) fn set_granted(&self, granted: u16) {
        self.0.lock().max_waiting = (usize::from(granted) / 2).max(1);
    }

    /// Waits until a task of `requester` has its turn. Without `may_leave`, it waits as long as that takes. Safe to
    /// cancel.
    ///
    /// # Errors
    /// [`Crowded`]: the task is to wait in a retry queue.
    pub(super) async fn take(&self, requester: u64, may_leave: bool) -> Result<Turn, Crowded> {
        self.take_at(None, requester, may_leave).await
    }

    /// As [`Turns::take`], for a turn at a server from which files are fetched.
    pub(super) async fn take_at(
        &self,
        server: Option<u64>,
        requester: u64,
        may_leave: bool,
    ) -> Result<Turn, Crowded> {
        let (decision, mut decided) = oneshot::channel();
        {
            let mut lane = self.0.lock();
            let rank = 2 * lane.turns;
            lane.ranks.entry(requester).or_insert(rank);
            lane.waiting.push(WaitingTask { requester, server, may_leave, decision });
            lane.review(Instant::now());
        }
        self.begin();
        loop {
            match timeout(REVIEW_INTERVAL, &mut decided).await {
                Ok(Ok(Decision::Begin(turn))) => return Ok(turn),
                // The sender is dropped only after a decision.
                Ok(Ok(Decision::PutOff) | Err(_)) => return Err(Crowded),
                Err(_) if may_leave => self.0.lock().review(Instant::now()),
                Err(_) => {}
            }
        }
    }

    /// Begins the turns of all tasks that may have one: the end of one turn can make room for two, one at the server and
    /// one of the requester. If a task no longer waits, its turn is dropped.
    fn begin(&self) {
        loop {
            let next = self.0.lock().next(Instant::now());
            let Some(WaitingTask { decision, requester, server, .. }) = next else { return };
            let _ = decision.send(Decision::Begin(Turn { turns: self.clone(), requester, server }));
        }
    }
}

impl Lane {
    /// Ends a turn of this requester at this server.
    fn end(&mut self, requester: u64, server: Option<u64>, now: Instant) {
        let is_it = |current: &Current| current.requester == requester && current.server == server;
        if let Some(index) = self.current.iter().position(is_it) {
            let current = self.current.remove(index);
            let duration = now.saturating_duration_since(current.began);
            self.average_turn =
                self.average_turn.mul_f64(1.0 - LATEST_WEIGHT) + duration.mul_f64(LATEST_WEIGHT);
        }
    }

    /// Begins the turn of the next task that may have one, and returns that task.
    fn next(&mut self, now: Instant) -> Option<WaitingTask> {
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
        self.current.push(Current { requester: task.requester, server: task.server, began: now });
        Some(task)
    }

    /// Sends tasks to a retry queue while too many wait: each time the latest task of the requester that has the most.
    /// Ties between requesters are broken at random. Otherwise a task that returns from its retry queue would be the
    /// latest each time, and be put off again.
    fn review(&mut self, now: Instant) {
        self.remove_departed();
        let elapsed = |current: &Current| now.saturating_duration_since(current.began);
        let turn_time = self.current.iter().map(elapsed).max().unwrap_or_default().max(self.average_turn);
        let total_time = |waiting: usize| turn_time * waiting as u32 / self.max_turns.max(1) as u32;
        while self.waiting.len() > self.max_waiting && total_time(self.waiting.len()) > SHORT_WAIT {
            let mut counts: HashMap<u64, usize> = HashMap::new();
            for task in &self.waiting {
                *counts.entry(task.requester).or_default() += 1;
            }
            let keys: HashMap<u64, (usize, u32)> =
                counts.into_iter().map(|(requester, count)| (requester, (count, rand::random()))).collect();
            let leaving = self.waiting.iter().enumerate().filter(|(_, task)| task.may_leave);
            // Of tasks with the same key, `max_by_key` returns the last, which is the latest of its requester.
            let Some((index, _)) = leaving.max_by_key(|(_, task)| keys.get(&task.requester)) else {
                return;
            };
            let _ = self.waiting.remove(index).decision.send(Decision::PutOff);
        }
    }

    /// Forgets tasks that no longer wait, and requesters without a task.
    fn remove_departed(&mut self) {
        self.waiting.retain(|task| !task.decision.is_closed());
        let current = self.current.iter().map(|current| current.requester);
        let present: HashSet<u64> = current.chain(self.waiting.iter().map(|task| task.requester)).collect();
        self.ranks.retain(|requester, _| present.contains(requester));
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    const GRANTED: u16 = 8;

    /// Starts a task that waits for its turn.
    async fn waits(
        turns: &Turns,
        requester: u64,
        may_leave: bool,
    ) -> tokio::task::JoinHandle<Result<Turn, Crowded>> {
        let turns = turns.clone();
        let task = tokio::spawn(async move { turns.take(requester, may_leave).await });
        tokio::task::yield_now().await;
        task
    }

    /// Returns the requesters in the order of their turns until nobody waits. Each turn takes `each`.
    async fn order(
        mut turn: Turn,
        each: Duration,
        mut waiting: Vec<(u64, tokio::task::JoinHandle<Result<Turn, Crowded>>)>,
    ) -> Vec<u64> {
        let mut order = Vec::new();
        while !waiting.is_empty() {
            tokio::time::sleep(each).await;
            drop(turn);
            tokio::task::yield_now().await;
            let index = waiting.iter().position(|(_, task)| task.is_finished()).expect("one has a turn");
            let (requester, task) = waiting.remove(index);
            turn = task.now_or_never().unwrap().unwrap().expect("it has its turn");
            order.push(requester);
        }
        order
    }

    #[tokio::test(start_paused = true)]
    async fn a_newcomer_waits_for_the_current_turn_and_one_more_at_most() {
        let turns = Turns::new(GRANTED, 1);
        let turn = turns.take(1, true).await.unwrap();
        let mut waiting = Vec::new();
        for requester in [1, 1, 1, 2, 3, 2] {
            waiting.push((requester, waits(&turns, requester, true).await));
        }
        let order = order(turn, Duration::from_millis(20), waiting).await;
        assert_eq!(order, [2, 3, 1, 2, 1, 1]);
    }

    #[tokio::test(start_paused = true)]
    async fn slow_turns_let_half_the_granted_tasks_wait_and_put_off_the_rest() {
        let turns = Turns::new(GRANTED, 1);
        let _turn = turns.take(1, true).await.unwrap();
        let mut waiting = Vec::new();
        for requester in [2, 1, 1, 1, 1, 1, 1] {
            waiting.push(waits(&turns, requester, true).await);
        }
        tokio::time::sleep(Duration::from_millis(90)).await;
        assert!(waiting.iter().all(|task| !task.is_finished()), "seven turns of 90 ms take less than 1 s");
        tokio::time::sleep(Duration::from_millis(300)).await;
        let left: Vec<bool> = waiting.iter().map(|task| task.is_finished()).collect();
        assert_eq!(left, [false, false, false, false, true, true, true], "the latest of requester 1");
        let late = waits(&turns, 3, true).await;
        assert!(waiting[3].is_finished() && !late.is_finished(), "there is room for another requester");
    }

    #[tokio::test(start_paused = true)]
    async fn a_newcomer_sometimes_stays_where_each_requester_has_one_task() {
        let turns = Turns::new(GRANTED, 1);
        let _turn = turns.take(0, true).await.unwrap();
        let mut waiting = Vec::new();
        for requester in 1..=4 {
            waiting.push(waits(&turns, requester, true).await);
        }
        tokio::time::sleep(SHORT_WAIT).await;
        let mut stayed = 0;
        for newcomer in 5..105 {
            let task = waits(&turns, newcomer, true).await;
            stayed += u32::from(!task.is_finished());
            waiting.push(task);
        }
        // Each has a chance of four in five.
        assert!((40..100).contains(&stayed), "{stayed}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_requester_has_at_most_half_of_several_turns_at_once() {
        let turns = Turns::new(GRANTED, 4);
        let mut first = Vec::new();
        for _ in 0..4 {
            first.push(waits(&turns, 1, true).await);
        }
        let begun: Vec<bool> = first.iter().map(|task| task.is_finished()).collect();
        assert_eq!(begun, [true, true, false, false]);
        let (second, third) = (waits(&turns, 2, true).await, waits(&turns, 3, true).await);
        let fourth = waits(&turns, 4, true).await;
        assert!(second.is_finished() && third.is_finished() && !fourth.is_finished());
        drop(second.await.unwrap().unwrap());
        tokio::task::yield_now().await;
        assert!(fourth.is_finished() && !first[2].is_finished(), "the first requester has its half");
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_has_at_most_half_of_several_turns_whoever_asks() {
        let turns = Turns::new(GRANTED, 4);
        let mut slow = Vec::new();
        for requester in 0..4 {
            let turns = turns.clone();
            slow.push(tokio::spawn(async move { turns.take_at(Some(7), requester, true).await }));
            tokio::task::yield_now().await;
        }
        let begun: Vec<bool> = slow.iter().map(|task| task.is_finished()).collect();
        assert_eq!(begun, [true, true, false, false]);
        let other = turns.take_at(Some(8), 9, true).now_or_never();
        assert!(other.is_some_and(|turn| turn.is_ok()), "the other half is for other servers");
        drop(slow.remove(0).await.unwrap().unwrap());
        tokio::task::yield_now().await;
        assert!(slow[1].is_finished() && !slow[2].is_finished());
    }

    #[tokio::test(start_paused = true)]
    async fn the_end_of_one_turn_makes_room_for_two() {
        let turns = Turns::new(GRANTED, 4);
        let hostile = [turns.take_at(Some(7), 1, true).await, turns.take_at(Some(7), 1, true).await];
        let wait = |server, requester| {
            let turns = turns.clone();
            tokio::spawn(async move { turns.take_at(Some(server), requester, true).await })
        };
        let (third, innocent) = (wait(8, 1), wait(7, 2));
        tokio::task::yield_now().await;
        assert!(!third.is_finished() && !innocent.is_finished());
        let [first, _second] = hostile;
        drop(first);
        tokio::task::yield_now().await;
        assert!(third.is_finished() && innocent.is_finished());
    }

    #[tokio::test(start_paused = true)]
    async fn tasks_that_cannot_be_put_off_keep_waiting() {
        let turns = Turns::new(GRANTED, 1);
        let turn = turns.take(1, true).await.unwrap();
        let mut waiting = Vec::new();
        for _ in 0..6 {
            waiting.push((1, waits(&turns, 1, false).await));
        }
        let order = order(turn, Duration::from_secs(2), waiting).await;
        assert_eq!(order, [1; 6]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_task_that_stopped_waiting_gets_no_turn() {
        let turns = Turns::new(GRANTED, 1);
        let turn = turns.take(1, true).await.unwrap();
        let gone = waits(&turns, 2, true).await;
        let stays = waits(&turns, 3, true).await;
        gone.abort();
        tokio::task::yield_now().await;
        drop(turn);
        assert!(stays.await.unwrap().is_ok());
        assert!(turns.take(4, true).now_or_never().is_some_and(|turn| turn.is_ok()), "nobody has the turn");
        assert!(turns.0.lock().ranks.is_empty() || turns.0.lock().ranks.len() == 1);
    }
}
