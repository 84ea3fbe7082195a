// How keys and values lie in blocks of 32 tokens. A sequence refers to its blocks by a table of their numbers.
//
// Values are [blocks, heads, 32, width]. Keys are [blocks, heads, width / chunk, 32, chunk], where a chunk is 16 bytes
// of a key: when each thread of a warp reads a chunk of its own key, the warp reads 512 adjacent bytes.
#pragma once
#include "numbers.cuh"

constexpr u32 BLOCK = 32;

// The numbers of a chunk.
template <typename N>
constexpr u32 CHUNK = 16 / sizeof(N);

// The index of a head's first number in a block, in the memory of keys and in that of values.
__device__ inline size_t head_block(u32 block, u32 head, u32 heads, u32 width) {
    return (static_cast<size_t>(block) * heads + head) * BLOCK * width;
}

// The index of number `i` of the key of token `token`, in a head's block.
template <typename N>
__device__ inline size_t in_keys(u32 token, u32 i) {
    return (static_cast<size_t>(i / CHUNK<N>) * BLOCK + token) * CHUNK<N> + i % CHUNK<N>;
}

__device__ inline void load_chunk(float (&to)[4], const float* from) {
    const float4 x = four(from);
    to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
}

template <typename N>
__device__ inline void load_chunk(float (&to)[8], const N* from) {
    const uint4 pairs = *reinterpret_cast<const uint4*>(from);
    const u32 words[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        to[2 * i] = to_f32(N{static_cast<u16>(words[i])});
        to[2 * i + 1] = to_f32(N{static_cast<u16>(words[i] >> 16)});
    }
}
