// Rows ← LayerNorm(a + bias + b): after both sublayers of a block, and over the token and position embeddings.
// One warp computes a row, and keeps it in shared memory between its three passes.
#include "warp.cuh"

// `params` are the bias, the norm's weight and its shift, `width` numbers each. `width` is a multiple of 4, and
// `row` has room for `width` numbers.
template <typename N>
__device__ inline void norm_row(N* to, const N* a, const N* b, const float* params, float eps, u32 width, float* row) {
    const u32 lane = threadIdx.x % 32;
    float sum = 0;
    for (u32 at = 4 * lane; at < width; at += 4 * 32) {
        const float4 x = four(a + at), y = four(b + at), bias = four(params + at);
        const float4 all = make_float4(x.x + (y.x + bias.x), x.y + (y.y + bias.y), x.z + (y.z + bias.z), x.w + (y.w + bias.w));
        put_four(row + at, all);
        sum += all.x + all.y + all.z + all.w;
    }
    // Each lane reads only what it wrote itself.
    const float mean = sum_of_warp(sum) / width;
    float squares = 0;
    for (u32 at = 4 * lane; at < width; at += 4 * 32) {
        const float4 x = four(row + at);
        const float4 d = make_float4(x.x - mean, x.y - mean, x.z - mean, x.w - mean);
        squares += d.x * d.x + d.y * d.y + d.z * d.z + d.w * d.w;
    }
    const float scale = 1.0f / sqrtf(sum_of_warp(squares) / width + eps);
    for (u32 at = 4 * lane; at < width; at += 4 * 32) {
        const float4 x = four(row + at), weight = four(params + width + at), shift = four(params + 2 * width + at);
        put_four(to + at, make_float4((x.x - mean) * scale * weight.x + shift.x, (x.y - mean) * scale * weight.y + shift.y,
                                      (x.z - mean) * scale * weight.z + shift.z, (x.w - mean) * scale * weight.w + shift.w));
    }
}

#ifdef __CUDACC__
extern __shared__ float4 shared[];
#endif

template <typename N>
__device__ inline void add_norm(N* x, const N* residual, const float* params, float eps, u32 rows, u32 width) {
    const u32 warp = threadIdx.x / 32, at = blockIdx.x * (blockDim.x / 32) + warp;
    if (at >= rows) return;
    N* row = x + static_cast<size_t>(at) * width;
    const N* other = residual + static_cast<size_t>(at) * width;
    norm_row(row, row, other, params, eps, width, reinterpret_cast<float*>(shared) + warp * width);
}

// `plan` begins with the ids of all tokens and then their positions, `rows` numbers each.
template <typename N>
__device__ inline void embed(N* x, const N* words, const N* positions, const u32* plan, const float* params, float eps, u32 rows, u32 width) {
    const u32 warp = threadIdx.x / 32, at = blockIdx.x * (blockDim.x / 32) + warp;
    if (at >= rows) return;
    const N* word = words + static_cast<size_t>(plan[at]) * width;
    const N* position = positions + static_cast<size_t>(plan[rows + at]) * width;
    norm_row(x + static_cast<size_t>(at) * width, word, position, params, eps, width, reinterpret_cast<float*>(shared) + warp * width);
}

#define KERNELS(name, N)                                                                                            \
    extern "C" __global__ void add_norm_##name(N* x, const N* residual, const float* params, float eps, u32 rows,    \
                                               u32 width) {                                                          \
        add_norm(x, residual, params, eps, rows, width);                                                             \
    }                                                                                                                \
    extern "C" __global__ void embed_##name(N* x, const N* words, const N* positions, const u32* plan,               \
                                            const float* params, float eps, u32 rows, u32 width) {                   \
        embed(x, words, positions, plan, params, eps, rows, width);                                                  \
    }
FOR_EACH_NUMBER(KERNELS)
#undef KERNELS
