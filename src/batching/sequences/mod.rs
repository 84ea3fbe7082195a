//! Decides which sequences run, and which rows a step computes. Owns the waiting sequences of each requester in their
//! order. For each running sequence, it owns the number of prompt tokens left and the tokens reserved for it.
//!
//! - **Room.** A sequence is admitted when a slot is free and all tokens of its prompt and its longest possible answer
//!   can be reserved. So no running sequence runs out of room.
//! - **Queues.** The limits are divided among the queues with running or waiting sequences by their shares, and at least
//!   one sequence each. A queue that is alone may use everything. Between queues, the one that has been served least
//!   for its share comes first (`shares`); all rules about order below are about the sequences of one queue.
//! - **Shares.** A requester's share is the part of its queue divided by the number of the queue's requesters with
//!   running or waiting sequences, and at least one sequence. While requesters within their shares wait, nothing is admitted beyond a
//!   share, and sequences that run beyond one are preempted for them: the preempted ones wait again, and restart from
//!   the beginning.
//!   Within its share a sequence is preempted in three cases only: it overtook (see Overtaking), it is a background
//!   sequence, or an isolated sequence needs its room. One requester alone may use everything.
//! - **Large sequences.** A sequence is large if it has more tokens than a share, and also more than all reservable
//!   tokens divided by the number of slots, and if its requester runs no other. A running large sequence is within its
//!   requester's share if no large one was admitted before it, or if it and those admitted before it hold at most half
//!   of the tokens. Of the waiting large ones, only the one whose turn is first can be within a share. So a few
//!   requesters whose sequences are as long as the context cannot occupy all room until their sequences end, and each
//!   large sequence has its turn.
//! - **Order.** Within a requester, first come, first served; one level of priority is worth [`PRIORITY_STEP`] of
//!   waiting, up to [`MAX_PRIORITY`]. Between requesters, the first waiting sequences of each compete by the same rule,
//!   except that a requester counts as having arrived when one of its sequences was last admitted or last ended. So a
//!   requester with hundreds of sequences waits for the others after each of its own.
//! - **Overtaking.** A sequence that finds no room holds up only the later ones of its own requester. Smaller sequences
//!   of other requesters are admitted before it, and are preempted as soon as it would find room without them. So
//!   neither a small sequence nor one that needs nearly all room waits for ever.
//! - **Isolated** sequences belong to tasks that may have killed a worker. They run only beside each other: while they
//!   run, no step has a row of another sequence.
//! - **Background** sequences count as having arrived [`BACKGROUND_PENALTY`] later. Until then they run only while
//!   nobody else waits, and are preempted by ordinary sequences.
//! - **Steps.** A step first has a row (1 token) for each sequence that decodes: one whose whole prompt has been fed.
//!   The tokens left are for chunks of prompts, and `prompts` divides them. No more sequences are admitted than a
//!   step has tokens, so that every prompt makes progress. If more sequences run than a step has tokens, because the
//!   limit of a step was lowered, they take turns.
//! - **Windows.** A window is input that an encoder processes as a whole before the first token, such as 30 s of sound.
//!   It is encoded by a step that has only windows, so that other sequences are not suspected if a window fails or
//!   kills the worker. While sequences decode, such a step has one window, and at least [`Encoding::interval`] token
//!   steps lie between two such steps. If a sequence of another requester decodes, at least as many lie between two
//!   windows of a requester as take the time of a window, so that its windows take no more time than the answers. The
//!   same holds between queues.
//!   While none decodes, it has up to [`Encoding::batch`] windows, and alternates with chunks of prompts. `windows`
//!   decides whose windows they are. Windows do not count as tokens of a step. A preempted sequence encodes its window
//!   again.

use std::cell::LazyCell;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::prompts::{self, Prompt};
use super::shares::{Owner, QueueShare, Shares};
use super::windows::{self, Encoding, Window};

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
pub struct Request {
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

impl Request {
    fn tokens(&self) -> usize {
        self.prompt.saturating_add(self.answer)
    }

    fn party(&self) -> Party {
        Party { owner: self.owner, group: self.group }
    }

    /// The time by which requests are ordered, for a request of this priority that counts as having arrived at
    /// `arrival`.
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

/// The holder of a share. The ordinary, the background and the isolated sequences of a requester count as those of
/// separate parties.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Party {
    owner: Owner,
    group: Option<Group>,
}

/// A position in a queue: a time, and a serial number that decides between equal times.
type Order = (Instant, u64);

#[derive(Clone, Copy)]
struct Sequence<K> {
    key: K,
    request: Request,
    /// When it counts as having arrived.
    arrival: Instant,
    /// Its position among the sequences of its party.
    order: Order,
    /// Its position among the next sequences of all parties. It is fixed when the sequence is admitted. A preempted
    /// sequence may keep it (see [`Scheduler::preempt`]).
    turn: Option<Order>,
    /// The serial number of its last change: of the beginning of its wait, or of its admission.
    serial: u64,
}

#[derive(Clone, Copy)]
struct Running<K> {
    sequence: Sequence<K>,
    /// Whether its window still has to be encoded.
    must_encode: bool,
    /// Tokens of its prompt that are not fed yet.
    prompt_left: usize,
    /// The number of its last row. All rows of all sequences are numbered together.
    last_row: u64,
    /// Whether it was admitted before another whose turn it was.
    overtook: bool,
}

impl<K> Running<K> {
    /// Whether its whole prompt has been fed, so that it is fed the tokens of its answer.
    fn decodes(&self) -> bool {
        !self.must_encode && self.prompt_left == 0
    }
}

/// The sequences of one party, at least one.
struct PartyLine<K> {
    waiting: BTreeMap<Order, Sequence<K>>,
    /// What its running sequences use.
    used: Resources,
    /// When a sequence was last admitted, or ended after it had run.
    served_at: Option<Instant>,
    /// When a step last had a window of this party.
    encoded_at: Option<Instant>,
    /// The value of `token_steps` when a window of this party was last encoded.
    window_step: Option<usize>,
}

/// Slots and reserved tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Resources {
    sequences: usize,
    tokens: usize,
}

impl Resources {
    fn with(self, request: &Request) -> Self {
        let tokens = self.tokens.saturating_add(request.tokens());
        Self { sequences: self.sequences + 1, tokens }
    }

    fn without(self, request: &Request) -> Self {
        Self { sequences: self.sequences - 1, tokens: self.tokens - request.tokens() }
    }

    fn is_within(self, limit: Self) -> bool {
        self.sequences <= limit.sequences && self.tokens <= limit.tokens
    }
}

/// What each party may use while others wait. A party may run one sequence even if that exceeds `limit`. That sequence
/// is bounded by the rule for large sequences.
#[derive(Clone, Copy)]
struct Share {
    /// What a party that runs several sequences may use.
    limit: Resources,
    /// A sequence with more tokens than this is large, if it is the first of its party's running sequences.
    large_above: usize,
    /// The tokens that the large sequences of all parties may use together, if there are several of them.
    large_tokens: usize,
}

impl Share {
    /// Whether this sequence is large, given that it is the first of its party.
    fn is_large(self, request: &Request) -> bool {
        request.tokens() > self.large_above
    }

    /// Whether a party that already uses `used` stays within its share if it also runs this sequence. `large` is what
    /// the large sequences of the other parties use.
    fn allows(self, request: &Request, used: Resources, large: Resources) -> bool {
        if used.sequences > 0 {
            return used.with(request).is_within(self.limit);
        }
        !self.is_large(request) || large.sequences == 0 || large.with(request).tokens <= self.large_tokens
    }
}

/// The part of one of the pool's queues.
#[derive(Clone, Copy)]
struct QueuePart {
    /// What the queue may use while other queues wait. It may run one sequence even if that exceeds this.
    limit: Resources,
    /// What each party of the queue may use.
    share: Share,
    /// What the running sequences of the queue use that nobody may preempt: neither those that exceed their party's
    /// share nor those that overtook others.
    settled: Resources,
}

impl QueuePart {
    /// Whether the queue stays within its part if it runs this sequence besides those that use `used`.
    fn allows(&self, request: &Request, used: Resources) -> bool {
        used.sequences == 0 || used.with(request).is_within(self.limit)
    }
}

/// How the limits are divided among the queues with running or waiting sequences, by the queue's index.
struct Division {
    parts: BTreeMap<usize, QueuePart>,
    /// What the running large sequences use.
    large: Resources,
}

impl Division {
    fn part(&self, request: &Request) -> Option<&QueuePart> {
        self.parts.get(&request.owner.queue.queue)
    }

    /// Whether a sequence of a party that uses `used_by_party`, in a queue that uses `used_by_queue`, stays within both
    /// shares. `large` is what the large sequences of other parties use.
    fn allows(
        &self,
        request: &Request,
        used_by_party: Resources,
        used_by_queue: Resources,
        large: Resources,
    ) -> bool {
        self.part(request).is_some_and(|part| {
            part.share.allows(request, used_by_party, large)
                && (self.parts.len() == 1 || part.allows(request, used_by_queue))
        })
    }

    /// Whether this sequence is large, given that it is the first of its party.
    fn is_large(&self, request: &Request) -> bool {
        self.part(request).is_some_and(|part| part.share.is_large(request))
    }
}

/// The class of a waiting sequence. A class is considered only while no sequence of an earlier class waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
    WithinShare,
    BeyondShare,
    Background,
}

/// The first waiting sequence of a party, which may be admitted next.
#[derive(Clone, Copy)]
struct Candidate<K> {
    rank: Rank,
    /// When the next work of its queue starts, in virtual time.
    queue_start: u64,
    turn: Order,
    sequence: Sequence<K>,
    /// Whether it would be its party's only running sequence, and is large.
    is_large: bool,
}

/// A sequence that may run now.
struct Admission<K> {
    candidate: Candidate<K>,
    /// Slots whose sequences must be preempted first.
    preempts: Vec<usize>,
    overtakes: bool,
}

/// A running sequence that some waiting ones may preempt.
struct Preemptible<'a, K> {
    slot: usize,
    running: &'a Running<K>,
    /// Whether its party exceeds the share because of it, if the party's sequences are counted in the order of their
    /// admission.
    beyond_share: bool,
}

impl<K> Preemptible<'_, K> {
    /// Whether it may be preempted for the candidate. `isolated`: only sequences of this group are admitted.
    fn yields_to(&self, candidate: &Candidate<K>, isolated: Option<Group>) -> bool {
        let Running { sequence: Sequence { request, order, turn, serial, .. }, overtook, .. } = self.running;
        if isolated.is_some() {
            return request.group != isolated;
        }
        let is_background = candidate.sequence.request.owner.background;
        // The rules on background sequences and on overtaking require that the turn of the candidate is earlier, so
        // that two sequences cannot preempt each other in a loop.
        let candidate_is_ahead = *turn > Some(candidate.turn);
        let yields_as_background =
            request.owner.background && !is_background && *order > candidate.sequence.order;
        if candidate_is_ahead && yields_as_background {
            return true;
        }
        // The running sequence was admitted after the candidate had begun to wait.
        let overtook_candidate = candidate_is_ahead && *overtook && *serial > candidate.sequence.serial;
        // A background sequence preempts nobody to get its share.
        candidate.rank == Rank::WithinShare && (overtook_candidate || self.beyond_share && !is_background)
    }
}

enum Place {
    Waiting(Party, Order),
    Running(usize),
}

/// The sequences of one device.
pub struct Scheduler<K> {
    limits: Limits,
    /// The limits as they were set, before memory failures reduced them.
    configured: Limits,
    /// The line of each party that has running or waiting sequences.
    lines: BTreeMap<Party, PartyLine<K>>,
    /// What the queues of the pool have been admitted, in tokens.
    admitted: Shares,
    /// How many windows of them have been encoded.
    encoded: Shares,
    /// The value of `token_steps` when a window of a queue was last encoded, by the queue's index.
    queue_window_steps: BTreeMap<usize, usize>,
    /// Indexed by slot.
    running: Vec<Option<Running<K>>>,
    /// Where each sequence is.
    places: BTreeMap<K, Place>,
    /// What all running sequences use.
    used: Resources,
    /// The last serial number: each arrival, admission and preemption has one.
    serial: u64,
    /// The number of rows computed so far.
    rows: u64,
    /// Token steps since the last step with windows.
    steps_since_window: usize,
    /// The number of token steps so far.
    token_steps: usize,
    /// The number of token steps that take as long as a window.
    steps_per_window: usize,
    /// Whether sequences are preempted.
    preempts: bool,
}

impl<K: Copy + Ord> Scheduler<K> {
    /// A scheduler without sequences.
    pub fn new(limits: Limits) -> Self {
        let step_tokens = limits.step_tokens.max(1);
        let limits = Limits { step_tokens, sequences: limits.sequences.min(step_tokens), ..limits };
        Self {
            limits,
            configured: limits,
            lines: BTreeMap::new(),
            admitted: Shares::default(),
            encoded: Shares::default(),
            queue_window_steps: BTreeMap::new(),
            running: vec![None; limits.sequences],
            places: BTreeMap::new(),
            used: Resources::default(),
            serial: 0,
            rows: 0,
            steps_since_window: usize::MAX,
            token_steps: 0,
            steps_per_window: 0,
            preempts: true,
        }
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
        self.steps_per_window = steps;
    }

    /// Tokens that are reserved for running sequences.
    pub fn reserved(&self) -> usize {
        self.used.tokens
    }

    /// The sequences that run.
    pub fn running(&self) -> impl Iterator<Item = K> {
        self.running.iter().flatten().map(|running| running.sequence.key)
    }

    /// Enqueues a sequence. The caller must refuse one that needs more tokens than may be reserved: neither it nor any
    /// later sequence of its requester would ever run.
    pub fn enqueue(&mut self, key: K, request: Request, now: Instant) {
        self.serial += 1;
        let arrival = if request.owner.background { now + BACKGROUND_PENALTY } else { now };
        let order = (request.order_time(arrival), self.serial);
        self.add_waiting(Sequence { key, request, arrival, order, turn: None, serial: self.serial });
    }

    fn add_waiting(&mut self, sequence: Sequence<K>) {
        let Sequence { key, request, order, .. } = sequence;
        let party = request.party();
        let (waiting, used) = (BTreeMap::new(), Resources::default());
        let empty = || PartyLine { waiting, used, served_at: None, encoded_at: None, window_step: None };
        self.lines.entry(party).or_insert_with(empty).waiting.insert(order, sequence);
        self.places.insert(key, Place::Waiting(party, order));
    }

    /// Removes a sequence that has ended or is no longer wanted. Returns its slot, if it has one.
    pub fn remove(&mut self, key: K, now: Instant) -> Option<usize> {
        let (party, slot) = match self.places.remove(&key)? {
            Place::Waiting(party, order) => {
                self.lines.get_mut(&party)?.waiting.remove(&order);
                (party, None)
            }
            Place::Running(slot) => {
                let party = self.vacate(slot)?.sequence.request.party();
                self.lines.get_mut(&party)?.served_at = Some(now);
                (party, Some(slot))
            }
        };
        let PartyLine { waiting, used, .. } = self.lines.get(&party)?;
        if waiting.is_empty() && used.sequences == 0 {
            self.lines.remove(&party);
        }
        slot
    }

    fn vacate(&mut self, slot: usize) -> Option<Running<K>> {
        let running = self.running.get_mut(slot)?.take()?;
        let request = &running.sequence.request;
        self.used = self.used.without(request);
        let line = self.lines.get_mut(&request.party())?;
        line.used = line.used.without(request);
        Some(running)
    }

    /// Admits the sequences that may run now; only those of the group `isolated`, if there is one. The caller must
    /// apply the returned changes in their order.
    pub fn admit(&mut self, isolated: Option<Group>, now: Instant) -> Vec<Change<K>> {
        let mut changes = Vec::new();
        // The number of slots bounds the admissions, so that this ends whatever the rules decide.
        for _ in 0..self.running.len() {
            let Some(admission) = self.next_admission(isolated, now) else { break };
            for slot in &admission.preempts {
                changes.extend(self.preempt(*slot));
            }
            let Some(admitted) = self.start(admission, now) else { break };
            changes.push(admitted);
        }
        changes
    }

    /// The first candidate that may run now.
    fn next_admission(&self, isolated: Option<Group>, now: Instant) -> Option<Admission<K>> {
        let candidates = self.candidates(isolated, now);
        let rank = candidates.first()?.rank;
        let considered = candidates.into_iter().take_while(|candidate| candidate.rank == rank);
        let preemptible = LazyCell::new(|| self.preemptible(isolated));
        // Isolated sequences do not overtake each other, because they are few.
        let considered = considered.take(if isolated.is_some() { 1 } else { usize::MAX });
        considered.enumerate().find_map(|(index, candidate)| {
            let request = &candidate.sequence.request;
            let preempts = if self.fits(request, self.used) {
                Vec::new()
            } else {
                let yielding = preemptible.iter().filter(|it| it.yields_to(&candidate, isolated));
                self.slots_to_empty(request, yielding)?
            };
            Some(Admission { candidate, preempts, overtakes: index > 0 })
        })
    }

    /// The first waiting sequence of each party, in the order in which they are considered for admission; only those of
    /// the group `isolated`, if there is one.
    fn candidates(&self, isolated: Option<Group>, now: Instant) -> Vec<Candidate<K>> {
        let division = LazyCell::new(|| self.division());
        let candidate = |(party, line): (&Party, &PartyLine<K>)| {
            let (_, sequence) = line.waiting.first_key_value()?;
            let Sequence { request, arrival, order, turn, .. } = sequence;
            let settled = || division.part(request).map(|part| part.settled).unwrap_or_default();
            let rank = if isolated.is_some() {
                Rank::WithinShare
            } else if party.owner.background && *arrival > now {
                Rank::Background
            } else if division.allows(request, line.used, settled(), division.large) {
                Rank::WithinShare
            } else {
                Rank::BeyondShare
            };
            let served_at = line.served_at.unwrap_or(*arrival);
            let turn = turn.unwrap_or((request.order_time(served_at.max(*arrival)), order.1));
            let is_large = line.used.sequences == 0 && division.is_large(request);
            let queue_start = self.admitted.start(party.owner.queue);
            Some(Candidate { rank, queue_start, turn, sequence: *sequence, is_large })
        };
        let lines = self.lines.iter().filter(|(party, _)| isolated.is_none() || party.group == isolated);
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
    fn division(&self) -> Division {
        let mut queues: BTreeMap<usize, (QueueShare, usize)> = BTreeMap::new();
        for party in self.lines.keys() {
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
        for (_, running) in self.in_order(None) {
            let request = &running.sequence.request;
            let used_by_party = used.entry(request.party()).or_default();
            let share = division.part(request).map(|part| part.share);
            let is_within = share.is_some_and(|it| it.allows(request, *used_by_party, division.large));
            // Only the first running sequence of a party can be large, because its limit bounds a party that runs
            // several.
            if used_by_party.sequences == 0 && division.is_large(request) {
                division.large = division.large.with(request);
            }
            *used_by_party = used_by_party.with(request);
            if is_within && !running.overtook {
                let of_queue = settled.entry(request.owner.queue.queue).or_default();
                *of_queue = of_queue.with(request);
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
    fn preemptible(&self, isolated: Option<Group>) -> Vec<Preemptible<'_, K>> {
        if !self.preempts {
            return Vec::new();
        }
        let division = self.division();
        let mut used_by_party: BTreeMap<Party, Resources> = BTreeMap::new();
        let mut used_by_queue: BTreeMap<usize, Resources> = BTreeMap::new();
        let mut large = Resources::default();
        let mut preemptible = Vec::new();
        for (slot, running) in self.in_order(None) {
            let request = &running.sequence.request;
            let of_party = used_by_party.entry(request.party()).or_default();
            let of_queue = used_by_queue.entry(request.owner.queue.queue).or_default();
            let beyond_share = !division.allows(request, *of_party, *of_queue, large);
            if of_party.sequences == 0 && division.is_large(request) {
                large = large.with(request);
            }
            (*of_party, *of_queue) = (of_party.with(request), of_queue.with(request));
            if isolated.is_some() || beyond_share || request.owner.background || running.overtook {
                preemptible.push(Preemptible { slot, running, beyond_share });
            }
        }
        preemptible.reverse();
        preemptible
    }

    /// Whether there is room for the request beside what is `used`.
    fn fits(&self, request: &Request, used: Resources) -> bool {
        let Limits { sequences, reserved_tokens, .. } = self.limits;
        used.with(request).is_within(Resources { sequences, tokens: reserved_tokens })
    }

    /// The slots to empty so that the request finds room. None if emptying all of `preemptible` would not make enough
    /// room: their work would be lost for nothing.
    fn slots_to_empty<'a>(
        &self,
        request: &Request,
        preemptible: impl Iterator<Item = &'a Preemptible<'a, K>>,
    ) -> Option<Vec<usize>>
    where
        K: 'a,
    {
        let fits = |used: Resources| self.fits(request, used);
        let (mut used, mut chosen) = (self.used, Vec::new());
        for it in preemptible {
            if fits(used) {
                break;
            }
            used = used.without(&it.running.sequence.request);
            chosen.push(it);
        }
        if !fits(used) {
            return None;
        }
        // A sequence that was chosen before a larger one may not be in the way after all.
        let mut slots = Vec::new();
        for it in chosen.into_iter().rev() {
            let with_it = used.with(&it.running.sequence.request);
            if fits(with_it) {
                used = with_it;
            } else {
                slots.push(it.slot);
            }
        }
        Some(slots)
    }

    fn start(&mut self, admission: Admission<K>, now: Instant) -> Option<Change<K>> {
        let Admission { candidate: Candidate { turn, sequence, .. }, overtakes: overtook, .. } = admission;
        let slot = self.running.iter().position(Option::is_none)?;
        let Sequence { key, request, order, .. } = sequence;
        let line = self.lines.get_mut(&request.party())?;
        line.waiting.remove(&order)?;
        (line.used, line.served_at) = (line.used.with(&request), Some(now));
        self.used = self.used.with(&request);
        self.admitted.serve(request.owner.queue, request.tokens() as u64);
        self.serial += 1;
        let sequence = Sequence { turn: Some(turn), serial: self.serial, ..sequence };
        let (must_encode, prompt_left) = (request.has_window, request.prompt);
        self.running[slot] = Some(Running { sequence, must_encode, prompt_left, last_row: 0, overtook });
        self.places.insert(key, Place::Running(slot));
        Some(Change::Admitted { key, slot })
    }

    /// Preempts the sequence in this slot. If it had overtaken another, or was the only running one of its party, it
    /// keeps its turn among all parties, so that later arrivals cannot go before it.
    fn preempt(&mut self, slot: usize) -> Option<Change<K>> {
        let Running { sequence, overtook, .. } = self.vacate(slot)?;
        self.serial += 1;
        let runs = |line: &PartyLine<K>| line.used.sequences > 0;
        let has_others = self.lines.get(&sequence.request.party()).is_some_and(runs);
        let turn = sequence.turn.filter(|_| overtook || !has_others);
        self.add_waiting(Sequence { turn, serial: self.serial, ..sequence });
        Some(Change::Preempted { key: sequence.key, slot })
    }

    /// The running sequences with their slots, in the order of their admission; only those of the group
    /// `isolated`, if there is one.
    fn in_order(&self, isolated: Option<Group>) -> Vec<(usize, &Running<K>)> {
        let slots = self.running.iter().enumerate();
        let mut running: Vec<(usize, &Running<K>)> = slots
            .filter_map(|(slot, it)| Some((slot, it.as_ref()?)))
            .filter(|(_, it)| isolated.is_none() || it.sequence.request.group == isolated)
            .collect();
        running.sort_unstable_by_key(|(_, it)| it.sequence.serial);
        running
    }

    /// Whether any sequence decodes; only those of the group `isolated` count, if there is one.
    pub fn is_decoding(&self, isolated: Option<Group>) -> bool {
        self.in_order(isolated).iter().any(|(_, it)| it.decodes())
    }

    /// The rows of the next step, which the caller must compute now; only those of the group `isolated`, if there is
    /// one. Either all rows are windows or none is. `prompt_tokens` limits the tokens of all chunks of prompts
    /// together; it counts as at least the number of prompts. The limit of the step bounds all rows.
    pub fn rows(&mut self, isolated: Option<Group>, prompt_tokens: usize, now: Instant) -> Vec<Row<K>> {
        let (windows, without_window): (Vec<_>, Vec<_>) =
            self.in_order(isolated).into_iter().partition(|(_, it)| it.must_encode);
        let (decoding, prompts): (Vec<_>, Vec<_>) =
            without_window.into_iter().partition(|(_, it)| it.decodes());
        let Encoding { interval, batch } = self.limits.encoding;
        let is_due = |(_, window): &(usize, &Running<K>)| match (&decoding[..], &prompts[..]) {
            // Nothing else is to be computed.
            ([], []) => true,
            // Windows alternate with chunks of prompts.
            ([], _) => self.steps_since_window >= 1,
            _ => self.steps_since_window >= interval && self.leaves_time_for(&decoding, window),
        };
        let due: Vec<_> = windows.into_iter().filter(is_due).collect();
        if !due.is_empty() {
            // Each window delays the answers, so there is only one at a time while sequences decode.
            let max_windows = if decoding.is_empty() { batch } else { 1 };
            let rows = self.window_rows(&due, max_windows);
            self.steps_since_window = 0;
            for row in &rows {
                self.note_window(row.slot, now);
            }
            return rows;
        }
        let mut rows = self.decode_rows(decoding);
        let tokens_left = self.limits.step_tokens.saturating_sub(rows.len());
        rows.extend(prompt_rows(&prompts, tokens_left.min(prompt_tokens.max(prompts.len()))));
        if !rows.is_empty() {
            self.steps_since_window = self.steps_since_window.saturating_add(1);
            self.token_steps += 1;
        }
        rows
    }

    /// Whether the answers of other requesters have had as much time as a window takes, since a window of the same party
    /// was last encoded. The same between queues.
    fn leaves_time_for(&self, decoding: &[(usize, &Running<K>)], window: &Running<K>) -> bool {
        let owner = window.sequence.request.owner;
        let has_passed = |last: Option<usize>| {
            last.map_or(usize::MAX, |last| self.token_steps - last) >= self.steps_per_window
        };
        let all_are = |matches: &dyn Fn(Owner) -> bool| {
            decoding.iter().all(|(_, it)| matches(it.sequence.request.owner))
        };
        let of_party = self.lines.get(&window.sequence.request.party()).and_then(|line| line.window_step);
        let of_queue = self.queue_window_steps.get(&owner.queue.queue).copied();
        (has_passed(of_party) || all_are(&|it| (it.queue, it.requester) == (owner.queue, owner.requester)))
            && (has_passed(of_queue) || all_are(&|it| it.queue == owner.queue))
    }

    /// Rows for at most `max` of these windows. The sequences are in the order of their admission.
    fn window_rows(&self, waiting: &[(usize, &Running<K>)], max: usize) -> Vec<Row<K>> {
        let window = |(_, it): &(usize, &Running<K>)| {
            let Sequence { request, arrival, .. } = it.sequence;
            let (requester, queue) = (request.party(), request.owner.queue);
            let encoded_at = self.lines.get(&requester).and_then(|line| line.encoded_at);
            let since = encoded_at.map_or(arrival, |encoded_at| encoded_at.max(arrival));
            Window { queue, queue_start: self.encoded.start(queue), requester, since }
        };
        let windows: Vec<Window<Party>> = waiting.iter().map(window).collect();
        let chosen = windows::choose(&windows, max).into_iter().filter_map(|index| waiting.get(index));
        chosen.map(|(slot, it)| Row { key: it.sequence.key, slot: *slot, feed: Feed::Encode }).collect()
    }

    /// Records that a step has the window of the sequence in this slot. This is recorded before the window may fail, so
    /// that a requester whose windows fail takes turns with the others, too.
    fn note_window(&mut self, slot: usize, now: Instant) {
        let token_steps = self.token_steps;
        if let Some(line) = self.note_encoded(slot, now) {
            line.window_step = Some(token_steps);
        }
        if let Some(running) = self.running.get(slot).and_then(Option::as_ref) {
            let queue = running.sequence.request.owner.queue;
            self.encoded.serve(queue, 1);
            self.queue_window_steps.insert(queue.queue, token_steps);
        }
    }

    /// Records when a window of the party in this slot was last encoded, and returns the party's queue.
    fn note_encoded(&mut self, slot: usize, now: Instant) -> Option<&mut PartyLine<K>> {
        let running = self.running.get(slot).and_then(Option::as_ref)?;
        let line = self.lines.get_mut(&running.sequence.request.party())?;
        line.encoded_at = Some(now);
        Some(line)
    }

    /// A row for each sequence that decodes. If they are too many for a step, they take turns.
    fn decode_rows(&self, mut decoding: Vec<(usize, &Running<K>)>) -> Vec<Row<K>> {
        if decoding.len() > self.limits.step_tokens {
            decoding.sort_by_key(|(_, it)| it.last_row);
            decoding.truncate(self.limits.step_tokens);
        }
        decoding
            .into_iter()
            .map(|(slot, it)| Row { key: it.sequence.key, slot, feed: Feed::Tokens(1) })
            .collect()
    }

    /// Records that a row was computed.
    pub fn advance(&mut self, row: &Row<K>, now: Instant) {
        self.rows += 1;
        if row.feed == Feed::Encode {
            // A requester whose window arrived while this one was encoded comes first now.
            self.note_encoded(row.slot, now);
        }
        if let Some(running) = self.running.get_mut(row.slot).and_then(Option::as_mut) {
            running.last_row = self.rows;
            match row.feed {
                Feed::Encode => running.must_encode = false,
                Feed::Tokens(tokens) => running.prompt_left = running.prompt_left.saturating_sub(tokens),
            }
        }
    }

    /// Restarts the sequence in this slot: its window is encoded again, if it has one, and its prompt is fed again.
    pub fn restart(&mut self, slot: usize) {
        if let Some(running) = self.running.get_mut(slot).and_then(Option::as_mut) {
            let Request { has_window, prompt, .. } = running.sequence.request;
            (running.must_encode, running.prompt_left) = (has_window, prompt);
        }
    }
}

/// Chunks of prompts, `budget` tokens in all. The sequences are in the order of their admission.
fn prompt_rows<K: Copy>(running: &[(usize, &Running<K>)], budget: usize) -> Vec<Row<K>> {
    let prompt = |(_, it): &(usize, &Running<K>)| Prompt {
        queue: it.sequence.request.owner.queue,
        requester: it.sequence.request.party(),
        remaining: it.prompt_left,
    };
    let prompts: Vec<Prompt<Party>> = running.iter().map(prompt).collect();
    let chunks = prompts::divide(&prompts, budget);
    let fed = running.iter().zip(chunks).filter(|(_, tokens)| *tokens > 0);
    let row = |((slot, it), tokens): (&(usize, &Running<K>), usize)| Row {
        key: it.sequence.key,
        slot: *slot,
        feed: Feed::Tokens(tokens),
    };
    fed.map(row).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    const ENCODING: Encoding = Encoding { interval: 8, batch: 4 };
    const LIMITS: Limits = Limits { sequences: 4, reserved_tokens: 100, step_tokens: 16, encoding: ENCODING };

    fn request(prompt: usize, answer: usize) -> Request {
        let owner = Owner::default();
        Request { has_window: false, prompt, answer, priority: 0, owner, group: None }
    }

    fn window(prompt: usize, answer: usize) -> Request {
        Request { has_window: true, ..request(prompt, answer) }
    }

    /// A sequence of this requester.
    fn from(requester: u64, prompt: usize, answer: usize) -> Request {
        request(prompt, answer).of(requester)
    }

    impl Request {
        fn of(mut self, requester: u64) -> Self {
            self.owner.requester = requester;
            self
        }

        fn in_queue(mut self, queue: usize, share: u32) -> Self {
            self.owner.queue = QueueShare { queue, share };
            self
        }
    }

    fn background(prompt: usize, answer: usize) -> Request {
        let mut request = request(prompt, answer);
        request.owner.background = true;
        request
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

        fn enqueue(&mut self, key: u32, request: Request) {
            self.scheduler.enqueue(key, request, self.now);
        }

        fn enqueue_all(&mut self, keys: impl IntoIterator<Item = u32>, request: impl Fn(u32) -> Request) {
            keys.into_iter().for_each(|key| self.enqueue(key, request(key)));
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
            let steps_since_window = self.scheduler.steps_since_window;
            let rows = self.scheduler.rows(isolated, usize::MAX, self.now);
            self.check_windows(isolated, steps_since_window, &rows);
            let left = |row: &Row<u32>| self.scheduler.running[row.slot].unwrap().prompt_left;
            let prompts = rows.iter().position(|row| left(row) > 0).unwrap_or(rows.len());
            let is_encoding = rows.first().is_some_and(|row| row.feed == Feed::Encode);
            assert!(
                is_encoding || rows[prompts..].iter().all(|row| left(row) > 0),
                "decoding sequences come first"
            );
            self.now += Duration::from_millis(10);
            for row in &rows {
                self.scheduler.advance(row, self.now);
                let running = self.scheduler.running[row.slot].unwrap();
                if row.feed != Feed::Encode && running.prompt_left == 0 {
                    let generated = self.generated.entry(row.key).or_default();
                    *generated += 1;
                    if *generated >= running.sequence.request.answer.max(1) {
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
            let max_windows = self.scheduler.running.len().pow(2);
            let running = self.scheduler.in_order(isolated);
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
            for (_, it) in running.iter().filter(|(_, it)| waits(it) && !it.sequence.request.owner.background)
            {
                let (tokens, others) = self.waited.entry(it.sequence.key).or_default();
                assert!(*others <= max_windows, "{others} steps had other windows");
                assert!(*tokens <= interval * (max_windows + 1), "{tokens} steps had none");
                *(if windows > 0 { others } else { tokens }) += 1;
            }
        }

        /// Checks that no ordinary sequence within its share waits if preempting those beyond theirs makes room.
        fn check_shares(&self, isolated: Option<Group>) {
            let scheduler = &self.scheduler;
            let division = scheduler.division();
            if isolated.is_some() || division.parts.values().any(|part| part.share.limit.sequences == 0) {
                return;
            }
            let beyond = scheduler.preemptible(None).into_iter().filter(|it| it.beyond_share);
            let used = beyond.fold(scheduler.used, |used, it| used.without(&it.running.sequence.request));
            let candidates = scheduler.candidates(None, self.now);
            let mut within = candidates
                .iter()
                .filter(|it| it.rank == Rank::WithinShare && !it.sequence.request.owner.background);
            let waits = within.find(|it| scheduler.fits(&it.sequence.request, used));
            assert!(
                waits.is_none(),
                "a sequence within its share waits for ones beyond theirs: {:?}",
                waits.map(|it| it.sequence.request)
            );
        }

        fn is_idle(&self) -> bool {
            self.scheduler.lines.is_empty()
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
        run.enqueue(1, request(20, 5));
        run.enqueue(2, request(20, 5));
        assert_eq!(fed(run.step(None)), [(1, 16)]);
        assert_eq!(fed(run.step(None)), [(1, 4), (2, 12)]);
        run.enqueue(3, request(40, 5));
        assert_eq!(fed(run.step(None)), [(1, 1), (2, 8), (3, 7)]);
    }

    #[test]
    fn a_prompt_of_one_token_does_not_wait_for_three_of_four_thousand() {
        for requester in [1, 2] {
            let mut run =
                Run::new(Limits { sequences: 16, reserved_tokens: 16_384, step_tokens: 512, ..LIMITS });
            run.enqueue_all(0..3, |_| from(1, 4_000, 100));
            run.step(None);
            run.enqueue(9, from(requester, 1, 1));
            assert_eq!(run.steps_until(9, 100), 1);
        }
    }

    #[test]
    fn reservations_of_one_requester_do_not_hold_up_another() {
        let mut run =
            Run::new(Limits { sequences: 16, reserved_tokens: 16_384, step_tokens: 1_024, ..LIMITS });
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
        assert_eq!(
            run.admit(None),
            [],
            "preempting one makes too little room, and two of three are within half"
        );
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
        run.enqueue(1, request(50, 10));
        run.enqueue(2, request(50, 10));
        run.enqueue(3, request(1, 1));
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
        let request = |requester: u64| from(requester, 1, if requester < 8 { 10 } else { 2 });
        let mut current: BTreeMap<u64, u32> = BTreeMap::new();
        for step in 0..300 {
            for requester in 0..20 {
                if current.get(&requester).is_none_or(|key| run.ended.contains_key(key)) {
                    key += 1;
                    current.insert(requester, key);
                    run.enqueue(key, request(requester));
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
                let request = Request { priority, ..from(requesters[key as usize - 1], 1, 1) };
                run.scheduler.enqueue(key, request, begun + later * PRIORITY_STEP);
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
        run.enqueue_all(1..1_000, |_| Request { priority: u8::MAX, ..from(1, 1, 9) });
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
        run.enqueue_all(0..4, |_| request(1, 20));
        run.step(None);
        run.scheduler.limit_step(2);
        for _ in 0..4 {
            assert_eq!(run.step(None).len(), 2);
        }
        assert_eq!(run.generated.values().copied().collect::<Vec<_>>(), [3, 3, 3, 3]);
        run.enqueue(4, request(1, 1));
        assert!(run.admit(None).is_empty(), "four are running, and only two may");
    }

    #[test]
    fn background_sequences_are_preempted_by_arrivals_within_a_minute() {
        let mut run = Run::new(LIMITS);
        let begun = run.now;
        run.enqueue_all(0..3, |_| background(4, 26));
        assert_eq!(run.admit(None).len(), 3);
        run.now = begun + BACKGROUND_PENALTY / 2;
        run.enqueue(9, request(4, 30));
        assert_eq!(run.admit(None), [preempted(2, 2), admitted(9, 2)]);
        assert_eq!(run.admit(None), [], "only a background sequence waits");
        run.now = begun + 2 * BACKGROUND_PENALTY;
        run.enqueue(10, request(4, 30));
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
        run.enqueue_all(0..3, |_| request(4, 26));
        assert_eq!(run.step(None).len(), 3);
        run.enqueue(9, Request { group: Some(1), ..request(4, 30) });
        assert_eq!(run.admit(Some(1)), [preempted(2, 2), admitted(9, 2)]);
        assert!(run.scheduler.rows(Some(1), usize::MAX, run.now).iter().all(|row| row.key == 9));
        assert_eq!(run.scheduler.remove(9, run.now), Some(2));
        assert_eq!(run.admit(Some(1)), []);
        assert_eq!(run.admit(None), [admitted(2, 2)], "it restarts in its slot");
    }

    #[test]
    fn sequences_of_an_earlier_group_are_like_all_others_for_the_next() {
        let mut run = Run::new(LIMITS);
        run.enqueue(1, Request { group: Some(1), ..request(4, 26) });
        assert_eq!(run.step(Some(1)).len(), 1);
        run.enqueue(2, request(4, 26));
        assert_eq!(run.step(None).len(), 2, "the group is not isolated any more");
        run.enqueue(3, Request { group: Some(2), ..request(4, 26) });
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
        let windows: Vec<u32> =
            rows.iter().filter(|row| row.feed == Feed::Encode).map(|row| row.key).collect();
        if windows.is_empty() {
            Tokens(rows.iter().map(|row| row.feed.tokens()).sum())
        } else {
            Windows(windows)
        }
    }

    #[test]
    fn while_sequences_decode_there_are_eight_steps_between_two_windows() {
        let mut run = Run::new(Limits { sequences: 6, ..LIMITS });
        run.enqueue(1, request(4, 30));
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
            run.enqueue(1, request(4, 90).of(1));
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
        run.enqueue(2, request(1, 50));
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
        request: Request,
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
            let request = Request { has_window, prompt, answer, priority, owner, group: None };
            Arrival { step, request, is_cancelled: fate == 0 }
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
                    if it.step == steps && it.request.tokens() <= reserved_tokens {
                        run.enqueue(key, it.request);
                        if it.is_cancelled { cancelled.push((key, steps + 3)) } else { expected.push((key, it.request.answer.max(1))) }
                    }
                }
                for (key, cancel_step) in &cancelled {
                    if *cancel_step == steps { run.scheduler.remove(*key, run.now); }
                }
                let rows = run.step(None);
                prop_assert!(run.scheduler.used.tokens <= reserved_tokens);
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
            prop_assert_eq!(run.scheduler.used, Resources::default());
            prop_assert!(run.scheduler.places.is_empty());
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
                    if it.step == steps && it.request.tokens() <= limits.reserved_tokens {
                        run.enqueue(key, it.request.in_queue(*queue, [500, 1_000, 7_000][*queue]));
                        expected.push(key);
                    }
                }
                let rows = run.step(None);
                prop_assert!(run.scheduler.used.tokens <= limits.reserved_tokens);
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
                    if it.step == steps { run.enqueue(key, it.request) }
                }
                if steps == arrival_step { run.enqueue(1_000, Request { priority, ..from(9, 1, 1) }) }
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
            for _ in 0..20_000 { run.step(None); }
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
                    if it.step == steps { run.enqueue(key, it.request) }
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
}
