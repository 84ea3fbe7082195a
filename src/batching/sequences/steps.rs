//! Decides which rows the next step computes. Owns the counts of steps and windows.
//!
//! - A step first has a row (1 token) for each sequence that decodes: one whose whole prompt has been fed. The tokens left
//!   are for chunks of prompts, and `prompts` divides them. No more sequences are admitted than a step has tokens, so that
//!   every prompt makes progress. If more sequences run than a step has tokens, because the limit of a step was lowered,
//!   they take turns.
//! - A window is input that an encoder processes as a whole before the first token, such as 30 s of sound. It is encoded by
//!   a step that has only windows, so that other sequences are not suspected if a window fails or kills the worker. While
//!   sequences decode, such a step has one window, and at least [`Encoding::interval`] token steps lie between two such
//!   steps. If a sequence of another requester decodes, at least as many lie between two windows of a requester as take the
//!   time of a window, so that its windows take no more time than the answers. The same holds between queues. While none
//!   decodes, a step has up to [`Encoding::batch`] windows, and alternates with chunks of prompts. `windows` decides whose
//!   windows they are. Windows do not count as tokens of a step. A preempted sequence encodes its window again.

use std::collections::BTreeMap;
use std::time::Instant;

use super::book::{Book, Party, Running, Sequence};
use super::prompts::{self, Prompt};
use super::windows::{self, Encoding, Window};
use super::{Feed, Group, Limits, Row};
use crate::batching::shares::{Owner, Shares};

/// A running sequence with its slot.
type InSlot<'a, K> = (usize, &'a Running<K>);

/// The steps so far, and the windows in them.
#[derive(Default)]
pub(super) struct Steps {
    /// The number of token steps.
    tokens: usize,
    /// Token steps since the last step with windows; none if there was none.
    since_window: Option<usize>,
    /// The number of token steps that take as long as a window.
    per_window: usize,
    /// How many windows of the pool's queues have been encoded.
    encoded: Shares,
    /// The value of `tokens` when a window of a queue was last encoded, by the queue's index.
    queue_window_steps: BTreeMap<usize, usize>,
}

impl Steps {
    pub(super) fn set_per_window(&mut self, steps: usize) {
        self.per_window = steps;
    }

    /// Token steps since the last step with windows.
    pub(super) fn since_window(&self) -> usize {
        self.since_window.unwrap_or(usize::MAX)
    }

    /// The rows of the next step.
    pub(super) fn rows<K: Copy + Ord>(
        &self,
        book: &Book<K>,
        limits: Limits,
        isolated: Option<Group>,
        prompt_tokens: usize,
    ) -> Vec<Row<K>> {
        let (windows, without_window): (Vec<_>, Vec<_>) =
            book.in_order(isolated).into_iter().partition(|(_, it)| it.must_encode);
        let (decoding, prompts): (Vec<_>, Vec<_>) =
            without_window.into_iter().partition(|(_, it)| it.decodes());
        let Encoding { interval, batch } = limits.encoding;
        let is_due = |(_, window): &InSlot<'_, K>| match (&decoding[..], &prompts[..]) {
            // Nothing else is to be computed.
            ([], []) => true,
            // Windows alternate with chunks of prompts.
            ([], _) => self.since_window() >= 1,
            _ => self.since_window() >= interval && self.leaves_time_for(book, &decoding, window),
        };
        let due: Vec<_> = windows.into_iter().filter(is_due).collect();
        if !due.is_empty() {
            // Each window delays the answers, so there is only one at a time while sequences decode.
            let max_windows = if decoding.is_empty() { batch } else { 1 };
            return self.window_rows(book, &due, max_windows);
        }
        let mut rows = decode_rows(decoding, limits.step_tokens);
        let tokens_left = limits.step_tokens.saturating_sub(rows.len());
        rows.extend(prompt_rows(&prompts, tokens_left.min(prompt_tokens.max(prompts.len()))));
        rows
    }

    /// Records the rows of the step that is computed now. This is recorded before a window may fail, so that a requester
    /// whose windows fail takes turns with the others, too.
    pub(super) fn record<K: Copy + Ord>(&mut self, book: &mut Book<K>, rows: &[Row<K>], now: Instant) {
        let Some(first) = rows.first() else { return };
        if first.feed != Feed::Encode {
            self.since_window = self.since_window.map(|steps| steps + 1);
            self.tokens += 1;
            return;
        }
        self.since_window = Some(0);
        for row in rows {
            if let Some(line) = book.line_in(row.slot) {
                (line.encoded_at, line.window_step) = (Some(now), Some(self.tokens));
            }
            if let Some(running) = book.running.get(row.slot).and_then(Option::as_ref) {
                let queue = running.sequence.spec.owner.queue;
                self.encoded.serve(queue, 1);
                self.queue_window_steps.insert(queue.queue, self.tokens);
            }
        }
    }

    /// Whether the answers of other requesters have had as much time as a window takes, since a window of the same party
    /// was last encoded. The same between queues.
    fn leaves_time_for<K: Copy + Ord>(
        &self,
        book: &Book<K>,
        decoding: &[InSlot<'_, K>],
        window: &Running<K>,
    ) -> bool {
        let owner = window.sequence.spec.owner;
        let has_passed =
            |last: Option<usize>| last.map_or(usize::MAX, |last| self.tokens - last) >= self.per_window;
        let all_are =
            |matches: &dyn Fn(Owner) -> bool| decoding.iter().all(|(_, it)| matches(it.sequence.spec.owner));
        let of_party = book.lines.get(&window.sequence.party()).and_then(|line| line.window_step);
        let of_queue = self.queue_window_steps.get(&owner.queue.queue).copied();
        (has_passed(of_party) || all_are(&|it| (it.queue, it.requester) == (owner.queue, owner.requester)))
            && (has_passed(of_queue) || all_are(&|it| it.queue == owner.queue))
    }

    /// Rows for at most `max` of these windows. The sequences are in the order of their admission.
    fn window_rows<K: Copy + Ord>(
        &self,
        book: &Book<K>,
        waiting: &[InSlot<'_, K>],
        max: usize,
    ) -> Vec<Row<K>> {
        let window = |(_, it): &InSlot<'_, K>| {
            let Sequence { spec, arrival, .. } = it.sequence;
            let (requester, queue) = (it.sequence.party(), spec.owner.queue);
            let encoded_at = book.lines.get(&requester).and_then(|line| line.encoded_at);
            let since = encoded_at.map_or(arrival, |encoded_at| encoded_at.max(arrival));
            Window { queue, queue_start: self.encoded.start(queue), requester, since }
        };
        let windows: Vec<Window<Party>> = waiting.iter().map(window).collect();
        let chosen = windows::choose(&windows, max).into_iter().filter_map(|index| waiting.get(index));
        chosen.map(|(slot, it)| Row { key: it.sequence.key, slot: *slot, feed: Feed::Encode }).collect()
    }
}

/// A row for each sequence that decodes. If they are too many for a step, they take turns.
fn decode_rows<K: Copy>(mut decoding: Vec<InSlot<'_, K>>, step_tokens: usize) -> Vec<Row<K>> {
    if decoding.len() > step_tokens {
        decoding.sort_by_key(|(_, it)| it.last_row);
        decoding.truncate(step_tokens);
    }
    let row = |(slot, it): InSlot<'_, K>| Row { key: it.sequence.key, slot, feed: Feed::Tokens(1) };
    decoding.into_iter().map(row).collect()
}

/// Chunks of prompts, `budget` tokens in all. The sequences are in the order of their admission.
fn prompt_rows<K: Copy>(running: &[InSlot<'_, K>], budget: usize) -> Vec<Row<K>> {
    let prompt = |(_, it): &InSlot<'_, K>| Prompt {
        queue: it.sequence.spec.owner.queue,
        requester: it.sequence.party(),
        remaining: it.prompt_left,
    };
    let prompts: Vec<Prompt<Party>> = running.iter().map(prompt).collect();
    let chunks = prompts::divide(&prompts, budget);
    let fed = running.iter().zip(chunks).filter(|(_, tokens)| *tokens > 0);
    let row = |((slot, it), tokens): (&InSlot<'_, K>, usize)| Row {
        key: it.sequence.key,
        slot: *slot,
        feed: Feed::Tokens(tokens),
    };
    fed.map(row).collect()
}
