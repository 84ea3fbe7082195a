//! Decides when a task without a reply is published again, when it is given up, and how many tasks may be under way.
//! Owns the messages of the tasks under way. Does no I/O and has no clock: times are passed in.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::protocol::Message;

/// When a task without a reply is published again. A queue delivers its tasks in order, so a task counts as late only
/// if a later task was answered long ago, or if no task has been answered for long.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Resend {
    /// A task is late once that answer, or the last answer of any task, is this old. Only time in which workers consume
    /// counts.
    pub(crate) after: Duration,
    /// Maximum number of times that a task is published, the first time included.
    pub(crate) attempts: u32,
}

/// At least this many tasks may be under way, so that several workers fill their batches from the beginning.
const MIN_UNDER_WAY: usize = 256;
/// The number of tasks under way is limited to the number answered in the previous and the current span of this length.
/// More tasks would only wait in the queue, where they could not be withdrawn.
const SPAN: Duration = Duration::from_secs(10);
/// Maximum bytes of the tasks under way, which are kept to be published again.
const MAX_BYTES: usize = 32 << 20;

/// A late task, by its number, and what happens to it.
#[derive(Debug, PartialEq)]
pub(super) enum LateTask {
    /// It is published to this queue again.
    Republish(u64, Arc<str>, Arc<Message>),
    /// It was published the maximum number of times.
    GiveUp(u64),
}

/// The tasks under way, with what is needed to publish them again.
pub(super) struct Resends {
    policy: Resend,
    under_way: BTreeMap<u64, UnderWay>,
    /// Bytes of the bodies of `under_way`.
    bytes: usize,
    clock: Clock,
    recent_answers: RecentAnswers,
    overtaken: Overtaken,
}

struct UnderWay {
    queue: Arc<str>,
    message: Arc<Message>,
    /// The consuming time when the broker last accepted it; none: it has not accepted the latest publish yet.
    accepted: Option<Duration>,
    attempts: u32,
}

/// Decides which tasks were overtaken long ago: tasks that the broker accepted later are answered already. All times
/// are consuming times: see [`Clock`].
#[derive(Default)]
struct Overtaken {
    /// One entry for each second with answers. Bound: the seconds of [`Resend::after`].
    answers: VecDeque<AnsweredSecond>,
    /// A task that the broker accepted before this time was overtaken long ago.
    overtaken_before: Duration,
    /// The time of the last answer.
    last_answer: Duration,
}

/// The answers of one second: the time of the first, and the latest time at which the broker accepted their tasks.
struct AnsweredSecond {
    first_answer: Duration,
    latest_accepted: Duration,
}

impl Overtaken {
    fn answered(&mut self, accepted: Duration, answered: Duration) {
        self.last_answer = answered;
        match self.answers.back_mut() {
            Some(second) if second.first_answer.as_secs() == answered.as_secs() => {
                second.latest_accepted = accepted.max(second.latest_accepted);
            }
            _ => self.answers.push_back(AnsweredSecond { first_answer: answered, latest_accepted: accepted }),
        }
    }

    /// Whether a task is late that the broker accepted at this time.
    fn is_late(&mut self, accepted: Duration, consuming: Duration, after: Duration) -> bool {
        while let Some(second) = self.answers.front().filter(|it| it.first_answer + after <= consuming) {
            self.overtaken_before = self.overtaken_before.max(second.latest_accepted);
            self.answers.pop_front();
        }
        accepted < self.overtaken_before || consuming >= self.last_answer.max(accepted) + after
    }
}

/// Counts the consuming time: the time in which workers consume. So time without workers costs no task an attempt.
struct Clock {
    /// The time counted until it last started or stopped.
    passed: Duration,
    /// Since when it runs; none: it is stopped.
    running_since: Option<Instant>,
}

impl Clock {
    fn consuming_time(&self, now: Instant) -> Duration {
        self.passed + self.running_since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since))
    }
}

/// Counts answers in the previous and the current span.
struct RecentAnswers {
    /// When the current span began.
    began: Instant,
    /// The previous span's count, then the current one's.
    counts: [usize; 2],
}

impl RecentAnswers {
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
        let clock = Clock { passed: Duration::ZERO, running_since: Some(now) };
        let recent_answers = RecentAnswers { began: now, counts: [0; 2] };
        let overtaken = Overtaken::default();
        Self { policy, under_way: BTreeMap::new(), bytes: 0, clock, recent_answers, overtaken }
    }

    /// Whether one more task may be under way. `max_tasks` is the caller's limit.
    pub(super) fn has_room(&self, max_tasks: usize) -> bool {
        let recently_answered = self.recent_answers.counts.iter().sum::<usize>();
        let limit = recently_answered.max(MIN_UNDER_WAY).min(max_tasks);
        self.under_way.len() < limit && self.bytes < MAX_BYTES
    }

    /// A task is published for the first time.
    pub(super) fn begin(&mut self, number: u64, queue: Arc<str>, message: Arc<Message>) {
        self.bytes += message.body.len();
        self.under_way.insert(number, UnderWay { queue, message, accepted: None, attempts: 1 });
    }

    /// The broker has accepted a task.
    pub(super) fn confirmed(&mut self, number: u64, now: Instant) {
        if let Some(task) = self.under_way.get_mut(&number) {
            task.accepted = Some(self.clock.consuming_time(now));
        }
    }

    /// A task was answered, or given up.
    pub(super) fn answered(&mut self, number: u64, now: Instant) {
        if let Some(task) = self.under_way.remove(&number) {
            self.bytes -= task.message.body.len();
            self.recent_answers.count(1, now);
            let answered = self.clock.consuming_time(now);
            self.overtaken.answered(task.accepted.unwrap_or(answered), answered);
        }
    }

    /// Runs the clock if workers consume, as far as is known, and stops it if they do not.
    pub(super) fn consumed(&mut self, is_consumed: bool, now: Instant) {
        self.clock.passed = self.clock.consuming_time(now);
        self.clock.running_since = is_consumed.then_some(now);
    }

    /// The tasks that are late, each with what happens to it. Counts an attempt for those that are published again.
    pub(super) fn late(&mut self, now: Instant) -> Vec<LateTask> {
        let (consuming, Resend { after, attempts }) = (self.clock.consuming_time(now), self.policy);
        let overtaken = &mut self.overtaken;
        let late = self.under_way.iter_mut().filter(|(_, task)| {
            task.accepted.is_some_and(|accepted| overtaken.is_late(accepted, consuming, after))
        });
        let decide = |(number, task): (&u64, &mut UnderWay)| {
            if task.attempts >= attempts {
                return LateTask::GiveUp(*number);
            }
            task.attempts += 1;
            task.accepted = None;
            LateTask::Republish(*number, task.queue.clone(), task.message.clone())
        };
        late.map(decide).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AFTER: Duration = Duration::from_secs(60);
    const SECOND: Duration = Duration::from_secs(1);

    fn message(bytes: usize) -> Arc<Message> {
        Arc::new(Message { body: vec![0; bytes].into(), ..Message::default() })
    }

    fn resends(now: Instant) -> Resends {
        Resends::new(Resend { after: AFTER, attempts: 2 }, now)
    }

    fn publish(resends: &mut Resends, number: u64, now: Instant) {
        resends.begin(number, "q".into(), message(3));
        resends.confirmed(number, now);
    }

    fn republish(number: u64) -> LateTask {
        LateTask::Republish(number, "q".into(), message(3))
    }

    #[test]
    fn a_task_overtaken_long_ago_is_published_again_then_given_up() {
        let now = Instant::now();
        let mut resends = resends(now);
        (0..3).for_each(|number| publish(&mut resends, number, now + SECOND * number as u32));
        resends.answered(2, now + 3 * SECOND);
        assert_eq!(resends.late(now + 3 * SECOND + AFTER - SECOND), []);
        let late = now + 3 * SECOND + AFTER;
        assert_eq!(resends.late(late), [republish(0), republish(1)]);
        assert_eq!(resends.late(late + 9 * AFTER), [], "the broker has not taken them");
        (0..2).for_each(|number| resends.confirmed(number, late));
        assert_eq!(resends.late(late + AFTER - SECOND), []);
        assert_eq!(resends.late(late + AFTER), [LateTask::GiveUp(0), LateTask::GiveUp(1)]);
    }

    #[test]
    fn tasks_answered_in_order_are_not_late_however_long_the_queue() {
        let now = Instant::now();
        let mut resends = resends(now);
        (0..9).for_each(|number| publish(&mut resends, number, now));
        for number in 0..8 {
            let answered = now + AFTER / 2 * (number as u32 + 1);
            assert_eq!(resends.late(answered), []);
            resends.answered(number, answered);
        }
        let last = now + 4 * AFTER;
        assert_eq!(resends.late(last + AFTER - SECOND), []);
        assert_eq!(resends.late(last + AFTER), [republish(8)], "nothing is answered any more");
    }

    #[test]
    fn time_without_workers_does_not_count() {
        let now = Instant::now();
        let mut resends = resends(now);
        publish(&mut resends, 0, now);
        resends.consumed(false, now + AFTER / 2);
        assert_eq!(resends.late(now + 100 * AFTER), []);
        resends.consumed(true, now + 100 * AFTER);
        assert_eq!(resends.late(now + 100 * AFTER + AFTER / 3), []);
        assert_eq!(resends.late(now + 100 * AFTER + AFTER / 2).len(), 1);
    }

    #[test]
    fn the_number_under_way_follows_the_recent_answers_within_bounds() {
        let now = Instant::now();
        let mut resends = resends(now);
        let mut begun = 0;
        let mut fill = |resends: &mut Resends| {
            while resends.has_room(1_000) {
                resends.begin(begun, "q".into(), message(1));
                begun += 1;
            }
            resends.under_way.len()
        };
        assert_eq!(fill(&mut resends), MIN_UNDER_WAY);
        (0..200).for_each(|number| resends.answered(number, now));
        assert_eq!(fill(&mut resends), MIN_UNDER_WAY);
        (200..450).for_each(|number| resends.answered(number, now));
        assert_eq!(fill(&mut resends), 450);
        (450..900).for_each(|number| resends.answered(number, now + SPAN));
        assert_eq!(fill(&mut resends), 900);
        (900..1_700).for_each(|number| resends.answered(number, now + SPAN));
        assert_eq!(fill(&mut resends), 1_000, "the bound");
        (1_700..1_800).for_each(|number| resends.answered(number, now + 3 * SPAN));
        assert_eq!(fill(&mut resends), 900, "those are under way already");
        resends.begin(9_999, "q".into(), message(MAX_BYTES));
        assert!(!resends.has_room(usize::MAX));
    }
}
