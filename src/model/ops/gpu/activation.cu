// x ← activation(x + bias), in place: between the two products of a feed-forward sublayer.
#include "numbers.cuh"

// The values of `Activation` in activation.rs.
enum { GELU, GELU_TANH, RELU };

template <u32 which>
__device__ inline float activated(float x) {
    if (which == GELU) return 0.5f * x * (1.0f + erff(x * 0.70710678f));
    if (which == GELU_TANH) return 0.5f * x * (1.0f + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
    // Not fmaxf, which would turn NaN into a number.
    return x < 0.0f ? 0.0f : x;
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
