// The numbers that kernels read and write: f32, f16 and bf16. Sums are always f32. This file is compiled by NVIDIA's
// compiler for the program, and by the host's compiler for tests, with an emulation of the device
// (tests/fixtures/emulator).
#pragma once

#ifdef __CUDACC__
#include <cuda_fp16.h>

typedef unsigned int u32;
typedef unsigned short u16;
#endif

struct f16 { u16 bits; };
struct bf16 { u16 bits; };

#ifdef __CUDACC__
__device__ inline float to_f32(f16 x) { return __half2float(__ushort_as_half(x.bits)); }
__device__ inline f16 to_f16(float x) { return f16{__half_as_ushort(__float2half_rn(x))}; }
#else
float to_f32(f16 x);
f16 to_f16(float x);
#endif

__device__ inline float to_f32(float x) { return x; }

__device__ inline float to_f32(bf16 x) { return __uint_as_float(static_cast<u32>(x.bits) << 16); }

// Rounds to nearest, ties to even; NaN stays NaN.
__device__ inline bf16 to_bf16(float x) {
    const u32 bits = __float_as_uint(x);
    if (x != x) return bf16{static_cast<u16>(bits >> 16 | 0x40)};
    return bf16{static_cast<u16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

__device__ inline void put(float* to, float x) { *to = x; }
__device__ inline void put(f16* to, float x) { *to = to_f16(x); }
__device__ inline void put(bf16* to, float x) { *to = to_bf16(x); }

// The values of `ElementType::code` in mod.rs.
enum { TYPE_F32, TYPE_F16, TYPE_BF16 };

// Number `at` of a list whose type only the launch knows.
__device__ inline void put_as(void* list, size_t at, u32 type, float x) {
    if (type == TYPE_F32) put(static_cast<float*>(list) + at, x);
    if (type == TYPE_F16) put(static_cast<f16*>(list) + at, x);
    if (type == TYPE_BF16) put(static_cast<bf16*>(list) + at, x);
}

// Four adjacent numbers at an index that is a multiple of four: one access to memory.
__device__ inline float4 four(const float* from) { return *reinterpret_cast<const float4*>(from); }

template <typename N>
__device__ inline float4 four(const N* from) {
    const uint2 pairs = *reinterpret_cast<const uint2*>(from);
    return make_float4(to_f32(N{static_cast<u16>(pairs.x)}), to_f32(N{static_cast<u16>(pairs.x >> 16)}),
                       to_f32(N{static_cast<u16>(pairs.y)}), to_f32(N{static_cast<u16>(pairs.y >> 16)}));
}

// Two numbers in one register, the first in its lower half.
__device__ inline u32 pair(f16*, float first, float second) {
    return to_f16(first).bits | static_cast<u32>(to_f16(second).bits) << 16;
}
__device__ inline u32 pair(bf16*, float first, float second) {
    return to_bf16(first).bits | static_cast<u32>(to_bf16(second).bits) << 16;
}

__device__ inline void put_four(float* to, float4 x) { *reinterpret_cast<float4*>(to) = x; }

template <typename N>
__device__ inline void put_four(N* to, float4 x) {
    *reinterpret_cast<uint2*>(to) = make_uint2(pair(to, x.x, x.y), pair(to, x.z, x.w));
}

// A kernel for each kind of number: NAME_f32, NAME_f16, NAME_bf16.
#define FOR_EACH_NUMBER(KERNEL) KERNEL(f32, float) KERNEL(f16, f16) KERNEL(bf16, bf16)
// The same for each pair of two kinds: NAME_f32_f32, NAME_f32_f16, …
#define FOR_EACH_PAIR(KERNEL) PAIRS_WITH(KERNEL, f32, float) PAIRS_WITH(KERNEL, f16, f16) PAIRS_WITH(KERNEL, bf16, bf16)
#define PAIRS_WITH(KERNEL, name, N) \
    KERNEL(name, N, f32, float) KERNEL(name, N, f16, f16) KERNEL(name, N, bf16, bf16)
