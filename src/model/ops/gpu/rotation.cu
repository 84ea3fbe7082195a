// From the product of a layer's input with the projections to queries, keys and values: adds their bias, norms and
// rotates the heads of queries and keys, and writes keys and values to their blocks (kv_blocks.cuh). A warp computes a
// head of a row.
#include "kv_blocks.cuh"
#include "warp.cuh"

constexpr u32 HEADS_AT_ONCE = 4, MAX_HEAD_WIDTH = 256;

// `qkv` is [rows, (heads + 2·kv_heads)·width]: the heads of queries, of keys and of values. `queries` is
// [rows, heads, width] in f32. `bias` may be null, and so may the norms' weights. These are for one head, or with
// `norms_all` for all heads side by side, which then are normed together. `slots` has a number for each row: a block,
// times 32, plus the token's place in it. `angles` has the cosines of each row, and then its sines, `pairs` numbers
// each: pair i is numbers i and i + pairs of a head. `growth` has a factor of the queries for each row, or is null.
template <typename N, typename K>
__device__ inline void rotate(
    float* queries, K* keys, K* values, const N* qkv, const float* bias, const float* q_norm, const float* k_norm,
    const u32* slots, const float* angles, const float* growth, float eps, u32 norms_all, u32 heads, u32 kv_heads,
    u32 width, u32 pairs) {
    __shared__ float numbers[HEADS_AT_ONCE][MAX_HEAD_WIDTH];
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 row = blockIdx.x, head = blockIdx.y * HEADS_AT_ONCE + warp;
    if (head >= heads + 2 * kv_heads) return;
    const u32 first_of_kind = head < heads ? 0 : head < heads + kv_heads ? heads : heads + kv_heads;
    const u32 of_kind = head - first_of_kind, count_of_kind = head < heads ? heads : kv_heads;
    const N* from = qkv + static_cast<size_t>(row) * (heads + 2 * kv_heads) * width;
    const auto number = [&](u32 i) { return to_f32(from[i]) + (bias ? bias[i] : 0.0f); };

    float* x = numbers[warp];
    for (u32 i = lane; i < width; i += 32) x[i] = number(head * width + i);
    const float* norm = head < heads ? q_norm : head < heads + kv_heads ? k_norm : nullptr;
    if (norm) {
        const u32 first = norms_all ? first_of_kind : head, count = (norms_all ? count_of_kind : 1) * width;
        float squares = 0;
        for (u32 i = lane; i < count; i += 32) {
            const float y = number(first * width + i);
            squares += y * y;
        }
        const float scale = 1.0f / sqrtf(sum_of_warp(squares) / count + eps);
        const float* weights = norm + (norms_all ? of_kind * width : 0);
        for (u32 i = lane; i < width; i += 32) x[i] *= scale * weights[i];
    }
    __syncwarp();
    const bool is_value = head >= heads + kv_heads;
    const float* cosines = angles + static_cast<size_t>(row) * 2 * pairs;
    const float* sines = cosines + pairs;
    const u32 block = slots[row] / BLOCK, token = slots[row] % BLOCK;
    const size_t place = head_block(block, of_kind, kv_heads, width);
    for (u32 i = lane; i < width; i += 32) {
        float y = x[i];
        if (!is_value && i < pairs) y = y * cosines[i] - x[i + pairs] * sines[i];
        else if (!is_value && i < 2 * pairs) y = y * cosines[i - pairs] + x[i - pairs] * sines[i - pairs];
        if (is_value) put(values + place + token * width + i, y);
        else if (head >= heads) put(keys + place + in_keys<K>(token, i), y);
        else queries[(static_cast<size_t>(row) * heads + head) * width + i] = growth ? y * growth[row] : y;
    }
}

#define KERNELS(name, N, k_name, K)                                                                                   \
    extern "C" __global__ void rotate_##name##_##k_name(                                                              \
        float* queries, K* keys, K* values, const N* qkv, const float* bias, const float* q_norm,                    \
        const float* k_norm, const u32* slots, const float* angles, const float* growth, float eps, u32 norms_all,   \
        u32 heads, u32 kv_heads, u32 width, u32 pairs) {                                                              \
        rotate(queries, keys, values, qkv, bias, q_norm, k_norm, slots, angles, growth, eps, norms_all, heads,       \
               kv_heads, width, pairs);                                                                              \
    }
FOR_EACH_PAIR(KERNELS)
#undef KERNELS
