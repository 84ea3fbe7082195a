// What the 32 threads of a warp compute together on its matrix units. Each function is one instruction, for which
// CUDA has no function in this form. Tests emulate it by its definition (tests/fixtures/emulator).
#pragma once
#include "numbers.cuh"

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
