//! Decides who publishes what and when in a storm of hostile requesters. Pure: the same seed and time make the same
//! plan. The plan of the ordinary phase has an ordinary task wherever that of the hostile phase has a hostile one,
//! at the same moment and for the same pool. Owns no state.

use std::time::Duration;

use super::super::plan::Dice;

/// A kind of request, and the pool that serves it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Pool {
    Texts,
    Images,
    Embeddings,
}

/// What the requesters beside the innocent ones do in a phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manners {
    /// They publish ordinary tasks.
    Ordinary,
    /// They make trouble.
    Hostile,
}

/// Where an innocent requester has its replies sent, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// To a queue of its own.
    OwnQueue,
    /// To a queue of its own, in parts first.
    Streamed,
    /// To the pool's reply queue, because the task has no `reply_to`.
    PoolQueue,
}

/// One kind of trouble.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Trouble {
    /// A grammar that explodes.
    Grammar,
    /// 4 MiB of `stop` for each of 512 prompts.
    Stops,
    /// A `cache_salt` or `user` of 64 KiB.
    LargeSalt,
    /// A burst of legal salts, all different.
    ManySalts,
    /// Hundreds of images of 40 million pixels in one task.
    ManyImages,
    /// Four images of 40 million pixels, which is legal.
    GiantImages,
    /// Three prompts of about the pool's context, at once.
    LongPrompts,
    /// `n` = 8 answers of up to 500 tokens each, which end early: together all that the pool can reserve.
    Reservation,
    /// A burst of tasks whose reply queue is full.
    FullQueue,
    /// The reply queue is deleted and made again while the task runs.
    QueueMadeAgain,
    /// The reply queue is deleted while the task runs.
    QueueGone,
}

/// Something to publish.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Planned {
    /// From the beginning of the phase.
    pub due: Duration,
    pub id: String,
    pub role: Role,
}

/// By whom a task is published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// An innocent requester asks one of a few requests, whose answers are known.
    Innocent { pool: Pool, request: usize, way: Way },
    /// A hostile requester, or an ordinary one in its place. Tasks of one kind are numbered.
    Other { trouble: Trouble, number: usize },
    /// A stranger cancels the innocent task with this number, or, in the ordinary phase, a requester one of its own
    /// that has ended.
    Cancel { task: usize },
}

/// How large a storm is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scale {
    pub phase: Duration,
    /// Tasks in a burst of [`Trouble::FullQueue`].
    pub burst: usize,
    /// Tokens of each long prompt.
    pub prompt: usize,
    /// Whether latencies say something: there are enough of them.
    pub judged: bool,
}

/// When one kind of trouble recurs.
struct Recurrence {
    trouble: Trouble,
    /// Seconds from the beginning of the phase to the first time, and from each time to the next.
    first: f64,
    every: f64,
    /// Tasks each time.
    count: usize,
}

/// The most tokens of a prompt and its answer in the pool of texts.
pub const CONTEXT: usize = 1_024;
/// Innocent tasks a second.
const RATES: [(Pool, f64); 3] = [(Pool::Texts, 1.0), (Pool::Images, 1.5), (Pool::Embeddings, 4.0)];
/// Different requests of each innocent kind.
pub const REQUESTS: usize = 6;
/// A stranger tries to cancel each innocent text so soon after it is published.
const CANCEL_AFTER: Duration = Duration::from_millis(150);
/// Before this every trouble has occurred.
const SHORTEST: Duration = Duration::from_secs(5);
/// A shorter phase has too few tasks for a 99th percentile.
const JUDGED: Duration = Duration::from_secs(60);

impl Trouble {
    pub const ALL: [Self; 11] = [
        Self::Grammar,
        Self::Stops,
        Self::LargeSalt,
        Self::ManySalts,
        Self::ManyImages,
        Self::GiantImages,
        Self::LongPrompts,
        Self::Reservation,
        Self::FullQueue,
        Self::QueueMadeAgain,
        Self::QueueGone,
    ];

    pub fn pool(self) -> Pool {
        match self {
            Self::ManyImages | Self::GiantImages => Pool::Images,
            Self::FullQueue => Pool::Embeddings,
            Self::Grammar
            | Self::Stops
            | Self::LargeSalt
            | Self::ManySalts
            | Self::LongPrompts
            | Self::Reservation
            | Self::QueueMadeAgain
            | Self::QueueGone => Pool::Texts,
        }
    }

    /// Whether each task has a reply queue of its own, which may be deleted.
    pub fn has_queue_for_each(self) -> bool {
        matches!(self, Self::QueueMadeAgain | Self::QueueGone)
    }

    /// The status codes and the reasons of dead letters that a hostile task may come to.
    pub fn verdicts(self) -> (&'static [&'static str], &'static [&'static str]) {
        match self {
            Self::Grammar | Self::LargeSalt => (&["400"], &[]),
            Self::Stops | Self::ManyImages => (&["400", "413"], &[]),
            Self::ManySalts | Self::GiantImages | Self::LongPrompts => (&["200"], &[]),
            // 413: beside long prompts a step takes so long that the answer could take half of the consumer timeout.
            Self::Reservation => (&["200", "413"], &[]),
            // A broker may take more than the one that fills the queue, and all once it is read.
            Self::FullQueue => (&["200"], &["unconfirmed"]),
            // 200: the answer came before the queue was deleted, or when it was there again.
            Self::QueueMadeAgain | Self::QueueGone => (&["200"], &["unroutable"]),
        }
    }

    fn recurrence(self, scale: &Scale) -> Recurrence {
        let (first, every, count) = match self {
            Self::Grammar => (1.0, 4.0, 1),
            Self::Stops => (2.5, 20.0, 1),
            Self::LargeSalt => (0.5, 3.0, 1),
            Self::ManySalts => (1.7, 15.0, 20),
            Self::ManyImages => (3.1, 20.0, 1),
            Self::GiantImages => (0.2, 10.0, 1),
            Self::LongPrompts => (2.0, 100.0, 3),
            Self::Reservation => (1.2, 15.0, 2),
            Self::FullQueue => (0.8, 30.0, scale.burst),
            Self::QueueMadeAgain => (1.4, 40.0, 1),
            Self::QueueGone => (3.3, 40.0, 1),
        };
        Recurrence { trouble: self, first, every, count }
    }
}

impl Scale {
    /// Of two phases in a soak of so many seconds: a sixth of it, or as long as every trouble needs to occur. A short one
    /// has shorter prompts and bursts.
    pub fn of(seconds: u64) -> Self {
        let phase = Duration::from_secs(seconds / 12).max(SHORTEST);
        let judged = phase >= JUDGED;
        let (burst, prompt) = if judged { (500, CONTEXT - 48) } else { (100, 300) };
        Self { phase, burst, prompt, judged }
    }
}

/// The whole phase, in the order of time. `only`: these troubles, and no others.
pub fn phase(seed: u64, scale: &Scale, only: &[Trouble]) -> Vec<Planned> {
    let mut all = innocents(seed, scale);
    for trouble in only {
        let Recurrence { trouble, first, every, count } = trouble.recurrence(scale);
        let times = (0..).map(|time| first + every * f64::from(time));
        let times = times.take_while(|due| *due < scale.phase.as_secs_f64());
        let tasks = times.flat_map(|due| std::iter::repeat_n(due, count));
        all.extend(tasks.enumerate().map(|(number, due)| Planned {
            due: Duration::from_secs_f64(due),
            id: format!("{trouble:?}-{number}"),
            role: Role::Other { trouble, number },
        }));
    }
    all.sort_by_key(|planned| planned.due);
    all
}

/// Tasks at a constant rate, each at a random moment of its turn, so that they do not keep step with the troubles.
fn innocents(seed: u64, scale: &Scale) -> Vec<Planned> {
    let mut dice = Dice::new(seed);
    let mut all = Vec::new();
    for (pool, rate) in RATES {
        let count = (scale.phase.as_secs_f64() * rate) as usize;
        for number in 0..count {
            let place = dice.below(1_000) as f64 / 1e3;
            let due = Duration::from_secs_f64((number as f64 + place) / rate);
            let ways = [Way::OwnQueue, Way::Streamed, Way::PoolQueue];
            // Only texts come in parts.
            let way = match ways[number % ways.len()] {
                Way::Streamed if pool != Pool::Texts => Way::OwnQueue,
                way => way,
            };
            let request = dice.below(REQUESTS as u64) as usize;
            let role = Role::Innocent { pool, request, way };
            all.push(Planned { due, id: innocent_id(pool, number), role });
            if pool == Pool::Texts {
                let role = Role::Cancel { task: number };
                all.push(Planned { due: due + CANCEL_AFTER, id: format!("cancel-{number}"), role });
            }
        }
    }
    all
}

/// An id that anybody can guess.
pub fn innocent_id(pool: Pool, number: usize) -> String {
    format!("{pool:?}-{number}")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_same_seed_makes_the_same_phase_in_which_every_trouble_occurs() {
        for seconds in [20, 3_600] {
            let scale = Scale::of(seconds);
            let plan = phase(7, &scale, &Trouble::ALL);
            assert!(plan == phase(7, &scale, &Trouble::ALL));
            assert!(plan != phase(8, &scale, &Trouble::ALL));
            assert!(plan.is_sorted_by_key(|planned| planned.due));
            let ids: BTreeSet<&str> = plan.iter().map(|planned| planned.id.as_str()).collect();
            assert_eq!(ids.len(), plan.len());
            let made = |trouble: Trouble| {
                plan.iter()
                    .any(|planned| matches!(planned.role, Role::Other { trouble: it, .. } if it == trouble))
            };
            assert!(Trouble::ALL.into_iter().all(made), "{seconds} s");
        }
    }

    #[test]
    fn innocent_tasks_are_the_same_whoever_is_beside_them() {
        let innocent = |plan: Vec<Planned>| -> Vec<Planned> {
            plan.into_iter().filter(|planned| !matches!(planned.role, Role::Other { .. })).collect()
        };
        let scale = Scale::of(20);
        assert_eq!(innocent(phase(7, &scale, &Trouble::ALL)), innocent(phase(7, &scale, &[])));
    }
}
