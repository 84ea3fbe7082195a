// What the 32 threads of a warp compute together, and the threads of a block.
#pragma once
#include "numbers.cuh"

// Each thread gets the same sum, whose order is fixed.
__device__ inline float sum_of_warp(float x) {
    for (u32 apart = 16; apart > 0; apart /= 2) x += __shfl_xor_sync(0xffffffffu, x, apart);
    return x;
}

// NaN is ignored if there is another number.
__device__ inline float largest_of_warp(float x) {
    for (u32 apart = 16; apart > 0; apart /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, apart));
    return x;
}

// Combines the numbers of all threads of a block, in a fixed order. Each thread gets the same result.
template <typename T, typename Combine>
__device__ inline T of_block(T x, Combine combine) {
    __shared__ T of_warps[32];
    for (u32 apart = 16; apart > 0; apart /= 2) x = combine(x, __shfl_xor_sync(0xffffffffu, x, apart));
    // An earlier result may still be read.
    __syncthreads();
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = x;
    __syncthreads();
    T all = of_warps[0];
    for (u32 warp = 1; warp < blockDim.x / 32; ++warp) all = combine(all, of_warps[warp]);
    return all;
}

template <typename T>
__device__ inline T sum_of_block(T x) {
    return of_block(x, [](T a, T b) { return a + b; });
}

// The functions below compute on the warp's matrix units. Each is one instruction, for which CUDA has no function in
// this form. Tests emulate it by its definition (tests/fixtures/emulator).

#ifdef __CUDACC__
// c += a·b for a [16, 16], b [16, 8], c [16, 8]. With g = lane / 4 and t = lane % 4 a thread holds, in
// pairs, a's rows g and g + 8 at columns 2t and 2t + 8, b's column g at rows 2t and 2t + 8, and c's rows g
// and g + 8 at column 2t. (PTX ISA, mma.m16n8k16.)
template <typename N>
__device__ inline void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1);

#if __CUDA_ARCH__ >= 800
template <>
__device__ inline void multiply_add<f16>(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ inline void multiply_add<bf16>(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

// Loads four matrices [8, 8] from shared memory: thread i gives the address of row i % 8 of matrix i / 8 (16
// bytes), and gets from each matrix row g at columns 2t and 2t + 1. (PTX ISA, ldmatrix.)
__device__ inline void load_four(u32 (&to)[4], const u16* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(static_cast<u32>(__cvta_generic_to_shared(row)))
                 : "memory");
}

// The same, transposed: from each matrix column g at rows 2t and 2t + 1.
__device__ inline void load_four_transposed(u32 (&to)[4], const u16* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(static_cast<u32>(__cvta_generic_to_shared(row)))
                 : "memory");
}
#else
template <typename N>
void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1);
void load_four(u32 (&to)[4], const u16* row);
void load_four_transposed(u32 (&to)[4], const u16* row);
#endif
