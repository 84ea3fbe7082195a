//! The settings of a running worker that can be changed from outside: whether it consumes, and the bounds of
//! its batches. Owns the latest overrides; the docs of [`Overrides`] name who applies them.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use crate::batching::Policy;
use crate::protocol::control::BatchChange;
use crate::shutdown::{Phase, Stop};

/// The overrides of a running worker. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct LiveSettings(Arc<Overrides>);

#[derive(Debug, Default)]
struct Overrides {
    /// Written by the reader of the launcher's commands; read by the intake, which ends its session, and by the
    /// worker, which starts none.
    paused: watch::Sender<bool>,
    /// Written by the same reader, read by the worker, which passes it to its engine. Each value includes the earlier
    /// changes.
    batch: watch::Sender<BatchChange>,
}

impl LiveSettings {
    /// Pauses or resumes consuming.
    pub fn set_paused(&self, paused: bool) {
        self.0.paused.send_replace(paused);
    }

    /// Changes the bounds of batches.
    pub fn set_batch(&self, change: BatchChange) {
        self.0.batch.send_modify(|overrides| *overrides = change.over(*overrides));
    }

    pub(super) fn is_paused(&self) -> bool {
        *self.0.paused.borrow()
    }

    /// Waits until the worker is to pause.
    pub(super) async fn wait_for_pause(&self) {
        // `self` owns the sender, so waiting cannot fail.
        let _ = self.0.paused.subscribe().wait_for(|paused| *paused).await;
    }

    /// Waits until the worker may consume. False: the worker is to stop.
    pub(super) async fn wait_until_may_consume(&self, stop: &Stop) -> bool {
        let mut paused = self.0.paused.subscribe();
        tokio::select! {
            _ = paused.wait_for(|paused| !paused) => true,
            () = stop.reached(Phase::Finishing) => false,
        }
    }

    /// The overrides for batches, with later changes.
    pub(super) fn batch(&self) -> watch::Receiver<BatchChange> {
        self.0.batch.subscribe()
    }
}

/// Returns `policy` with the overrides applied.
pub(super) fn with_overrides(policy: Policy, overrides: BatchChange) -> Policy {
    Policy {
        max_tokens: overrides.max_tokens.unwrap_or(policy.max_tokens),
        max_requests: overrides.max_requests.unwrap_or(policy.max_requests),
        max_delay: overrides.max_delay_ms.and_then(duration_of_ms).unwrap_or(policy.max_delay),
        ..policy
    }
}

fn duration_of_ms(ms: f64) -> Option<Duration> {
    Duration::try_from_secs_f64(ms / 1e3).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_new_override_keeps_earlier_ones_that_it_does_not_set() {
        let settings = LiveSettings::default();
        settings.set_batch(BatchChange { max_tokens: Some(9), ..BatchChange::default() });
        settings.set_batch(BatchChange { max_requests: Some(3), ..BatchChange::default() });
        let policy = Policy::new(1, 1, Duration::from_millis(2));
        let changed_policy = with_overrides(policy, *settings.batch().borrow());
        assert_eq!((changed_policy.max_tokens, changed_policy.max_requests), (9, 3));
        assert_eq!(changed_policy.max_delay, policy.max_delay);
    }

    #[tokio::test]
    async fn a_paused_worker_stops_without_being_resumed() {
        let (settings, stop) = (LiveSettings::default(), Stop::default());
        assert!(settings.wait_until_may_consume(&stop).await);
        settings.set_paused(true);
        settings.wait_for_pause().await;
        stop.advance(Phase::Finishing, "test");
        assert!(!settings.wait_until_may_consume(&stop).await);
    }
}
