//! Decides which waiting sequence is admitted next, and which running ones are preempted for it. Changes nothing.
//!
//! - **Shares.** A requester's share is the part of its queue divided by the number of the queue's requesters with running
//!   or waiting sequences, and at least one sequence. While requesters within their shares wait, nothing is admitted beyond
//!   a share, and sequences that run beyond one are preempted for them. Within its share a sequence is preempted in three
//!   cases only: it overtook, it is a background sequence, or an isolated sequence needs its room. Between queues, the one
//!   that has been served least for its share comes first (`shares`); the other rules about order hold within a queue.
//! - **Large sequences.** A sequence is large if it has more tokens than a share, and also more than all reservable
//!   tokens divided by the number of slots, and if its requester runs no other. A running large sequence is within its
//!   requester's share if no large one was admitted before it, or if it and those admitted before it hold at most half
//!   of the tokens. Of the waiting large ones, only the one whose turn is first can be within a share. So a few
//!   requesters whose sequences are as long as the context cannot occupy all room until their sequences end, and each
//!   large sequence has its turn.
//! - **Order.** The first waiting sequences of each requester compete by the time of their arrival and their priority. But
//!   a requester counts as having arrived when one of its sequences was last admitted or last ended. So a requester with
//!   hundreds of sequences waits for the others after each of its own.
//! - **Overtaking.** A sequence that finds no room holds up only the later ones of its own requester. Smaller sequences
//!   of other requesters are admitted before it, and are preempted as soon as it would find room without them. So
//!   neither a small sequence nor one that needs nearly all room waits for ever.
//! - **Background** sequences run until their late arrival only while nobody else waits, and are preempted by ordinary
//!   sequences.

use std::cell::LazyCell;
use std::collections::BTreeMap;
use std::time::Instant;

use super::book::{Book, Order, Party, PartyLine, Resources, Running, Sequence};
use super::{Group, Limits, SequenceSpec};
use crate::batching::shares::QueueShare;

/// What each party may use while others wait. A party may run one sequence even if that exceeds `limit`. That sequence
/// is bounded by the rule for large sequences.
#[derive(Clone, Copy)]
pub(super) struct Share {
    /// What a party that runs several sequences may use.
    pub(super) limit: Resources,
    /// A sequence with more tokens than this is large, if it is the first of its party's running sequences.
    large_above: usize,
    /// The tokens that the large sequences of all parties may use together, if there are several of them.
    large_tokens: usize,
}

impl Share {
    /// Whether this sequence is large, given that it is the first of its party.
    fn is_large(self, spec: &SequenceSpec) -> bool {
        spec.tokens() > self.large_above
    }

    /// Whether a party that already uses `used` stays within its share if it also runs this sequence. `large` is what
    /// the large sequences of the other parties use.
    fn allows(self, spec: &SequenceSpec, used: Resources, large: Resources) -> bool {
        if used.sequences > 0 {
            return used.with(spec).is_within(self.limit);
        }
        !self.is_large(spec) || large.sequences == 0 || large.with(spec).tokens <= self.large_tokens
    }
}

/// The part of one of the pool's queues.
#[derive(Clone, Copy)]
pub(super) struct QueuePart {
    /// What the queue may use while other queues wait. It may run one sequence even if that exceeds this.
    limit: Resources,
    /// What each party of the queue may use.
    pub(super) share: Share,
    /// What the running sequences of the queue use that nobody may preempt: neither those that exceed their party's
    /// share nor those that overtook others.
    settled: Resources,
}

impl QueuePart {
    /// Whether the queue stays within its part if it runs this sequence besides those that use `used`.
    fn allows(&self, spec: &SequenceSpec, used: Resources) -> bool {
        used.sequences == 0 || used.with(spec).is_within(self.limit)
    }
}

/// How the limits are divided among the queues with running or waiting sequences, by the queue's index.
pub(super) struct Division {
    pub(super) parts: BTreeMap<usize, QueuePart>,
    /// What the running large sequences use.
    large: Resources,
}

impl Division {
    fn part(&self, spec: &SequenceSpec) -> Option<&QueuePart> {
        self.parts.get(&spec.owner.queue.queue)
    }

    /// Whether a sequence of a party that uses `used_by_party`, in a queue that uses `used_by_queue`, stays within both
    /// shares. `large` is what the large sequences of other parties use.
    fn allows(
        &self,
        spec: &SequenceSpec,
        used_by_party: Resources,
        used_by_queue: Resources,
        large: Resources,
    ) -> bool {
        self.part(spec).is_some_and(|part| {
            part.share.allows(spec, used_by_party, large)
                && (self.parts.len() == 1 || part.allows(spec, used_by_queue))
        })
    }

    /// Whether this sequence is large, given that it is the first of its party.
    fn is_large(&self, spec: &SequenceSpec) -> bool {
        self.part(spec).is_some_and(|part| part.share.is_large(spec))
    }
}

/// The class of a waiting sequence. A class is considered only while no sequence of an earlier class waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Rank {
    WithinShare,
    BeyondShare,
    Background,
}

/// The first waiting sequence of a party, which may be admitted next.
#[derive(Clone, Copy)]
pub(super) struct Candidate<K> {
    pub(super) rank: Rank,
    /// When the next work of its queue starts, in virtual time.
    queue_start: u64,
    turn: Order,
    pub(super) sequence: Sequence<K>,
    /// Whether it would be its party's only running sequence, and is large.
    is_large: bool,
}

/// A sequence that may run now.
pub(super) struct Admission<K> {
    pub(super) sequence: Sequence<K>,
    /// Its position among the next sequences of all parties.
    pub(super) turn: Order,
    /// Slots whose sequences must be preempted first.
    pub(super) preempts: Vec<usize>,
    /// Whether it is admitted before another whose turn it is.
    pub(super) overtakes: bool,
}

/// A running sequence that some waiting ones may preempt.
pub(super) struct Preemptible<'a, K> {
    slot: usize,
    pub(super) running: &'a Running<K>,
    /// Whether its party exceeds the share because of it, if the party's sequences are counted in the order of their
    /// admission.
    pub(super) beyond_share: bool,
}

impl<K> Preemptible<'_, K> {
    /// Whether it may be preempted for the candidate. `isolated`: only sequences of this group are admitted.
    fn yields_to(&self, candidate: &Candidate<K>, isolated: Option<Group>) -> bool {
        let Running { sequence: Sequence { spec, order, turn, serial, .. }, overtook, .. } = self.running;
        if isolated.is_some() {
            return spec.group != isolated;
        }
        let is_background = candidate.sequence.spec.owner.background;
        // The rules on background sequences and on overtaking require that the turn of the candidate is earlier, so
        // that two sequences cannot preempt each other in a loop.
        let candidate_is_ahead = *turn > Some(candidate.turn);
        let yields_as_background =
            spec.owner.background && !is_background && *order > candidate.sequence.order;
        if candidate_is_ahead && yields_as_background {
            return true;
        }
        // The running sequence was admitted after the candidate had begun to wait.
        let overtook_candidate = candidate_is_ahead && *overtook && *serial > candidate.sequence.serial;
        // A background sequence preempts nobody to get its share.
        candidate.rank == Rank::WithinShare && (overtook_candidate || self.beyond_share && !is_background)
    }
}

/// The rules of admission, applied to the sequences of a book.
pub(super) struct Admissions<'a, K> {
    pub(super) book: &'a Book<K>,
    pub(super) limits: Limits,
    /// Whether sequences are preempted.
    pub(super) preempts: bool,
}

impl<K: Copy + Ord> Admissions<'_, K> {
    /// The first candidate that may run now.
    pub(super) fn next(&self, isolated: Option<Group>, now: Instant) -> Option<Admission<K>> {
        let candidates = self.candidates(isolated, now);
        let rank = candidates.first()?.rank;
        let considered = candidates.into_iter().take_while(|candidate| candidate.rank == rank);
        let preemptible = LazyCell::new(|| self.preemptible(isolated));
        // Isolated sequences do not overtake each other, because they are few.
        let considered = considered.take(if isolated.is_some() { 1 } else { usize::MAX });
        considered.enumerate().find_map(|(index, candidate)| {
            let spec = &candidate.sequence.spec;
            let preempts = if self.fits(spec, self.book.used) {
                Vec::new()
            } else {
                let yielding = preemptible.iter().filter(|it| it.yields_to(&candidate, isolated));
                self.slots_to_empty(spec, yielding)?
            };
            let Candidate { sequence, turn, .. } = candidate;
            Some(Admission { sequence, turn, preempts, overtakes: index > 0 })
        })
    }

    /// The first waiting sequence of each party, in the order in which they are considered for admission; only those of
    /// the group `isolated`, if there is one.
    pub(super) fn candidates(&self, isolated: Option<Group>, now: Instant) -> Vec<Candidate<K>> {
        let division = LazyCell::new(|| self.division());
        let candidate = |(party, line): (&Party, &PartyLine<K>)| {
            let (_, sequence) = line.waiting.first_key_value()?;
            let Sequence { spec, arrival, order, turn, .. } = sequence;
            let settled = || division.part(spec).map(|part| part.settled).unwrap_or_default();
            let rank = if isolated.is_some() {
                Rank::WithinShare
            } else if party.owner.background && *arrival > now {
                Rank::Background
            } else if division.allows(spec, line.used, settled(), division.large) {
                Rank::WithinShare
            } else {
                Rank::BeyondShare
            };
            let served_at = line.served_at.unwrap_or(*arrival);
            let turn = turn.unwrap_or((spec.order_time(served_at.max(*arrival)), order.1));
            let is_large = line.used.sequences == 0 && division.is_large(spec);
            let queue_start = self.book.admitted.start(party.owner.queue);
            Some(Candidate { rank, queue_start, turn, sequence: *sequence, is_large })
        };
        let lines = self.book.lines.iter().filter(|(party, _)| isolated.is_none() || party.group == isolated);
        let mut candidates: Vec<Candidate<K>> = lines.filter_map(candidate).collect();
        if isolated.is_none() {
            // The room for large sequences is kept for the one whose turn is first. Otherwise the smaller ones among
            // them would fill each gap, and no gap would ever be large enough for it.
            let competes = |it: &&Candidate<K>| it.is_large && it.rank < Rank::Background;
            let turn = |it: &Candidate<K>| (it.queue_start, it.turn);
            let first_turn = candidates.iter().filter(competes).map(turn).min();
            for later in candidates.iter_mut().filter(|it| it.is_large && Some(turn(it)) > first_turn) {
                later.rank = later.rank.max(Rank::BeyondShare);
            }
        }
        candidates.sort_unstable_by_key(|it| (it.rank, it.queue_start, it.turn));
        candidates
    }

    /// How the limits are divided now.
    pub(super) fn division(&self) -> Division {
        let mut queues: BTreeMap<usize, (QueueShare, usize)> = BTreeMap::new();
        for party in self.book.lines.keys() {
            queues.entry(party.owner.queue.queue).or_insert((party.owner.queue, 0)).1 += 1;
        }
        let shares: u128 = queues.values().map(|(queue, _)| u128::from(queue.share)).sum();
        let Limits { sequences, reserved_tokens, .. } = self.limits;
        let part = |(queue, parties): (QueueShare, usize)| {
            let of_queue = |all: usize| (all as u128 * u128::from(queue.share) / shares.max(1)) as usize;
            let limit = Resources { sequences: of_queue(sequences), tokens: of_queue(reserved_tokens) };
            let of_party = Resources { sequences: limit.sequences / parties, tokens: limit.tokens / parties };
            // No more parties run at once than there are slots. So with more parties than slots, the tokens are divided
            // by the slots.
            let large_above = limit.tokens / parties.min(limit.sequences.max(1));
            let share = Share { limit: of_party, large_above, large_tokens: reserved_tokens / 2 };
            QueuePart { limit, share, settled: Resources::default() }
        };
        let parts = queues.into_iter().map(|(index, queue)| (index, part(queue))).collect();
        let mut division = Division { parts, large: Resources::default() };
        let (mut used, mut settled): (BTreeMap<Party, Resources>, BTreeMap<usize, Resources>) =
            (BTreeMap::new(), BTreeMap::new());
        for (_, running) in self.book.in_order(None) {
            let spec = &running.sequence.spec;
            let used_by_party = used.entry(running.sequence.party()).or_default();
            let share = division.part(spec).map(|part| part.share);
            let is_within = share.is_some_and(|it| it.allows(spec, *used_by_party, division.large));
            // Only the first running sequence of a party can be large, because its limit bounds a party that runs
            // several.
            if used_by_party.sequences == 0 && division.is_large(spec) {
                division.large = division.large.with(spec);
            }
            *used_by_party = used_by_party.with(spec);
            if is_within && !running.overtook {
                let of_queue = settled.entry(spec.owner.queue.queue).or_default();
                *of_queue = of_queue.with(spec);
            }
        }
        for (index, settled) in settled {
            if let Some(part) = division.parts.get_mut(&index) {
                part.settled = settled;
            }
        }
        division
    }

    /// The running sequences that waiting ones may preempt, the last admitted first; none without preemption. All if a group is
    /// `isolated`, otherwise those beyond a share, background sequences, and those that overtook others.
    pub(super) fn preemptible(&self, isolated: Option<Group>) -> Vec<Preemptible<'_, K>> {
        if !self.preempts {
            return Vec::new();
        }
        let division = self.division();
        let mut used_by_party: BTreeMap<Party, Resources> = BTreeMap::new();
        let mut used_by_queue: BTreeMap<usize, Resources> = BTreeMap::new();
        let mut large = Resources::default();
        let mut preemptible = Vec::new();
        for (slot, running) in self.book.in_order(None) {
            let spec = &running.sequence.spec;
            let of_party = used_by_party.entry(running.sequence.party()).or_default();
            let of_queue = used_by_queue.entry(spec.owner.queue.queue).or_default();
            let beyond_share = !division.allows(spec, *of_party, *of_queue, large);
            if of_party.sequences == 0 && division.is_large(spec) {
                large = large.with(spec);
            }
            (*of_party, *of_queue) = (of_party.with(spec), of_queue.with(spec));
            if isolated.is_some() || beyond_share || spec.owner.background || running.overtook {
                preemptible.push(Preemptible { slot, running, beyond_share });
            }
        }
        preemptible.reverse();
        preemptible
    }

    /// Whether there is room for a sequence beside what is `used`.
    pub(super) fn fits(&self, spec: &SequenceSpec, used: Resources) -> bool {
        let Limits { sequences, reserved_tokens, .. } = self.limits;
        used.with(spec).is_within(Resources { sequences, tokens: reserved_tokens })
    }

    /// The slots to empty so that a sequence finds room. None if emptying all of `preemptible` would not make enough
    /// room: their work would be lost for nothing.
    fn slots_to_empty<'a>(
        &self,
        spec: &SequenceSpec,
        preemptible: impl Iterator<Item = &'a Preemptible<'a, K>>,
    ) -> Option<Vec<usize>>
    where
        K: 'a,
    {
        let fits = |used: Resources| self.fits(spec, used);
        let (mut used, mut chosen) = (self.book.used, Vec::new());
        for it in preemptible {
            if fits(used) {
                break;
            }
            used = used.without(&it.running.sequence.spec);
            chosen.push(it);
        }
        if !fits(used) {
            return None;
        }
        // A sequence that was chosen before a larger one may not be in the way after all.
        let mut slots = Vec::new();
        for it in chosen.into_iter().rev() {
            let with_it = used.with(&it.running.sequence.spec);
            if fits(with_it) {
                used = with_it;
            } else {
                slots.push(it.slot);
            }
        }
        Some(slots)
    }

    /// Whether the sequence in this slot keeps its turn among all parties if it is preempted, so that later arrivals cannot
    /// go before it: it has overtaken another, or is the only running one of its party.
    pub(super) fn keeps_turn(&self, slot: usize) -> bool {
        let Some(running) = self.book.running.get(slot).and_then(Option::as_ref) else { return false };
        let line = self.book.lines.get(&running.sequence.party());
        running.overtook || line.is_none_or(|line| line.used.sequences == 1)
    }
}
