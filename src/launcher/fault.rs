//! Decides the reason for which a worker ended, and the text that describes it. Pure.

use std::process::ExitStatus;

use super::gpus::device_fault::DeviceFault;
use super::restart::{Death, RestartReason};
use crate::protocol::control::Unfit;
use crate::protocol::shorten;
use crate::shutdown::Exit;

/// The maximum number of bytes that are kept of a worker's error text.
const MESSAGE_BYTES: usize = 500;

/// The reason for which the launcher kills a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// The worker reported another device than its own.
    WrongDevice,
    /// A forward pass takes longer than `batch.timeout`.
    Stuck,
    /// The worker sends no events, or did not become ready in time.
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

    /// Whether the device is to blame, and not a task.
    pub(super) fn is_device_fault(&self) -> bool {
        matches!(self, Self::WrongDevice | Self::Device(_))
    }
}

/// What is known about a worker's end apart from its exit status.
#[derive(Debug, Default)]
pub(super) struct Circumstances {
    /// The reason for which the launcher killed the worker.
    pub(super) fault: Option<Fault>,
    /// What the worker reported as wrong with its device.
    pub(super) unfit: Option<(Unfit, String)>,
    /// Whether the launcher had told the worker to abort, or was stopping.
    pub(super) is_forced: bool,
    /// What a SIGKILL that the launcher has not sent may mean.
    pub(super) kill_hint: Option<String>,
}

impl Circumstances {
    /// The reason for the end, and a text if the exit status alone does not explain it.
    pub(super) fn reason(
        &self,
        death: &Death,
        status: Option<ExitStatus>,
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
        let hint = self.kill_hint.as_ref().filter(|_| death.exit.is_none());
        let message = hint.zip(status).map(|(hint, status)| format!("{status}: {hint}"));
        (reason_by_exit_status(death, status), message)
    }
}

/// The reason that the exit status shows.
fn reason_by_exit_status(death: &Death, status: Option<ExitStatus>) -> RestartReason {
    match death.exit {
        Some(Exit::BrokerLost) => RestartReason::BrokerLost,
        Some(Exit::ModelFailed | Exit::ModelUnavailable) => RestartReason::ModelFailed,
        Some(Exit::ModelProcessFailed) => RestartReason::ModelProcess,
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
            is_lasting: false,
            has_loaded: true,
        };
        (death, Some(ExitStatus::from_raw(code << 8)))
    }

    #[test]
    fn faults_and_reports_take_precedence_over_the_exit_status() {
        let (death, status) = ended(83);
        let name = |it: &Circumstances| {
            let (reason, message) = it.reason(&death, status);
            (reason.as_str(), message)
        };
        let mut it = Circumstances::default();
        assert_eq!(name(&it), ("device_failed", None));
        it.unfit = Some((Unfit::TooSlow, "slow".to_owned()));
        assert_eq!(name(&it), ("too_slow", Some("slow".to_owned())));
        let lost = DeviceFault { kind: Kind::OffTheBus, message: "lost".to_owned() };
        it.fault = Some(Fault::Device(lost));
        assert_eq!(name(&it), ("off_the_bus", Some("lost".to_owned())));
        it.fault = Some(Fault::Stuck);
        assert_eq!(name(&it), ("stuck", None));
    }

    #[test]
    fn an_exit_code_has_its_own_reason() {
        for (code, name) in
            [(81, "broker_lost"), (82, "model_failed"), (78, "bad_configuration"), (0, "other")]
        {
            let (death, status) = ended(code);
            let (reason, message) = Circumstances::default().reason(&death, status);
            assert_eq!((reason.as_str(), message), (name, None));
        }
        let (death, _) = ended(99);
        let killed = Some(ExitStatus::from_raw(9));
        assert_eq!(Circumstances::default().reason(&death, killed).0, RestartReason::Killed);
    }

    #[test]
    fn the_hint_about_a_sigkill_follows_the_signal_unless_another_cause_is_known() {
        let (death, _) = ended(99);
        let killed = Some(ExitStatus::from_raw(9));
        let mut it = Circumstances { kill_hint: Some("a hint".to_owned()), ..Circumstances::default() };
        let message = Some("signal: 9 (SIGKILL): a hint".to_owned());
        assert_eq!(it.reason(&death, killed), (RestartReason::Killed, message));
        let (settled, _) = ended(0);
        assert_eq!(it.reason(&settled, killed), (RestartReason::Other, None));
        it.fault = Some(Fault::Stuck);
        assert_eq!(it.reason(&death, killed), (RestartReason::Stuck, None));
    }
}
