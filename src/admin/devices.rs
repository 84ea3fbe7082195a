//! The devices' memory and utilization, for the metrics. Queries the driver on a thread of its own, since a
//! broken driver may not answer. Until it does, its last answer is used.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Semaphore;

use crate::launcher::gpus::Gpus;

/// How long a scrape waits for the driver.
const DRIVER_TIMEOUT: Duration = Duration::from_secs(1);

/// The last answer of the driver. Clones share it.
#[derive(Clone, Debug)]
pub(super) struct Devices {
    last: Arc<Mutex<Gpus>>,
    /// One permit, so that there is one query at a time. Other scrapes use the last answer.
    query_permit: Arc<Semaphore>,
}

impl Default for Devices {
    fn default() -> Self {
        Self { last: Arc::default(), query_permit: Arc::new(Semaphore::new(1)) }
    }
}

impl Devices {
    /// Queries the driver. Returns its last answer if the query takes over a second, or if another one is under way.
    pub(super) async fn query(&self) -> Gpus {
        if let Ok(permit) = self.query_permit.clone().try_acquire_owned() {
            let last = self.last.clone();
            let queried = tokio::task::spawn_blocking(move || {
                let _permit = permit;
                let gpus = Gpus::here();
                *last.lock() = gpus;
            });
            let _ = tokio::time::timeout(DRIVER_TIMEOUT, queried).await;
        }
        self.last.lock().clone()
    }
}
