//! What of a running worker can be set from outside: whether it consumes, and the bounds of its
//! batches. Owns the latest wish; who acts on it is said at each.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use crate::batching::Policy;
use crate::protocol::control::BatchChange;
use crate::shutdown::{Phase, Stop};

/// What is wished of a running worker. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Dials(Arc<Wishes>);

#[derive(Debug, Default)]
struct Wishes {
    /// Written by who reads the launcher's commands; read by the intake, which ends its stint, and by
    /// the worker, which begins none.
    paused: watch::Sender<bool>,
    /// Written by the same, read by the batch former. Each wish holds the ones before.
    batch: watch::Sender<BatchChange>,
}

impl Dials {
    /// Consume, or do not.
    pub fn pause(&self, paused: bool) {
        self.0.paused.send_replace(paused);
    }

    /// Other bounds of batches.
    pub fn set_batch(&self, change: BatchChange) {
        self.0.batch.send_modify(|wish| *wish = change.over(*wish));
    }

    pub(super) fn is_paused(&self) -> bool {
        *self.0.paused.borrow()
    }

    /// Waits until the worker is told to pause.
    pub(super) async fn paused(&self) {
        // The sender lives in self, so waiting cannot fail.
        let _ = self.0.paused.subscribe().wait_for(|paused| *paused).await;
    }

    /// Waits until the worker may consume. False: it is to stop.
    pub(super) async fn may_consume(&self, stop: &Stop) -> bool {
        let mut paused = self.0.paused.subscribe();
        tokio::select! {
            _ = paused.wait_for(|paused| !paused) => true,
            () = stop.reached(Phase::Finishing) => false,
        }
    }

    /// The wishes for batches, now and from now on.
    pub(super) fn batch(&self) -> watch::Receiver<BatchChange> {
        self.0.batch.subscribe()
    }
}

/// `policy` with what is wished.
pub(super) fn changed(policy: Policy, wish: BatchChange) -> Policy {
    Policy {
        max_tokens: wish.max_tokens.unwrap_or(policy.max_tokens),
        max_requests: wish.max_requests.unwrap_or(policy.max_requests),
        max_delay: wish.max_delay_ms.and_then(seconds).unwrap_or(policy.max_delay),
    }
}

fn seconds(ms: f64) -> Option<Duration> {
    Duration::try_from_secs_f64(ms / 1e3).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_wish_keeps_what_the_one_before_wished_and_it_does_not_mention() {
        let dials = Dials::default();
        dials.set_batch(BatchChange { max_tokens: Some(9), ..BatchChange::default() });
        dials.set_batch(BatchChange { max_requests: Some(3), ..BatchChange::default() });
        let policy = Policy { max_tokens: 1, max_requests: 1, max_delay: Duration::from_millis(2) };
        let wished = changed(policy, *dials.batch().borrow());
        assert_eq!((wished.max_tokens, wished.max_requests), (9, 3));
        assert_eq!(wished.max_delay, policy.max_delay);
    }

    #[tokio::test]
    async fn a_paused_worker_that_is_told_to_stop_does_not_wait_to_be_resumed() {
        let (dials, stop) = (Dials::default(), Stop::default());
        assert!(dials.may_consume(&stop).await);
        dials.pause(true);
        dials.paused().await;
        stop.advance(Phase::Finishing, "test");
        assert!(!dials.may_consume(&stop).await);
    }
}
