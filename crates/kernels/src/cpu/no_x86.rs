//! A CPU that is not x86-64 has none of its instructions.

use pulp::Arch;

use super::CpuFeatures;

pub(super) fn arch_named(_: CpuFeatures) -> Option<Arch> {
    None
}

pub(super) fn is_avx512(_: Arch) -> bool {
    false
}

pub(super) fn is_avx2(_: Arch) -> bool {
    false
}

pub(crate) fn has_amx() -> bool {
    false
}

pub(crate) fn has_avx2() -> bool {
    false
}

pub(crate) fn has_bf16() -> bool {
    false
}

pub(crate) fn has_vnni() -> bool {
    false
}
