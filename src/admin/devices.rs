//! The devices' own values (memory, use), for the metrics. Asks the driver on a thread of its own, since a
//! broken driver may not answer; until it does, its last answer is used.

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
    /// One query at a time: others use the last answer.
    asking: Arc<Semaphore>,
}

impl Default for Devices {
    fn default() -> Self {
        Self { last: Arc::default(), asking: Arc::new(Semaphore::new(1)) }
    }
}

impl Devices {
    /// The driver's answer, or its last one if it takes too long.
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
