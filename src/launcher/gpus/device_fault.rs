//! The faults that a device can have, by name and in words, and what the driver's Xid numbers mean for
//! processes that compute on the device. Pure.
//!
//! Sources: NVIDIA's catalogue ("Analyzing Xid Errors with the Xid Catalog", the immediate action), and the
//! list of Xids that its device plugin for Kubernetes ascribes to the application.

use crate::launcher::restart::RestartReason;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DeviceFault {
    pub(crate) kind: Kind,
    /// In words, with the driver's number.
    pub(crate) message: String,
}

/// The kinds of faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The driver reports an error.
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
pub(crate) enum Weight {
    /// Nothing: the error is corrected, or follows from another one.
    Nothing,
    /// The driver ends the processes concerned; if a worker ends now, this is the reason.
    Passing,
    /// No process can use the device any more.
    DeviceFailed,
}

/// Xid number, meaning for us, kind, NVIDIA's description in short.
type Row = (u64, Weight, Kind, &'static str);

/// The Xids that concern a process that computes. Others are only logged; the driver's recovery action says
/// whether the device can still be used.
const XIDS: [Row; 35] = [
    (8, Weight::Passing, Kind::Xid, "GPU stopped processing"),
    (11, Weight::Passing, Kind::Xid, "invalid or corrupted push buffer stream"),
    (13, Weight::Passing, Kind::Xid, "graphics engine exception"),
    (31, Weight::Passing, Kind::Xid, "GPU memory page fault"),
    (32, Weight::Passing, Kind::Xid, "invalid or corrupted push buffer stream"),
    (43, Weight::Passing, Kind::Xid, "GPU stopped processing"),
    // Follows from the end of any process, so it is never the reason for one.
    (45, Weight::Nothing, Kind::Xid, "preemptive cleanup, due to previous errors"),
    (46, Weight::DeviceFailed, Kind::Xid, "GPU stopped processing"),
    (48, Weight::DeviceFailed, Kind::Ecc, "double bit ECC error"),
    (61, Weight::DeviceFailed, Kind::Xid, "internal micro-controller breakpoint"),
    (62, Weight::DeviceFailed, Kind::Xid, "internal micro-controller halt"),
    (63, Weight::Nothing, Kind::Ecc, "page retirement or row remapping recorded"),
    (64, Weight::DeviceFailed, Kind::Ecc, "page retirement or row remapping failed"),
    (68, Weight::Passing, Kind::Xid, "video processor exception"),
    (69, Weight::Passing, Kind::Xid, "graphics engine class error"),
    (74, Weight::DeviceFailed, Kind::Xid, "NVLink error"),
    (79, Weight::DeviceFailed, Kind::OffTheBus, "GPU has fallen off the bus"),
    (92, Weight::Nothing, Kind::Ecc, "high single-bit ECC error rate"),
    (94, Weight::Passing, Kind::Ecc, "contained memory error"),
    (95, Weight::DeviceFailed, Kind::Ecc, "uncontained memory error"),
    (109, Weight::Passing, Kind::Xid, "context switch timeout"),
    (110, Weight::DeviceFailed, Kind::Xid, "security fault"),
    (119, Weight::DeviceFailed, Kind::Xid, "GSP RPC timeout"),
    (120, Weight::DeviceFailed, Kind::Xid, "GSP error"),
    (121, Weight::Nothing, Kind::Xid, "corrected C2C link error"),
    (136, Weight::DeviceFailed, Kind::Xid, "link training failed"),
    (137, Weight::Passing, Kind::Xid, "NVLink privilege error"),
    (140, Weight::DeviceFailed, Kind::Ecc, "unrecovered ECC error"),
    (143, Weight::DeviceFailed, Kind::Xid, "GPU initialisation error"),
    // After every event the recovery action itself is read.
    (154, Weight::Nothing, Kind::Xid, "GPU recovery action changed"),
    (155, Weight::DeviceFailed, Kind::Xid, "NVLink error defined by software"),
    (156, Weight::DeviceFailed, Kind::Ecc, "resource retirement"),
    (158, Weight::DeviceFailed, Kind::Xid, "GPU fatal timeout"),
    (171, Weight::Nothing, Kind::Ecc, "uncorrectable DRAM error"),
    (172, Weight::Nothing, Kind::Ecc, "uncorrectable SRAM error"),
];

pub(super) fn xid(number: u64) -> (DeviceFault, Weight) {
    match XIDS.iter().find(|(known, ..)| *known == number) {
        Some((_, weight, kind, meaning)) => {
            (DeviceFault { kind: *kind, message: format!("Xid {number}: {meaning}") }, *weight)
        }
        None => (DeviceFault { kind: Kind::Xid, message: format!("Xid {number}") }, Weight::Nothing),
    }
}

/// What the driver wants done with a GPU before it is used again, by nvml.h's `nvmlDeviceGpuRecoveryAction_t`.
/// None: nothing that matters for a worker here. (3 asks to stop traffic between GPUs, and workers have none; 5
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
    fn what_an_application_did_fails_no_device_and_what_the_hardware_did_does() {
        let weight = |number| xid(number).1;
        assert!([13, 31, 43, 68, 69, 94, 109].iter().all(|it| weight(*it) == Weight::Passing));
        assert!([45, 63, 92, 154, 9_999].iter().all(|it| weight(*it) == Weight::Nothing));
        assert!([48, 62, 64, 74, 79, 95, 119, 120].iter().all(|it| weight(*it) == Weight::DeviceFailed));
    }

    #[test]
    fn each_xid_has_a_name_for_counting_its_number_and_its_meaning() {
        let said = |number| (xid(number).0.kind.reason().as_str(), xid(number).0.message);
        assert_eq!(said(79), ("off_the_bus", "Xid 79: GPU has fallen off the bus".to_owned()));
        assert_eq!(said(95), ("ecc", "Xid 95: uncontained memory error".to_owned()));
        assert_eq!(said(31), ("xid", "Xid 31: GPU memory page fault".to_owned()));
        assert_eq!(said(9_999), ("xid", "Xid 9999".to_owned()));
        assert!(XIDS.is_sorted_by(|a, b| a.0 < b.0), "each number once");
    }

    #[test]
    fn the_documentation_lists_them_as_they_are() {
        let page = include_str!("../../../docs/gpu.md");
        for (weight, behind) in [
            (Weight::DeviceFailed, " | mean that the device has failed |"),
            (Weight::Passing, " | concern one process"),
            (Weight::Nothing, ", and all others | are logged"),
        ] {
            let numbers = XIDS.iter().filter(|row| row.1 == weight).map(|row| row.0.to_string());
            let row = format!("| {}{behind}", numbers.collect::<Vec<_>>().join(", "));
            assert!(page.contains(&row), "{row}");
        }
    }

    #[test]
    fn what_the_driver_wants_done_first_hinders_workers_unless_it_concerns_others() {
        assert!([0, 3, 5].iter().all(|action| recovery(*action).is_none()));
        assert!([1, 2, 4, 6, 7, 99].iter().all(|action| recovery(*action).is_some()));
    }
}
