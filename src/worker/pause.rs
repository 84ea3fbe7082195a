//! Whether a running worker consumes. An order may change this at any time.

use std::sync::Arc;

use tokio::sync::watch;

use crate::shutdown::{Phase, Stop};

/// Whether a worker is paused. Clones share this.
#[derive(Clone, Debug, Default)]
pub struct Pause {
    /// Written by the reader of the launcher's commands; read by the intake, which ends its session, and by the
    /// worker, which starts none.
    is_paused: Arc<watch::Sender<bool>>,
}

impl Pause {
    /// Pauses or resumes consuming.
    pub fn set(&self, is_paused: bool) {
        self.is_paused.send_replace(is_paused);
    }

    pub(super) fn is_set(&self) -> bool {
        *self.is_paused.borrow()
    }

    /// Waits until the worker is to pause.
    pub(super) async fn wait_until_set(&self) {
        // `self` owns the sender, so waiting cannot fail.
        let _ = self.is_paused.subscribe().wait_for(|is_paused| *is_paused).await;
    }

    /// Waits until the worker may consume. False: the worker is to stop.
    pub(super) async fn wait_until_may_consume(&self, stop: &Stop) -> bool {
        let mut is_paused = self.is_paused.subscribe();
        tokio::select! {
            _ = is_paused.wait_for(|is_paused| !is_paused) => true,
            () = stop.reached(Phase::Finishing) => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_paused_worker_stops_without_being_resumed() {
        let (pause, stop) = (Pause::default(), Stop::default());
        assert!(pause.wait_until_may_consume(&stop).await);
        pause.set(true);
        pause.wait_until_set().await;
        stop.advance(Phase::Finishing, "test");
        assert!(!pause.wait_until_may_consume(&stop).await);
    }
}
