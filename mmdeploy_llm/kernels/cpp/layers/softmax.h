// Online softmax over tiles of keys (Milakov and Gimelshein, 2018): keeps the maximum and the sum
// of each row so far, and returns the factor that corrects earlier sums when the maximum grows.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "../products/dot.h"
#include "../products/numbers.h"

namespace mm {

// The state of one row. sums: one partial sum per lane; `total` adds them up.
struct RunningSoftmax {
    alignas(64) float sums[LANES];
    float maximum;

    void begin() {
        std::fill(sums, sums + LANES, 0.0f);
        maximum = -INFINITY;
    }
    float total() const {
        float sum = 0.0f;
        for (float part : sums) sum += part;
        return sum;
    }
};

// How products become scores. softcap: 0 is none. key_scales, value_scales: of a tile's int8 keys
// and values, else null.
struct Scaling {
    float scale;
    float softcap;
    const float* key_scales;
    const float* value_scales;
};

inline void soften(float* scores, int64_t count, float scale, float softcap) {
    const float factor = scale / softcap;
#pragma omp simd
    for (int64_t c = 0; c < count; ++c) scores[c] = softcap * fast_tanh(scores[c] * factor);
}

inline void scale_keys(float* scores, int64_t from, int64_t to, const Scaling& scaling) {
    if (scaling.key_scales == nullptr) return;
#pragma omp simd
    for (int64_t c = from; c < to; ++c) scores[c] *= scaling.key_scales[c];
}

// Linear biases of one row (ALiBi): factor * (slope * index of the key in its sequence), the product
// rounded to bf16 if `rounds`. slope: 0 is none.
struct Bias {
    float slope;
    float factor;
    bool rounds;
};

// scores = scores * scale + biases of the keys first, first + 1, ... `columns` is a multiple of LANES:
// each score is computed by the same instructions, wherever its tile begins.
inline void add_bias(float* scores, int64_t columns, int64_t first, float scale, const Bias& bias) {
    for (int64_t c = 0; c < columns; c += LANES) {
        alignas(64) float biases[LANES];
        for (int64_t lane = 0; lane < LANES; ++lane) {
            const float own = bias.slope * float(first + c + lane);
            biases[lane] = bias.rounds ? rounded<bf16>(own) : own;
        }
        const Floats own = load_lanes<Floats>(biases) * all_lanes(bias.factor);
        const Floats before = load_lanes<Floats>(scores + c);
        store_lanes(scores + c, multiply_add(before, all_lanes(scale), own));
    }
}

// Returns 2^x for x <= 0; 0 below -150, NaN for NaN. Uses a minimax polynomial on [-1/2, 1/2], with a
// relative error of 3e-6 for bf16 and 1e-7 for float.
template <typename T>
MM_INLINE Floats exp2_of_negative(Floats x) {
    x = larger(all_lanes(MM_VECTOR_BYTES == 64 ? -200.0f : -127.0f), x);
    const Floats n = to_nearest(x);
    const Floats r = x - n;
    const auto next = [&](Floats y, float coefficient) {
        return multiply_add(y, r, all_lanes(coefficient));
    };
    Floats y;
    if constexpr (sizeof(T) == 2) {
        y = all_lanes(0.00958285294f);
        y = next(y, 0.0559064262f);
        y = next(y, 0.240240991f);
        y = next(y, 0.693124175f);
    } else {
        y = all_lanes(0.00015461448f);
        y = next(y, 0.0013390867f);
        y = next(y, 0.009618057f);
        y = next(y, 0.05550357f);
        y = next(y, 0.2402265f);
        y = next(y, 0.6931472f);
    }
    return times_power(next(y, 1.0f), n);
}

MM_INLINE void store_weights(float* to, Floats first, Floats second) {
    store_lanes(to, first);
    store_lanes(to + LANES, second);
}

#ifdef MM_HAS_BF16_DOT
MM_INLINE void store_weights(bf16* to, Floats first, Floats second) { store_bf16(to, first, second); }
#endif

// IS_WHOLE: all columns are visible.
template <typename T, bool IS_WHOLE, bool IS_INT8>
inline float weigh_lanes(const float* scores, int64_t from, int64_t to, int64_t columns,
                         float scale, const float* value_scales, RunningSoftmax& row,
                         Left<T>* weights) {
    const Floats zeros = all_lanes(0.0f), lowest = all_lanes(-INFINITY);
    const auto visible = [&](int64_t at, Floats values, Floats others) {
        return IS_WHOLE ? values : select(lanes_within(at, from, to), values, others);
    };
    Floats largest[2] = {lowest, lowest};
    for (int64_t c = 0; c < columns; c += 2 * LANES) {
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            const int64_t at = c + half * LANES;
            const Floats score = load_lanes<Floats>(scores + at);
            largest[half] = larger(largest[half], visible(at, score, lowest));
        }
    }
    const float before = row.maximum;
    row.maximum = std::max(before, largest_lane(larger(largest[0], largest[1])) * scale);
    constexpr float LOG2_E = 1.44269504088896341f;
    const Floats factor = all_lanes(scale * LOG2_E);
    const Floats offset = all_lanes(-(row.maximum * LOG2_E));
    const Floats correction = exp2_of_negative<T>(all_lanes((before - row.maximum) * LOG2_E));
    Floats sums = load_lanes<Floats>(row.sums) * correction;
    for (int64_t c = 0; c < columns; c += 2 * LANES) {
        Floats two[2];
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            const int64_t at = c + half * LANES;
            const Floats score = load_lanes<Floats>(scores + at);
            two[half] = exp2_of_negative<T>(multiply_add(score, factor, offset));
            two[half] = visible(at, two[half], zeros);
            sums += two[half];
            if (IS_INT8) two[half] *= visible(at, load_lanes<Floats>(value_scales + at), zeros);
        }
        store_weights(weights + c, two[0], two[1]);
    }
    store_lanes(row.sums, sums);
    return before == row.maximum ? 1.0f : correction[0];
}

// Computes weights = exp(scaled scores - maximum) of one row over `columns` keys (a multiple of
// 32), 0 for keys outside from .. to, which holds at least one. Returns the factor by which the
// row's earlier sums of weighted values must be multiplied. scale >= 0. first: the index of the first
// key in its sequence, which `bias` needs.
template <typename T>
inline float weigh_row(float* scores, int64_t from, int64_t to, int64_t columns,
                       const Scaling& scaling, const Bias& bias, int64_t first,
                       RunningSoftmax& row, Left<T>* weights) {
    scale_keys(scores, from, to, scaling);
    float scale = scaling.scale;
    if (scaling.softcap != 0.0f) {
        soften(scores + from, to - from, scale, scaling.softcap);
        scale = 1.0f;
    }
    if (bias.slope != 0.0f) {
        add_bias(scores, columns, first, scale, bias);
        scale = 1.0f;
    }
    const bool is_whole = from == 0 && to == columns;
    const bool is_int8 = scaling.value_scales != nullptr;
    const auto weigh = is_whole ? (is_int8 ? weigh_lanes<T, true, true> : weigh_lanes<T, true, false>)
                                : (is_int8 ? weigh_lanes<T, false, true> : weigh_lanes<T, false, false>);
    return weigh(scores, from, to, columns, scale, scaling.value_scales, row, weights);
}

}  // namespace mm
