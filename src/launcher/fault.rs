//! The reason for which a worker ended, and words. Pure.

use std::process::ExitStatus;

use super::gpus::device_fault::DeviceFault;
use super::restart::{Death, RestartReason};
use crate::protocol::control::Unfit;
use crate::protocol::shorten;
use crate::shutdown::Exit;

/// Bytes that are kept of an error text of the worker.
const MESSAGE_BYTES: usize = 500;

/// The reason for which the launcher kills a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// The worker reported another device than its own.
    WrongDevice,
    /// A forward pass exceeds `batch.timeout`.
    Stuck,
    /// The worker sends nothing any more.
    Silent,
    /// The driver reports that the worker's device has failed.
    Device(DeviceFault),
}

impl Fault {
    pub(super) fn reason(&self) -> RestartReason {
        match self {
            Self::WrongDevice => RestartReason::WrongDevice,
            Self::Stuck => RestartReason::Stuck,
            Self::Silent => RestartReason::Silent,
            Self::Device(device_fault) => device_fault.kind.reason(),
        }
    }

    /// Whether the device is to blame, and no task.
    pub(super) fn is_the_devices(&self) -> bool {
        matches!(self, Self::WrongDevice | Self::Device(_))
    }
}

/// What is known of a worker's end beside its exit status.
#[derive(Debug, Default)]
pub(super) struct Circumstances {
    /// The reason for which the launcher killed it.
    pub(super) fault: Option<Fault>,
    /// What it reported as wrong with its device.
    pub(super) unfit: Option<(Unfit, String)>,
}

impl Circumstances {
    /// The reason, and words if the exit status does not say it all. `lately`: the last event on
    /// the device before the end.
    pub(super) fn reason(
        &self,
        death: &Death,
        status: Option<ExitStatus>,
        lately: Option<&DeviceFault>,
    ) -> (RestartReason, Option<String>) {
        if let Some(fault) = &self.fault {
            let message = match fault {
                Fault::Device(device_fault) => Some(device_fault.message.clone()),
                Fault::WrongDevice | Fault::Stuck | Fault::Silent => None,
            };
            return (fault.reason(), message);
        }
        if let Some((reason, message)) = &self.unfit {
            return ((*reason).into(), Some(shorten(message, MESSAGE_BYTES)));
        }
        let by_itself = match death.exit {
            Some(Exit::DeviceFailed | Exit::Internal) => true,
            Some(_) => false,
            None => status.is_some(),
        };
        match lately.filter(|_| by_itself) {
            Some(device_fault) => (
                device_fault.kind.reason(),
                Some(format!("{}, and then the worker died", device_fault.message)),
            ),
            None => (of_status(death, status), None),
        }
    }
}

/// The reason by the exit status.
fn of_status(death: &Death, status: Option<ExitStatus>) -> RestartReason {
    match death.exit {
        Some(Exit::BrokerLost) => RestartReason::BrokerLost,
        Some(Exit::ModelFailed | Exit::ModelUnavailable) => RestartReason::ModelFailed,
        Some(Exit::DeviceFailed) => RestartReason::DeviceFailed,
        Some(Exit::Config | Exit::Usage) => RestartReason::BadConfiguration,
        Some(Exit::Internal) => RestartReason::InternalError,
        None if status.is_some_and(|status| status.code().is_none()) => RestartReason::Killed,
        _ => RestartReason::Other,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::time::Duration;

    use super::super::gpus::device_fault::Kind;
    use super::*;

    fn ended(code: i32) -> (Death, Option<ExitStatus>) {
        let death = Death {
            exit: Exit::from_code(code),
            was_ready: true,
            lived: Duration::ZERO,
            worked: true,
            broker_reached: false,
            has_loaded: true,
        };
        (death, Some(ExitStatus::from_raw(code << 8)))
    }

    fn device_fault(kind: Kind) -> DeviceFault {
        DeviceFault { kind, message: "Xid 31: x".to_owned() }
    }

    #[test]
    fn what_the_launcher_and_the_worker_know_comes_before_the_status() {
        let (death, status) = ended(83);
        let name = |it: &Circumstances, lately: Option<&DeviceFault>| {
            let (reason, message) = it.reason(&death, status, lately);
            (reason.as_str(), message)
        };
        let lately = Some(&device_fault(Kind::Xid));
        let mut it = Circumstances::default();
        assert_eq!(name(&it, None), ("device_failed", None));
        let message = Some("Xid 31: x, and then the worker died".to_owned());
        assert_eq!(name(&it, lately), ("xid", message));
        it.unfit = Some((Unfit::TooSlow, "slow".to_owned()));
        assert_eq!(name(&it, lately), ("too_slow", Some("slow".to_owned())));
        it.fault = Some(Fault::Device(device_fault(Kind::OffTheBus)));
        assert_eq!(name(&it, lately), ("off_the_bus", Some("Xid 31: x".to_owned())));
        it.fault = Some(Fault::Stuck);
        assert_eq!(name(&it, lately), ("stuck", None));
    }

    #[test]
    fn a_worker_that_says_itself_why_it_ends_did_not_end_of_an_event_on_its_device() {
        for (code, name) in
            [(81, "broker_lost"), (82, "model_failed"), (78, "bad_configuration"), (0, "other")]
        {
            let (death, status) = ended(code);
            let lately = device_fault(Kind::Xid);
            let (reason, message) = Circumstances::default().reason(&death, status, Some(&lately));
            assert_eq!((reason.as_str(), message), (name, None));
        }
        let (death, _) = ended(99);
        let killed = Some(ExitStatus::from_raw(9));
        let reason = |lately| Circumstances::default().reason(&death, killed, lately).0;
        assert_eq!(reason(None), RestartReason::Killed);
        assert_eq!(reason(Some(&device_fault(Kind::Ecc))), RestartReason::Ecc);
    }
}
