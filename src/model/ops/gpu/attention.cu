// softmax((Q + bias)·Kᵀ/√d)·V for texts that follow each other without padding. A block computes a tile: some
// queries of one text and head, over all keys of that text. It reads a stretch of keys at a time and updates the
// softmax's maximum and sum (online softmax). There is no bias of keys, which would change no weight. The caller adds
// the bias of values to the result.
#include "warp.cuh"

// `qkv` is [tokens, 3·heads·d], the three products side by side, `q_bias` [heads·d], `out` [tokens, heads·d]. A
// tile is three numbers: the text's first row, its tokens, and the index in the text of the tile's first query.
// `scale` is log2(e)/√d, since powers of 2 are used.

// The score of a key that does not exist.
constexpr float MASKED = -INFINITY;

// One query per thread, computed in f32 for any type of numbers. It works on any device.
template <typename N, u32 d>
__device__ inline void attend(N* out, const N* qkv, const float* q_bias, const u32* tiles, float scale, u32 heads) {
    constexpr u32 stretch = 32, step = 8;
    __shared__ float4 keys[stretch][d / 4];
    __shared__ float4 values[stretch][d / 4];
    const u32* tile = tiles + 3 * blockIdx.x;
    const u32 start = tile[0], length = tile[1], query = tile[2] + threadIdx.x;
    const u32 hidden = heads * d, column = blockIdx.y * d;
    const N* text = qkv + static_cast<size_t>(start) * 3 * hidden + column;
    const bool has_query = query < length;

    float4 q[d / 4], o[d / 4];
    for (u32 i = 0; i < d / 4; ++i) {
        q[i] = o[i] = make_float4(0, 0, 0, 0);
        if (has_query) {
            const float4 x = four(text + static_cast<size_t>(query) * 3 * hidden + 4 * i), bias = four(q_bias + column + 4 * i);
            q[i] = make_float4((x.x + bias.x) * scale, (x.y + bias.y) * scale, (x.z + bias.z) * scale, (x.w + bias.w) * scale);
        }
    }
    float max_score = MASKED, sum = 0;
    for (u32 first = 0; first < length; first += stretch) {
        __syncthreads();
        for (u32 at = threadIdx.x; at < stretch * (d / 4); at += blockDim.x) {
            const u32 row = at / (d / 4), i = at % (d / 4);
            const bool is_there = first + row < length;
            const N* key = text + static_cast<size_t>(first + row) * 3 * hidden + hidden + 4 * i;
            keys[row][i] = is_there ? four(key) : make_float4(0, 0, 0, 0);
            values[row][i] = is_there ? four(key + hidden) : make_float4(0, 0, 0, 0);
        }
        __syncthreads();
        for (u32 row = 0; row < stretch && first + row < length; row += step) {
            float weights[step], new_max = max_score;
#pragma unroll
            for (u32 j = 0; j < step; ++j) {
                float score = 0;
#pragma unroll
                for (u32 i = 0; i < d / 4; ++i) {
                    const float4 k = keys[row + j][i];
                    score += q[i].x * k.x + q[i].y * k.y + q[i].z * k.z + q[i].w * k.w;
                }
                weights[j] = first + row + j < length ? score : MASKED;
                new_max = fmaxf(new_max, weights[j]);
            }
            const float shrink = exp2f(max_score - new_max);
            max_score = new_max;
            sum *= shrink;
#pragma unroll
            for (u32 j = 0; j < step; ++j) sum += weights[j] = exp2f(weights[j] - max_score);
#pragma unroll
            for (u32 i = 0; i < d / 4; ++i) {
                float4 x = make_float4(o[i].x * shrink, o[i].y * shrink, o[i].z * shrink, o[i].w * shrink);
#pragma unroll
                for (u32 j = 0; j < step; ++j) {
                    const float4 v = values[row + j][i];
                    x.x += weights[j] * v.x;
                    x.y += weights[j] * v.y;
                    x.z += weights[j] * v.z;
                    x.w += weights[j] * v.w;
                }
                o[i] = x;
            }
        }
    }
    if (!has_query) return;
    N* to = out + static_cast<size_t>(start + query) * hidden + column;
    for (u32 i = 0; i < d / 4; ++i) put_four(to + 4 * i, make_float4(o[i].x / sum, o[i].y / sum, o[i].z / sum, o[i].w / sum));
}

#define KERNELS(name, N)                                                                                             \
    extern "C" __global__ void attend_##name##_32(N* out, const N* qkv, const float* q_bias, const u32* tiles,       \
                                                  float scale, u32 heads) {                                          \
        attend<N, 32>(out, qkv, q_bias, tiles, scale, heads);                                                        \
    }                                                                                                                \
    extern "C" __global__ void attend_##name##_64(N* out, const N* qkv, const float* q_bias, const u32* tiles,       \
                                                  float scale, u32 heads) {                                          \
        attend<N, 64>(out, qkv, q_bias, tiles, scale, heads);                                                        \
    }
KERNELS(f32, float)
// Cards of capability 8.0 and later have matrix units for f16 and bf16, and use the kernel below.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ < 800
KERNELS(f16, f16)
KERNELS(bf16, bf16)
#endif
#undef KERNELS

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
// 16 queries per warp, on the matrix units: products of f16 or bf16, sums in f32, weights rounded once.
template <typename N, u32 d>
__device__ inline void attend_by_matrices(N* out, const N* qkv, const float* q_bias, const u32* tiles, float scale, u32 heads) {
    constexpr u32 stretch = 64, row_room = d + 8;
    // Rows are padded by eight numbers, so that the rows that a warp reads at once are in different banks.
    __shared__ uint4 keys[stretch * row_room / 8];
    __shared__ uint4 values[stretch * row_room / 8];
    const u32* tile = tiles + 3 * blockIdx.x;
    const u32 start = tile[0], length = tile[1], warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 g = lane / 4, t = lane % 4, row = tile[2] + 16 * warp + g;
    const u32 hidden = heads * d, column = blockIdx.y * d;
    const N* text = qkv + static_cast<size_t>(start) * 3 * hidden + column;
    const bool has_queries = tile[2] + 16 * warp < length;

    u32 q[d / 16][4];
#pragma unroll
    for (u32 at = 0; at < d / 16; ++at) {
#pragma unroll
        for (u32 part = 0; part < 4; ++part) {
            const u32 query = row + part % 2 * 8, i = 16 * at + 2 * t + part / 2 * 8;
            q[at][part] = 0;
            if (query < length) {
                const N* from = text + static_cast<size_t>(query) * 3 * hidden + i;
                q[at][part] = pair(static_cast<N*>(nullptr), (to_f32(from[0]) + q_bias[column + i]) * scale,
                                   (to_f32(from[1]) + q_bias[column + i + 1]) * scale);
            }
        }
    }
    float o[d / 8][4] = {};
    float max_score[2] = {MASKED, MASKED}, sum[2] = {0, 0};
    for (u32 first = 0; first < length; first += stretch) {
        const u32 here = length - first < stretch ? length - first : stretch;
        __syncthreads();
        // The number of keys is rounded up to a multiple of 16; rows without a key are zeros.
        for (u32 at = threadIdx.x; at < (here + 15) / 16 * 16 * (d / 8); at += blockDim.x) {
            const u32 key = at / (d / 8), i = at % (d / 8);
            const N* from = text + static_cast<size_t>(first + key) * 3 * hidden + hidden + 8 * i;
            const uint4 none = make_uint4(0, 0, 0, 0);
            keys[key * (row_room / 8) + i] = key < here ? *reinterpret_cast<const uint4*>(from) : none;
            values[key * (row_room / 8) + i] = key < here ? *reinterpret_cast<const uint4*>(from + hidden) : none;
        }
        __syncthreads();
        if (!has_queries) continue;

        float s[stretch / 8][4] = {};
#pragma unroll
        for (u32 n = 0; n < stretch / 8; n += 2) {
            if (8 * n >= here) continue;
#pragma unroll
            for (u32 at = 0; at < d / 16; ++at) {
                u32 k[4];
                const u32 key = 8 * n + lane / 16 * 8 + lane % 8, i = 16 * at + lane / 8 % 2 * 8;
                load_four(k, reinterpret_cast<const u16*>(keys) + key * row_room + i);
                multiply_add<N>(s[n], q[at], k[0], k[1]);
                multiply_add<N>(s[n + 1], q[at], k[2], k[3]);
            }
        }
        float new_max[2] = {max_score[0], max_score[1]};
#pragma unroll
        for (u32 n = 0; n < stretch / 8; ++n) {
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                if (8 * n + 2 * t + i % 2 >= here) s[n][i] = MASKED;
                new_max[i / 2] = fmaxf(new_max[i / 2], s[n][i]);
            }
        }
        float shrink[2];
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            // Combines the four threads of a row.
            new_max[half] = fmaxf(new_max[half], __shfl_xor_sync(0xffffffffu, new_max[half], 1));
            new_max[half] = fmaxf(new_max[half], __shfl_xor_sync(0xffffffffu, new_max[half], 2));
            shrink[half] = exp2f(max_score[half] - new_max[half]);
            max_score[half] = new_max[half];
            sum[half] *= shrink[half];
        }
#pragma unroll
        for (u32 n = 0; n < stretch / 8; ++n) {
#pragma unroll
            for (u32 i = 0; i < 4; ++i) sum[i / 2] += s[n][i] = exp2f(s[n][i] - max_score[i / 2]);
        }
#pragma unroll
        for (u32 n = 0; n < d / 8; ++n) {
#pragma unroll
            for (u32 i = 0; i < 4; ++i) o[n][i] *= shrink[i / 2];
        }
        // The layout of the weights as a result (c) is the layout that a factor (a) must have.
#pragma unroll
        for (u32 at = 0; at < stretch / 16; ++at) {
            if (16 * at >= here) continue;
            N* const kind = nullptr;
            const u32 weights[4] = {pair(kind, s[2 * at][0], s[2 * at][1]), pair(kind, s[2 * at][2], s[2 * at][3]),
                                    pair(kind, s[2 * at + 1][0], s[2 * at + 1][1]), pair(kind, s[2 * at + 1][2], s[2 * at + 1][3])};
#pragma unroll
            for (u32 n = 0; n < d / 8; n += 2) {
                u32 v[4];
                const u32 key = 16 * at + lane / 8 % 2 * 8 + lane % 8, i = 8 * n + lane / 16 * 8;
                load_four_transposed(v, reinterpret_cast<const u16*>(values) + key * row_room + i);
                multiply_add<N>(o[n], weights, v[0], v[1]);
                multiply_add<N>(o[n + 1], weights, v[2], v[3]);
            }
        }
    }
    if (!has_queries) return;
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
        sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 1);
        sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 2);
        const u32 query = row + 8 * half;
        if (query >= length) continue;
        N* to = out + static_cast<size_t>(start + query) * hidden + column + 2 * t;
#pragma unroll
        for (u32 n = 0; n < d / 8; ++n) {
            *reinterpret_cast<u32*>(to + 8 * n) = pair(to, o[n][2 * half] / sum[half], o[n][2 * half + 1] / sum[half]);
        }
    }
}

#define KERNELS(name, N)                                                                                             \
    extern "C" __global__ void attend_by_matrices_##name##_32(N* out, const N* qkv, const float* q_bias,             \
                                                              const u32* tiles, float scale, u32 heads) {            \
        attend_by_matrices<N, 32>(out, qkv, q_bias, tiles, scale, heads);                                            \
    }                                                                                                                \
    extern "C" __global__ void attend_by_matrices_##name##_64(N* out, const N* qkv, const float* q_bias,             \
                                                              const u32* tiles, float scale, u32 heads) {            \
        attend_by_matrices<N, 64>(out, qkv, q_bias, tiles, scale, heads);                                            \
    }
KERNELS(f16, f16)
KERNELS(bf16, bf16)
#undef KERNELS
#endif
