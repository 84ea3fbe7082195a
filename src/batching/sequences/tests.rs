//! Tests of the scheduler of sequences: its rules one by one, and what must hold whatever arrives.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::admission::Rank;
use super::book::{Resources, Running};
use super::*;
use crate::batching::shares::QueueShare;

const ENCODING: Encoding = Encoding { interval: 8, batch: 4 };
const LIMITS: Limits = Limits { sequences: 4, reserved_tokens: 100, step_tokens: 16, encoding: ENCODING };

fn sequence(prompt: usize, answer: usize) -> SequenceSpec {
    let owner = Owner::default();
    SequenceSpec { has_window: false, prompt, answer, priority: 0, owner, group: None }
}

fn window(prompt: usize, answer: usize) -> SequenceSpec {
    SequenceSpec { has_window: true, ..sequence(prompt, answer) }
}

/// A sequence of this requester.
fn from(requester: u64, prompt: usize, answer: usize) -> SequenceSpec {
    sequence(prompt, answer).of(requester)
}

impl SequenceSpec {
    fn of(mut self, requester: u64) -> Self {
        self.owner.requester = requester;
        self
    }

    fn in_queue(mut self, queue: usize, share: u32) -> Self {
        self.owner.queue = QueueShare { queue, share };
        self
    }
}

fn background(prompt: usize, answer: usize) -> SequenceSpec {
    let mut spec = sequence(prompt, answer);
    spec.owner.background = true;
    spec
}

fn admitted(key: u32, slot: usize) -> Change<u32> {
    Change::Admitted { key, slot }
}

fn preempted(key: u32, slot: usize) -> Change<u32> {
    Change::Preempted { key, slot }
}

/// A scheduler with sequences that run until their answers are complete.
struct Run {
    scheduler: Scheduler<u32>,
    now: Instant,
    /// Tokens of each answer that were generated since the last admission of its sequence.
    generated: BTreeMap<u32, usize>,
    /// The sequences that have ended, with the tokens of their answers.
    ended: BTreeMap<u32, usize>,
    preempted: usize,
    /// The running sequences whose window is not encoded: how many token steps, and how many steps with windows,
    /// each has waited for.
    waited: BTreeMap<u32, (usize, usize)>,
}

impl Run {
    fn new(limits: Limits) -> Self {
        let (scheduler, now) = (Scheduler::new(limits), Instant::now());
        let (generated, ended, waited) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        Self { scheduler, now, generated, ended, preempted: 0, waited }
    }

    fn enqueue(&mut self, key: u32, spec: SequenceSpec) {
        self.scheduler.enqueue(key, spec, self.now);
    }

    fn enqueue_all(&mut self, keys: impl IntoIterator<Item = u32>, spec: impl Fn(u32) -> SequenceSpec) {
        keys.into_iter().for_each(|key| self.enqueue(key, spec(key)));
    }

    fn admit(&mut self, isolated: Option<Group>) -> Vec<Change<u32>> {
        let changes = self.scheduler.admit(isolated, self.now);
        for change in &changes {
            if let Change::Preempted { key, .. } = change {
                self.generated.remove(key);
                self.preempted += 1;
            }
        }
        changes
    }

    /// Computes a step that takes 10 ms. Returns its rows.
    fn step(&mut self, isolated: Option<Group>) -> Vec<Row<u32>> {
        self.admit(isolated);
        self.check_shares(isolated);
        let steps_since_window = self.scheduler.steps.since_window();
        let rows = self.scheduler.rows(isolated, usize::MAX, self.now);
        self.check_windows(isolated, steps_since_window, &rows);
        let left = |row: &Row<u32>| self.scheduler.book.running[row.slot].unwrap().prompt_left;
        let prompts = rows.iter().position(|row| left(row) > 0).unwrap_or(rows.len());
        let is_encoding = rows.first().is_some_and(|row| row.feed == Feed::Encode);
        assert!(
            is_encoding || rows[prompts..].iter().all(|row| left(row) > 0),
            "decoding sequences come first"
        );
        self.now += Duration::from_millis(10);
        for row in &rows {
            self.scheduler.advance(row, self.now);
            let running = self.scheduler.book.running[row.slot].unwrap();
            if row.feed != Feed::Encode && running.prompt_left == 0 {
                let generated = self.generated.entry(row.key).or_default();
                *generated += 1;
                if *generated >= running.sequence.spec.answer.max(1) {
                    self.ended.insert(row.key, *generated);
                    self.scheduler.remove(row.key, self.now);
                }
            }
        }
        rows
    }

    /// Checks the rows of a step before it is computed: neither windows nor tokens starve.
    fn check_windows(&mut self, isolated: Option<Group>, steps_since_window: usize, rows: &[Row<u32>]) {
        let Limits { step_tokens, encoding: Encoding { interval, batch }, .. } = self.scheduler.limits;
        // The r-th window of a requester waits for at most r windows of each other requester. r and the number of
        // these requesters are at most the number of slots.
        let max_windows = self.scheduler.book.running.len().pow(2);
        let running = self.scheduler.book.in_order(isolated);
        let keys = |matches: fn(&Running<u32>) -> bool| -> Vec<u32> {
            running.iter().filter(|(_, it)| matches(it)).map(|(_, it)| it.sequence.key).collect()
        };
        let (waiting, decoding) = (keys(|it| it.must_encode), keys(Running::decodes));
        let prompts = running.len() - waiting.len() - decoding.len();
        let rows_of = |key: &u32| rows.iter().filter(|row| row.key == *key).count();
        self.waited.retain(|key, _| waiting.contains(key));
        let windows = rows.iter().filter(|row| row.feed == Feed::Encode).count();
        if windows > 0 {
            assert_eq!(windows, rows.len(), "a step with windows has no other rows");
            assert!(rows.iter().all(|row| waiting.contains(&row.key) && rows_of(&row.key) == 1));
            assert!(windows <= if decoding.is_empty() { batch } else { 1 });
            let min_steps = if decoding.is_empty() { prompts.min(1) } else { interval };
            assert!(steps_since_window >= min_steps, "{steps_since_window}");
        } else {
            assert!(
                rows.iter().all(|row| !waiting.contains(&row.key)),
                "a window is encoded before the tokens are fed"
            );
            assert!(waiting.is_empty() || !rows.is_empty(), "a window waits though the step is empty");
            let fed = decoding.iter().filter(|key| rows_of(key) == 1).count();
            assert_eq!(fed, decoding.len().min(step_tokens), "each sequence that decodes goes on");
        }
        let waits = |it: &Running<u32>| it.must_encode && rows_of(&it.sequence.key) == 0;
        for (_, it) in running.iter().filter(|(_, it)| waits(it) && !it.sequence.spec.owner.background) {
            let (tokens, others) = self.waited.entry(it.sequence.key).or_default();
            assert!(*others <= max_windows, "{others} steps had other windows");
            assert!(*tokens <= interval * (max_windows + 1), "{tokens} steps had none");
            *(if windows > 0 { others } else { tokens }) += 1;
        }
    }

    /// Checks that no ordinary sequence within its share waits if preempting those beyond theirs makes room.
    fn check_shares(&self, isolated: Option<Group>) {
        let admissions = self.scheduler.admissions();
        let division = admissions.division();
        if isolated.is_some() || division.parts.values().any(|part| part.share.limit.sequences == 0) {
            return;
        }
        let beyond = admissions.preemptible(None).into_iter().filter(|it| it.beyond_share);
        let used = beyond.fold(self.scheduler.book.used, |used, it| used.without(&it.running.sequence.spec));
        let candidates = admissions.candidates(None, self.now);
        let mut within =
            candidates.iter().filter(|it| it.rank == Rank::WithinShare && !it.sequence.spec.owner.background);
        let waits = within.find(|it| admissions.fits(&it.sequence.spec, used));
        assert!(
            waits.is_none(),
            "a sequence within its share waits for ones beyond theirs: {:?}",
            waits.map(|it| it.sequence.spec)
        );
    }

    fn is_idle(&self) -> bool {
        self.scheduler.book.lines.is_empty()
    }

    /// Computes steps until this sequence has ended. Returns their number.
    fn steps_until(&mut self, key: u32, max: usize) -> usize {
        let steps = (1..=max).find(|_| {
            self.step(None);
            self.ended.contains_key(&key)
        });
        steps.unwrap_or_else(|| panic!("{key} has not ended in {max} steps"))
    }
}

/// The sequence of each row, and its tokens.
fn fed(rows: Vec<Row<u32>>) -> Vec<(u32, usize)> {
    rows.iter().map(|row| (row.key, row.feed.tokens())).collect()
}

#[test]
fn decoding_comes_first_and_prompts_fill_the_rest_of_the_step() {
    let mut run = Run::new(LIMITS);
    run.enqueue(1, sequence(20, 5));
    run.enqueue(2, sequence(20, 5));
    assert_eq!(fed(run.step(None)), [(1, 16)]);
    assert_eq!(fed(run.step(None)), [(1, 4), (2, 12)]);
    run.enqueue(3, sequence(40, 5));
    assert_eq!(fed(run.step(None)), [(1, 1), (2, 8), (3, 7)]);
}

#[test]
fn a_prompt_of_one_token_does_not_wait_for_three_of_four_thousand() {
    for requester in [1, 2] {
        let mut run = Run::new(Limits { sequences: 16, reserved_tokens: 16_384, step_tokens: 512, ..LIMITS });
        run.enqueue_all(0..3, |_| from(1, 4_000, 100));
        run.step(None);
        run.enqueue(9, from(requester, 1, 1));
        assert_eq!(run.steps_until(9, 100), 1);
    }
}

#[test]
fn reservations_of_one_requester_do_not_hold_up_another() {
    let mut run = Run::new(Limits { sequences: 16, reserved_tokens: 16_384, step_tokens: 1_024, ..LIMITS });
    run.enqueue_all(0..8, |_| from(1, 40, 4_000));
    for _ in 0..100 {
        run.step(None);
    }
    run.enqueue(9, from(2, 600, 1));
    assert_eq!(run.admit(None), [preempted(3, 3), admitted(9, 3)], "one of four is preempted");
    assert_eq!(run.steps_until(9, 100), 1);
    assert_eq!(run.admit(None), [admitted(3, 3)], "it restarts in its slot");
    for key in 0..8 {
        run.steps_until(key, 10_000);
    }
    assert_eq!(run.preempted, 1);
}

#[test]
fn a_share_and_the_only_sequence_of_a_requester_are_not_preempted() {
    let mut run = Run::new(LIMITS);
    run.enqueue(1, from(1, 10, 10));
    run.enqueue(2, from(1, 10, 10));
    run.enqueue(3, from(1, 10, 10));
    assert_eq!(run.admit(None).len(), 3);
    run.enqueue(4, from(2, 10, 51));
    assert_eq!(run.admit(None), [], "preempting one makes too little room, and two of three are within half");
    run.scheduler.remove(4, run.now);
    run.enqueue(5, from(2, 10, 40));
    assert_eq!(run.admit(None), [preempted(3, 2), admitted(5, 2)]);
    run.enqueue(6, from(2, 10, 10));
    assert_eq!(run.admit(None), [], "6 is beyond the share of its requester");
    run.enqueue(7, from(3, 5, 5));
    assert_eq!(run.admit(None), [admitted(7, 3)], "6 holds up nobody else");
    run.scheduler.remove(7, run.now);
    run.enqueue(8, from(3, 20, 20));
    assert_eq!(
        run.admit(None),
        [],
        "the only sequence of a requester is kept, although it is larger than a third"
    );
}

#[test]
fn no_more_is_preempted_than_needed_and_nothing_if_not_enough() {
    let mut run = Run::new(LIMITS);
    for (key, tokens) in [(1, 30), (2, 50), (3, 10)] {
        run.enqueue(key, from(1, 1, tokens - 1));
    }
    assert_eq!(run.admit(None).len(), 3);
    run.enqueue(9, from(2, 1, 49));
    assert_eq!(run.admit(None), [preempted(2, 1), admitted(9, 1)], "the last one is spared");
    let mut run = Run::new(LIMITS);
    run.enqueue(1, from(1, 1, 79));
    run.enqueue(2, from(1, 1, 9));
    assert_eq!(run.admit(None).len(), 2);
    run.enqueue(9, from(2, 1, 39));
    assert_eq!(run.admit(None), []);
}

#[test]
fn a_single_requester_may_use_everything_in_its_own_order() {
    let mut run = Run::new(LIMITS);
    run.enqueue(1, sequence(50, 10));
    run.enqueue(2, sequence(50, 10));
    run.enqueue(3, sequence(1, 1));
    assert_eq!(run.admit(None), [admitted(1, 0)]);
    assert_eq!(run.scheduler.remove(1, run.now), Some(0));
    assert_eq!(run.admit(None), [admitted(2, 0), admitted(3, 1)]);
}

#[test]
fn a_small_sequence_runs_before_a_large_one_until_the_large_one_fits() {
    let mut run = Run::new(LIMITS);
    run.enqueue(1, from(1, 10, 20));
    run.step(None);
    run.enqueue(2, from(2, 10, 80));
    run.step(None);
    run.enqueue(3, from(3, 5, 25));
    assert_eq!(run.admit(None), [admitted(3, 1)]);
    run.scheduler.remove(1, run.now);
    assert_eq!(run.admit(None), [preempted(3, 1), admitted(2, 0)]);
    run.enqueue(4, from(4, 10, 80));
    run.enqueue(5, from(5, 5, 5));
    assert_eq!(run.admit(None), [admitted(5, 1)]);
    run.scheduler.remove(2, run.now);
    assert_eq!(run.admit(None), [admitted(3, 0)], "before 5, which arrived later");
}

#[test]
fn a_large_sequence_does_not_starve_behind_endless_small_ones() {
    let mut run = Run::new(LIMITS);
    for step in 0..600_u32 {
        // These nearly fill the slots.
        if step.is_multiple_of(6) {
            run.enqueue(100 + step, from((100 + step).into(), 2, 10));
            run.enqueue(1_000 + step, from(50, 2, 10));
        }
        if step == 100 {
            run.enqueue(1, from(1, 30, 65));
        }
        run.step(None);
        // It needs 66 steps.
        assert!(step < 190 || run.ended.contains_key(&1));
    }
    assert!((0..90).all(|n| run.ended.contains_key(&(100 + 6 * n))), "the others end too");
}

#[test]
fn a_requester_whose_sequences_are_often_preempted_ends_them_all() {
    let mut run = Run::new(LIMITS);
    run.enqueue_all(0..12, |_| from(1, 4, 20));
    for step in 0..400_u32 {
        // Every five steps another sequence arrives, which runs for three steps.
        if step.is_multiple_of(5) {
            run.enqueue(100 + step, from((100 + step).into(), 2, 3));
        }
        run.step(None);
    }
    assert!((0..12).all(|key| run.ended.contains_key(&key)), "{:?}", run.ended);
    assert!((0..79).all(|n| run.ended.contains_key(&(100 + 5 * n))));
    assert!((5..60).contains(&run.preempted), "{}", run.preempted);
}

#[test]
fn large_sequences_of_several_requesters_leave_half_of_the_room() {
    let mut run = Run::new(Limits { sequences: 8, ..LIMITS });
    run.enqueue_all(0..4, |key| from(key.into(), 5, 20));
    assert_eq!(run.admit(None).len(), 4, "each has a quarter of the tokens");
    run.enqueue(4, from(4, 1, 1));
    assert_eq!(run.admit(None), [preempted(3, 3), admitted(4, 3)]);
    run.enqueue(5, from(5, 5, 20));
    run.enqueue(6, from(6, 1, 1));
    assert_eq!(run.admit(None), [admitted(6, 4)]);
    for (key, slot) in [(7, 5), (8, 6)] {
        run.enqueue(key, from(key.into(), 5, 5));
        assert_eq!(run.admit(None), [admitted(key, slot)]);
    }
    run.enqueue(9, from(9, 1, 4));
    assert_eq!(run.admit(None), [preempted(2, 2), admitted(9, 2)]);
    run.enqueue(10, from(10, 5, 5));
    run.enqueue(11, from(11, 5, 5));
    assert_eq!(run.admit(None), [admitted(10, 7)], "for 11 no slot is left; two large ones run");
    let order = [0, 1, 4].map(|key| {
        run.scheduler.remove(key, run.now);
        run.admit(None)
    });
    let expected = [[admitted(2, 0)], [admitted(3, 1)], [admitted(11, 3)]].map(Vec::from);
    assert_eq!(order, expected, "those that were preempted keep their turns");
}

#[test]
fn large_sequences_end_although_small_ones_keep_preempting_them() {
    let mut run = Run::new(Limits { sequences: 8, ..LIMITS });
    run.enqueue_all(0..8, |key| from(key.into(), 5, 45));
    for step in 0..1_200_u32 {
        // Between two small sequences there is room for a second large one, which the next small one preempts.
        if step % 5 == 0 {
            run.enqueue(100 + step, from((100 + step).into(), 1, 2));
        }
        run.step(None);
    }
    assert!((0..8).all(|key| run.ended.contains_key(&key)), "{:?}", run.ended);
}

#[test]
fn a_large_sequence_does_not_starve_behind_endless_slightly_smaller_ones() {
    let limits = Limits { sequences: 16, reserved_tokens: 160, step_tokens: 64, ..LIMITS };
    let mut run = Run::new(limits);
    let (mut key, mut ended) = (1_000, 0);
    // Eight requesters with 11 tokens each fill the half of the tokens that large sequences may hold. With twelve
    // more requesters, the slots are too few.
    let spec = |requester: u64| from(requester, 1, if requester < 8 { 10 } else { 2 });
    let mut current: BTreeMap<u64, u32> = BTreeMap::new();
    for step in 0..300 {
        for requester in 0..20 {
            if current.get(&requester).is_none_or(|key| run.ended.contains_key(key)) {
                key += 1;
                current.insert(requester, key);
                run.enqueue(key, spec(requester));
            }
        }
        if step == 50 {
            run.enqueue(1, from(99, 1, 39));
            ended = run.ended.len();
        }
        run.step(None);
    }
    assert!(run.ended.contains_key(&1) && run.ended.len() > ended + 100);
}

#[test]
fn a_priority_is_worth_some_seconds_of_waiting_and_no_more() {
    let mut run = Run::new(Limits { sequences: 1, ..LIMITS });
    let begun = run.now;
    for requesters in [[0, 0, 0], [1, 2, 3]] {
        for (key, priority, later) in [(1, 0, 0), (2, 2, 1), (3, 2, 3)] {
            let spec = SequenceSpec { priority, ..from(requesters[key as usize - 1], 1, 1) };
            run.scheduler.enqueue(key, spec, begun + later * PRIORITY_STEP);
        }
        run.now = begun;
        let order = [(); 3].map(|()| fed(run.step(None))[0].0);
        assert_eq!(order, [2, 1, 3]);
    }
}

#[test]
fn the_highest_priority_holds_up_another_requester_for_less_than_a_minute() {
    let mut run = Run::new(Limits { sequences: 1, ..LIMITS });
    run.enqueue(0, from(0, 1, 1));
    run.enqueue_all(1..1_000, |_| SequenceSpec { priority: u8::MAX, ..from(1, 1, 9) });
    let steps = run.steps_until(0, 100_000);
    assert!((4_400..6_000).contains(&steps), "{steps} steps of 10 ms");
}

#[test]
fn others_have_a_turn_between_two_sequences_of_a_busy_requester() {
    let mut run = Run::new(Limits { sequences: 1, ..LIMITS });
    run.enqueue_all(0..5, |_| from(1, 1, 1));
    let mut order = fed(run.step(None));
    run.enqueue(8, from(8, 1, 1));
    run.enqueue(9, from(9, 1, 1));
    run.enqueue(10, from(9, 1, 1));
    while !run.is_idle() {
        order.extend(fed(run.step(None)));
    }
    let keys: Vec<u32> = order.into_iter().map(|(key, _)| key).collect();
    assert_eq!(keys, [0, 1, 8, 9, 2, 10, 3, 4]);
}

#[test]
fn running_sequences_take_turns_if_a_step_is_too_small_for_all() {
    let mut run = Run::new(LIMITS);
    run.enqueue_all(0..4, |_| sequence(1, 20));
    run.step(None);
    run.scheduler.limit_step(2);
    for _ in 0..4 {
        assert_eq!(run.step(None).len(), 2);
    }
    assert_eq!(run.generated.values().copied().collect::<Vec<_>>(), [3, 3, 3, 3]);
    run.enqueue(4, sequence(1, 1));
    assert!(run.admit(None).is_empty(), "four are running, and only two may");
}

#[test]
fn background_sequences_are_preempted_by_arrivals_within_a_minute() {
    let mut run = Run::new(LIMITS);
    let begun = run.now;
    run.enqueue_all(0..3, |_| background(4, 26));
    assert_eq!(run.admit(None).len(), 3);
    run.now = begun + BACKGROUND_PENALTY / 2;
    run.enqueue(9, sequence(4, 30));
    assert_eq!(run.admit(None), [preempted(2, 2), admitted(9, 2)]);
    assert_eq!(run.admit(None), [], "only a background sequence waits");
    run.now = begun + 2 * BACKGROUND_PENALTY;
    run.enqueue(10, sequence(4, 30));
    assert_eq!(run.admit(None), [], "those that run have waited longer");
    run.scheduler.remove(9, run.now);
    assert_eq!(run.admit(None), [admitted(10, 2)], "the two background sequences are within their share");
    run.scheduler.remove(10, run.now);
    assert_eq!(run.admit(None), [admitted(2, 2)], "it restarts");
}

#[test]
fn a_background_job_gets_nothing_for_a_minute_and_then_half() {
    let mut run = Run::new(LIMITS);
    let begun = run.now;
    for key in 0..20 {
        run.enqueue(key, from(1, 1, 9));
        run.enqueue(100 + key, background(1, 9));
    }
    let running_background = |run: &Run| run.scheduler.running().filter(|key| *key >= 100).count();
    for step in 0..20 {
        run.now = begun + step * Duration::from_secs(1);
        run.step(None);
        assert_eq!(running_background(&run), 0);
    }
    run.now = begun + BACKGROUND_PENALTY;
    assert_eq!(run.admit(None), [], "it preempts nobody even then");
    for _ in 0..10 {
        run.step(None);
    }
    assert_eq!(running_background(&run), 2);
    assert_eq!(run.preempted, 0);
}

#[test]
fn isolated_sequences_run_alone_and_preempt_the_latest_others() {
    let mut run = Run::new(LIMITS);
    run.enqueue_all(0..3, |_| sequence(4, 26));
    assert_eq!(run.step(None).len(), 3);
    run.enqueue(9, SequenceSpec { group: Some(1), ..sequence(4, 30) });
    assert_eq!(run.admit(Some(1)), [preempted(2, 2), admitted(9, 2)]);
    assert!(run.scheduler.rows(Some(1), usize::MAX, run.now).iter().all(|row| row.key == 9));
    assert_eq!(run.scheduler.remove(9, run.now), Some(2));
    assert_eq!(run.admit(Some(1)), []);
    assert_eq!(run.admit(None), [admitted(2, 2)], "it restarts in its slot");
}

#[test]
fn sequences_of_an_earlier_group_are_like_all_others_for_the_next() {
    let mut run = Run::new(LIMITS);
    run.enqueue(1, SequenceSpec { group: Some(1), ..sequence(4, 26) });
    assert_eq!(run.step(Some(1)).len(), 1);
    run.enqueue(2, sequence(4, 26));
    assert_eq!(run.step(None).len(), 2, "the group is not isolated any more");
    run.enqueue(3, SequenceSpec { group: Some(2), ..sequence(4, 26) });
    assert_eq!(run.step(Some(2)).iter().map(|row| row.key).collect::<Vec<_>>(), [3]);
    assert_eq!(run.step(None).len(), 3);
}

/// What the rows of a step feed.
#[derive(Debug, PartialEq, Eq)]
enum Contents {
    /// The windows of these sequences.
    Windows(Vec<u32>),
    /// This many tokens.
    Tokens(usize),
}

use Contents::{Tokens, Windows};

fn contents(rows: &[Row<u32>]) -> Contents {
    let windows: Vec<u32> = rows.iter().filter(|row| row.feed == Feed::Encode).map(|row| row.key).collect();
    if windows.is_empty() { Tokens(rows.iter().map(|row| row.feed.tokens()).sum()) } else { Windows(windows) }
}

#[test]
fn while_sequences_decode_there_are_eight_steps_between_two_windows() {
    let mut run = Run::new(Limits { sequences: 6, ..LIMITS });
    run.enqueue(1, sequence(4, 30));
    assert_eq!(contents(&run.step(None)), Tokens(4));
    run.enqueue(2, window(3, 10));
    run.enqueue(3, window(0, 10));
    assert_eq!(contents(&run.step(None)), Windows(vec![2]), "no window was encoded before");
    let steps: Vec<_> = (0..8).map(|_| contents(&run.step(None))).collect();
    assert_eq!(steps, [4, 2, 2, 2, 2, 2, 2, 2].map(Tokens));
    assert_eq!(contents(&run.step(None)), Windows(vec![3]));
    assert_eq!(contents(&run.step(None)), Tokens(3), "3 has no prompt, and decodes at once");
}

#[test]
fn a_window_takes_half_of_the_time_of_another_requesters_answers_at_most() {
    for (requester, steps) in [(1, 8), (2, 50)] {
        let mut run = Run::new(Limits { sequences: 6, ..LIMITS });
        run.scheduler.set_steps_per_window(50);
        run.enqueue(1, sequence(4, 90).of(1));
        run.step(None);
        run.enqueue(2, window(0, 1).of(requester));
        assert_eq!(contents(&run.step(None)), Windows(vec![2]), "no window was encoded before");
        run.enqueue(3, window(0, 1).of(requester));
        let waits = (0..).find(|_| contents(&run.step(None)) == Windows(vec![3])).unwrap();
        assert_eq!(waits, steps, "requester {requester}");
    }
}

#[test]
fn without_decoding_windows_are_batched_and_alternate_with_prompts() {
    let mut run = Run::new(Limits { sequences: 8, reserved_tokens: 1_000, ..LIMITS });
    run.enqueue_all(0..6, |_| window(40, 10));
    let steps: Vec<_> = (0..4).map(|_| contents(&run.step(None))).collect();
    assert_eq!(steps, [Windows(vec![0, 1, 2, 3]), Tokens(16), Windows(vec![4, 5]), Tokens(16)]);
    let mut run = Run::new(LIMITS);
    run.scheduler.limit_windows(1);
    (0..3).for_each(|key| run.enqueue(key, window(0, 10)));
    assert_eq!(contents(&run.step(None)), Windows(vec![0]), "the limit after a memory failure");
}

#[test]
fn a_thousand_windows_do_not_hold_up_another_requesters_first_one() {
    let mut run = Run::new(Limits { sequences: 8, reserved_tokens: 1_000, ..LIMITS });
    run.enqueue_all(0..1_000, |_| window(1, 20).of(1));
    (0..100).for_each(|_| drop(run.step(None)));
    run.enqueue(1_000, window(1, 1).of(2));
    assert!(run.steps_until(1_000, 100) <= 20, "two windows, each after eight token steps");
}

#[test]
fn a_window_that_arrives_while_another_requesters_is_encoded_is_next() {
    let mut run = Run::new(LIMITS);
    (0..100).for_each(|key| run.enqueue(key, window(1, 1).of(1)));
    run.scheduler.limit_windows(1);
    run.admit(None);
    let first = run.scheduler.rows(None, usize::MAX, run.now)[0];
    run.now += Duration::from_millis(5);
    run.enqueue(100, window(1, 1).of(2));
    run.now += Duration::from_millis(5);
    run.scheduler.advance(&first, run.now);
    run.scheduler.remove(first.key, run.now);
    run.admit(None);
    assert_eq!(run.scheduler.rows(None, usize::MAX, run.now)[0].key, 100);
}

#[test]
fn a_requester_whose_windows_fail_does_not_hold_up_another() {
    let mut run = Run::new(LIMITS);
    (0..100).for_each(|key| run.enqueue(key, window(1, 1).of(1)));
    run.scheduler.limit_windows(1);
    run.enqueue(100, window(1, 1).of(2));
    run.now += Duration::from_millis(10);
    let order = [(); 3].map(|()| {
        run.admit(None);
        let row = run.scheduler.rows(None, usize::MAX, run.now)[0];
        run.now += Duration::from_millis(10);
        run.scheduler.remove(row.key, run.now);
        row.key
    });
    assert_eq!(order, [0, 100, 1]);
}

#[test]
fn a_sequence_that_begins_again_waits_for_its_turn_to_encode() {
    let mut run = Run::new(LIMITS);
    run.enqueue(1, window(2, 9));
    let rows = [(); 2].map(|()| fed(run.step(None)));
    assert_eq!(rows, [[(1, 0)], [(1, 2)]]);
    run.enqueue(2, sequence(1, 50));
    run.step(None);
    run.scheduler.restart(0);
    let waits = (0..).find(|_| fed(run.step(None)) == [(1, 0)]).unwrap();
    assert!((5..8).contains(&waits), "{waits} steps in which the other one decodes");
    assert_eq!(fed(run.step(None)), [(2, 1), (1, 2)]);
}

#[test]
fn a_preempted_sequence_encodes_its_window_again() {
    let mut run = Run::new(LIMITS);
    run.enqueue_all(0..4, |_| from(1, 1, 20));
    run.scheduler.remove(3, run.now);
    run.enqueue(3, window(1, 20).of(1));
    assert_eq!(run.admit(None).len(), 4);
    while contents(&run.step(None)) != Windows(vec![3]) {}
    run.enqueue(9, from(2, 1, 1));
    assert_eq!(run.admit(None), [preempted(3, 3), admitted(9, 3)]);
    let again = (0..30).filter(|_| contents(&run.step(None)) == Windows(vec![3])).count();
    assert_eq!(again, 1);
}

/// A scheduler with four slots, and 500 requesters that flood queue 0.
fn flooded(shares: [u32; 2]) -> Run {
    let mut run = Run::new(Limits { reserved_tokens: 1_000, ..LIMITS });
    run.enqueue_all(0..500, |key| from(key.into(), 1, 100).in_queue(0, shares[0]));
    (0..10).for_each(|_| drop(run.step(None)));
    run
}

#[test]
fn a_flood_of_many_requesters_in_one_queue_delays_another_queue_by_no_step() {
    let mut run = flooded([1_000, 1_000]);
    for key in 1_000..1_010 {
        run.enqueue(key, from(1, 1, 1).in_queue(1, 1_000));
        assert_eq!(run.steps_until(key, 2), 1);
    }
}

#[test]
fn running_sequences_are_divided_among_queues_by_their_shares() {
    let mut run = flooded([3_000, 1_000]);
    run.enqueue_all(1_000..1_500, |key| from(key.into(), 1, 100).in_queue(1, 1_000));
    let mut of_second = 0;
    for _ in 0..1_000 {
        of_second += run.step(None).iter().filter(|row| row.key >= 1_000).count();
    }
    assert!((950..=1_100).contains(&of_second), "{of_second} of 4,000 rows");
}

#[test]
fn a_queue_that_is_alone_uses_all_slots_and_gives_them_back_when_another_has_work() {
    let mut run = Run::new(Limits { reserved_tokens: 1_000, ..LIMITS });
    run.enqueue_all(0..8, |_| from(1, 1, 100).in_queue(0, 1));
    run.step(None);
    assert_eq!(run.scheduler.running().count(), 4);
    run.enqueue_all(10..12, |_| from(2, 1, 100).in_queue(1, 1));
    run.step(None);
    let running: BTreeSet<u32> = run.scheduler.running().collect();
    assert_eq!(running, BTreeSet::from([0, 1, 10, 11]));
}

#[test]
fn windows_of_a_flooded_queue_leave_time_for_the_answers_of_another() {
    let mut run = Run::new(Limits { sequences: 6, ..LIMITS });
    run.scheduler.set_steps_per_window(50);
    run.enqueue(1, from(1, 4, 90).in_queue(1, 1_000));
    run.step(None);
    for key in 2..6 {
        run.enqueue(key, window(0, 1).of(key.into()).in_queue(0, 1_000));
    }
    assert!(matches!(contents(&run.step(None)), Windows(_)), "no window was encoded before");
    let waits = (0..).find(|_| matches!(contents(&run.step(None)), Windows(_))).unwrap();
    assert_eq!(waits, 50, "whoever of the queue requested the next one");
}

#[derive(Clone, Copy, Debug)]
struct Arrival {
    step: u64,
    spec: SequenceSpec,
    /// Whether it is cancelled three steps later.
    is_cancelled: bool,
}

prop_compose! {
    fn arrival()(
        (step, prompt, answer) in (0_u64..30, 1_usize..60, 0_usize..40),
        (requester, priority, fate) in (0_u64..6, 0_u8..10, 0_usize..9),
        (background, has_window) in (prop::bool::weighted(0.2), prop::bool::weighted(0.5)),
    ) -> Arrival {
        let prompt = if has_window { prompt - 1 } else { prompt };
        let owner = Owner { queue: QueueShare::LONE, requester, background };
        let spec = SequenceSpec { has_window, prompt, answer, priority, owner, group: None };
        Arrival { step, spec, is_cancelled: fate == 0 }
    }
}

prop_compose! {
    fn limits()(
        (sequences, reserved_tokens, step_tokens) in (1_usize..6, 20_usize..200, 1_usize..40),
        (interval, batch) in (1_usize..10, 1_usize..6),
    ) -> Limits {
        Limits { sequences, reserved_tokens, step_tokens, encoding: Encoding { interval, batch } }
    }
}

proptest! {
    /// For any input the bounds hold at each step, each sequence ends, and what is computed again is bounded.
    #[test]
    fn bounds_hold_and_nobody_starves(
        limits in limits(),
        shrink_step in 0_u64..60,
        arrivals in prop::collection::vec(arrival(), 1..60),
    ) {
        let Limits { sequences, reserved_tokens, step_tokens, .. } = limits;
        let mut run = Run::new(limits);
        let (mut expected, mut cancelled) = (Vec::new(), Vec::new());
        let last = arrivals.iter().map(|it| it.step).max().unwrap();
        let count = arrivals.len();
        for steps in 0.. {
            for (key, it) in (0_u32..).zip(&arrivals) {
                if it.step == steps && it.spec.tokens() <= reserved_tokens {
                    run.enqueue(key, it.spec);
                    if it.is_cancelled { cancelled.push((key, steps + 3)) } else { expected.push((key, it.spec.answer.max(1))) }
                }
            }
            for (key, cancel_step) in &cancelled {
                if *cancel_step == steps { run.scheduler.remove(*key, run.now); }
            }
            let rows = run.step(None);
            prop_assert!(run.scheduler.book.used.tokens <= reserved_tokens);
            prop_assert!(rows.iter().map(|row| row.feed.tokens()).sum::<usize>() <= step_tokens);
            prop_assert!(rows.len() <= sequences);
            if steps == shrink_step {
                // From this step on, less fits in the device's memory.
                run.scheduler.limit_step(step_tokens / 2);
            }
            let idle = run.is_idle();
            if idle && steps >= last { break; }
            prop_assert!(idle || !rows.is_empty(), "there is always a sequence that can run");
            prop_assert!(steps < 60 * 100 * 8, "the run ends");
        }
        for (key, answer) in expected {
            prop_assert_eq!(run.ended.get(&key), Some(&answer), "{} has its whole answer", key);
        }
        prop_assert!(run.preempted <= 2 * count, "{} preemptions of {} sequences", run.preempted, count);
        prop_assert_eq!(run.scheduler.book.used, Resources::default());
        prop_assert!(run.scheduler.book.standings.is_empty());
    }

    /// Sequences of several queues end too, whatever the shares.
    #[test]
    fn no_queue_starves(
        limits in limits(),
        arrivals in prop::collection::vec((arrival(), 0_usize..3), 1..60),
    ) {
        let mut run = Run::new(limits);
        let mut expected = Vec::new();
        for steps in 0.. {
            for (key, (it, queue)) in (0_u32..).zip(&arrivals) {
                if it.step == steps && it.spec.tokens() <= limits.reserved_tokens {
                    run.enqueue(key, it.spec.in_queue(*queue, [500, 1_000, 7_000][*queue]));
                    expected.push(key);
                }
            }
            let rows = run.step(None);
            prop_assert!(run.scheduler.book.used.tokens <= limits.reserved_tokens);
            if run.is_idle() && steps >= 30 { break; }
            prop_assert!(run.is_idle() || !rows.is_empty(), "there is always a sequence that can run");
            prop_assert!(steps < 60 * 100 * 8, "the run ends");
        }
        prop_assert!(expected.iter().all(|key| run.ended.contains_key(key)));
    }

    /// Whatever others do, a sequence that is small beside its requester's share ends within two steps of its
    /// arrival.
    #[test]
    fn a_small_sequence_waits_for_nobody(
        arrivals in prop::collection::vec(arrival(), 1..60),
        arrival_step in 0_u64..60,
        priority in 0_u8..3,
    ) {
        // Six other requesters, each with background sequences too, make 13 parties with this one. So a share is
        // one sequence and 100 tokens, and no sequence is larger.
        let mut run = Run::new(Limits { sequences: 13, reserved_tokens: 13 * 100, step_tokens: 40, ..LIMITS });
        for steps in 0..arrival_step + 2 {
            for (key, it) in (0_u32..).zip(&arrivals) {
                if it.step == steps { run.enqueue(key, it.spec) }
            }
            if steps == arrival_step { run.enqueue(1_000, SequenceSpec { priority, ..from(9, 1, 1) }) }
            run.step(None);
        }
        prop_assert!(run.ended.contains_key(&1_000));
    }

    /// A small sequence does not wait for the ends of large ones, whatever large ones others have.
    #[test]
    fn a_small_sequence_waits_for_no_large_one(
        sizes in prop::collection::vec(prop_oneof![2_usize..50, 101_usize..650], 12),
        arrival_step in 0_u64..60,
    ) {
        // There are 13 requesters at most, so a sequence of up to 100 tokens is small. The small sequences of the
        // other 12 have less than half of the tokens together.
        let mut run = Run::new(Limits { sequences: 13, reserved_tokens: 13 * 100, step_tokens: 40, ..LIMITS });
        for (key, tokens) in (0_u32..).zip(&sizes) {
            run.enqueue(key, from(key.into(), 1, tokens - 1));
        }
        for steps in 0..arrival_step + 2 {
            if steps == arrival_step { run.enqueue(1_000, from(99, 1, 1)) }
            run.step(None);
        }
        prop_assert!(run.ended.contains_key(&1_000));
        for _ in 0..20_000 {
            if run.is_idle() { break }
            run.step(None);
        }
        prop_assert!(run.is_idle(), "the large ones end, too");
    }

    /// Whatever others do, a requester's first window waits for at most one window of each other requester.
    #[test]
    fn a_window_waits_for_one_of_each_other_requester(
        arrivals in prop::collection::vec(arrival(), 1..60),
        arrival_step in 0_u64..60,
    ) {
        let mut run = Run::new(Limits { sequences: 13, reserved_tokens: 13 * 100, step_tokens: 40, ..LIMITS });
        let mut waited = 0;
        for steps in 0.. {
            for (key, it) in (0_u32..).zip(&arrivals) {
                if it.step == steps { run.enqueue(key, it.spec) }
            }
            if steps == arrival_step { run.enqueue(1_000, window(0, 1).of(9)) }
            run.step(None);
            waited = run.waited.get(&1_000).map_or(waited, |(_, others)| *others);
            if run.ended.contains_key(&1_000) { break; }
            prop_assert!(steps < arrival_step + 12 * 9, "it has ended");
        }
        // One window of each of six requesters, whose background windows count as having arrived later, and the one
        // of the step in which it arrived.
        prop_assert!(waited <= 7, "{} steps had other windows", waited);
    }
}
