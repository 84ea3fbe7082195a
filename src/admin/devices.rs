//! The devices' memory and utilization, for the metrics. A separate thread queries the driver, because a
//! broken driver may not answer. Until it answers, its previous answer is used.

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
    /// Queries the driver. Returns its last answer if the query takes longer than [`DRIVER_TIMEOUT`], or if another
    /// query is under way.
    pub(super) async fn query(&self) -> Gpus {
        if let Ok(permit) = self.query_permit.clone().try_acquire_owned() {
            let last = self.last.clone();
            let query = tokio::task::spawn_blocking(move || {
                let _permit = permit;
                let gpus = Gpus::here();
                *last.lock() = gpus;
            });
            let _ = tokio::time::timeout(DRIVER_TIMEOUT, query).await;
        }
        self.last.lock().clone()
    }
}
