//! Keeps tasks that may have killed a worker apart from all others, from preprocessing to reply: if they kill
//! this worker too, no other task is affected. Such tasks run in groups, each at most half as large as the
//! group that a worker died of before, so the task to blame among n is found in log₂ n deaths. A group without a crash
//! record runs alone for a short time only, because others wait meanwhile. Decides which tasks form a group, and which
//! tasks may be preprocessed, computed and answered meanwhile; reports the groups to the launcher. Owns the tasks that
//! wait for a group, and the latest crash records of the launcher.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::{RwLock, RwLockReadGuard, mpsc, oneshot};
use tokio::time::timeout;

use super::report::Reporter;
use crate::batching::Group;
use crate::engine::Queue;
use crate::protocol::control::{CrashRecord, Event, TaskName};

/// Capacity of the channel to the group runner, which reads the tasks at once.
const CANDIDATES_CAPACITY: usize = 256;
/// The most tasks in a group of tasks without a crash record.
const MAX_GROUP: usize = 32;
/// From this number of earlier deliveries on, a task is suspect even without a crash record: its crash may have ended
/// the launcher too.
const SUSPECT_DELIVERIES: i64 = 2;
/// How long a group without crash records runs alone. Its tasks may be long texts that stopping workers handed back. If
/// one of them kills the worker after this time, it gets a record. If tasks of the group still run when this time is
/// over, the other tasks run for the same time before the next group.
const UNPROVEN_TIME: Duration = Duration::from_secs(2);
/// How long the group runner waits for further candidates, so that tasks that were redelivered together share a group.
const GATHER_TIME: Duration = Duration::from_millis(5);

/// The crash records, by the task's fingerprint. Written by the reader of the launcher's commands, read when a
/// redelivered task is run. Clones share them. The launcher bounds their number.
#[derive(Clone, Debug, Default)]
pub struct CrashRecords(Arc<parking_lot::RwLock<HashMap<String, CrashRecord>>>);

impl CrashRecords {
    /// Replaces all records with the launcher's latest.
    pub fn replace(&self, records: Vec<CrashRecord>) {
        let records = records.into_iter().map(|record| (record.task.clone(), record)).collect();
        *self.0.write() = records;
    }

    pub(super) fn get(&self, fingerprint: &str) -> Option<CrashRecord> {
        self.0.read().get(fingerprint).cloned()
    }
}

/// Why a task is kept apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Suspicion {
    /// The most tasks in its group, itself included.
    max_group: usize,
    /// Whether a worker is known to have died while this task ran, of it or of another task.
    has_record: bool,
}

/// Returns how a task that was delivered `redeliveries` times before must be kept apart. None: it is not suspect.
/// `counted`: the broker counts deliveries; otherwise it only says that there were some.
pub(super) fn suspicion(redeliveries: i64, counted: bool, record: Option<&CrashRecord>) -> Option<Suspicion> {
    // A message that is delivered for the first time is not suspect. If its task has a crash record, it was published
    // again, and is tried like any other.
    if redeliveries == 0 {
        return None;
    }
    let by_record = record.map(|record| (record.among as usize / 2).max(1));
    let by_deliveries = (!counted || redeliveries >= SUSPECT_DELIVERIES).then_some(MAX_GROUP);
    let max_group = by_record.into_iter().chain(by_deliveries).min()?;
    Some(Suspicion { max_group, has_record: record.is_some() })
}

/// Admits either a group of suspect tasks, or all other tasks.
pub(super) struct Isolation {
    /// Write-locked while a group runs; read-locked by every other task while it is preprocessed or its reply
    /// is written. The lock is granted in order of request, so that neither side starves.
    exclusion: RwLock<()>,
    /// Written by each suspect task, read by the group runner.
    candidates: mpsc::Sender<Candidate>,
    /// While a group runs, the engine computes nothing else.
    queue: Arc<dyn Queue>,
    /// Set when the device has failed, read by the group runner.
    has_device_failed: AtomicBool,
    reporter: Reporter,
}

struct Candidate {
    task: TaskName,
    suspicion: Suspicion,
    admit: oneshot::Sender<Membership>,
}

/// One task's membership in its group. The group ends when all its members are dropped, or when its time is over: then
/// its members are like all other tasks.
pub(super) struct Membership {
    task: TaskName,
    group: Group,
    /// Written once, by the group runner.
    is_over: Arc<AtomicBool>,
    /// Receives the tasks that were finished. Read by the group runner. Bound: the size of the group.
    finished: mpsc::Sender<TaskName>,
}

impl Membership {
    /// Returns the task's group, until the time of the group is over.
    pub(super) fn group(&self) -> Option<Group> {
        (!self.is_over.load(Ordering::Acquire)).then_some(self.group)
    }

    /// Records that the task is finished and that this process survived it.
    pub(super) fn record_survival(self) {
        let Self { task, finished, .. } = self;
        let _ = finished.try_send(task);
    }
}

impl Isolation {
    /// Starts the group runner, a tokio task that ends when the last clone of the returned value is dropped.
    pub(super) fn start(queue: Arc<dyn Queue>, reporter: Reporter) -> Arc<Self> {
        let (candidates, queued) = mpsc::channel(CANDIDATES_CAPACITY);
        let (exclusion, has_device_failed) = (RwLock::new(()), AtomicBool::new(false));
        let isolation = Arc::new(Self { exclusion, candidates, queue, has_device_failed, reporter });
        tokio::spawn(run_groups(Arc::downgrade(&isolation), queued));
        isolation
    }

    /// Waits until no group runs. None starts until the returned guard is dropped.
    pub(super) async fn exclude_groups(&self) -> RwLockReadGuard<'_, ()> {
        self.exclusion.read().await
    }

    /// Waits until the task may run in a group, which it leaves when the returned value is dropped. None: the group
    /// runner has ended. Other tasks that are already on the device stay there; they were reported to the launcher.
    pub(super) async fn enter(&self, task: TaskName, suspicion: Suspicion) -> Option<Membership> {
        let (admit, admitted) = oneshot::channel();
        self.candidates.send(Candidate { task, suspicion, admit }).await.ok()?;
        admitted.await.ok()
    }

    /// Records that the device has failed, so that no task of the current group counts as survived.
    pub(super) fn record_device_failure(&self) {
        self.has_device_failed.store(true, Ordering::Release);
    }

    /// Runs one group: admits its tasks, and waits until all have left, or until the time of a group without records is
    /// over. Returns whether all have left; if not, the remaining ones continue among all other tasks.
    async fn run_group(&self, group: Group, mut members: Vec<Candidate>) -> bool {
        let exclusion = self.exclusion.write().await;
        members.retain(|candidate| !candidate.admit.is_closed());
        let Some(Candidate { suspicion: Suspicion { has_record, .. }, .. }) = members.first() else {
            return true;
        };
        let (has_record, is_over) = (*has_record, Arc::new(AtomicBool::new(false)));
        self.queue.isolate(Some(group));
        let tasks = members.iter().map(|it| it.task.clone()).collect();
        self.reporter.send(&Event::Isolated { tasks, through: Vec::new() }).await;
        // Written before the group starts, since the process may die of it.
        self.reporter.flush().await;
        let (finished, mut survivors) = mpsc::channel(members.len());
        for Candidate { task, admit, .. } in members {
            let (is_over, finished) = (is_over.clone(), finished.clone());
            let _ = admit.send(Membership { task, group, is_over, finished });
        }
        drop(finished);
        let mut through = Vec::new();
        let all_leave = async {
            while let Some(task) = survivors.recv().await {
                through.push(task);
            }
        };
        let have_left = if has_record {
            all_leave.await;
            true
        } else {
            timeout(UNPROVEN_TIME, all_leave).await.is_ok()
        };
        is_over.store(true, Ordering::Release);
        if !self.has_device_failed.load(Ordering::Acquire) {
            self.reporter.send(&Event::Isolated { tasks: Vec::new(), through }).await;
        }
        self.queue.isolate(None);
        drop(exclusion);
        have_left
    }
}

/// The group runner: runs one group after the other.
async fn run_groups(isolation: Weak<Isolation>, mut queued: mpsc::Receiver<Candidate>) {
    let mut waiting = VecDeque::new();
    for number in 1.. {
        if waiting.is_empty() {
            match queued.recv().await {
                Some(first) => waiting.push_back(first),
                None => return,
            }
        }
        tokio::time::sleep(GATHER_TIME).await;
        while let Ok(more) = queued.try_recv() {
            waiting.push_back(more);
        }
        waiting.retain(|candidate: &Candidate| !candidate.admit.is_closed());
        let members = next_group(&mut waiting, |candidate| candidate.suspicion);
        let Some(isolation) = isolation.upgrade() else { return };
        if !members.is_empty() && !isolation.run_group(number, members).await {
            tokio::time::sleep(UNPROVEN_TIME).await;
        }
    }
}

/// Takes the first candidate, and further ones while no member's size limit is exceeded. Candidates with a crash record
/// and those without do not share a group, because only groups with records run alone until all members have left.
fn next_group<T>(waiting: &mut VecDeque<T>, suspicion: impl Fn(&T) -> Suspicion) -> Vec<T> {
    let mut group = Vec::new();
    let mut limit = usize::MAX;
    let mut skipped = VecDeque::new();
    let first_has_record = waiting.front().is_some_and(|first| suspicion(first).has_record);
    while let Some(candidate) = waiting.pop_front() {
        let Suspicion { max_group, has_record } = suspicion(&candidate);
        let smaller = limit.min(max_group);
        if group.len() < smaller && has_record == first_has_record {
            limit = smaller;
            group.push(candidate);
        } else {
            skipped.push_back(candidate);
        }
    }
    *waiting = skipped;
    group
}

#[cfg(test)]
mod tests {
    use super::*;

    fn deaths(among: u32) -> CrashRecord {
        CrashRecord { task: "t".into(), count: 1, alone: 0, among, poison: None }
    }

    #[test]
    fn only_a_crash_record_or_repeated_redelivery_makes_a_task_suspect() {
        assert_eq!(suspicion(0, true, Some(&deaths(8))), None, "published again");
        assert_eq!(suspicion(1, true, None), None);
        let unproven = Some(Suspicion { max_group: MAX_GROUP, has_record: false });
        assert_eq!(suspicion(2, true, None), unproven);
        assert_eq!(suspicion(1, false, None), unproven, "a classic queue does not count");
        for (among, max_group) in [(64, 32), (9, 4), (3, 1), (1, 1)] {
            let known = Some(Suspicion { max_group, has_record: true });
            assert_eq!(suspicion(1, true, Some(&deaths(among))), known);
        }
        let known = Some(Suspicion { max_group: MAX_GROUP, has_record: true });
        assert_eq!(suspicion(5, true, Some(&deaths(100))), known);
    }

    #[test]
    fn a_group_starts_with_the_first_task_and_respects_every_size_limit() {
        let mut waiting = VecDeque::from([4, 32, 1, 4, 4, 4]);
        let suspicion = |max_group: &usize| Suspicion { max_group: *max_group, has_record: true };
        assert_eq!(next_group(&mut waiting, suspicion), [4, 32, 4, 4]);
        assert_eq!(next_group(&mut waiting, suspicion), [1]);
        assert_eq!(next_group(&mut waiting, suspicion), [4]);
        assert!(next_group(&mut waiting, suspicion).is_empty());
        let mut waiting = VecDeque::from([(9, true), (9, false), (9, true), (9, false)]);
        let suspicion = |pair: &(usize, bool)| Suspicion { max_group: pair.0, has_record: pair.1 };
        assert_eq!(next_group(&mut waiting, suspicion), [(9, true), (9, true)]);
        assert_eq!(next_group(&mut waiting, suspicion), [(9, false), (9, false)]);
    }

    /// Simulates workers that die of one task, and counts the deaths until that task is alone in its group.
    #[test]
    fn the_culprit_among_n_tasks_is_found_in_about_log_n_deaths() {
        for (tasks, culprit, most_deaths) in [(64, 0, 7), (64, 63, 7), (500, 123, 10), (1, 0, 1)] {
            let mut among: Vec<u32> = vec![tasks; tasks as usize];
            let mut waiting: Vec<usize> = (0..tasks as usize).collect();
            let mut found = 0;
            let died = loop {
                found += 1;
                assert!(found <= most_deaths, "{tasks} tasks, {culprit} kills");
                let mut queue = VecDeque::from(waiting.clone());
                let group = loop {
                    let max_group = |task: &usize| (among[*task] as usize / 2).max(1);
                    let suspicion = |task: &usize| Suspicion { max_group: max_group(task), has_record: true };
                    let group = next_group(&mut queue, suspicion);
                    if group.contains(&culprit) {
                        break group;
                    }
                    // These survive, and are answered.
                    waiting.retain(|task| !group.contains(task));
                };
                for task in &group {
                    among[*task] = among[*task].min(group.len() as u32);
                }
                if group.len() == 1 {
                    break group[0];
                }
            };
            assert_eq!(died, culprit);
        }
    }

    /// Computes nothing; records whether it is isolated.
    #[derive(Default)]
    struct Watched(AtomicBool);

    impl Queue for Watched {
        fn expect(&self, _: crate::engine::Expect) {}
        fn isolate(&self, isolated: Option<Group>) {
            self.0.store(isolated.is_some(), Ordering::SeqCst);
        }
        fn depth(&self) -> usize {
            1
        }
        fn sequences(&self) -> Option<usize> {
            None
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_group_excludes_other_tasks_until_all_its_members_have_left() {
        let queue = Arc::new(Watched::default());
        let reporter = Reporter::start(std::io::sink()).unwrap();
        let isolation = Isolation::start(queue.clone(), reporter);
        let is_isolated = || queue.0.load(Ordering::SeqCst);
        let name = |id: &str| TaskName { id: id.into(), fingerprint: id.into() };
        let two = Suspicion { max_group: 2, has_record: true };
        let (a, b) = tokio::join!(isolation.enter(name("a"), two), isolation.enter(name("b"), two));
        assert!(is_isolated());
        let third = isolation.enter(name("c"), two);
        tokio::pin!(third);
        drop(a);
        assert!(tokio::time::timeout(Duration::from_secs(1), isolation.exclude_groups()).await.is_err());
        assert!(tokio::time::timeout(Duration::from_secs(1), &mut third).await.is_err(), "another group");
        drop(b);
        let c = third.await;
        assert!(c.is_some() && is_isolated());
        drop(c);
        let _out = isolation.exclude_groups().await;
        assert!(!is_isolated());
    }

    #[tokio::test(start_paused = true)]
    async fn a_group_without_crash_records_is_alone_for_a_short_time_only() {
        let queue = Arc::new(Watched::default());
        let isolation = Isolation::start(queue.clone(), Reporter::start(std::io::sink()).unwrap());
        let is_isolated = || queue.0.load(Ordering::SeqCst);
        let name = |id: &str| TaskName { id: id.into(), fingerprint: id.into() };
        let unproven = Suspicion { max_group: 2, has_record: false };
        let (long, _) =
            tokio::join!(isolation.enter(name("a"), unproven), isolation.enter(name("b"), unproven));
        assert!(is_isolated());
        let began = tokio::time::Instant::now();
        drop(isolation.exclude_groups().await);
        assert!(!is_isolated() && began.elapsed() <= UNPROVEN_TIME + GATHER_TIME, "{:?}", began.elapsed());
        let long = long.unwrap();
        assert_eq!(long.group(), None, "it is like all others now");
        // Others run for as long before the next group begins, though the first one has not left.
        let next = isolation.enter(name("c"), unproven).await.unwrap();
        assert!(is_isolated() && began.elapsed() >= 2 * UNPROVEN_TIME, "{:?}", began.elapsed());
        assert!(next.group().is_some());
        next.record_survival();
        long.record_survival();
        drop(isolation.exclude_groups().await);
        assert!(!is_isolated());
    }
}
