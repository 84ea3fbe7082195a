//! Decides which sequences run, and which rows a step computes. Owns the waiting sequences in their order, and
//! for each running one the tokens left of its prompt and the tokens reserved for it.
//!
//! - A sequence is admitted when a slot is free and all tokens of its prompt and its longest answer can be
//!   reserved. So no sequence runs out of room half way.
//! - Sequences are admitted strictly in order, so that small ones never starve a large one. The order is the
//!   time of arrival; one level of priority counts as [`AGEING`] of waiting. Each sequence counts as come at least
//!   [`TURN`] after the one before it of the same requester, unless nothing waits.
//! - A step first has a row (1 token) for each sequence whose prompt is fed, then chunks of prompts in the
//!   order of admission, within the step's tokens. No more sequences run than a step has tokens, so that every
//!   prompt makes progress.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

/// The waiting time that one level of priority is worth.
pub const AGEING: Duration = Duration::from_secs(5);
/// How much later a background sequence counts than it came, at least.
pub const BACKGROUND: Duration = Duration::from_secs(60);
/// The same at most, however many of one requester wait: others come at last behind those that came long before.
pub const BACKGROUND_AT_MOST: Duration = Duration::from_secs(120);
/// How much later a sequence counts than the one before it of the same requester and priority: a requester of a
/// hundred sequences lets others in between.
pub const TURN: Duration = Duration::from_secs(1);

/// The scheduler's bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Sequences that run at once.
    pub sequences: usize,
    /// Tokens that may be reserved for all running sequences.
    pub reserved_tokens: usize,
    /// Tokens in one step.
    pub step_tokens: usize,
}

/// A sequence that is to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Tokens of its prompt, 1 at least.
    pub prompt: usize,
    /// The most tokens that its answer may have.
    pub answer: usize,
    /// A higher number runs sooner.
    pub priority: u8,
    /// Who wants it.
    pub requester: u64,
    /// It runs where others leave room, until it has waited long.
    pub background: bool,
    /// It runs only with other isolated sequences.
    pub isolated: bool,
}

impl Request {
    fn tokens(&self) -> usize {
        self.prompt.saturating_add(self.answer)
    }
}

/// A row of a step: `take` tokens of the sequence `key` in `slot`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row<K> {
    /// The sequence.
    pub key: K,
    /// The slot in which it runs.
    pub slot: usize,
    /// Tokens that the sequence is fed.
    pub take: usize,
}

/// The sort key of waiting sequences.
type Order = (Instant, u64);

#[derive(Clone, Copy)]
struct Running<K> {
    key: K,
    request: Request,
    order: Order,
    /// Tokens of its prompt that are not fed yet.
    prompt_left: usize,
    /// The last step that had this sequence.
    step: u64,
    /// Number of its admission, counting up.
    admitted: u64,
}

/// The sequences of one device.
pub struct Scheduler<K> {
    limits: Limits,
    /// The limits as they were set, before memory failures reduced them.
    asked: Limits,
    waiting: BTreeMap<Order, (K, Request)>,
    /// The place of each requester's last sequence, by priority and background, as long as it makes a difference to the
    /// next.
    last: HashMap<(u64, u8, bool), Instant>,
    /// Indexed by slot.
    running: Vec<Option<Running<K>>>,
    reserved: usize,
    arrivals: u64,
    admissions: u64,
    steps: u64,
}

impl<K: Copy + PartialEq> Scheduler<K> {
    /// A scheduler without sequences.
    pub fn new(limits: Limits) -> Self {
        let mut scheduler = Self {
            limits,
            asked: limits,
            steps: 0,
            waiting: BTreeMap::new(),
            last: HashMap::new(),
            running: Vec::new(),
            reserved: 0,
            arrivals: 0,
            admissions: 0,
        };
        scheduler.set_limits(limits);
        scheduler
    }

    /// Changes the limits. Running sequences beyond them continue to their end.
    pub fn set_limits(&mut self, limits: Limits) {
        let step_tokens = limits.step_tokens.max(1);
        let sequences = limits.sequences.min(step_tokens);
        self.limits = Limits { step_tokens, sequences, ..limits };
        self.asked = self.limits;
        let most = self.running.len().max(sequences);
        self.running.resize(most, None);
    }

    /// Limits steps to `tokens` tokens, and to as many sequences. If more are running, they take turns.
    pub fn limit_step(&mut self, tokens: usize) {
        self.limits.step_tokens = tokens.clamp(1, self.asked.step_tokens);
        self.limits.sequences = self.asked.sequences.min(self.limits.step_tokens);
    }

    /// Tokens that are reserved for running sequences.
    pub fn reserved(&self) -> usize {
        self.reserved
    }

    /// Enqueues a sequence. The caller must refuse one that needs more tokens than may be reserved: it would
    /// never run, and would block those after it.
    pub fn enqueue(&mut self, key: K, request: Request, now: Instant) {
        let turn_of = |priority: u8, background: bool| {
            let later = if background { BACKGROUND } else { Duration::ZERO };
            now + AGEING * u32::from(u8::MAX - priority) + later
        };
        let mut at = turn_of(request.priority, request.background);
        let is_empty = self.waiting.is_empty();
        self.last.retain(|(_, priority, background), last| {
            !is_empty && *last + TURN > turn_of(*priority, *background)
        });
        let of = (request.requester, request.priority, request.background);
        if let Some(last) = self.last.get(&of) {
            at = at.max(*last + TURN);
        }
        if request.background {
            at = at.min(turn_of(request.priority, true) + (BACKGROUND_AT_MOST - BACKGROUND));
        }
        self.last.insert(of, at);
        self.arrivals += 1;
        self.waiting.insert((at, self.arrivals), (key, request));
    }

    /// Removes a sequence that has ended or is not wanted any more. Returns its slot, if it has one.
    pub fn leave(&mut self, key: K) -> Option<usize> {
        if let Some(order) = self.waiting.iter().find(|(_, (of, _))| *of == key).map(|(order, _)| *order) {
            self.waiting.remove(&order);
            return None;
        }
        let slot = self.running.iter().position(|it| it.as_ref().is_some_and(|it| it.key == key))?;
        self.vacate(slot);
        Some(slot)
    }

    fn vacate(&mut self, slot: usize) -> Option<Running<K>> {
        let running = self.running.get_mut(slot)?.take()?;
        self.reserved -= running.request.tokens();
        Some(running)
    }

    /// Admits the sequences that may run now; only isolated ones if `isolated`. Returns keys and slots.
    pub fn admit(&mut self, isolated: bool) -> Vec<(K, usize)> {
        let mut admitted = Vec::new();
        while let Some((order, key, request)) = self.next(isolated) {
            let Some(slot) = self.room_for(&request) else { break };
            self.waiting.remove(&order);
            self.reserved += request.tokens();
            self.admissions += 1;
            let (prompt_left, number) = (request.prompt, self.admissions);
            self.running[slot] =
                Some(Running { key, request, order, prompt_left, step: 0, admitted: number });
            admitted.push((key, slot));
        }
        admitted
    }

    /// When the next sequence finds no room: stops the one that was admitted last of those that give way to it. That
    /// one waits again at its old place, and begins anew. Ordinary sequences give way to isolated ones, when only those
    /// may run; background sequences to others, unless they have waited long.
    pub fn preempt(&mut self, isolated: bool) -> Option<(K, usize)> {
        let (order, _, request) = self.next(isolated)?;
        if self.room_for(&request).is_some() {
            return None;
        }
        let gives_way = |running: &Running<K>| match isolated {
            true => !running.request.isolated,
            false => running.request.background && !request.background && running.order > order,
        };
        let running = self.running.iter().enumerate().filter_map(|(slot, it)| Some((slot, it.as_ref()?)));
        let giving_way: Vec<_> = running.filter(|(_, running)| gives_way(running)).collect();
        let freed: usize = giving_way.iter().map(|(_, running)| running.request.tokens()).sum();
        if (self.reserved - freed).saturating_add(request.tokens()) > self.limits.reserved_tokens {
            // Their work would be lost, and it would find no room all the same.
            return None;
        }
        let (slot, _) = giving_way.into_iter().max_by_key(|(_, running)| running.admitted)?;
        let Running { key, request, order, .. } = self.vacate(slot)?;
        self.waiting.insert(order, (key, request));
        Some((key, slot))
    }

    /// The rows of the next step; only of isolated sequences if `isolated`.
    pub fn rows(&self, isolated: bool) -> Vec<Row<K>> {
        let runs = |running: &Running<K>| running.request.isolated || !isolated;
        let slots = self.running.iter().enumerate();
        let mut running: Vec<(usize, &Running<K>)> =
            slots.filter_map(|(slot, it)| Some((slot, it.as_ref()?))).filter(|(_, it)| runs(it)).collect();
        running.sort_by_key(|(_, it)| it.admitted);
        let (mut answering, prompts): (Vec<_>, Vec<_>) =
            running.into_iter().partition(|(_, it)| it.prompt_left == 0);
        if answering.len() > self.limits.step_tokens {
            answering.sort_by_key(|(_, it)| it.step);
            answering.truncate(self.limits.step_tokens);
        }
        let mut rows: Vec<Row<K>> =
            answering.into_iter().map(|(slot, it)| Row { key: it.key, slot, take: 1 }).collect();
        let mut left = self.limits.step_tokens.saturating_sub(rows.len());
        for (slot, it) in prompts {
            let take = it.prompt_left.min(left);
            if take > 0 {
                rows.push(Row { key: it.key, slot, take });
                left -= take;
            }
        }
        rows
    }

    /// Records that a row was computed.
    pub fn advance(&mut self, row: &Row<K>) {
        self.steps += 1;
        if let Some(running) = self.running.get_mut(row.slot).and_then(Option::as_mut) {
            running.step = self.steps;
            running.prompt_left = running.prompt_left.saturating_sub(row.take);
        }
    }

    fn next(&self, isolated: bool) -> Option<(Order, K, Request)> {
        let mut waiting = self.waiting.iter().map(|(order, (key, request))| (*order, *key, *request));
        waiting.find(|(.., request)| request.isolated || !isolated)
    }

    /// A free slot for the sequence, if its tokens can be reserved too.
    fn room_for(&self, request: &Request) -> Option<usize> {
        let fits = self.reserved.saturating_add(request.tokens()) <= self.limits.reserved_tokens;
        let runs = self.running.iter().flatten().count();
        let free = self.running.iter().position(Option::is_none)?;
        (fits && runs < self.limits.sequences).then_some(free)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIMITS: Limits = Limits { sequences: 4, reserved_tokens: 100, step_tokens: 16 };

    fn request(prompt: usize, answer: usize) -> Request {
        Request { prompt, answer, priority: 0, requester: 0, background: false, isolated: false }
    }

    /// Computes a step; sequences leave once their answers are full. Returns its rows.
    fn step(
        scheduler: &mut Scheduler<u32>,
        given: &mut BTreeMap<u32, usize>,
        isolated: bool,
    ) -> Vec<Row<u32>> {
        let admitted: Vec<u32> = scheduler.admit(isolated).into_iter().map(|(key, _)| key).collect();
        let order =
            |key: &u32| scheduler.running.iter().flatten().find(|it| it.key == *key).map(|it| it.order);
        let next = scheduler.waiting.keys().next().copied();
        assert!(
            isolated || admitted.iter().all(|key| next.is_none_or(|next| order(key) < Some(next))),
            "in order"
        );
        let rows = scheduler.rows(isolated);
        let left = |row: &Row<u32>| scheduler.running[row.slot].unwrap().prompt_left;
        let prompts = rows.iter().position(|row| left(row) > 0).unwrap_or(rows.len());
        assert!(rows[prompts..].iter().all(|row| left(row) > 0), "answers first");
        for row in &rows {
            scheduler.advance(row);
            let running = scheduler.running[row.slot].unwrap();
            if running.prompt_left == 0 {
                let given = given.entry(row.key).or_default();
                *given += 1;
                if *given >= running.request.answer.max(1) {
                    scheduler.leave(row.key);
                }
            }
        }
        rows
    }

    #[test]
    fn answers_go_first_and_prompts_take_what_is_left_of_the_step() {
        let now = Instant::now();
        let mut scheduler = Scheduler::new(LIMITS);
        let mut given = BTreeMap::new();
        scheduler.enqueue(1, request(20, 5), now);
        scheduler.enqueue(2, request(10, 5), now);
        let take = |rows: Vec<Row<u32>>| rows.iter().map(|row| (row.key, row.take)).collect::<Vec<_>>();
        assert_eq!(take(step(&mut scheduler, &mut given, false)), [(1, 16)]);
        assert_eq!(take(step(&mut scheduler, &mut given, false)), [(1, 4), (2, 10)]);
        scheduler.enqueue(3, request(40, 5), now);
        assert_eq!(take(step(&mut scheduler, &mut given, false)), [(1, 1), (2, 1), (3, 14)]);
    }

    #[test]
    fn a_sequence_waits_until_all_its_tokens_can_be_reserved_and_is_not_overtaken() {
        let now = Instant::now();
        let mut scheduler = Scheduler::new(LIMITS);
        scheduler.enqueue(1, request(50, 10), now);
        scheduler.enqueue(2, request(50, 10), now);
        scheduler.enqueue(3, request(1, 1), now);
        assert_eq!(scheduler.admit(false), [(1, 0)]);
        assert_eq!(scheduler.leave(1), Some(0));
        assert_eq!(scheduler.admit(false), [(2, 0), (3, 1)]);
    }

    #[test]
    fn a_priority_is_worth_some_seconds_of_waiting_and_no_more() {
        let now = Instant::now();
        let mut scheduler = Scheduler::new(Limits { sequences: 1, ..LIMITS });
        scheduler.enqueue(1, request(1, 1), now);
        scheduler.enqueue(2, Request { priority: 2, ..request(1, 1) }, now + AGEING);
        scheduler.enqueue(3, Request { priority: 2, ..request(1, 1) }, now + 3 * AGEING);
        let mut order = Vec::new();
        while let [(key, _)] = scheduler.admit(false)[..] {
            order.push(key);
            scheduler.leave(key);
        }
        assert_eq!(order, [2, 1, 3]);
    }

    #[test]
    fn a_requester_of_many_sequences_lets_others_in_between() {
        let now = Instant::now();
        let mut scheduler = Scheduler::new(Limits { sequences: 1, ..LIMITS });
        for key in 0..5 {
            scheduler.enqueue(key, request(1, 1), now);
        }
        let later = now + Duration::from_millis(1_500);
        scheduler.enqueue(9, Request { requester: 9, ..request(1, 1) }, later);
        let mut order = Vec::new();
        while let [(key, _)] = scheduler.admit(false)[..] {
            order.push(key);
            scheduler.leave(key);
        }
        assert_eq!(order, [0, 1, 9, 2, 3, 4]);
    }

    #[test]
    fn where_a_step_has_room_for_fewer_than_run_they_take_turns() {
        let mut scheduler = Scheduler::new(LIMITS);
        let mut given = BTreeMap::new();
        for key in 0..4 {
            scheduler.enqueue(key, request(1, 20), Instant::now());
        }
        step(&mut scheduler, &mut given, false);
        scheduler.limit_step(2);
        for _ in 0..4 {
            assert_eq!(step(&mut scheduler, &mut given, false).len(), 2);
        }
        assert_eq!(given.values().copied().collect::<Vec<_>>(), [3, 3, 3, 3]);
        scheduler.enqueue(4, request(1, 1), Instant::now());
        assert!(scheduler.admit(false).is_empty(), "four run already, and two may");
    }

    #[test]
    fn background_sequences_give_way_to_others_that_come_within_a_minute() {
        let now = Instant::now();
        let mut scheduler = Scheduler::new(LIMITS);
        let mut given = BTreeMap::new();
        for key in 0..3 {
            scheduler.enqueue(key, Request { background: true, ..request(4, 26) }, now);
        }
        assert_eq!(step(&mut scheduler, &mut given, false).len(), 3);
        assert_eq!(scheduler.preempt(false), None, "nobody waits");
        scheduler.enqueue(9, request(4, 30), now + BACKGROUND / 2);
        assert!(scheduler.admit(false).is_empty());
        assert_eq!(scheduler.preempt(false), Some((2, 2)));
        assert_eq!(scheduler.admit(false), [(9, 2)]);
        assert_eq!(scheduler.preempt(false), None, "a background sequence waits, and gives way to nobody");
        scheduler.enqueue(10, request(4, 30), now + 2 * BACKGROUND);
        assert_eq!(scheduler.preempt(false), None, "those that run have waited longer");
        scheduler.leave(9);
        assert_eq!(scheduler.admit(false), [(2, 2)], "it begins anew, at its old place");
    }

    #[test]
    fn isolated_sequences_run_alone_and_the_youngest_others_make_room_for_them() {
        let now = Instant::now();
        let mut scheduler = Scheduler::new(LIMITS);
        let mut given = BTreeMap::new();
        for key in 0..3 {
            scheduler.enqueue(key, request(4, 26), now);
        }
        assert_eq!(step(&mut scheduler, &mut given, false).len(), 3);
        scheduler.enqueue(9, Request { isolated: true, ..request(4, 30) }, now);
        assert!(scheduler.admit(true).is_empty());
        assert_eq!(scheduler.preempt(true), Some((2, 2)));
        assert_eq!(scheduler.preempt(true), None, "there is room now");
        assert_eq!(scheduler.admit(true), [(9, 2)]);
        assert!(scheduler.rows(true).iter().all(|row| row.key == 9));
        assert_eq!(scheduler.leave(9), Some(2));
        assert_eq!(scheduler.admit(false), [(2, 2)], "it begins anew, where it was");
    }

    proptest! {
        /// For any input the bounds hold at each step, and each sequence ends.
        #[test]
        fn bounds_hold_and_nobody_starves(
            limits in (1_usize..6, 20_usize..200, 1_usize..40),
            shrinks in 0_u64..60,
            arrivals in prop::collection::vec((0_u64..30, 1_usize..60, 0_usize..40, 0_u8..10, 0_usize..9), 1..60),
        ) {
            let (sequences, reserved_tokens, step_tokens) = limits;
            let mut scheduler = Scheduler::new(Limits { sequences, reserved_tokens, step_tokens });
            let begun = Instant::now();
            let (mut given, mut expected, mut cancelled) = (BTreeMap::new(), Vec::new(), Vec::new());
            let mut pending: Vec<_> = arrivals.into_iter().enumerate().collect();
            pending.sort_by_key(|(_, (at, ..))| *at);
            let mut pending = pending.into_iter().peekable();
            let mut steps = 0_u64;
            let work: usize = 60 * 100 * 4;
            loop {
                let now = begun + Duration::from_millis(steps);
                while let Some((key, (_, prompt, answer, priority, fate))) =
                    pending.next_if(|(_, (at, ..))| *at <= steps)
                {
                    let requester = (prompt % 3) as u64;
                    let request =
                        Request { prompt, answer, priority, requester, background: false, isolated: false };
                    if request.tokens() <= reserved_tokens {
                        scheduler.enqueue(key as u32, request, now);
                        if fate == 0 { cancelled.push((key as u32, steps + 3)) } else { expected.push((key as u32, answer.max(1))) }
                    }
                }
                cancelled.retain(|(key, at)| {
                    if *at <= steps { scheduler.leave(*key); }
                    *at > steps
                });
                let rows = step(&mut scheduler, &mut given, false);
                prop_assert!(scheduler.reserved <= reserved_tokens);
                prop_assert!(rows.iter().map(|row| row.take).sum::<usize>() <= step_tokens);
                prop_assert!(rows.len() <= sequences);
                if steps == shrinks {
                    // The device's memory takes less from here on.
                    scheduler.limit_step(step_tokens / 2);
                }
                let idle = scheduler.waiting.is_empty() && scheduler.running.iter().all(Option::is_none);
                if idle && pending.peek().is_none() { break; }
                prop_assert!(idle || !rows.is_empty(), "something can always go on");
                steps += 1;
                prop_assert!((steps as usize) < work, "it comes to an end");
            }
            for (key, answer) in expected {
                prop_assert_eq!(given.get(&key), Some(&answer), "{} has its whole answer", key);
            }
            prop_assert_eq!(scheduler.reserved, 0);
        }
    }
}
