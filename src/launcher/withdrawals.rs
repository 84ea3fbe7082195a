//! Remembers for an hour which jobs (runs of `sconce submit`) and which stops (runs of `sconce stop`) were withdrawn.
//! The list is sent to workers that start later. Owns the list.

use std::collections::VecDeque;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use tokio::sync::watch;

use crate::protocol::Message;
use crate::protocol::control::{Cancellation, MAX_WITHDRAWN, WITHDRAWN_FOR};

/// The maximum length of an id, in bytes. Entries with longer ids are ignored, which bounds the list's memory.
const MAX_ID_BYTES: usize = 64;
/// How far an entry's time may be ahead of this host's clock. Entries further ahead are ignored.
const MAX_CLOCK_DIFFERENCE: Duration = Duration::from_secs(5 * 60);

/// The withdrawn jobs and stops, with the times of their withdrawal. Written when the broker's stream of withdrawals is
/// read, and by slots; read when a worker starts.
#[derive(Debug, Default)]
pub struct Withdrawals {
    /// Oldest first, [`MAX_WITHDRAWN`] entries at most.
    entries: Mutex<VecDeque<(Cancellation, SystemTime)>>,
    /// Whether the broker's stream must still be read. Until it was read, workers take no tasks.
    are_expected: watch::Sender<bool>,
}

impl Withdrawals {
    /// Remembers the entries of the broker's stream of withdrawals. Entries without a plausible time, and those that
    /// withdraw no job and no stop, are ignored: whoever may write to the control exchange can add such entries.
    pub fn load(&self, entries: &[Message], now: SystemTime) {
        for entry in entries {
            let Some(seconds) = entry.properties.timestamp else { continue };
            let at = SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds));
            if let Some(at) = at.filter(|at| *at <= now + MAX_CLOCK_DIFFERENCE)
                && let Ok(cancellation) = serde_json::from_slice(&entry.body)
            {
                self.remember(&cancellation, at.min(now));
            }
        }
    }

    /// Records that the broker's stream will be read. Until [`Withdrawals::end_reading`], workers take no tasks.
    pub fn begin_reading(&self) {
        self.are_expected.send_replace(true);
    }

    /// Lets workers take tasks, because the broker's stream was read or cannot be read.
    pub fn end_reading(&self) {
        self.are_expected.send_replace(false);
    }

    /// Whether the stream is being read. Slots wait for changes of this.
    pub(super) fn subscribe(&self) -> watch::Receiver<bool> {
        self.are_expected.subscribe()
    }

    /// Remembers a cancellation if it is a withdrawal, which means that it cancels a whole job or a stop.
    pub(super) fn remember(&self, cancellation: &Cancellation, at: SystemTime) {
        let id = cancellation.job.as_ref().or(cancellation.stop.as_ref());
        if cancellation.problem().is_some() || id.is_none_or(|id| id.len() > MAX_ID_BYTES) {
            return;
        }
        let mut all = self.entries.lock();
        // Every slot receives the withdrawal, and a user may repeat it. The time of the last one counts.
        all.retain(|(other, _)| other != cancellation);
        if all.len() == MAX_WITHDRAWN {
            all.pop_front();
        }
        all.push_back((cancellation.clone(), at));
    }

    /// The withdrawals of the last hour; none while more are expected. Older ones are forgotten.
    pub(super) fn current(&self, now: SystemTime) -> Option<Vec<Cancellation>> {
        if *self.are_expected.borrow() {
            return None;
        }
        let mut all = self.entries.lock();
        // An entry is ahead of `now` if the clock was set back.
        all.retain(|(_, at)| now.duration_since(*at).is_ok_and(|age| age <= WITHDRAWN_FOR) || now <= *at);
        Some(all.iter().map(|(cancellation, _)| cancellation.clone()).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::Properties;

    fn current(all: &Withdrawals, now: SystemTime) -> Vec<Cancellation> {
        all.current(now).expect("no more are expected")
    }

    fn stop(id: &str) -> Cancellation {
        Cancellation { stop: Some(id.to_owned()), ..Cancellation::default() }
    }

    #[test]
    fn withdrawals_are_remembered_once_for_an_hour_within_bounds() {
        let (all, now) = (Withdrawals::default(), SystemTime::now());
        all.remember(&stop("a"), now);
        all.remember(&stop("a"), now);
        all.remember(&stop(&"x".repeat(MAX_ID_BYTES + 1)), now);
        all.remember(&Cancellation { task: Some("t".into()), ..Cancellation::default() }, now);
        assert_eq!(current(&all, now + WITHDRAWN_FOR), [stop("a")]);
        assert_eq!(current(&all, now + WITHDRAWN_FOR + Duration::from_secs(1)), []);
        (0..=MAX_WITHDRAWN).for_each(|id| all.remember(&stop(&id.to_string()), now));
        assert_eq!((current(&all, now).len(), &current(&all, now)[0]), (MAX_WITHDRAWN, &stop("1")));
    }

    #[test]
    fn entries_of_the_stream_are_remembered_from_their_own_time() {
        let (all, now) = (Withdrawals::default(), SystemTime::now());
        let seconds = now.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
        let entry = |timestamp: Option<u64>, body: &'static str| {
            let properties = Properties { timestamp, ..Properties::default() };
            Message { properties, body: body.into() }
        };
        let entries = [
            entry(Some(seconds - 3_000), r#"{"stop": "old"}"#),
            entry(Some(seconds - 4_000), r#"{"stop": "too old"}"#),
            entry(Some(seconds + 4_000), r#"{"stop": "of the future"}"#),
            entry(Some(u64::MAX), r#"{"stop": "of no time"}"#),
            entry(None, r#"{"stop": "without a time"}"#),
            entry(Some(seconds), r#"{"correlation_id": "c", "reply_to": "q"}"#),
            entry(Some(seconds), "null"),
        ];
        all.load(&entries, now);
        assert_eq!(current(&all, now), [stop("old")]);
        assert_eq!(current(&all, now + Duration::from_secs(1_000)), []);
    }
}
