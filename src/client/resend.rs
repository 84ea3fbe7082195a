//! Decides when a task whose reply does not come is published again, and when it is given up; and how many tasks may
//! be under way. Pure: owns the messages of the tasks under way; times are passed in.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::protocol::Message;

/// When a task without a reply is published again.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Resend {
    /// Time without a reply, while workers consume.
    pub(crate) after: Duration,
    /// How often a task is published in all.
    pub(crate) attempts: u32,
}

/// Fewest tasks under way, so that several workers fill their batches from the beginning.
const FEWEST: usize = 256;
/// As many tasks may be under way as were answered in the last one to two spans of this length: more would only wait
/// in the queue, and could not be withdrawn from there.
const SPAN: Duration = Duration::from_secs(10);
/// The most bytes of the tasks under way, which are kept to be published again.
const BYTES: usize = 32 << 20;

/// What happens to a task whose time is over.
#[derive(Debug, PartialEq)]
pub(super) enum Late {
    /// It is published again.
    Again(u64, Arc<str>, Arc<Message>),
    /// It was published often enough.
    GivenUp(u64),
}

/// The tasks under way, with what is needed to publish them again.
pub(super) struct Resends {
    policy: Resend,
    under_way: BTreeMap<u64, UnderWay>,
    bytes: usize,
    clock: Clock,
    answered: Recently,
}

struct UnderWay {
    queue: Arc<str>,
    message: Arc<Message>,
    /// On the clock, when it was published last.
    since: Duration,
    attempts: u32,
}

/// Time that passes only while workers consume: a fleet that is down for an hour costs no task an attempt.
struct Clock {
    passed: Duration,
    /// None: it stands.
    from: Option<Instant>,
}

impl Clock {
    fn now(&self, now: Instant) -> Duration {
        self.passed + self.from.map_or(Duration::ZERO, |from| now.saturating_duration_since(from))
    }
}

/// Counts in the current and the last span.
struct Recently {
    began: Instant,
    counts: [usize; 2],
}

impl Recently {
    fn count(&mut self, count: usize, now: Instant) {
        let spans = now.saturating_duration_since(self.began).as_secs() / SPAN.as_secs();
        if spans > 0 {
            self.counts = [if spans == 1 { self.counts[1] } else { 0 }, 0];
            self.began = now;
        }
        self.counts[1] += count;
    }
}

impl Resends {
    pub(super) fn new(policy: Resend, now: Instant) -> Self {
        let clock = Clock { passed: Duration::ZERO, from: Some(now) };
        let answered = Recently { began: now, counts: [0; 2] };
        Self { policy, under_way: BTreeMap::new(), bytes: 0, clock, answered }
    }

    /// Whether one more task may be under way, of `most`.
    pub(super) fn has_room(&self, most: usize) -> bool {
        let recently = self.answered.counts.iter().sum::<usize>();
        self.under_way.len() < recently.max(FEWEST).min(most) && self.bytes < BYTES
    }

    /// A task is published for the first time.
    pub(super) fn begin(&mut self, number: u64, queue: Arc<str>, message: Arc<Message>, now: Instant) {
        self.bytes += message.body.len();
        let since = self.clock.now(now);
        self.under_way.insert(number, UnderWay { queue, message, since, attempts: 1 });
    }

    /// A task was answered, or given up.
    pub(super) fn answered(&mut self, number: u64, now: Instant) {
        if let Some(task) = self.under_way.remove(&number) {
            self.bytes -= task.message.body.len();
            self.answered.count(1, now);
        }
    }

    /// Whether workers consume, as far as is known.
    pub(super) fn consumed(&mut self, is_consumed: bool, now: Instant) {
        self.clock.passed = self.clock.now(now);
        self.clock.from = is_consumed.then_some(now);
    }

    /// The tasks whose time is over.
    pub(super) fn late(&mut self, now: Instant) -> Vec<Late> {
        let (now, Resend { after, attempts }) = (self.clock.now(now), self.policy);
        let late = self.under_way.iter_mut().filter(|(_, task)| now >= task.since + after);
        let decide = |(number, task): (&u64, &mut UnderWay)| {
            if task.attempts >= attempts {
                return Late::GivenUp(*number);
            }
            task.attempts += 1;
            task.since = now;
            Late::Again(*number, task.queue.clone(), task.message.clone())
        };
        late.map(decide).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AFTER: Duration = Duration::from_secs(60);

    fn message(bytes: usize) -> Arc<Message> {
        Arc::new(Message { body: vec![0; bytes].into(), ..Message::default() })
    }

    fn resends(now: Instant) -> Resends {
        Resends::new(Resend { after: AFTER, attempts: 2 }, now)
    }

    #[test]
    fn a_task_without_a_reply_is_published_again_and_then_given_up() {
        let now = Instant::now();
        let mut resends = resends(now);
        for number in 0..2 {
            resends.begin(number, "q".into(), message(3), now);
        }
        resends.answered(0, now);
        assert_eq!(resends.late(now + AFTER - Duration::from_secs(1)), []);
        assert_eq!(resends.late(now + AFTER), [Late::Again(1, "q".into(), message(3))]);
        assert_eq!(resends.late(now + AFTER), []);
        assert_eq!(resends.late(now + 2 * AFTER), [Late::GivenUp(1)]);
    }

    #[test]
    fn time_without_workers_does_not_count() {
        let now = Instant::now();
        let mut resends = resends(now);
        resends.begin(0, "q".into(), message(3), now);
        resends.consumed(false, now + AFTER / 2);
        assert_eq!(resends.late(now + 100 * AFTER), []);
        resends.consumed(true, now + 100 * AFTER);
        assert_eq!(resends.late(now + 100 * AFTER + AFTER / 3), []);
        assert_eq!(resends.late(now + 100 * AFTER + AFTER / 2).len(), 1);
    }

    #[test]
    fn as_many_are_under_way_as_were_answered_lately_within_bounds() {
        let now = Instant::now();
        let mut resends = resends(now);
        let mut begun = 0;
        let mut fill = |resends: &mut Resends, now| {
            while resends.has_room(1_000) {
                resends.begin(begun, "q".into(), message(1), now);
                begun += 1;
            }
            resends.under_way.len()
        };
        assert_eq!(fill(&mut resends, now), FEWEST);
        (0..200).for_each(|number| resends.answered(number, now));
        assert_eq!(fill(&mut resends, now), FEWEST);
        (200..450).for_each(|number| resends.answered(number, now));
        assert_eq!(fill(&mut resends, now), 450);
        (450..900).for_each(|number| resends.answered(number, now + SPAN));
        assert_eq!(fill(&mut resends, now + SPAN), 900);
        (900..1_700).for_each(|number| resends.answered(number, now + SPAN));
        assert_eq!(fill(&mut resends, now + SPAN), 1_000, "the bound");
        (1_700..1_800).for_each(|number| resends.answered(number, now + 3 * SPAN));
        assert_eq!(fill(&mut resends, now + 3 * SPAN), 900, "those are under way already");
        resends.begin(9_999, "q".into(), message(BYTES), now);
        assert!(!resends.has_room(usize::MAX));
    }
}
