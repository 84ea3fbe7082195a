//! The faults that a device can have, and what the driver's recovery actions mean for processes that compute on the
//! device. Pure.

use crate::launcher::restart::RestartReason;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DeviceFault {
    pub(crate) kind: Kind,
    /// A description for people.
    pub(crate) message: String,
}

/// The kinds of faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The driver wants a recovery action, such as a reset, before the device is used again.
    Xid,
    /// The driver cannot find the device any more.
    OffTheBus,
    /// The driver does not answer.
    Unresponsive,
}

impl Kind {
    pub(crate) fn reason(self) -> RestartReason {
        match self {
            Self::Xid => RestartReason::Xid,
            Self::OffTheBus => RestartReason::OffTheBus,
            Self::Unresponsive => RestartReason::DeviceFailed,
        }
    }
}

/// What the driver requires before a GPU is used again, by nvml.h's `nvmlDeviceGpuRecoveryAction_t`. None if it
/// requires nothing that matters to a worker. (3 asks to stop traffic between GPUs, which workers do not have; 5
/// concerns several hosts.)
pub(super) fn recovery(action: u64) -> Option<&'static str> {
    match action {
        0 | 3 | 5 => None,
        1 | 4 => Some("the driver wants the GPU reset before it is used again (nvidia-smi --gpu-reset)"),
        2 | 7 => Some("the driver wants the host rebooted before the GPU is used again"),
        6 => Some("the driver wants the GPU's PCIe bus reset before it is used again"),
        _ => Some("the driver wants something done before the GPU is used again (nvidia-smi -q)"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_recovery_actions_that_concern_a_worker_are_faults() {
        assert!([0, 3, 5].iter().all(|action| recovery(*action).is_none()));
        assert!([1, 2, 4, 6, 7, 99].iter().all(|action| recovery(*action).is_some()));
    }
}
