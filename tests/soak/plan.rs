//! Decides what a storm consists of: which task what, and which fault when. Pure: the same seed, the
//! same plan, whatever happens meanwhile. Owns no state.

/// Random numbers (SplitMix64) that stay the same whatever becomes of a library.
pub struct Dice(u64);

/// What a task must come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Answered with its own input.
    Good,
    /// Not JSON: a 400 and a dead letter.
    Undecodable,
    /// JSON of the wrong shape: a 400.
    Misshapen,
    /// A control message of a type that nobody knows: a dead letter.
    UnknownControl,
    /// Wants its reply where no queue is: it becomes a dead letter.
    NoReplyQueue,
    /// Wants its reply in a queue that confirms nothing: a dead letter, or a reply where it recovers.
    StuckReplyQueue,
    /// Wants its reply in a queue that is full: the same.
    FullReplyQueue,
    /// Its reply is larger than the broker takes: a 413.
    Oversized,
    /// Past its deadline when it is published: a 408.
    Expired,
    /// Its computation fails: a 500.
    Failing,
    /// Kills the worker that computes it: a dead letter and a 500.
    Poison,
}

/// What is done to the service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    KillWorker,
    StopWorker,
    KillLauncher,
    StopLauncher,
    Cut,
    ShortStall,
    LongStall,
    KillBroker,
    MemoryAlarm,
    Sentinel,
    PoisonTask,
    /// A worker is stopped (SIGSTOP) and its launcher killed.
    FreezeAndKill,
    /// The password is another one for some seconds, and all connections are cut.
    RefuseLogin,
    /// No further connection is allowed for some seconds, and all are cut.
    RefuseConnections,
    /// The dead-letter queue is deleted.
    DeleteDeadLetters,
}

/// One fault, and a number that decides whom it hits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Strike {
    pub fault: Fault,
    pub pick: u64,
}

/// One task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Planned {
    pub kind: Kind,
    pub body: Vec<u8>,
    /// The body of the reply to a good one.
    pub answer: Vec<u8>,
}

/// Of a thousand tasks, so many are bad.
const BAD: &[(Kind, u64)] = &[
    (Kind::Undecodable, 8),
    (Kind::Misshapen, 8),
    (Kind::UnknownControl, 5),
    (Kind::NoReplyQueue, 6),
    (Kind::StuckReplyQueue, 4),
    (Kind::FullReplyQueue, 4),
    (Kind::Oversized, 2),
    (Kind::Expired, 6),
    (Kind::Failing, 8),
];

/// How often each fault is in a deck. A restart of the broker takes longest.
const DECK: &[(Fault, usize)] = &[
    (Fault::KillWorker, 8),
    (Fault::StopWorker, 6),
    (Fault::KillLauncher, 4),
    (Fault::StopLauncher, 4),
    (Fault::Cut, 7),
    (Fault::ShortStall, 5),
    (Fault::LongStall, 2),
    (Fault::KillBroker, 1),
    (Fault::MemoryAlarm, 3),
    (Fault::Sentinel, 4),
    (Fault::PoisonTask, 1),
    (Fault::FreezeAndKill, 2),
    (Fault::RefuseLogin, 2),
    (Fault::RefuseConnections, 2),
    (Fault::DeleteDeadLetters, 2),
];

/// The broker takes no larger message: more than any task here but those that are to be too large.
pub const MOST_BYTES: usize = 512 * 1024;

/// A kind of random sequence never shares its numbers with another.
const FAULTS: u64 = 1 << 60;
const BURSTS: u64 = 1 << 61;

impl Dice {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The dice of one producer's bursts.
    pub fn of_producer(seed: u64, producer: u64) -> Self {
        Self::of(seed, BURSTS + producer)
    }

    fn of(seed: u64, sequence: u64) -> Self {
        let mut dice = Self(seed ^ sequence.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        dice.next();
        dice
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// 0 to `end` - 1.
    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
}

/// The `number`th task of a storm.
pub fn task(seed: u64, number: u64) -> Planned {
    let mut dice = Dice::of(seed, number);
    let mut drawn = dice.below(1_000);
    for (kind, share) in BAD {
        if drawn < *share {
            return of_kind(*kind, &mut dice);
        }
        drawn -= share;
    }
    of_kind(Kind::Good, &mut dice)
}

/// A task that kills workers; one for each `pick`.
pub fn poison(pick: u64) -> Planned {
    of_kind(Kind::Poison, &mut Dice::new(pick))
}

fn of_kind(kind: Kind, dice: &mut Dice) -> Planned {
    let input = match kind {
        // The task itself is just taken; what its answer adds is more than that.
        Kind::Oversized => format!("\"{:x} {}\"", dice.next(), "x".repeat(MOST_BYTES - 50)),
        _ => input(dice),
    };
    let sleep_ms = if dice.below(4) == 0 { dice.below(40) } else { 0 };
    let body = match kind {
        Kind::Undecodable => format!("{{\"input\": {}", &input[..input.len() - 1]),
        Kind::Misshapen => format!("{{\"input\":{input},\"sleep_ms\":\"long\"}}"),
        Kind::Failing => format!("{{\"input\":{input},\"fail\":\"error\"}}"),
        Kind::Poison => format!("{{\"input\":{},\"fail\":\"exit\"}}", dice.next()),
        Kind::Good
        | Kind::UnknownControl
        | Kind::NoReplyQueue
        | Kind::StuckReplyQueue
        | Kind::FullReplyQueue
        | Kind::Expired
        | Kind::Oversized => {
            format!("{{\"input\":{input},\"sleep_ms\":{sleep_ms}}}")
        }
    };
    let answer = match kind {
        // What is among the dead letters is the task.
        Kind::NoReplyQueue => body.clone(),
        _ => format!("{{\"object\":\"echo\",\"input\":{input},\"model\":\"echo\"}}"),
    };
    Planned { kind, body: body.into_bytes(), answer: answer.into_bytes() }
}

/// A text, or a list of dozens: mostly small, now and then hundreds of KiB.
fn input(dice: &mut Dice) -> String {
    let bytes = match dice.below(100) {
        0..80 => dice.below(600),
        80..96 => dice.below(16 * 1024),
        _ => dice.below(300 * 1024),
    };
    let count = if dice.below(3) == 0 { 1 + dice.below(48) } else { 0 };
    let text = |dice: &mut Dice, bytes: u64| {
        let letters = (b'a'..=b'z').cycle().skip(dice.below(26) as usize).take(bytes as usize);
        format!("\"{:x} {}\"", dice.next(), letters.map(char::from).collect::<String>())
    };
    match count {
        0 => text(dice, bytes),
        _ => {
            let items: Vec<_> = (0..count).map(|_| text(dice, bytes / count)).collect();
            format!("[{}]", items.join(","))
        }
    }
}

/// The faults, without end: first one of each kind, then deck after deck.
pub fn faults(seed: u64) -> impl Iterator<Item = Strike> {
    let mut dice = Dice::of(seed, FAULTS);
    let mut deck: Vec<Fault> = DECK.iter().map(|(fault, _)| *fault).collect();
    shuffle(&mut deck, &mut dice);
    std::iter::from_fn(move || {
        if deck.is_empty() {
            deck = DECK.iter().flat_map(|(fault, count)| vec![*fault; *count]).collect();
            shuffle(&mut deck, &mut dice);
        }
        Some(Strike { fault: deck.pop()?, pick: dice.next() })
    })
}

/// How many kinds of faults there are: so many come first.
pub fn kinds_of_faults() -> usize {
    DECK.len()
}

fn shuffle(deck: &mut [Fault], dice: &mut Dice) {
    for last in (1..deck.len()).rev() {
        deck.swap(last, dice.below(last as u64 + 1) as usize);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_same_seed_makes_the_same_storm_and_another_makes_another() {
        let storm = |seed: u64| -> (Vec<Planned>, Vec<Strike>) {
            ((0..200).map(|number| task(seed, number)).collect(), faults(seed).take(200).collect())
        };
        assert!(storm(7) == storm(7));
        assert!(storm(7) != storm(8));
        assert_ne!(task(7, 1), task(7, 2));
    }

    #[test]
    fn a_storm_holds_tasks_of_every_kind_and_size_in_their_shares() {
        let tasks: Vec<_> = (0..5_000).map(|number| task(1, number)).collect();
        let share = |kind: Kind| tasks.iter().filter(|task| task.kind == kind).count();
        for (kind, per_mille) in BAD {
            let expected = *per_mille as usize * 5;
            assert!((expected / 3..expected * 3).contains(&share(*kind)), "{kind:?}: {}", share(*kind));
        }
        assert_eq!(share(Kind::Poison), 0, "poison is a fault");
        let sizes = tasks.iter().map(|task| task.body.len());
        assert!(sizes.clone().min() < Some(100) && sizes.max() > Some(200 * 1024));
    }

    #[test]
    fn every_kind_of_fault_comes_once_before_any_comes_again() {
        for seed in 0..20 {
            let first: BTreeSet<_> = faults(seed).take(kinds_of_faults()).map(|it| it.fault).collect();
            assert_eq!(first.len(), kinds_of_faults());
        }
    }
}
