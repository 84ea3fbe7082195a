// x ← factor · the embeddings of a decoder's tokens. And between two sublayers: x ← x + factor · RMSNorm(result + bias), and y ← RMSNorm(x), the input of the next
// product. A thread block computes a row. Each thread reads only what it wrote itself.
#include "warp.cuh"

__device__ inline float square(float4 x) { return x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w; }

// `x` is [rows, width] in f32, and `result` has its shape; without a result x stays as it is. `bias` may be null, and so
// may the weights `after` of the norm of results and `before` of the norm of x, if there is no such norm. `y` is null
// if it is not wanted. Its row i is of row `rows[i]`; if `rows` is null, of row i. `width` is a multiple of 4.
template <typename R, typename Y>
__device__ inline void add_rms_norm(
    float* x, const R* result, const float* bias, const float* after, const float* before, Y* y, const u32* rows,
    float factor, float eps, u32 width) {
    const size_t row = rows ? rows[blockIdx.x] : blockIdx.x;
    x += row * width;
    const u32 first = 4 * threadIdx.x, step = 4 * blockDim.x;
    const R* added = result + row * width;
    const auto four_added = [&](u32 at) {
        const float4 r = four(added + at);
        if (!bias) return r;
        const float4 b = four(bias + at);
        return make_float4(r.x + b.x, r.y + b.y, r.z + b.z, r.w + b.w);
    };
    if (result) {
        float scale = factor;
        if (after) {
            float squares = 0;
            for (u32 at = first; at < width; at += step) squares += square(four_added(at));
            scale *= 1.0f / sqrtf(sum_of_block(squares) / width + eps);
        }
        for (u32 at = first; at < width; at += step) {
            const float4 r = four_added(at), to = four(x + at);
            const float4 w = after ? four(after + at) : make_float4(1, 1, 1, 1);
            put_four(x + at, make_float4(to.x + r.x * scale * w.x, to.y + r.y * scale * w.y, to.z + r.z * scale * w.z, to.w + r.w * scale * w.w));
        }
    }
    if (!y) return;
    y += static_cast<size_t>(blockIdx.x) * width;
    float scale = 1;
    if (before) {
        float squares = 0;
        for (u32 at = first; at < width; at += step) squares += square(four(x + at));
        scale = 1.0f / sqrtf(sum_of_block(squares) / width + eps);
    }
    for (u32 at = first; at < width; at += step) {
        const float4 z = four(x + at), w = before ? four(before + at) : make_float4(1, 1, 1, 1);
        put_four(y + at, make_float4(z.x * scale * w.x, z.y * scale * w.y, z.z * scale * w.z, z.w * scale * w.w));
    }
}

#define KERNELS(name, R, y_name, Y)                                                                                   \
    extern "C" __global__ void add_rms_norm_##name##_##y_name(                                                        \
        float* x, const R* result, const float* bias, const float* after, const float* before, Y* y,                 \
        const u32* rows, float factor, float eps, u32 width) {                                                       \
        add_rms_norm(x, result, bias, after, before, y, rows, factor, eps, width);                                   \
    }
FOR_EACH_PAIR(KERNELS)
#undef KERNELS

// A thread block computes a row. `table` is [_, width].
template <typename N>
__device__ inline void embed_rows(float* x, const N* table, const u32* ids, float factor, u32 width) {
    const N* from = table + static_cast<size_t>(ids[blockIdx.x]) * width;
    x += static_cast<size_t>(blockIdx.x) * width;
    for (u32 at = 4 * threadIdx.x; at < width; at += 4 * blockDim.x) {
        const float4 y = four(from + at);
        put_four(x + at, make_float4(y.x * factor, y.y * factor, y.z * factor, y.w * factor));
    }
}

#define KERNELS(name, N)                                                                                              \
    extern "C" __global__ void embed_rows_##name(float* x, const N* table, const u32* ids, float factor, u32 width) { \
        embed_rows(x, table, ids, factor, width);                                                                    \
    }
FOR_EACH_NUMBER(KERNELS)
#undef KERNELS
