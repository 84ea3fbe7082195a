//! The instructions that an x86-64 CPU has, as it tells them.

use std::arch::x86_64::{__cpuid, __cpuid_count};
use std::sync::OnceLock;

use pulp::Arch;

use super::CpuFeatures;

/// The vector units of this name; none if this CPU does not have them.
pub(super) fn arch_named(features: CpuFeatures) -> Option<Arch> {
    match features {
        CpuFeatures::Avx512 => pulp::x86::V4::try_new().map(Arch::V4),
        CpuFeatures::Avx2Vnni if !has_avx_vnni() => None,
        CpuFeatures::Avx2 | CpuFeatures::Avx2Vnni => pulp::x86::V3::try_new().map(Arch::V3),
        CpuFeatures::None | CpuFeatures::Auto => None,
    }
}

pub(super) fn is_avx512(arch: Arch) -> bool {
    matches!(arch, Arch::V4(_))
}

/// Whether they are AVX2 and no AVX-512.
pub(super) fn is_avx2(arch: Arch) -> bool {
    matches!(arch, Arch::V3(_))
}

/// Whether this CPU has AVX2 and fused multiply-add.
pub(crate) fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")
}

/// Whether this CPU has AVX-VNNI, the instructions of AVX512-VNNI for registers of 8 f32.
pub(crate) fn has_avx_vnni() -> bool {
    is_x86_feature_detected!("avxvnni")
}

/// Whether this CPU has AVX512-BF16, and the other AVX-512 instructions that the kernel uses.
pub(crate) fn has_bf16() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512bf16")
}

/// Whether this CPU has AMX for bf16, and this process may use it. The first call asks Linux for that, because the tile
/// registers make the state of a thread larger by 8 KiB.
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
#[expect(unsafe_code, reason = "no safe interface has the system call")]
fn request_tiles() -> bool {
    /// `ARCH_REQ_XCOMP_PERM` of `arch_prctl(2)`, and the number of the tiles' state.
    const REQUEST: libc::c_ulong = 0x1023;
    const TILES: libc::c_ulong = 18;
    // SAFETY: the call takes two numbers, and changes no memory of this process.
    unsafe { libc::syscall(libc::SYS_arch_prctl, REQUEST, TILES) == 0 }
}

/// Whether this CPU has AVX512-VNNI, and the other AVX-512 instructions that the kernel uses.
pub(crate) fn has_vnni() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512vnni")
}
