//! The driver's reports about the devices since the launcher started: which devices have failed, and recent events.
//! Decides whether a worker may be started on a device, and notifies the watches of running workers when their device
//! fails. Owns the thread that listens to the driver, which starts with the first worker on a GPU and ends with the
//! launcher. Without a driver, no worker is refused.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::watch;

use super::gpus::device_fault::{DeviceFault, Kind, Severity};
use super::gpus::watch::{DriverReport, listen};

/// If a worker ends within this time after an event on its device, the event counts as the reason.
const RECENT_EVENT: Duration = Duration::from_secs(10);
/// After this time without a report the driver counts as unresponsive. Usually it is polled every 2 s.
const UNRESPONSIVE: Duration = Duration::from_secs(30);

/// What the driver has reported of each device. Shared by all slots.
#[derive(Default)]
pub(super) struct DeviceHealth {
    /// Whether the thread that listens to the driver was started, or could not be.
    is_started: AtomicBool,
    /// Locked for reading or writing a few values.
    driver_state: Mutex<DriverState>,
    /// The failures of each device that has failed. Written by the listening thread, read by the device watches of the
    /// workers.
    failed_devices: watch::Sender<BTreeMap<String, Failures>>,
}

/// The failures of one device.
struct Failures {
    count: u64,
    last: DeviceFault,
}

/// The state of the devices, by the reports of the driver.
#[derive(Default)]
struct DriverState {
    /// When the driver last reported; none if it never has.
    last_report: Option<Instant>,
    /// The fault that prevents the use of a device now.
    faults: BTreeMap<String, DeviceFault>,
    /// The last event on a device that could have ended a worker, and its time.
    events: BTreeMap<String, (Instant, DeviceFault)>,
}

/// Notifies the handle of one worker when its device fails.
pub(super) struct DeviceWatch {
    device: String,
    failed_devices: watch::Receiver<BTreeMap<String, Failures>>,
    /// How often the device had failed when this was last read.
    seen: u64,
}

impl DeviceHealth {
    /// Starts to listen to the driver, unless that was done before or `device` is no GPU. The thread ends when nobody
    /// else holds this `DeviceHealth`.
    pub(super) fn start_listening(self: &Arc<Self>, device: &str) {
        if device == "cpu" || self.is_started.swap(true, Ordering::Relaxed) {
            return;
        }
        let health = Arc::downgrade(self);
        let report = move |report| health.upgrade().map(|health| health.record(report)).is_some();
        if let Err(error) = thread::Builder::new().name("driver".into()).spawn(|| listen(report)) {
            tracing::warn!(%error, "no thread to listen to the driver; devices are not watched");
        }
    }

    /// Records a report of the driver, and notifies the device watches of new failures.
    fn record(&self, report: DriverReport) {
        let now = Instant::now();
        let mut state = self.driver_state.lock();
        state.last_report = Some(now);
        let failed_devices = match report {
            DriverReport::Event { severity: Severity::Ignored, .. } => Vec::new(),
            DriverReport::Event { devices, device_fault, severity } => {
                for device in &devices {
                    state.events.insert(device.clone(), (now, device_fault.clone()));
                }
                let failed_devices = if severity == Severity::DeviceFailed { devices } else { Vec::new() };
                // Valid until the next check of all devices, which follows at once.
                for device in &failed_devices {
                    state.faults.insert(device.clone(), device_fault.clone());
                }
                failed_devices.into_iter().map(|device| (device, device_fault.clone())).collect()
            }
            DriverReport::State(states) => {
                let mut failed_devices = Vec::new();
                for (device, fault) in states {
                    match fault {
                        Some(device_fault) => {
                            if state.faults.insert(device.clone(), device_fault.clone()).is_none() {
                                tracing::info!(
                                    device,
                                    fault = device_fault.message,
                                    "a device is out of order"
                                );
                                failed_devices.push((device, device_fault));
                            }
                        }
                        None => {
                            if state.faults.remove(&device).is_some() {
                                tracing::info!(device, "the driver says that the device can be used");
                            }
                        }
                    }
                }
                failed_devices
            }
        };
        drop(state);
        self.failed_devices.send_if_modified(|all| {
            for (device, device_fault) in &failed_devices {
                let count = all.get(device).map_or(0, |failures| failures.count) + 1;
                all.insert(device.clone(), Failures { count, last: device_fault.clone() });
            }
            !failed_devices.is_empty()
        });
    }

    /// The fault because of which no worker can be started on a device now.
    pub(super) fn blocking_fault(&self, device: &str) -> Option<DeviceFault> {
        if device == "cpu" {
            return None;
        }
        let state = self.driver_state.lock();
        let silence = state.last_report.map_or(Duration::ZERO, |at| at.elapsed());
        if silence > UNRESPONSIVE {
            let message = format!("the driver has not answered for {} s", silence.as_secs());
            return Some(DeviceFault { kind: Kind::Unresponsive, message });
        }
        state.faults.get(device).cloned()
    }

    /// The last event on a device, if it is recent.
    pub(super) fn recent_event(&self, device: &str) -> Option<DeviceFault> {
        let state = self.driver_state.lock();
        let (at, device_fault) = state.events.get(device)?;
        (at.elapsed() <= RECENT_EVENT).then(|| device_fault.clone())
    }

    /// Watches a device from now on.
    pub(super) fn device_watch(&self, device: &str) -> DeviceWatch {
        let failed_devices = self.failed_devices.subscribe();
        let seen = failed_devices.borrow().get(device).map_or(0, |failures| failures.count);
        DeviceWatch { device: device.to_owned(), failed_devices, seen }
    }
}

impl DeviceWatch {
    /// Waits until the device fails. Returns at once if it has failed since the last call. Safe to cancel.
    pub(super) async fn failure(&mut self) -> DeviceFault {
        loop {
            if let Some(failures) = self.failed_devices.borrow_and_update().get(&self.device)
                && failures.count > self.seen
            {
                self.seen = failures.count;
                return failures.last.clone();
            }
            if self.failed_devices.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
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

    fn state(fault: Option<DeviceFault>) -> DriverReport {
        DriverReport::State([("GPU-a".to_owned(), fault), ("GPU-b".to_owned(), None)].into())
    }

    fn event(severity: Severity) -> DriverReport {
        DriverReport::Event {
            devices: vec!["GPU-a".to_owned()],
            device_fault: device_fault(Kind::Xid, "Xid"),
            severity,
        }
    }

    #[test]
    fn a_failed_device_gets_no_worker_until_the_driver_reports_it_usable() {
        let health = DeviceHealth::default();
        assert_eq!(health.blocking_fault("GPU-a"), None, "nothing is known yet");
        health.record(state(Some(device_fault(Kind::OffTheBus, LOST))));
        assert_eq!(health.blocking_fault("GPU-a"), Some(device_fault(Kind::OffTheBus, LOST)));
        assert_eq!((health.blocking_fault("GPU-b"), health.blocking_fault("cpu")), (None, None));
        health.record(state(None));
        assert_eq!(health.blocking_fault("GPU-a"), None);
        health.record(event(Severity::DeviceFailed));
        assert_eq!(
            health.blocking_fault("GPU-a"),
            Some(device_fault(Kind::Xid, "Xid")),
            "until the next report"
        );
        health.record(state(None));
        assert_eq!(health.blocking_fault("GPU-a"), None);
    }

    #[test]
    fn only_watches_that_existed_before_a_failure_report_it_and_only_once() {
        let health = DeviceHealth::default();
        let (mut watch_a, mut watch_b) = (health.device_watch("GPU-a"), health.device_watch("GPU-b"));
        health.record(event(Severity::Process));
        assert_eq!(watch_a.failure().now_or_never(), None, "no reason to kill a worker");
        health.record(event(Severity::DeviceFailed));
        assert_eq!(watch_a.failure().now_or_never(), Some(device_fault(Kind::Xid, "Xid")));
        assert_eq!(watch_a.failure().now_or_never(), None);
        let mut next = health.device_watch("GPU-a");
        health.record(state(Some(device_fault(Kind::Xid, "Xid"))));
        assert_eq!(next.failure().now_or_never(), None, "it is still the same");
        health.record(state(None));
        health.record(state(Some(device_fault(Kind::OffTheBus, LOST))));
        assert_eq!(next.failure().now_or_never(), Some(device_fault(Kind::OffTheBus, LOST)));
        assert_eq!(watch_b.failure().now_or_never(), None);
    }

    #[test]
    fn an_event_is_recent_for_a_while_unless_it_is_ignored() {
        let health = DeviceHealth::default();
        health.record(event(Severity::Ignored));
        assert_eq!(health.recent_event("GPU-a"), None);
        health.record(event(Severity::Process));
        assert_eq!(health.recent_event("GPU-a"), Some(device_fault(Kind::Xid, "Xid")));
        assert_eq!(health.recent_event("GPU-b"), None);
        if let Some((at, _)) = health.driver_state.lock().events.get_mut("GPU-a") {
            *at -= RECENT_EVENT;
        }
        assert_eq!(health.recent_event("GPU-a"), None);
    }

    #[test]
    fn an_unresponsive_driver_prevents_every_start_on_a_gpu() {
        let health = DeviceHealth::default();
        health.record(state(None));
        let silent = Instant::now().checked_sub(UNRESPONSIVE + Duration::from_secs(1));
        health.driver_state.lock().last_report = silent;
        let refused = health.blocking_fault("GPU-b").map(|it| (it.kind, it.message));
        assert_eq!(refused, Some((Kind::Unresponsive, "the driver has not answered for 31 s".to_owned())));
        assert_eq!(health.blocking_fault("cpu"), None);
    }
}
