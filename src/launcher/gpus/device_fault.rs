//! The faults that a device can have, with names and descriptions, and what the driver's Xid numbers (error codes) mean
//! for processes that compute on the device. Pure.
//!
//! The sources are NVIDIA's catalogue ("Analyzing Xid Errors with the Xid Catalog", its immediate actions) and the list
//! of Xids that NVIDIA's device plugin for Kubernetes ascribes to the application.

use crate::launcher::restart::RestartReason;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DeviceFault {
    pub(crate) kind: Kind,
    /// A description for people, with the driver's Xid number if there is one.
    pub(crate) message: String,
}

/// The kinds of faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The driver reports an error with an Xid number.
    Xid,
    /// A memory error that cannot be corrected.
    Ecc,
    /// The driver cannot find the device any more.
    OffTheBus,
    /// The driver does not answer.
    Unresponsive,
}

impl Kind {
    pub(crate) fn reason(self) -> RestartReason {
        match self {
            Self::Xid => RestartReason::Xid,
            Self::Ecc => RestartReason::Ecc,
            Self::OffTheBus => RestartReason::OffTheBus,
            Self::Unresponsive => RestartReason::DeviceFailed,
        }
    }
}

/// What an event means for processes on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Severity {
    /// It means nothing for them: the error was corrected, or follows from another one.
    Ignored,
    /// The driver ends the affected processes. If a worker ends shortly after the event, the event is the reason.
    Process,
    /// No process can use the device any more.
    DeviceFailed,
}

/// The Xid number, the severity, the kind, and NVIDIA's description (shortened).
type Row = (u64, Severity, Kind, &'static str);

/// The Xids that matter to a process that computes. Others are only logged; the driver's recovery action says
/// whether the device can still be used.
const XIDS: [Row; 35] = [
    (8, Severity::Process, Kind::Xid, "GPU stopped processing"),
    (11, Severity::Process, Kind::Xid, "invalid or corrupted push buffer stream"),
    (13, Severity::Process, Kind::Xid, "graphics engine exception"),
    (31, Severity::Process, Kind::Xid, "GPU memory page fault"),
    (32, Severity::Process, Kind::Xid, "invalid or corrupted push buffer stream"),
    (43, Severity::Process, Kind::Xid, "GPU stopped processing"),
    // The end of any process causes it, so it is never the reason for an end.
    (45, Severity::Ignored, Kind::Xid, "preemptive cleanup, due to previous errors"),
    (46, Severity::DeviceFailed, Kind::Xid, "GPU stopped processing"),
    (48, Severity::DeviceFailed, Kind::Ecc, "double bit ECC error"),
    (61, Severity::DeviceFailed, Kind::Xid, "internal micro-controller breakpoint"),
    (62, Severity::DeviceFailed, Kind::Xid, "internal micro-controller halt"),
    (63, Severity::Ignored, Kind::Ecc, "page retirement or row remapping recorded"),
    (64, Severity::DeviceFailed, Kind::Ecc, "page retirement or row remapping failed"),
    (68, Severity::Process, Kind::Xid, "video processor exception"),
    (69, Severity::Process, Kind::Xid, "graphics engine class error"),
    (74, Severity::DeviceFailed, Kind::Xid, "NVLink error"),
    (79, Severity::DeviceFailed, Kind::OffTheBus, "GPU has fallen off the bus"),
    (92, Severity::Ignored, Kind::Ecc, "high single-bit ECC error rate"),
    (94, Severity::Process, Kind::Ecc, "contained memory error"),
    (95, Severity::DeviceFailed, Kind::Ecc, "uncontained memory error"),
    (109, Severity::Process, Kind::Xid, "context switch timeout"),
    (110, Severity::DeviceFailed, Kind::Xid, "security fault"),
    (119, Severity::DeviceFailed, Kind::Xid, "GSP RPC timeout"),
    (120, Severity::DeviceFailed, Kind::Xid, "GSP error"),
    (121, Severity::Ignored, Kind::Xid, "corrected C2C link error"),
    (136, Severity::DeviceFailed, Kind::Xid, "link training failed"),
    (137, Severity::Process, Kind::Xid, "NVLink privilege error"),
    (140, Severity::DeviceFailed, Kind::Ecc, "unrecovered ECC error"),
    (143, Severity::DeviceFailed, Kind::Xid, "GPU initialisation error"),
    // Ignored, because the recovery action itself is read after every event.
    (154, Severity::Ignored, Kind::Xid, "GPU recovery action changed"),
    (155, Severity::DeviceFailed, Kind::Xid, "NVLink error defined by software"),
    (156, Severity::DeviceFailed, Kind::Ecc, "resource retirement"),
    (158, Severity::DeviceFailed, Kind::Xid, "GPU fatal timeout"),
    (171, Severity::Ignored, Kind::Ecc, "uncorrectable DRAM error"),
    (172, Severity::Ignored, Kind::Ecc, "uncorrectable SRAM error"),
];

/// The fault that an Xid event reports, and what it means for processes.
pub(super) fn xid(number: u64) -> (DeviceFault, Severity) {
    match XIDS.iter().find(|(known, ..)| *known == number) {
        Some((_, severity, kind, meaning)) => {
            (DeviceFault { kind: *kind, message: format!("Xid {number}: {meaning}") }, *severity)
        }
        None => (DeviceFault { kind: Kind::Xid, message: format!("Xid {number}") }, Severity::Ignored),
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
    fn application_errors_do_not_fail_a_device_and_hardware_errors_do() {
        let severity = |number| xid(number).1;
        assert!([13, 31, 43, 68, 69, 94, 109].iter().all(|it| severity(*it) == Severity::Process));
        assert!([45, 63, 92, 154, 9_999].iter().all(|it| severity(*it) == Severity::Ignored));
        assert!([48, 62, 64, 74, 79, 95, 119, 120].iter().all(|it| severity(*it) == Severity::DeviceFailed));
    }

    #[test]
    fn each_xid_has_a_reason_and_a_message_with_its_number() {
        let described = |number| (xid(number).0.kind.reason().as_str(), xid(number).0.message);
        assert_eq!(described(79), ("off_the_bus", "Xid 79: GPU has fallen off the bus".to_owned()));
        assert_eq!(described(95), ("ecc", "Xid 95: uncontained memory error".to_owned()));
        assert_eq!(described(31), ("xid", "Xid 31: GPU memory page fault".to_owned()));
        assert_eq!(described(9_999), ("xid", "Xid 9999".to_owned()));
        assert!(XIDS.is_sorted_by(|a, b| a.0 < b.0), "each number once");
    }

    #[test]
    fn the_documentation_lists_the_xids_by_severity() {
        let page = include_str!("../../../docs/gpu.md");
        for (severity, behind) in [
            (Severity::DeviceFailed, " | mean that the device has failed |"),
            (Severity::Process, " | concern one process"),
            (Severity::Ignored, ", and all others | are logged"),
        ] {
            let numbers = XIDS.iter().filter(|row| row.1 == severity).map(|row| row.0.to_string());
            let row = format!("| {}{behind}", numbers.collect::<Vec<_>>().join(", "));
            assert!(page.contains(&row), "{row}");
        }
    }

    #[test]
    fn only_recovery_actions_that_concern_a_worker_are_faults() {
        assert!([0, 3, 5].iter().all(|action| recovery(*action).is_none()));
        assert!([1, 2, 4, 6, 7, 99].iter().all(|action| recovery(*action).is_some()));
    }
}
