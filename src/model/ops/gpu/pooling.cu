// Computes one vector of a text from the vectors of its tokens, in f32, so that only this vector is copied to the host.
#include "numbers.cuh"

// The values of `Mode` in pooling.rs.
enum { CLS, MAX, MEAN, MEAN_SQRT_LEN, LAST_TOKEN };

// One thread per number of the vector. `starts` are the texts' first rows, then the number of all rows. `modes`
// holds a mode in each group of four bits, the first in the lowest.
template <typename N>
__device__ inline void pool(float* out, const N* x, const u32* starts, u32 modes, u32 count, u32 hidden) {
    const u32 text = blockIdx.x, column = blockIdx.y * blockDim.x + threadIdx.x;
    if (column >= hidden) return;
    const u32 first = starts[text], tokens = starts[text + 1] - first;
    const N* from = x + static_cast<size_t>(first) * hidden + column;
    float* to = out + static_cast<size_t>(text) * count * hidden + column;
    for (u32 at = 0; at < count; ++at, modes >>= 4, to += hidden) {
        const u32 mode = modes & 15;
        float all = to_f32(mode == LAST_TOKEN ? from[static_cast<size_t>(tokens - 1) * hidden] : *from);
        if (mode != CLS && mode != LAST_TOKEN) {
            for (u32 token = 1; token < tokens; ++token) {
                const float next = to_f32(from[static_cast<size_t>(token) * hidden]);
                // Not fmaxf, which would drop NaN.
                if (mode != MAX) all += next;
                else if (next > all || next != next) all = next;
            }
        }
        if (mode == MEAN) all /= tokens;
        if (mode == MEAN_SQRT_LEN) all /= sqrtf(static_cast<float>(tokens));
        *to = all;
    }
}

#define KERNELS(name, N)                                                                                             \
    extern "C" __global__ void pool_##name(float* out, const N* x, const u32* starts, u32 modes, u32 count, u32 hidden) { \
        pool(out, x, starts, modes, count, hidden);                                                                   \
    }
FOR_EACH_NUMBER(KERNELS)
#undef KERNELS
