//! What the devices themselves say (memory, use), for the metrics. Asks the driver on a thread of its
//! own, since a broken one may not answer; while it does not, the last answer stands.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::Semaphore;

use crate::launcher::gpus::Gpus;

/// How long a scrape waits for the driver.
const PATIENCE: Duration = Duration::from_secs(1);

/// The last answer of the driver. Clones share it.
#[derive(Clone, Debug)]
pub(super) struct Devices {
    last: Arc<Mutex<Gpus>>,
    /// One question at a time: those behind it read the last answer.
    asking: Arc<Semaphore>,
}

impl Default for Devices {
    fn default() -> Self {
        Self { last: Arc::default(), asking: Arc::new(Semaphore::new(1)) }
    }
}

impl Devices {
    /// What they say now, or said last.
    pub(super) async fn look(&self) -> Gpus {
        if let Ok(permit) = self.asking.clone().try_acquire_owned() {
            let last = self.last.clone();
            let asked = tokio::task::spawn_blocking(move || {
                let _permit = permit;
                let gpus = Gpus::here();
                *last.lock().unwrap_or_else(PoisonError::into_inner) = gpus;
            });
            let _ = tokio::time::timeout(PATIENCE, asked).await;
        }
        self.last.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
