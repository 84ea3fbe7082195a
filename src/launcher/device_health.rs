//! The driver's reports about the devices since the launcher started: which devices have failed. Decides whether a worker
//! may be started on a device, and notifies the watches of running workers when their device fails. Owns the thread that
//! asks the driver, which starts with the first worker on a GPU and ends with the launcher. Without a driver, no worker is
//! refused.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::gpus::device_fault::{DeviceFault, Kind};
use super::gpus::watch::{DeviceStates, watch};

/// After this time without a report the driver counts as unresponsive. Usually it is polled every 2 s.
const UNRESPONSIVE: Duration = Duration::from_secs(30);

/// What the driver has reported of each device. Shared by all slots.
#[derive(Default)]
pub(super) struct DeviceHealth {
    /// Whether the thread that asks the driver was started, or could not be.
    is_started: AtomicBool,
    /// Written by that thread, read when a worker is to be started. A new fault notifies the device watches of the running
    /// workers.
    reported: watch::Sender<Reported>,
}

/// The state of the devices, by the reports of the driver.
#[derive(Default)]
struct Reported {
    /// When the driver last reported; none if it never has.
    at: Option<Instant>,
    /// The fault that prevents the use of a device now.
    faults: BTreeMap<String, DeviceFault>,
}

/// Notifies the handle of one worker when its device fails.
pub(super) struct DeviceWatch {
    device: String,
    reported: watch::Receiver<Reported>,
}

impl DeviceHealth {
    /// Starts to ask the driver, unless that was done before or `device` is no GPU. The thread ends when nobody else holds
    /// this `DeviceHealth`.
    pub(super) fn start_watching(self: &Arc<Self>, device: &str) {
        if device == "cpu" || self.is_started.swap(true, Ordering::Relaxed) {
            return;
        }
        let health = Arc::downgrade(self);
        let report = move |report| health.upgrade().map(|health| health.record(report)).is_some();
        if let Err(error) = thread::Builder::new().name("driver".into()).spawn(|| watch(report)) {
            tracing::warn!(%error, "no thread to ask the driver; devices are not watched");
        }
    }

    /// Records a report of the driver, and notifies the device watches of new faults.
    fn record(&self, states: DeviceStates) {
        self.reported.send_if_modified(|reported| {
            reported.at = Some(Instant::now());
            let mut is_new = false;
            for (device, fault) in states {
                if let Some(fault) = fault {
                    if !reported.faults.contains_key(&device) {
                        tracing::info!(device, fault = fault.message, "a device is out of order");
                        is_new = true;
                    }
                    reported.faults.insert(device, fault);
                } else if reported.faults.remove(&device).is_some() {
                    tracing::info!(device, "the driver says that the device can be used");
                }
            }
            is_new
        });
    }

    /// The fault because of which no worker can be started on a device now.
    pub(super) fn blocking_fault(&self, device: &str) -> Option<DeviceFault> {
        if device == "cpu" {
            return None;
        }
        let reported = self.reported.borrow();
        let silence = reported.at.map_or(Duration::ZERO, |at| at.elapsed());
        if silence > UNRESPONSIVE {
            let message = format!("the driver has not answered for {} s", silence.as_secs());
            return Some(DeviceFault { kind: Kind::Unresponsive, message });
        }
        reported.faults.get(device).cloned()
    }

    /// Watches a device from now on.
    pub(super) fn device_watch(&self, device: &str) -> DeviceWatch {
        DeviceWatch { device: device.to_owned(), reported: self.reported.subscribe() }
    }
}

impl DeviceWatch {
    /// Waits until the device fails. Returns at once if it has failed since the last call. Safe to cancel.
    pub(super) async fn failure(&mut self) -> DeviceFault {
        while self.reported.changed().await.is_ok() {
            if let Some(fault) = self.reported.borrow().faults.get(&self.device) {
                return fault.clone();
            }
        }
        std::future::pending().await
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    const LOST: &str = "lost";

    fn device_fault(kind: Kind, message: &str) -> DeviceFault {
        DeviceFault { kind, message: message.to_owned() }
    }

    fn states(fault: Option<DeviceFault>) -> DeviceStates {
        [("GPU-a".to_owned(), fault), ("GPU-b".to_owned(), None)].into()
    }

    #[test]
    fn a_failed_device_gets_no_worker_until_the_driver_reports_it_usable() {
        let health = DeviceHealth::default();
        assert_eq!(health.blocking_fault("GPU-a"), None, "nothing is known yet");
        health.record(states(Some(device_fault(Kind::OffTheBus, LOST))));
        assert_eq!(health.blocking_fault("GPU-a"), Some(device_fault(Kind::OffTheBus, LOST)));
        assert_eq!((health.blocking_fault("GPU-b"), health.blocking_fault("cpu")), (None, None));
        health.record(states(None));
        assert_eq!(health.blocking_fault("GPU-a"), None);
    }

    #[test]
    fn only_watches_that_existed_before_a_failure_report_it_and_only_once() {
        let health = DeviceHealth::default();
        let (mut watch_a, mut watch_b) = (health.device_watch("GPU-a"), health.device_watch("GPU-b"));
        health.record(states(None));
        assert_eq!(watch_a.failure().now_or_never(), None, "no reason to kill a worker");
        health.record(states(Some(device_fault(Kind::Xid, "reset"))));
        assert_eq!(watch_a.failure().now_or_never(), Some(device_fault(Kind::Xid, "reset")));
        assert_eq!(watch_a.failure().now_or_never(), None);
        let mut next = health.device_watch("GPU-a");
        health.record(states(Some(device_fault(Kind::Xid, "reset"))));
        assert_eq!(next.failure().now_or_never(), None, "it is still the same");
        health.record(states(None));
        health.record(states(Some(device_fault(Kind::OffTheBus, LOST))));
        assert_eq!(next.failure().now_or_never(), Some(device_fault(Kind::OffTheBus, LOST)));
        assert_eq!(watch_b.failure().now_or_never(), None);
    }

    #[test]
    fn an_unresponsive_driver_prevents_every_start_on_a_gpu() {
        let health = DeviceHealth::default();
        health.record(states(None));
        let silent = Instant::now().checked_sub(UNRESPONSIVE + Duration::from_secs(1));
        health.reported.send_modify(|reported| reported.at = silent);
        let refused = health.blocking_fault("GPU-b").map(|it| (it.kind, it.message));
        assert_eq!(refused, Some((Kind::Unresponsive, "the driver has not answered for 31 s".to_owned())));
        assert_eq!(health.blocking_fault("cpu"), None);
    }
}
