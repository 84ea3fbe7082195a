//! What the driver has reported of the devices since the launcher started: which have failed, and recent
//! events. Decides whether a worker is started on a device, and tells running workers' watches when their
//! device fails. Owns the thread that listens to the driver, which starts with the first worker on a GPU and
//! ends with the launcher. Without a driver, no worker is refused.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::gpus::device_fault::{DeviceFault, Kind, Weight};
use super::gpus::watch::{Word, listen};

/// If a worker ends within this time after an event on its device, the event is the reason.
const LATELY: Duration = Duration::from_secs(10);
/// After this time without a report the driver counts as unresponsive: it is asked every two seconds.
const UNRESPONSIVE: Duration = Duration::from_secs(30);

/// What the driver has reported of each device. Shared by all slots.
#[derive(Default)]
pub(super) struct Health {
    /// Listening has been started, or cannot be.
    begun: AtomicBool,
    /// Locked for reading or writing a few values.
    status: Mutex<SlotStatus>,
    /// Devices that have failed, each with how often and the last fault. Written by the listening thread, read
    /// by the device watches of the workers.
    failed_devices: watch::Sender<BTreeMap<String, (u64, DeviceFault)>>,
}

#[derive(Default)]
struct SlotStatus {
    /// When the driver last reported; none: never.
    heard: Option<Instant>,
    /// The fault that prevents the use of a device now.
    faults: BTreeMap<String, DeviceFault>,
    /// The last event on a device that could have ended a worker.
    events: BTreeMap<String, (Instant, DeviceFault)>,
}

/// Tells one worker whether its device fails.
pub(super) struct DeviceWatch {
    device: String,
    failed_devices: watch::Receiver<BTreeMap<String, (u64, DeviceFault)>>,
    /// How often the device had failed when this was last read.
    seen: u64,
}

impl Health {
    /// Starts to listen to the driver, unless that is done or `device` is no GPU. The thread ends when nobody
    /// else holds this `Health`.
    pub(super) fn watch_over(self: &Arc<Self>, device: &str) {
        if device == "cpu" || self.begun.swap(true, Ordering::Relaxed) {
            return;
        }
        let health = Arc::downgrade(self);
        let hear = move |word| health.upgrade().map(|health| health.hear(word)).is_some();
        if let Err(error) = thread::Builder::new().name("driver".into()).spawn(|| listen(hear)) {
            tracing::warn!(%error, "no thread to listen to the driver; devices are not watched");
        }
    }

    /// Takes in a report of the driver.
    fn hear(&self, word: Word) {
        let now = Instant::now();
        let mut status = self.status();
        status.heard = Some(now);
        let failed_devices = match word {
            Word::Event { weight: Weight::Nothing, .. } => Vec::new(),
            Word::Event { devices, device_fault, weight } => {
                for device in &devices {
                    status.events.insert(device.clone(), (now, device_fault.clone()));
                }
                let failed_devices = if weight == Weight::DeviceFailed { devices } else { Vec::new() };
                // Valid until the next check of all devices, which follows at once.
                for device in &failed_devices {
                    status.faults.insert(device.clone(), device_fault.clone());
                }
                failed_devices.into_iter().map(|device| (device, device_fault.clone())).collect()
            }
            Word::Look(states) => {
                let mut failed_devices = Vec::new();
                for (device, state) in states {
                    match state {
                        Some(device_fault) => {
                            if status.faults.insert(device.clone(), device_fault.clone()).is_none() {
                                tracing::info!(
                                    device,
                                    fault = device_fault.message,
                                    "a device is out of order"
                                );
                                failed_devices.push((device, device_fault));
                            }
                        }
                        None => {
                            if status.faults.remove(&device).is_some() {
                                tracing::info!(device, "the driver says that the device can be used");
                            }
                        }
                    }
                }
                failed_devices
            }
        };
        drop(status);
        self.failed_devices.send_if_modified(|all| {
            for (device, device_fault) in &failed_devices {
                let times = all.get(device).map_or(0, |(times, _)| *times);
                all.insert(device.clone(), (times + 1, device_fault.clone()));
            }
            !failed_devices.is_empty()
        });
    }

    /// The fault for which no worker can be started on a device now.
    pub(super) fn refuses(&self, device: &str) -> Option<DeviceFault> {
        if device == "cpu" {
            return None;
        }
        let status = self.status();
        let silence = status.heard.map_or(Duration::ZERO, |at| at.elapsed());
        if silence > UNRESPONSIVE {
            let message = format!("the driver has not answered for {} s", silence.as_secs());
            return Some(DeviceFault { kind: Kind::Unresponsive, message });
        }
        status.faults.get(device).cloned()
    }

    /// The last event on a device, if it is recent.
    pub(super) fn lately(&self, device: &str) -> Option<DeviceFault> {
        let status = self.status();
        let (at, device_fault) = status.events.get(device)?;
        (at.elapsed() <= LATELY).then(|| device_fault.clone())
    }

    /// Watches a device from now on.
    pub(super) fn device_watch(&self, device: &str) -> DeviceWatch {
        let failed_devices = self.failed_devices.subscribe();
        let seen = failed_devices.borrow().get(device).map_or(0, |(times, _)| *times);
        DeviceWatch { device: device.to_owned(), failed_devices, seen }
    }

    fn status(&self) -> MutexGuard<'_, SlotStatus> {
        self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DeviceWatch {
    /// Waits until the device fails, or returns at once if it failed since the last call. Safe to cancel.
    pub(super) async fn failed_devices(&mut self) -> DeviceFault {
        loop {
            if let Some((times, device_fault)) = self.failed_devices.borrow_and_update().get(&self.device)
                && *times > self.seen
            {
                self.seen = *times;
                return device_fault.clone();
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

    fn look(state: Option<DeviceFault>) -> Word {
        Word::Look([("GPU-a".to_owned(), state), ("GPU-b".to_owned(), None)].into())
    }

    fn event(weight: Weight) -> Word {
        Word::Event {
            devices: vec!["GPU-a".to_owned()],
            device_fault: device_fault(Kind::Xid, "Xid"),
            weight,
        }
    }

    #[test]
    fn a_device_that_has_failed_takes_no_worker_until_the_driver_says_it_can() {
        let health = Health::default();
        assert_eq!(health.refuses("GPU-a"), None, "nothing is known yet");
        health.hear(look(Some(device_fault(Kind::OffTheBus, LOST))));
        assert_eq!(health.refuses("GPU-a"), Some(device_fault(Kind::OffTheBus, LOST)));
        assert_eq!((health.refuses("GPU-b"), health.refuses("cpu")), (None, None));
        health.hear(look(None));
        assert_eq!(health.refuses("GPU-a"), None);
        health.hear(event(Weight::DeviceFailed));
        assert_eq!(health.refuses("GPU-a"), Some(device_fault(Kind::Xid, "Xid")), "until the next look");
        health.hear(look(None));
        assert_eq!(health.refuses("GPU-a"), None);
    }

    #[test]
    fn those_who_were_there_hear_once_that_a_device_has_failed_and_those_who_come_after_do_not() {
        let health = Health::default();
        let (mut eye, mut beside) = (health.device_watch("GPU-a"), health.device_watch("GPU-b"));
        health.hear(event(Weight::Passing));
        assert_eq!(eye.failed_devices().now_or_never(), None, "that is no reason to kill anybody");
        health.hear(event(Weight::DeviceFailed));
        assert_eq!(eye.failed_devices().now_or_never(), Some(device_fault(Kind::Xid, "Xid")));
        assert_eq!(eye.failed_devices().now_or_never(), None);
        let mut next = health.device_watch("GPU-a");
        health.hear(look(Some(device_fault(Kind::Xid, "Xid"))));
        assert_eq!(next.failed_devices().now_or_never(), None, "it is still the same");
        health.hear(look(None));
        health.hear(look(Some(device_fault(Kind::OffTheBus, LOST))));
        assert_eq!(next.failed_devices().now_or_never(), Some(device_fault(Kind::OffTheBus, LOST)));
        assert_eq!(beside.failed_devices().now_or_never(), None);
    }

    #[test]
    fn an_event_is_remembered_for_a_moment_unless_it_means_nothing() {
        let health = Health::default();
        health.hear(event(Weight::Nothing));
        assert_eq!(health.lately("GPU-a"), None);
        health.hear(event(Weight::Passing));
        assert_eq!(health.lately("GPU-a"), Some(device_fault(Kind::Xid, "Xid")));
        assert_eq!(health.lately("GPU-b"), None);
        if let Some((at, _)) = health.status().events.get_mut("GPU-a") {
            *at -= LATELY;
        }
        assert_eq!(health.lately("GPU-a"), None);
    }

    #[test]
    fn a_driver_that_does_not_answer_any_more_hinders_every_start_on_a_gpu() {
        let health = Health::default();
        health.hear(look(None));
        let silent = Instant::now().checked_sub(UNRESPONSIVE + Duration::from_secs(1));
        health.status().heard = silent;
        let refused = health.refuses("GPU-b").map(|it| (it.kind, it.message));
        assert_eq!(refused, Some((Kind::Unresponsive, "the driver has not answered for 31 s".to_owned())));
        assert_eq!(health.refuses("cpu"), None);
    }
}
