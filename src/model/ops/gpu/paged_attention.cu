// softmax(Q·Kᵀ)·V over keys and values where they lie, in blocks (kv_blocks.cuh). A tile is some adjacent queries of one
// sequence, and a part of the keys that they attend to; a thread block computes it for one head of keys, with the
// heads of queries that share it. Each of its four warps takes every fourth block of keys, and updates a maximum and a
// sum of its own (online softmax). Then the warps are joined in a fixed order. If the keys have several parts,
// `join_parts` joins these, also in a fixed order.
#include "kv_blocks.cuh"
#include "warp.cuh"

// The score of a key to which a query does not attend.
constexpr float UNSEEN = -INFINITY;
constexpr u32 WARPS = 4;

// What is subtracted from scores. It is 0 if there are none, so that no infinity is subtracted from another.
__device__ inline float base_of(float max_score) { return max_score == UNSEEN ? 0.0f : max_score; }

// The numbers of a tile, in the order of `Tile` in paged_attention.rs.
enum { ROW, QUERIES, POSITION, END, TABLE, FIRST_KEY, LAST_KEY, PARTIAL, TILE_WORDS };

// `partial` of a tile with all keys that its queries attend to.
constexpr u32 IS_WHOLE = 0xffffffffu;

// `queries` is [rows, heads, width] in f32. `out` is [rows, heads, width], of the type with the code `out_type`.
// `partials` is [partial rows, heads, width + 2]: sums of values, their largest score, and the sum of their weights.
// `most` is the largest number of queries that a thread block computes: those of all heads that share the keys, of one
// row or more. A thread has `parts` groups of four columns of values. Scores are multiplied by `scale`, which includes
// log2(e), since powers of 2 are used. With a cap, `scale` includes 1/cap instead, and `cap` includes log2(e).
// A query at position p attends to keys below min(p + window, end), or if it is causal, up to p; and after p - window.
template <typename N, u32 most, u32 parts>
__device__ inline void attend_blocks(
    void* out, float* partials, const float* queries, const N* keys, const N* values, const u32* tiles, const u32* tables,
    float scale, float cap, u32 window, u32 is_causal, u32 heads, u32 kv_heads, u32 width, u32 out_type) {
    constexpr u32 chunk = CHUNK<N>, quads = (most + 3) / 4;
    __shared__ float4 q[most][32 * parts];
    __shared__ u32 limits[most][2];
    __shared__ float4 weights[WARPS][BLOCK][quads];
    __shared__ float4 sums[WARPS][most][32 * parts];
    __shared__ float max_scores[WARPS][most], totals[WARPS][most];
    const u32* tile = tiles + TILE_WORDS * blockIdx.x;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // The heads of queries that share a head of keys may be too many for one thread block.
    const u32 sharing = heads / kv_heads, groups = (sharing + most - 1) / most;
    const u32 kv_head = blockIdx.y / groups, skipped = blockIdx.y % groups * most;
    const u32 here = sharing - skipped < most ? sharing - skipped : most;
    const u32 first_head = kv_head * sharing + skipped, count = tile[QUERIES] * here;

    for (u32 at = threadIdx.x; at < most * (width / 4); at += blockDim.x) {
        const u32 n = at / (width / 4), i = at % (width / 4);
        float4 x = make_float4(0, 0, 0, 0);
        if (n < count) {
            const size_t row = tile[ROW] + n / here;
            x = four(queries + (row * heads + first_head + n % here) * width + 4 * i);
        }
        q[n][i] = make_float4(x.x * scale, x.y * scale, x.z * scale, x.w * scale);
    }
    if (threadIdx.x < most) {
        const u32 position = tile[POSITION] + threadIdx.x / here;
        u32 end = position + 1;
        if (!is_causal) end = window < tile[END] - position ? position + window : tile[END];
        limits[threadIdx.x][0] = position + 1 > window ? position + 1 - window : 0;
        limits[threadIdx.x][1] = threadIdx.x < count ? end : 0;
    }
    __syncthreads();

    // Several values of four columns each fit into a warp if heads are narrow.
    const u32 row_lanes = width / 4 < 32 ? width / 4 : 32, at_once = 32 / row_lanes;
    const u32 first_value = lane / row_lanes, column = lane % row_lanes * 4;
    float max_score[most], total[most];
    float4 o[most][parts];
#pragma unroll
    for (u32 n = 0; n < most; ++n) {
        max_score[n] = UNSEEN, total[n] = 0;
#pragma unroll
        for (u32 part = 0; part < parts; ++part) o[n][part] = make_float4(0, 0, 0, 0);
    }
    for (u32 block = tile[FIRST_KEY] / BLOCK + warp; block * BLOCK < tile[LAST_KEY]; block += WARPS) {
        const size_t place = head_block(tables[tile[TABLE] + block], kv_head, kv_heads, width);
        // A thread computes the scores of one key.
        const u32 key = block * BLOCK + lane;
        const N* from = keys + place + in_keys<N>(lane, 0);
        float scores[most] = {};
#pragma unroll 4
        for (u32 i = 0; i < width; i += chunk, from += BLOCK * chunk) {
            float k[chunk];
            load_chunk(k, from);
#pragma unroll
            for (u32 n = 0; n < most; ++n) {
#pragma unroll
                for (u32 j = 0; j < chunk; j += 4) {
                    const float4 x = q[n][(i + j) / 4];
                    scores[n] += x.x * k[j] + x.y * k[j + 1] + x.z * k[j + 2] + x.w * k[j + 3];
                }
            }
        }
        float shares[4 * quads] = {};
#pragma unroll
        for (u32 n = 0; n < most; ++n) {
            const bool is_seen = limits[n][0] <= key && key < limits[n][1];
            const float score = !is_seen ? UNSEEN : cap > 0.0f ? cap * tanhf(scores[n]) : scores[n];
            const float new_max = fmaxf(max_score[n], largest_of_warp(score)), base = base_of(new_max);
            const float shrink = exp2f(max_score[n] - base);
            max_score[n] = new_max;
            shares[n] = exp2f(score - base);
            total[n] = total[n] * shrink + shares[n];
#pragma unroll
            for (u32 part = 0; part < parts; ++part) {
                float4& sum = o[n][part];
                sum = make_float4(sum.x * shrink, sum.y * shrink, sum.z * shrink, sum.w * shrink);
            }
        }
        __syncwarp();
#pragma unroll
        for (u32 quad = 0; quad < quads; ++quad) {
            const float* four_shares = shares + 4 * quad;
            weights[warp][lane][quad] = make_float4(four_shares[0], four_shares[1], four_shares[2], four_shares[3]);
        }
        __syncwarp();
        // A thread computes columns of the sums of values. What lies beyond the keys is not read.
        const u32 begin = tile[FIRST_KEY] > block * BLOCK ? tile[FIRST_KEY] - block * BLOCK : 0;
        const u32 end = tile[LAST_KEY] - block * BLOCK < BLOCK ? tile[LAST_KEY] - block * BLOCK : BLOCK;
        if (first_value >= at_once) continue;
#pragma unroll 4
        for (u32 at = begin + first_value; at < end; at += at_once) {
            float share[4 * quads];
#pragma unroll
            for (u32 quad = 0; quad < quads; ++quad) {
                const float4 x = weights[warp][at][quad];
                share[4 * quad] = x.x, share[4 * quad + 1] = x.y, share[4 * quad + 2] = x.z, share[4 * quad + 3] = x.w;
            }
#pragma unroll
            for (u32 part = 0; part < parts; ++part) {
                if (128 * part + column >= width) continue;
                const float4 v = four(values + place + static_cast<size_t>(at) * width + 128 * part + column);
#pragma unroll
                for (u32 n = 0; n < most; ++n) {
                    float4& sum = o[n][part];
                    sum = make_float4(sum.x + share[n] * v.x, sum.y + share[n] * v.y, sum.z + share[n] * v.z, sum.w + share[n] * v.w);
                }
            }
        }
    }
#pragma unroll
    for (u32 n = 0; n < most; ++n) {
        const float sum = sum_of_warp(total[n]);
        if (lane == 0) max_scores[warp][n] = max_score[n], totals[warp][n] = sum;
#pragma unroll
        for (u32 part = 0; part < parts; ++part) sums[warp][n][32 * part + lane] = o[n][part];
    }
    __syncthreads();
    for (u32 at = threadIdx.x; at < count * width; at += blockDim.x) {
        const u32 n = at / width, i = at % width, head = first_head + n % here;
        float max_of_all = UNSEEN, total_of_all = 0, sum = 0;
        for (u32 of = 0; of < WARPS; ++of) max_of_all = fmaxf(max_of_all, max_scores[of][n]);
        for (u32 of = 0; of < WARPS; ++of) {
            const float share = exp2f(max_scores[of][n] - base_of(max_of_all));
            total_of_all += share * totals[of][n];
            const float* columns = reinterpret_cast<const float*>(sums[of][n]);
            for (u32 value = 0; value < at_once; ++value) sum += share * columns[4 * row_lanes * value + i];
        }
        if (tile[PARTIAL] == IS_WHOLE) {
            const size_t row = tile[ROW] + n / here;
            put_as(out, (row * heads + head) * width + i, out_type, sum / total_of_all);
        } else {
            const size_t row = tile[PARTIAL] + n / here;
            float* partial = partials + (row * heads + head) * (width + 2);
            partial[i] = sum;
            if (i == 0) partial[width] = max_of_all, partial[width + 1] = total_of_all;
        }
    }
}

// The numbers of a row whose keys have several parts, in the order of `Join` in paged_attention.rs.
enum { JOIN_ROW, JOIN_PARTIAL, JOIN_DISTANCE, JOIN_PARTS, JOIN_WORDS };

// `out` and `partials` are those of attend_blocks. A thread computes a column.
extern "C" __global__ void join_parts(void* out, const float* partials, const u32* joins, u32 heads, u32 width, u32 out_type) {
    const u32* join = joins + JOIN_WORDS * blockIdx.x;
    const u32 head = blockIdx.y, parts = join[JOIN_PARTS];
    const size_t distance = static_cast<size_t>(join[JOIN_DISTANCE]) * heads * (width + 2);
    const float* first = partials + (static_cast<size_t>(join[JOIN_PARTIAL]) * heads + head) * (width + 2);
    float max_score = UNSEEN;
    for (u32 part = 0; part < parts; ++part) max_score = fmaxf(max_score, first[part * distance + width]);
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) {
        float total = 0, sum = 0;
        for (u32 part = 0; part < parts; ++part) {
            const float* partial = first + part * distance;
            const float share = exp2f(partial[width] - base_of(max_score));
            total += share * partial[width + 1];
            sum += share * partial[i];
        }
        put_as(out, (static_cast<size_t>(join[JOIN_ROW]) * heads + head) * width + i, out_type, sum / total);
    }
}

#define KERNEL(name, N, most, parts)                                                                                  \
    extern "C" __global__ void attend_blocks_##name##_##most##_##parts(                                              \
        void* out, float* partials, const float* queries, const N* keys, const N* values, const u32* tiles,          \
        const u32* tables, float scale, float cap, u32 window, u32 is_causal, u32 heads, u32 kv_heads, u32 width,    \
        u32 out_type) {                                                                                              \
        attend_blocks<N, most, parts>(out, partials, queries, keys, values, tiles, tables, scale, cap, window,       \
                                      is_causal, heads, kv_heads, width, out_type);                                  \
    }
#define KERNELS(name, N)                                                                                             \
    KERNEL(name, N, 1, 1) KERNEL(name, N, 4, 1) KERNEL(name, N, 8, 1)                                                \
    KERNEL(name, N, 1, 2) KERNEL(name, N, 4, 2) KERNEL(name, N, 8, 2)
FOR_EACH_NUMBER(KERNELS)
#undef KERNELS
#undef KERNEL

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
// The same by the matrix units, for tiles of many queries, and keys and values of 16 bits. A warp computes 16 queries over
// all keys of the tile, whose blocks the warps share. Queries and weights are rounded to the type of keys and values.
template <typename N, u32 d>
__device__ inline void attend_blocks_by_matrices(
    void* out, float* partials, const float* queries, const N* keys, const N* values, const u32* tiles, const u32* tables,
    float scale, float cap, u32 window, u32 is_causal, u32 heads, u32 kv_heads, u32 out_type) {
    constexpr u32 most = 16 * WARPS, row_room = d + 8;
    // Rows are padded by eight numbers, so that the rows that a warp reads at once are in different banks.
    __shared__ uint4 block_keys[BLOCK * row_room / 8];
    __shared__ uint4 block_values[BLOCK * row_room / 8];
    const u32* tile = tiles + TILE_WORDS * blockIdx.x;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const u32 sharing = heads / kv_heads, groups = (sharing + most - 1) / most;
    const u32 kv_head = blockIdx.y / groups, skipped = blockIdx.y % groups * most;
    const u32 here = sharing - skipped < most ? sharing - skipped : most;
    const u32 first_head = kv_head * sharing + skipped, count = tile[QUERIES] * here;
    const auto limits_of = [&](u32 n, u32& begin, u32& end) {
        const u32 position = tile[POSITION] + n / here;
        end = position + 1;
        if (!is_causal) end = window < tile[END] - position ? position + window : tile[END];
        begin = position + 1 > window ? position + 1 - window : 0;
    };
    // A thread has two queries. Those of a warp attend to the keys from the first one's first to the last one's last.
    u32 begin[2], end[2], warp_begin = 0, warp_end = 0, unused;
    size_t place[2];
    u32 q[d / 16][4] = {};
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
        const u32 n = 16 * warp + g + 8 * half;
        begin[half] = end[half] = 0;
        const size_t row = n / here;
        place[half] = row * heads + first_head + n % here;
        if (n >= count) continue;
        limits_of(n, begin[half], end[half]);
        const float* from = queries + (static_cast<size_t>(tile[ROW]) * heads + place[half]) * d + 2 * t;
#pragma unroll
        for (u32 at = 0; at < d / 16; ++at) {
#pragma unroll
            for (u32 upper = 0; upper < 2; ++upper) {
                const float* two = from + 16 * at + 8 * upper;
                q[at][half + 2 * upper] = pair(static_cast<N*>(nullptr), two[0] * scale, two[1] * scale);
            }
        }
    }
    if (16 * warp < count) {
        const u32 last = 16 * warp + 15 < count ? 16 * warp + 15 : count - 1;
        limits_of(16 * warp, warp_begin, unused);
        limits_of(last, unused, warp_end);
    }

    float o[d / 8][4] = {};
    float max_score[2] = {UNSEEN, UNSEEN}, sum[2] = {0, 0};
    for (u32 block = tile[FIRST_KEY] / BLOCK; block * BLOCK < tile[LAST_KEY]; ++block) {
        const size_t from = head_block(tables[tile[TABLE] + block], kv_head, kv_heads, d);
        __syncthreads();
        for (u32 at = threadIdx.x; at < BLOCK * (d / 8); at += blockDim.x) {
            // Adjacent threads read adjacent memory: chunks of the same place in keys, chunks of the same value.
            const u32 key = at % BLOCK, key_chunk = at / BLOCK, value = at / (d / 8), value_chunk = at % (d / 8);
            block_keys[key * (row_room / 8) + key_chunk] = *reinterpret_cast<const uint4*>(keys + from + 8 * at);
            const bool is_there = tile[FIRST_KEY] <= block * BLOCK + value && block * BLOCK + value < tile[LAST_KEY];
            block_values[value * (row_room / 8) + value_chunk] = is_there ? *reinterpret_cast<const uint4*>(values + from + 8 * at) : make_uint4(0, 0, 0, 0);
        }
        __syncthreads();
        if (warp_end <= block * BLOCK || (block + 1) * BLOCK <= warp_begin) continue;

        float s[BLOCK / 8][4] = {};
#pragma unroll
        for (u32 n = 0; n < BLOCK / 8; n += 2) {
#pragma unroll
            for (u32 at = 0; at < d / 16; ++at) {
                u32 k[4];
                const u32 key = 8 * n + lane / 16 * 8 + lane % 8, i = 16 * at + lane / 8 % 2 * 8;
                load_four(k, reinterpret_cast<const u16*>(block_keys) + key * row_room + i);
                multiply_add<N>(s[n], q[at], k[0], k[1]);
                multiply_add<N>(s[n + 1], q[at], k[2], k[3]);
            }
        }
        float new_max[2] = {max_score[0], max_score[1]}, base[2], shrink[2];
#pragma unroll
        for (u32 n = 0; n < BLOCK / 8; ++n) {
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                const u32 key = block * BLOCK + 8 * n + 2 * t + i % 2;
                if (cap > 0.0f) s[n][i] = cap * tanhf(s[n][i]);
                if (key < begin[i / 2] || key >= end[i / 2]) s[n][i] = UNSEEN;
                new_max[i / 2] = fmaxf(new_max[i / 2], s[n][i]);
            }
        }
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            // Combines the four threads of a query.
            new_max[half] = fmaxf(new_max[half], __shfl_xor_sync(0xffffffffu, new_max[half], 1));
            new_max[half] = fmaxf(new_max[half], __shfl_xor_sync(0xffffffffu, new_max[half], 2));
            base[half] = base_of(new_max[half]);
            shrink[half] = exp2f(max_score[half] - base[half]);
            max_score[half] = new_max[half];
            sum[half] *= shrink[half];
        }
#pragma unroll
        for (u32 n = 0; n < BLOCK / 8; ++n) {
#pragma unroll
            for (u32 i = 0; i < 4; ++i) sum[i / 2] += s[n][i] = exp2f(s[n][i] - base[i / 2]);
        }
#pragma unroll
        for (u32 n = 0; n < d / 8; ++n) {
#pragma unroll
            for (u32 i = 0; i < 4; ++i) o[n][i] *= shrink[i / 2];
        }
        // The layout of the weights as a result (c) is the layout that a factor (a) must have.
#pragma unroll
        for (u32 at = 0; at < BLOCK / 16; ++at) {
            N* const kind = nullptr;
            const u32 weights[4] = {pair(kind, s[2 * at][0], s[2 * at][1]), pair(kind, s[2 * at][2], s[2 * at][3]),
                                    pair(kind, s[2 * at + 1][0], s[2 * at + 1][1]), pair(kind, s[2 * at + 1][2], s[2 * at + 1][3])};
#pragma unroll
            for (u32 n = 0; n < d / 8; n += 2) {
                u32 v[4];
                const u32 key = 16 * at + lane / 8 % 2 * 8 + lane % 8, i = 8 * n + lane / 16 * 8;
                load_four_transposed(v, reinterpret_cast<const u16*>(block_values) + key * row_room + i);
                multiply_add<N>(o[n], weights, v[0], v[1]);
                multiply_add<N>(o[n + 1], weights, v[2], v[3]);
            }
        }
    }
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
        sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 1);
        sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 2);
        if (16 * warp + g + 8 * half >= count) continue;
        const bool is_whole = tile[PARTIAL] == IS_WHOLE;
        const size_t to = static_cast<size_t>(is_whole ? tile[ROW] : tile[PARTIAL]) * heads + place[half];
        float* partial = partials + to * (d + 2);
        if (!is_whole && t == 0) partial[d] = max_score[half], partial[d + 1] = sum[half];
#pragma unroll
        for (u32 n = 0; n < d / 8; ++n) {
#pragma unroll
            for (u32 i = 0; i < 2; ++i) {
                const u32 column = 8 * n + 2 * t + i;
                if (is_whole) put_as(out, to * d + column, out_type, o[n][2 * half + i] / sum[half]);
                else partial[column] = o[n][2 * half + i];
            }
        }
    }
}

#define KERNEL(name, N, d)                                                                                            \
    extern "C" __global__ void attend_blocks_by_matrices_##name##_##d(                                               \
        void* out, float* partials, const float* queries, const N* keys, const N* values, const u32* tiles,          \
        const u32* tables, float scale, float cap, u32 window, u32 is_causal, u32 heads, u32 kv_heads, u32,          \
        u32 out_type) {                                                                                              \
        attend_blocks_by_matrices<N, d>(out, partials, queries, keys, values, tiles, tables, scale, cap, window,     \
                                        is_causal, heads, kv_heads, out_type);                                       \
    }
#define KERNELS(name, N)                                                                                             \
    KERNEL(name, N, 64) KERNEL(name, N, 80) KERNEL(name, N, 96) KERNEL(name, N, 128) KERNEL(name, N, 256)
KERNELS(f16, f16)
KERNELS(bf16, bf16)
#undef KERNELS
#undef KERNEL
#endif
