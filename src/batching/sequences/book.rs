//! The book-keeping of the scheduler: which sequences wait and run, in which order, and what they use. Decides nothing.

use std::collections::BTreeMap;
use std::time::Instant;

use super::{Feed, Group, Row, SequenceSpec};
use crate::batching::shares::{Owner, Shares};

/// The holder of a share. The ordinary, the background and the isolated sequences of a requester count as those of
/// separate parties.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Party {
    pub(super) owner: Owner,
    pub(super) group: Option<Group>,
}

/// A position in a queue: a time, and a serial number that decides between equal times.
pub(super) type Order = (Instant, u64);

/// A sequence, which waits or runs.
#[derive(Clone, Copy)]
pub(super) struct Sequence<K> {
    pub(super) key: K,
    pub(super) spec: SequenceSpec,
    /// When it counts as having arrived.
    pub(super) arrival: Instant,
    /// Its position among the sequences of its party.
    pub(super) order: Order,
    /// Its position among the next sequences of all parties. It is fixed when the sequence is admitted. A preempted
    /// sequence may keep it.
    pub(super) turn: Option<Order>,
    /// The serial number of its last change: of the beginning of its wait, or of its admission.
    pub(super) serial: u64,
}

impl<K> Sequence<K> {
    pub(super) fn party(&self) -> Party {
        Party { owner: self.spec.owner, group: self.spec.group }
    }
}

#[derive(Clone, Copy)]
pub(super) struct Running<K> {
    pub(super) sequence: Sequence<K>,
    /// Whether its window still has to be encoded.
    pub(super) must_encode: bool,
    /// Tokens of its prompt that are not fed yet.
    pub(super) prompt_left: usize,
    /// The number of its last row. All rows of all sequences are numbered together.
    pub(super) last_row: u64,
    /// Whether it was admitted before another whose turn it was.
    pub(super) overtook: bool,
}

impl<K> Running<K> {
    /// A sequence from its beginning.
    fn begin(sequence: Sequence<K>, overtook: bool) -> Self {
        let SequenceSpec { has_window, prompt, .. } = sequence.spec;
        Self { sequence, must_encode: has_window, prompt_left: prompt, last_row: 0, overtook }
    }

    /// Whether its whole prompt has been fed, so that it is fed the tokens of its answer.
    pub(super) fn decodes(&self) -> bool {
        !self.must_encode && self.prompt_left == 0
    }
}

/// The sequences of one party, at least one.
pub(super) struct PartyLine<K> {
    pub(super) waiting: BTreeMap<Order, Sequence<K>>,
    /// What its running sequences use.
    pub(super) used: Resources,
    /// When a sequence was last admitted, or ended after it had run.
    pub(super) served_at: Option<Instant>,
    /// When a step with a window of this party last began or ended.
    pub(super) encoded_at: Option<Instant>,
    /// The number of token steps before a window of this party was last encoded.
    pub(super) window_step: Option<usize>,
}

/// Slots and reserved tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Resources {
    pub(super) sequences: usize,
    pub(super) tokens: usize,
}

impl Resources {
    pub(super) fn with(self, spec: &SequenceSpec) -> Self {
        let tokens = self.tokens.saturating_add(spec.tokens());
        Self { sequences: self.sequences + 1, tokens }
    }

    pub(super) fn without(self, spec: &SequenceSpec) -> Self {
        Self { sequences: self.sequences - 1, tokens: self.tokens - spec.tokens() }
    }

    pub(super) fn is_within(self, limit: Self) -> bool {
        self.sequences <= limit.sequences && self.tokens <= limit.tokens
    }
}

/// Where a sequence is.
pub(super) enum Standing {
    Waiting(Party, Order),
    Running(usize),
}

/// All sequences of a device.
pub(super) struct Book<K> {
    /// The line of each party that has running or waiting sequences.
    pub(super) lines: BTreeMap<Party, PartyLine<K>>,
    /// Indexed by slot.
    pub(super) running: Vec<Option<Running<K>>>,
    pub(super) standings: BTreeMap<K, Standing>,
    /// What all running sequences use.
    pub(super) used: Resources,
    /// What the queues of the pool have been admitted, in tokens.
    pub(super) admitted: Shares,
    /// The last serial number: each arrival, admission and preemption has one.
    serial: u64,
    /// The number of rows computed so far.
    rows: u64,
}

impl<K: Copy + Ord> Book<K> {
    pub(super) fn new(slots: usize) -> Self {
        Self {
            lines: BTreeMap::new(),
            running: vec![None; slots],
            standings: BTreeMap::new(),
            used: Resources::default(),
            admitted: Shares::default(),
            serial: 0,
            rows: 0,
        }
    }

    /// Adds a sequence that counts as having arrived at `arrival`, and waits.
    pub(super) fn enqueue(&mut self, key: K, spec: SequenceSpec, arrival: Instant) {
        self.serial += 1;
        let order = (spec.order_time(arrival), self.serial);
        self.add_waiting(Sequence { key, spec, arrival, order, turn: None, serial: self.serial });
    }

    fn add_waiting(&mut self, sequence: Sequence<K>) {
        let (party, order) = (sequence.party(), sequence.order);
        self.line(party).waiting.insert(order, sequence);
        self.standings.insert(sequence.key, Standing::Waiting(party, order));
    }

    fn line(&mut self, party: Party) -> &mut PartyLine<K> {
        let (waiting, used) = (BTreeMap::new(), Resources::default());
        let empty = || PartyLine { waiting, used, served_at: None, encoded_at: None, window_step: None };
        self.lines.entry(party).or_insert_with(empty)
    }

    /// Removes a sequence. Returns its slot, if it has one.
    pub(super) fn remove(&mut self, key: K, now: Instant) -> Option<usize> {
        let (party, slot) = match self.standings.remove(&key)? {
            Standing::Waiting(party, order) => {
                self.lines.get_mut(&party)?.waiting.remove(&order);
                (party, None)
            }
            Standing::Running(slot) => {
                let party = self.vacate(slot)?.sequence.party();
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
        let spec = &running.sequence.spec;
        self.used = self.used.without(spec);
        let line = self.lines.get_mut(&running.sequence.party())?;
        line.used = line.used.without(spec);
        Some(running)
    }

    /// Runs a waiting sequence in a free slot from now on, which it returns.
    pub(super) fn start(
        &mut self,
        sequence: Sequence<K>,
        turn: Order,
        overtook: bool,
        now: Instant,
    ) -> Option<usize> {
        let slot = self.running.iter().position(Option::is_none)?;
        let Sequence { key, spec, order, .. } = sequence;
        let line = self.lines.get_mut(&sequence.party())?;
        line.waiting.remove(&order)?;
        (line.used, line.served_at) = (line.used.with(&spec), Some(now));
        self.used = self.used.with(&spec);
        self.admitted.serve(spec.owner.queue, spec.tokens() as u64);
        self.serial += 1;
        let sequence = Sequence { turn: Some(turn), serial: self.serial, ..sequence };
        self.running[slot] = Some(Running::begin(sequence, overtook));
        self.standings.insert(key, Standing::Running(slot));
        Some(slot)
    }

    /// Makes the sequence in this slot wait again, and returns it. `keeps_turn`: later arrivals of other parties cannot go
    /// before it.
    pub(super) fn preempt(&mut self, slot: usize, keeps_turn: bool) -> Option<K> {
        let Running { sequence, .. } = self.vacate(slot)?;
        self.serial += 1;
        let turn = sequence.turn.filter(|_| keeps_turn);
        self.add_waiting(Sequence { turn, serial: self.serial, ..sequence });
        Some(sequence.key)
    }

    /// The running sequences with their slots, in the order of their admission; only those of the group
    /// `isolated`, if there is one.
    pub(super) fn in_order(&self, isolated: Option<Group>) -> Vec<(usize, &Running<K>)> {
        let slots = self.running.iter().enumerate();
        let mut running: Vec<(usize, &Running<K>)> = slots
            .filter_map(|(slot, it)| Some((slot, it.as_ref()?)))
            .filter(|(_, it)| isolated.is_none() || it.sequence.spec.group == isolated)
            .collect();
        running.sort_unstable_by_key(|(_, it)| it.sequence.serial);
        running
    }

    /// The line of the party whose sequence runs in this slot.
    pub(super) fn line_in(&mut self, slot: usize) -> Option<&mut PartyLine<K>> {
        let party = self.running.get(slot)?.as_ref()?.sequence.party();
        self.lines.get_mut(&party)
    }

    /// Records that a row was computed.
    pub(super) fn advance(&mut self, row: &Row<K>, now: Instant) {
        self.rows += 1;
        if row.feed == Feed::Encode
            && let Some(line) = self.line_in(row.slot)
        {
            // A requester whose window arrived while this one was encoded comes first now.
            line.encoded_at = Some(now);
        }
        if let Some(running) = self.running.get_mut(row.slot).and_then(Option::as_mut) {
            running.last_row = self.rows;
            match row.feed {
                Feed::Encode => running.must_encode = false,
                Feed::Tokens(tokens) => running.prompt_left = running.prompt_left.saturating_sub(tokens),
            }
        }
    }

    /// Records that the sequence in this slot is fed from its beginning again.
    pub(super) fn restart(&mut self, slot: usize) {
        if let Some(running) = self.running.get_mut(slot).and_then(Option::as_mut) {
            let last_row = running.last_row;
            *running = Running { last_row, ..Running::begin(running.sequence, running.overtook) };
        }
    }
}
