//! The vector units of this CPU. Decides for which vector units kernels are compiled, and on which of them kernels run.

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
use std::arch::x86_64::{__cpuid, __cpuid_count};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use pulp::{Arch, WithSimd};
use serde::{Deserialize, Serialize};

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
            #[cfg(target_arch = "x86_64")]
            Self::Avx2Vnni if !has_avx_vnni() => None,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 | Self::Avx2Vnni => pulp::x86::V3::try_new().map(Arch::V3),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => pulp::x86::V4::try_new().map(Arch::V4),
            #[cfg(not(target_arch = "x86_64"))]
            _ => None,
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
#[cfg(target_arch = "x86_64")]
pub(crate) fn allows_avx512(features: CpuFeatures) -> bool {
    matches!(features, CpuFeatures::Auto | CpuFeatures::Avx512) && matches!(Arch::new(), Arch::V4(_))
}

/// Whether kernels are compiled for AVX-512: the CPU has it, and the vector units that were set allow it.
#[cfg(target_arch = "x86_64")]
pub(crate) fn may_use_avx512() -> bool {
    matches!(ARCH.get_or_init(Arch::new), Arch::V4(_))
}

/// Whether rows may be converted to whole numbers of 8 bits before they are multiplied with a quantised matrix
/// ([`Matrix::with_rows_as`]): the CPU has AVX512-VNNI, and the vector units that were set allow it.
///
/// [`Matrix::with_rows_as`]: super::Matrix::with_rows_as
pub fn may_use_vnni() -> bool {
    #[cfg(target_arch = "x86_64")]
    let can = may_use_avx512() && has_vnni();
    #[cfg(not(target_arch = "x86_64"))]
    let can = false;
    can
}

/// Whether rows may be converted to whole numbers of 16 bits before they are multiplied with a quantised matrix
/// ([`Matrix::with_rows_as`]): the CPU has AVX512-VNNI, or it has AVX2 and no AVX-512. What is
/// faster with AVX-512 and without VNNI has not been measured.
///
/// [`Matrix::with_rows_as`]: super::Matrix::with_rows_as
pub fn may_use_int16() -> bool {
    #[cfg(target_arch = "x86_64")]
    let can = may_use_vnni() || may_use_avx2();
    #[cfg(not(target_arch = "x86_64"))]
    let can = false;
    can
}

/// Whether kernels are compiled for AVX2: the CPU has it and no AVX-512, or the vector units that were set are these.
#[cfg(target_arch = "x86_64")]
pub(crate) fn may_use_avx2() -> bool {
    matches!(ARCH.get_or_init(Arch::new), Arch::V3(_))
}

/// Whether products of bytes may use AVX-VNNI: the CPU has it, and the vector units that were set allow it.
#[cfg(target_arch = "x86_64")]
pub(crate) fn may_use_avx_vnni() -> bool {
    has_avx_vnni() && !WITHOUT_AVX_VNNI.load(Ordering::Relaxed)
}

/// Whether this CPU has AVX2 and fused multiply-add.
#[cfg(target_arch = "x86_64")]
pub(crate) fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")
}

/// Whether this CPU has AVX-VNNI, the instructions of AVX512-VNNI for registers of 8 f32.
#[cfg(target_arch = "x86_64")]
pub(crate) fn has_avx_vnni() -> bool {
    is_x86_feature_detected!("avxvnni")
}

/// Whether this CPU has AVX512-BF16, and the other AVX-512 instructions that the kernel uses.
#[cfg(target_arch = "x86_64")]
pub(crate) fn has_bf16() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512bf16")
}

/// Whether products may use AMX: the CPU has it, and the vector units that were set allow it.
pub(crate) fn may_use_amx() -> bool {
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    let can = may_use_avx512() && has_amx();
    #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
    let can = false;
    can
}

/// Whether this CPU has AMX for bf16, and this process may use it. The first call asks Linux for that, because the tile
/// registers make the state of a thread larger by 8 KiB.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub(crate) fn has_amx() -> bool {
    static HAS_AMX: OnceLock<bool> = OnceLock::new();
    *HAS_AMX.get_or_init(|| {
        /// Of leaf 7: AMX-BF16 and AMX-TILE in EDX.
        const TILES_OF_BF16: u32 = 1 << 22 | 1 << 24;
        let (leaves, features) = (__cpuid(0).eax, __cpuid_count(7, 0).edx);
        has_bf16() && leaves >= 7 && features & TILES_OF_BF16 == TILES_OF_BF16 && request_tiles()
    })
}

/// Asks Linux for the tile registers, for all threads of this process. Returns whether it allows them.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
#[expect(unsafe_code, reason = "no safe interface has the system call")]
fn request_tiles() -> bool {
    /// `ARCH_REQ_XCOMP_PERM` of `arch_prctl(2)`, and the number of the tiles' state.
    const REQUEST: libc::c_ulong = 0x1023;
    const TILES: libc::c_ulong = 18;
    // SAFETY: the call takes two numbers, and changes no memory of this process.
    unsafe { libc::syscall(libc::SYS_arch_prctl, REQUEST, TILES) == 0 }
}

/// Whether this CPU has AVX512-VNNI, and the other AVX-512 instructions that the kernel uses.
#[cfg(target_arch = "x86_64")]
pub(crate) fn has_vnni() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512vnni")
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
