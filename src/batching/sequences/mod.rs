//! Schedules the sequences of one device: decides which of them run, and which rows a step computes.
//!
//! 1. A sequence is admitted if a slot is free and all tokens of its prompt and its longest answer can be reserved.
//! 2. Queues divide the limits by their shares, requesters a queue's part equally. Who is alone may use everything.
//! 3. A sequence within its share preempts those that exceed theirs. They wait again, and start over.
//! 4. Large sequences of several requesters hold at most half of the tokens together, and each of them has its turn.
//! 5. Requesters take turns. Each one's sequences are first come, first served; a priority is worth seconds of waiting.
//! 6. A sequence without room delays only its requester's. Those that overtake it are preempted once it fits without them.
//! 7. A background sequence counts as having arrived a minute later. Until then it runs only while nobody else waits.
//! 8. The sequences of an isolated group run alone.
//! 9. A step feeds each sequence that decodes one token. The prompts divide its other tokens.
//! 10. Windows are encoded in steps of their own. Between two of them there is time for the answers of others.
//!
//! | file | decides |
//! |---|---|
//! | `admission` | which sequences are admitted and preempted: rules 1 to 8 |
//! | `steps` | which rows a step computes: rules 9 and 10 |
//! | `prompts` | how the tokens of a step are divided among prompts |
//! | `windows` | whose windows (inputs of an encoder) a step encodes |
//! | `book` | nothing: it keeps which sequences wait and run, and what they use |

mod admission;
mod book;
mod prompts;
mod steps;
#[cfg(test)]
mod tests;
mod windows;

use std::time::{Duration, Instant};

use self::admission::Admissions;
use self::book::Book;
use self::steps::Steps;
use super::shares::Owner;

pub use self::windows::Encoding;

/// The waiting time that one level of priority is worth.
pub const PRIORITY_STEP: Duration = Duration::from_secs(5);
/// The highest priority that counts; a higher one counts as this one. Otherwise a requester could hold up others for
/// many minutes.
pub const MAX_PRIORITY: u8 = 9;
/// A background sequence counts as having arrived this much later.
pub const BACKGROUND_PENALTY: Duration = Duration::from_secs(60);

/// The scheduler's bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The maximum number of sequences that run at once.
    pub sequences: usize,
    /// The maximum number of tokens reserved for all running sequences together.
    pub reserved_tokens: usize,
    /// The maximum number of tokens in one step.
    pub step_tokens: usize,
    /// How windows are spread among steps.
    pub encoding: Encoding,
}

/// A sequence that is to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceSpec {
    /// Whether it has a window, which is encoded before its first token.
    pub has_window: bool,
    /// Tokens of its prompt; 0 only if it has a window.
    pub prompt: usize,
    /// The maximum number of tokens of its answer.
    pub answer: usize,
    /// A sequence with a higher number runs sooner, up to [`MAX_PRIORITY`].
    pub priority: u8,
    /// Whose it is. A background sequence runs only in room that others leave, until it has waited for
    /// [`BACKGROUND_PENALTY`].
    pub owner: Owner,
    /// The group of isolated sequences to which it belongs.
    pub group: Option<Group>,
}

/// The number of a group of isolated sequences. While a group is isolated, no other sequence runs; afterwards its
/// sequences run as all others do.
pub type Group = u64;

impl SequenceSpec {
    fn tokens(&self) -> usize {
        self.prompt.saturating_add(self.answer)
    }

    /// The time by which sequences are ordered, for one of this priority that counts as having arrived at `arrival`.
    fn order_time(&self, arrival: Instant) -> Instant {
        arrival + PRIORITY_STEP * u32::from(MAX_PRIORITY.saturating_sub(self.priority))
    }
}

/// What a sequence is fed in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Feed {
    /// Its whole window, for the encoder.
    Encode,
    /// This many tokens of its prompt, or 1 of its answer.
    Tokens(usize),
}

impl Feed {
    /// The number of tokens of the prompt or the answer: 0 for [`Feed::Encode`].
    pub fn tokens(self) -> usize {
        match self {
            Self::Encode => 0,
            Self::Tokens(tokens) => tokens,
        }
    }
}

/// A row of a step: what one sequence is fed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row<K> {
    /// The sequence.
    pub key: K,
    /// The slot in which it runs.
    pub slot: usize,
    /// What the sequence is fed.
    pub feed: Feed,
}

/// The admission or the preemption of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change<K> {
    /// It runs in this slot from now on, from its beginning.
    Admitted {
        /// The sequence.
        key: K,
        /// Its slot.
        slot: usize,
    },
    /// It no longer runs, and waits again.
    Preempted {
        /// The sequence.
        key: K,
        /// Its former slot, which is free now.
        slot: usize,
    },
}

/// The sequences of one device.
pub struct Scheduler<K> {
    limits: Limits,
    /// The limits as they were set, before memory failures reduced them.
    configured: Limits,
    book: Book<K>,
    steps: Steps,
    /// Whether sequences are preempted.
    preempts: bool,
}

impl<K: Copy + Ord> Scheduler<K> {
    /// A scheduler without sequences.
    pub fn new(limits: Limits) -> Self {
        let step_tokens = limits.step_tokens.max(1);
        let limits = Limits { step_tokens, sequences: limits.sequences.min(step_tokens), ..limits };
        let (book, steps) = (Book::new(limits.sequences), Steps::default());
        Self { limits, configured: limits, book, steps, preempts: true }
    }

    /// A scheduler that never preempts, for sequences that would come out differently if they were started over.
    pub fn without_preemption(limits: Limits) -> Self {
        Self { preempts: false, ..Self::new(limits) }
    }

    /// Limits a step to `tokens` tokens and the same number of sequences. If more are running, they take turns.
    pub fn limit_step(&mut self, tokens: usize) {
        self.limits.step_tokens = tokens.clamp(1, self.configured.step_tokens);
        self.limits.sequences = self.configured.sequences.min(self.limits.step_tokens);
    }

    /// Limits the number of windows that are encoded together.
    pub fn limit_windows(&mut self, max: usize) {
        self.limits.encoding.batch = max.clamp(1, self.configured.encoding.batch);
    }

    /// Says how many token steps take as long as a window; 0 if it is not known yet.
    pub fn set_steps_per_window(&mut self, steps: usize) {
        self.steps.set_per_window(steps);
    }

    /// Tokens that are reserved for running sequences.
    pub fn reserved(&self) -> usize {
        self.book.used.tokens
    }

    /// The sequences that run.
    pub fn running(&self) -> impl Iterator<Item = K> {
        self.book.running.iter().flatten().map(|running| running.sequence.key)
    }

    /// Enqueues a sequence. The caller must refuse one that needs more tokens than may be reserved: neither it nor any
    /// later sequence of its requester would ever run.
    pub fn enqueue(&mut self, key: K, spec: SequenceSpec, now: Instant) {
        let arrival = if spec.owner.background { now + BACKGROUND_PENALTY } else { now };
        self.book.enqueue(key, spec, arrival);
    }

    /// Removes a sequence that has ended or is no longer wanted. Returns its slot, if it has one.
    pub fn remove(&mut self, key: K, now: Instant) -> Option<usize> {
        self.book.remove(key, now)
    }

    /// Admits the sequences that may run now; only those of the group `isolated`, if there is one. The caller must
    /// apply the returned changes in their order.
    pub fn admit(&mut self, isolated: Option<Group>, now: Instant) -> Vec<Change<K>> {
        let mut changes = Vec::new();
        // The number of slots bounds the admissions, so that this ends whatever the rules decide.
        for _ in 0..self.book.running.len() {
            let Some(admission) = self.admissions().next(isolated, now) else { break };
            for slot in admission.preempts {
                let keeps_turn = self.admissions().keeps_turn(slot);
                let preempted = self.book.preempt(slot, keeps_turn);
                changes.extend(preempted.map(|key| Change::Preempted { key, slot }));
            }
            let key = admission.sequence.key;
            let started = self.book.start(admission.sequence, admission.turn, admission.overtakes, now);
            let Some(slot) = started else { break };
            changes.push(Change::Admitted { key, slot });
        }
        changes
    }

    /// The rules of admission, for the sequences as they are now.
    fn admissions(&self) -> Admissions<'_, K> {
        Admissions { book: &self.book, limits: self.limits, preempts: self.preempts }
    }

    /// Whether any sequence decodes; only those of the group `isolated` count, if there is one.
    pub fn is_decoding(&self, isolated: Option<Group>) -> bool {
        self.book.in_order(isolated).iter().any(|(_, it)| it.decodes())
    }

    /// The rows of the next step, which the caller must compute now; only those of the group `isolated`, if there is
    /// one. Either all rows are windows or none is. `prompt_tokens` limits the tokens of all chunks of prompts
    /// together; it counts as at least the number of prompts. The limit of the step bounds all rows.
    pub fn rows(&mut self, isolated: Option<Group>, prompt_tokens: usize, now: Instant) -> Vec<Row<K>> {
        let rows = self.steps.rows(&self.book, self.limits, isolated, prompt_tokens);
        self.steps.record(&mut self.book, &rows, now);
        rows
    }

    /// Records that a row was computed.
    pub fn advance(&mut self, row: &Row<K>, now: Instant) {
        self.book.advance(row, now);
    }

    /// Restarts the sequence in this slot: its window is encoded again, if it has one, and its prompt is fed again.
    pub fn restart(&mut self, slot: usize) {
        self.book.restart(slot);
    }
}
