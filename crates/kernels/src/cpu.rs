//! The vector units of this CPU. Decides for which vector units kernels are compiled, and on which of them kernels run.

#[cfg_attr(not(target_arch = "x86_64"), path = "cpu/no_x86.rs")]
mod x86;

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use pulp::{Arch, WithSimd};
use serde::{Deserialize, Serialize};

#[cfg(target_arch = "x86_64")]
pub(crate) use x86::has_avx_vnni;
pub(crate) use x86::{has_amx, has_avx2, has_bf16, has_vnni};

/// The vector units of a CPU, as the `cpu_features` setting names them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CpuFeatures {
    /// The widest vector units that the CPU has.
    #[default]
    Auto,
    /// Registers of 16 f32.
    Avx512,
    /// Registers of 8 f32, fused multiply-add, and AVX-VNNI.
    #[serde(rename = "avx2-vnni")]
    Avx2Vnni,
    /// Registers of 8 f32, and fused multiply-add.
    Avx2,
    /// Scalar code, which every CPU of the architecture runs.
    None,
}

impl CpuFeatures {
    /// All values, with their names in settings.
    pub const ALL: [(Self, &str); 5] = [
        (Self::Auto, "auto"),
        (Self::Avx512, "avx512"),
        (Self::Avx2Vnni, "avx2-vnni"),
        (Self::Avx2, "avx2"),
        (Self::None, "none"),
    ];

    /// Checks whether this CPU has these vector units.
    ///
    /// # Errors
    /// It does not have them.
    pub fn check(self) -> Result<(), String> {
        self.arch().map(drop)
    }

    /// The vector units; none for `Auto`, which means the widest that the CPU has.
    fn arch(self) -> Result<Option<Arch>, String> {
        let arch = match self {
            Self::Auto => return Ok(None),
            Self::None => Some(Arch::Scalar),
            named => x86::arch_named(named),
        };
        let name = Self::ALL.iter().find(|(known, _)| *known == self).map_or("", |(_, name)| *name);
        let missing = || format!("cpu_features = {name:?}: this CPU does not have these vector units");
        arch.map(Some).ok_or_else(missing)
    }
}

/// The vector units that kernels use. Set once, before the first kernel runs; then only read.
static ARCH: OnceLock<Arch> = OnceLock::new();

/// Whether AVX-VNNI must not be used, although this CPU may have it. Set with [`ARCH`].
static WITHOUT_AVX_VNNI: AtomicBool = AtomicBool::new(false);

/// Makes all kernels of this process use these vector units. Call it before any kernel.
///
/// # Errors
/// This CPU does not have them.
pub fn use_features(features: CpuFeatures) -> Result<(), String> {
    if let Some(arch) = features.arch()? {
        WITHOUT_AVX_VNNI.store(features == CpuFeatures::Avx2, Ordering::Relaxed);
        // If it is set already, it is set to the same value, because a process has one worker.
        let _ = ARCH.set(arch);
    }
    Ok(())
}

/// Whether these vector units include AVX-512 on this CPU.
pub(crate) fn allows_avx512(features: CpuFeatures) -> bool {
    matches!(features, CpuFeatures::Auto | CpuFeatures::Avx512) && x86::is_avx512(Arch::new())
}

/// Whether kernels are compiled for AVX-512: the CPU has it, and the vector units that were set allow it.
pub(crate) fn may_use_avx512() -> bool {
    x86::is_avx512(*ARCH.get_or_init(Arch::new))
}

/// Whether rows may be converted to whole numbers of 8 bits before they are multiplied with a quantised matrix
/// ([`Matrix::with_rows_as`]): the CPU has AVX512-VNNI, and the vector units that were set allow it.
///
/// [`Matrix::with_rows_as`]: super::Matrix::with_rows_as
pub fn may_use_vnni() -> bool {
    may_use_avx512() && has_vnni()
}

/// Whether rows may be converted to whole numbers of 16 bits before they are multiplied with a quantised matrix
/// ([`Matrix::with_rows_as`]): the CPU has AVX512-VNNI, or it has AVX2 and no AVX-512. What is
/// faster with AVX-512 and without VNNI has not been measured.
///
/// [`Matrix::with_rows_as`]: super::Matrix::with_rows_as
pub fn may_use_int16() -> bool {
    may_use_vnni() || may_use_avx2()
}

/// Whether kernels are compiled for AVX2: the CPU has it and no AVX-512, or the vector units that were set are these.
pub(crate) fn may_use_avx2() -> bool {
    x86::is_avx2(*ARCH.get_or_init(Arch::new))
}

/// Whether products of bytes may use AVX-VNNI: the CPU has it, and the vector units that were set allow it.
#[cfg(target_arch = "x86_64")]
pub(crate) fn may_use_avx_vnni() -> bool {
    has_avx_vnni() && !WITHOUT_AVX_VNNI.load(Ordering::Relaxed)
}

/// Whether products may use AMX: the CPU has it, and the vector units that were set allow it.
pub(crate) fn may_use_amx() -> bool {
    may_use_avx512() && has_amx()
}

/// Runs the variant of a kernel that is compiled for this CPU's vector units (AVX-512, AVX2, NEON, or none), or for
/// those that were set.
pub(crate) fn dispatch<K: WithSimd>(kernel: K) -> K::Output {
    #[cfg(test)]
    match super::testing::LANES.get() {
        Some(1) => return kernel.with_simd(pulp::Scalar::new()),
        Some(16) => return kernel.with_simd(pulp::Scalar512b),
        _ => {}
    }
    ARCH.get_or_init(Arch::new).dispatch(kernel)
}
