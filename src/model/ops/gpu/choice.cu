// Chooses the next token after each row, as `Sampler` does on the host (sequences/sampler.rs): the likeliest one, or one
// drawn with a given random number. Lists the likeliest tokens with their probabilities if they are wanted. A thread block
// computes a row. All sums of weights are f64, in a fixed order.
#include "warp.cuh"

constexpr u32 CHOICE_THREADS = 512;
// What is chosen if a logit is NaN or infinite, or if there is no finite one.
constexpr u32 NO_TOKEN = 0xffffffffu;
// The weight of the likeliest token, 1, as bits. Bits of weights have the order of the weights.
constexpr u32 LARGEST_WEIGHT = 0x3f800000u;

// `MASK` of a draw that may choose any token.
constexpr u32 NO_MASK = 0xffffffffu;

// The numbers of a draw, in the order of `Draws::new` in choice.rs.
enum {
    LOGITS, FACTOR, TOP_K, TOP_P, MIN_P, UNIFORM_LOW, UNIFORM_HIGH, FIRST_COUNT, COUNTS, FREQUENCY, PRESENCE, REPETITION,
    // 0 if no probability is wanted; otherwise 1 + the number of tokens that are listed.
    LISTED,
    // The index of its mask.
    MASK,
    DRAW_WORDS
};

__device__ inline u32 least_of_block(u32 x) { return of_block(x, [](u32 a, u32 b) { return a < b ? a : b; }); }
__device__ inline u32 most_of_block(u32 x) { return of_block(x, [](u32 a, u32 b) { return a < b ? b : a; }); }

// The first of `count` tokens, by their ids, at which the sum of their `value` exceeds `target`; if there is none, the last
// one with a value above 0, or 0.
template <typename Value>
__device__ inline u32 first_beyond(u32 count, double target, Value value) {
    __shared__ double sums[CHOICE_THREADS];
    const u32 share = (count + CHOICE_THREADS - 1) / CHOICE_THREADS;
    const u32 first = threadIdx.x * share, end = first + share < count ? first + share : count;
    double sum = 0;
    u32 last = 0;
    for (u32 id = first; id < end; ++id) {
        sum += value(id);
        if (value(id) > 0) last = id;
    }
    __syncthreads();
    sums[threadIdx.x] = sum;
    __syncthreads();
    double before = 0;
    for (u32 thread = 0; thread < threadIdx.x; ++thread) before += sums[thread];
    u32 found = NO_TOKEN;
    if (before <= target && target < before + sum) {
        found = last;
        for (u32 id = first; id < end && before <= target; ++id) {
            before += value(id);
            if (before > target) found = id;
        }
    }
    found = least_of_block(found);
    return found == NO_TOKEN ? most_of_block(last) : found;
}

// The tokens that may be drawn: those with a weight above `bits`, and the first `ties` of those with this weight, by their
// ids.
struct Candidates {
    const float* weights;
    u32 count, bits, ties;

    __device__ u32 bits_of(u32 id) const { return __float_as_uint(weights[id]); }
    // The number of tokens with at least this weight, and with this weight.
    __device__ u32 at_least(u32 least) const {
        u32 found = 0;
        for (u32 id = threadIdx.x; id < count; id += CHOICE_THREADS) found += bits_of(id) >= least;
        return sum_of_block(found);
    }
    __device__ u32 equal(u32 same) const { return at_least(same) - at_least(same + 1); }
    // The sum of the weights of candidates with at least this weight.
    __device__ double sum_of(u32 least) const {
        double sum = 0;
        const u32 from = least > bits ? least : bits + 1;
        for (u32 id = threadIdx.x; id < count; id += CHOICE_THREADS) sum += bits_of(id) >= from ? weights[id] : 0.0f;
        return sum_of_block(sum) + (least > bits ? 0.0 : static_cast<double>(ties) * __uint_as_float(bits));
    }
    __device__ u32 ties_of(u32 same) const { return same == bits ? ties : equal(same); }
};

// The largest weight, as bits, for which `holds`; it holds for all smaller ones.
template <typename Holds>
__device__ inline u32 largest_weight(Holds holds) {
    u32 found = 0;
    for (u32 bit = 1u << 29; bit > 0; bit /= 2) {
        if ((found | bit) <= LARGEST_WEIGHT && holds(found | bit)) found |= bit;
    }
    return found;
}

// A number of ties, at least 1 and at most `most`.
__device__ inline u32 as_ties(double ties, u32 most) { return ties >= most ? most : ties >= 1.0 ? static_cast<u32>(ties) : 1; }

// The first token, by the ids, with this number; NO_TOKEN if there is none.
template <typename Is>
__device__ inline u32 first_token(u32 vocabulary, Is is) {
    u32 found = NO_TOKEN;
    for (u32 id = threadIdx.x; id < vocabulary; id += CHOICE_THREADS) {
        if (is(id) && id < found) found = id;
    }
    return least_of_block(found);
}

// The largest of some tokens' numbers.
template <typename Is>
__device__ inline float largest_number(const float* x, u32 vocabulary, Is is) {
    float most = -INFINITY;
    for (u32 id = threadIdx.x; id < vocabulary; id += CHOICE_THREADS) {
        if (is(id)) most = fmaxf(most, x[id]);
    }
    return of_block(most, [](float a, float b) { return fmaxf(a, b); });
}

// The logarithms of probabilities, relative to all tokens.
struct LogProbabilities {
    float most;
    double log_sum;

    LogProbabilities() = default;
    __device__ LogProbabilities(const float* x, u32 vocabulary) {
        most = largest_number(x, vocabulary, [](u32) { return true; });
        double sum = 0;
        for (u32 id = threadIdx.x; id < vocabulary; id += CHOICE_THREADS) sum += exp(static_cast<double>(x[id] - most));
        log_sum = log(sum_of_block(sum));
    }
    __device__ u32 bits_of(float x) const { return __float_as_uint(static_cast<float>(static_cast<double>(x - most) - log_sum)); }
};

// The likeliest `count` tokens, each with its probability. Of the same number, those with lower ids come first.
__device__ inline void list_likeliest(u32* to, const float* x, const LogProbabilities& probabilities, u32 vocabulary, u32 count) {
    float last = INFINITY;
    u32 last_id = NO_TOKEN;
    for (u32 at = 0; at < count; ++at) {
        const auto follows = [&](u32 id) { return x[id] < last || (x[id] == last && id > last_id); };
        const float most = largest_number(x, vocabulary, follows);
        last_id = first_token(vocabulary, [&](u32 id) { return x[id] == most && follows(id); });
        last = most;
        if (threadIdx.x == 0) to[2 * at] = last_id, to[2 * at + 1] = probabilities.bits_of(most);
    }
}

// A token that is drawn with the random number of a draw. `x` are its logits, and become weights.
__device__ inline u32 drawn_token(float* x, const u32* draw, float most, u32 vocabulary) {
    const float factor = __uint_as_float(draw[FACTOR]);
    for (u32 id = threadIdx.x; id < vocabulary; id += CHOICE_THREADS) x[id] = expf((x[id] - most) * factor);
    __syncthreads();

    const double uniform = __hiloint2double(draw[UNIFORM_HIGH], draw[UNIFORM_LOW]);
    const float top_p = __uint_as_float(draw[TOP_P]);
    Candidates candidates = {x, vocabulary, draw[MIN_P], 0};
    candidates.ties = candidates.equal(candidates.bits);
    if (draw[TOP_K] == 0 && top_p >= 1.0f && draw[MIN_P] == 0) {
        return first_beyond(vocabulary, uniform * candidates.sum_of(0), [&](u32 id) { return static_cast<double>(x[id]); });
    }
    if (draw[TOP_K] > 0 && draw[TOP_K] < candidates.at_least(candidates.bits)) {
        const u32 bits = largest_weight([&](u32 least) { return candidates.at_least(least) >= draw[TOP_K]; });
        const u32 ties = draw[TOP_K] - candidates.at_least(bits + 1);
        candidates.bits = bits, candidates.ties = ties;
    }
    if (top_p < 1.0f) {
        const double goal = top_p * candidates.sum_of(0);
        const u32 bits = largest_weight([&](u32 least) { return candidates.sum_of(least) >= goal; });
        const double missing = goal - candidates.sum_of(bits + 1);
        const u32 ties = as_ties(ceil(missing / __uint_as_float(bits)), candidates.ties_of(bits));
        candidates.bits = bits, candidates.ties = ties;
    }
    // The likeliest candidates come first, and those of the same weight by their ids.
    const double target = uniform * candidates.sum_of(0);
    const u32 bits = largest_weight([&](u32 least) { return candidates.sum_of(least) > target; });
    const double missing = target - candidates.sum_of(bits + 1);
    const u32 before = as_ties(missing / __uint_as_float(bits) + 1.0, candidates.ties_of(bits)) - 1;
    return first_beyond(vocabulary, before, [&](u32 id) { return candidates.bits_of(id) == bits ? 1.0 : 0.0; });
}

// `logits` is [_, vocabulary]; each is divided by `divisor` and bounded by `cap`, if that is not 0. `scratch` is
// [draws, vocabulary]. `counts` are pairs of a token, and how often it was generated. `masks` is [_, vocabulary / 32], a bit
// for each token that may be chosen. `results` is [draws, result_words]: the token, and if they are wanted its probability,
// and pairs of a listed token and its probability.
template <typename N>
__device__ inline void choose(
    u32* results, float* scratch, const N* logits, const u32* draws, const u32* counts, const u32* masks, float divisor,
    float cap, u32 vocabulary, u32 result_words) {
    const u32* draw = draws + DRAW_WORDS * blockIdx.x;
    const N* from = logits + static_cast<size_t>(draw[LOGITS]) * vocabulary;
    float* x = scratch + static_cast<size_t>(blockIdx.x) * vocabulary;
    u32* result = results + static_cast<size_t>(blockIdx.x) * result_words;
    const auto finished = [&](u32 id) {
        const float y = to_f32(from[id]) / divisor;
        return cap > 0.0f ? cap * tanhf(y / cap) : y;
    };
    for (u32 id = threadIdx.x; id < vocabulary; id += CHOICE_THREADS) x[id] = finished(id);
    __syncthreads();
    // Probabilities are those before the mask and the penalties.
    LogProbabilities probabilities = {};
    if (draw[LISTED] > 0) {
        probabilities = LogProbabilities(x, vocabulary);
        list_likeliest(result + 2, x, probabilities, vocabulary, draw[LISTED] - 1);
        __syncthreads();
    }
    if (draw[MASK] != NO_MASK) {
        const u32* mask = masks + static_cast<size_t>(draw[MASK]) * ((vocabulary + 31) / 32);
        for (u32 id = threadIdx.x; id < vocabulary; id += CHOICE_THREADS) {
            if ((mask[id / 32] >> id % 32 & 1) == 0) x[id] = -INFINITY;
        }
        __syncthreads();
    }
    for (u32 at = threadIdx.x; at < draw[COUNTS]; at += CHOICE_THREADS) {
        const u32* of = counts + 2 * (draw[FIRST_COUNT] + at);
        if (of[0] >= vocabulary) continue;
        const float y = x[of[0]], repetition = __uint_as_float(draw[REPETITION]);
        const float less = of[1] == 0 ? 0.0f : __uint_as_float(draw[FREQUENCY]) * of[1] + __uint_as_float(draw[PRESENCE]);
        x[of[0]] = (y > 0.0f ? y / repetition : y * repetition) - less;
    }
    __syncthreads();
    const float most = largest_number(x, vocabulary, [](u32) { return true; });
    const u32 not_a_number = first_token(vocabulary, [&](u32 id) { return x[id] != x[id]; });
    u32 found = NO_TOKEN;
    if (not_a_number == NO_TOKEN && fabsf(most) < INFINITY) {
        const bool takes_likeliest = __uint_as_float(draw[FACTOR]) == 0.0f;
        found = takes_likeliest ? first_token(vocabulary, [&](u32 id) { return x[id] == most; })
                                : drawn_token(x, draw, most, vocabulary);
    }
    if (threadIdx.x > 0) return;
    result[0] = found;
    if (draw[LISTED] > 0 && found != NO_TOKEN) result[1] = probabilities.bits_of(finished(found));
}

#define KERNELS(name, N)                                                                                              \
    extern "C" __global__ void choose_##name(                                                                         \
        u32* results, float* scratch, const N* logits, const u32* draws, const u32* counts, const u32* masks,        \
        float divisor, float cap, u32 vocabulary, u32 result_words) {                                                 \
        choose(results, scratch, logits, draws, counts, masks, divisor, cap, vocabulary, result_words);              \
    }
FOR_EACH_NUMBER(KERNELS)
#undef KERNELS
