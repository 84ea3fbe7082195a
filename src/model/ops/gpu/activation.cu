// What lies between the products of a feed-forward sublayer: x ← activation(x + bias) in place, or with gates
// activation(gate + bias) * (up + bias).
#include "numbers.cuh"

// The values of `Activation` in activation.rs.
enum { GELU, GELU_TANH, RELU, SILU, IDENTITY };

template <u32 which>
__device__ inline float activated(float x) {
    if (which == GELU) return 0.5f * x * (1.0f + erff(x * 0.70710678f));
    if (which == GELU_TANH) return 0.5f * x * (1.0f + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
    if (which == SILU) return x / (1.0f + expf(-x));
    // Not fmaxf, which would turn NaN into a number.
    if (which == RELU) return x < 0.0f ? 0.0f : x;
    return x;
}

template <u32 which, typename N>
__device__ inline void activate(N* x, const N* bias, size_t numbers, u32 width) {
    const size_t threads = static_cast<size_t>(gridDim.x) * blockDim.x;
    for (size_t at = 4 * (static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x); at < numbers; at += 4 * threads) {
        const float4 value = four(x + at), b = four(bias + at % width);
        put_four(x + at, make_float4(activated<which>(value.x + b.x), activated<which>(value.y + b.y),
                                     activated<which>(value.z + b.z), activated<which>(value.w + b.w)));
    }
}

#define KERNELS(name, N)                                                                                \
    extern "C" __global__ void activate_##name(N* x, const N* bias, u32 rows, u32 width, u32 which) {    \
        const size_t numbers = static_cast<size_t>(rows) * width;                                        \
        if (which == GELU) activate<GELU>(x, bias, numbers, width);                                      \
        if (which == GELU_TANH) activate<GELU_TANH>(x, bias, numbers, width);                            \
        if (which == RELU) activate<RELU>(x, bias, numbers, width);                                      \
    }
FOR_EACH_NUMBER(KERNELS)
#undef KERNELS

// `x` is [rows, 2·inner], the gates and then the others; `bias` is [2·inner], or null. `out` is [rows, inner], and
// `inner` is a multiple of 4.
template <u32 which, typename N>
__device__ inline void gate(N* out, const N* x, const float* bias, size_t numbers, u32 inner) {
    const size_t threads = static_cast<size_t>(gridDim.x) * blockDim.x;
    for (size_t at = 4 * (static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x); at < numbers; at += 4 * threads) {
        const u32 column = at % inner;
        const N* from = x + at / inner * 2 * inner + column;
        float4 gates = four(from), ups = four(from + inner);
        if (bias) {
            const float4 a = four(bias + column), b = four(bias + inner + column);
            gates = make_float4(gates.x + a.x, gates.y + a.y, gates.z + a.z, gates.w + a.w);
            ups = make_float4(ups.x + b.x, ups.y + b.y, ups.z + b.z, ups.w + b.w);
        }
        put_four(out + at, make_float4(activated<which>(gates.x) * ups.x, activated<which>(gates.y) * ups.y,
                                       activated<which>(gates.z) * ups.z, activated<which>(gates.w) * ups.w));
    }
}

#define KERNELS(name, N)                                                                                            \
    extern "C" __global__ void gate_##name(N* out, const N* x, const float* bias, u32 rows, u32 inner, u32 which) { \
        const size_t numbers = static_cast<size_t>(rows) * inner;                                                   \
        if (which == GELU) gate<GELU>(out, x, bias, numbers, inner);                                                \
        if (which == GELU_TANH) gate<GELU_TANH>(out, x, bias, numbers, inner);                                      \
        if (which == RELU) gate<RELU>(out, x, bias, numbers, inner);                                                \
        if (which == SILU) gate<SILU>(out, x, bias, numbers, inner);                                                \
        if (which == IDENTITY) gate<IDENTITY>(out, x, bias, numbers, inner);                                        \
    }
FOR_EACH_NUMBER(KERNELS)
#undef KERNELS
