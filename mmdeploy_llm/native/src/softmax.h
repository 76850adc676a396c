// Online softmax over tiles of keys (Milakov and Gimelshein, 2018): keeps the maximum and the sum
// of each row so far, and returns the factor that corrects earlier sums when the maximum grows.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "dot.h"
#include "numbers.h"

namespace mm {

// The state of one row. sums: one partial sum per lane; `total` adds them up.
struct RunningSoftmax {
    alignas(64) float sums[BLOCK];
    float maximum;

    void begin() {
        std::fill(sums, sums + BLOCK, 0.0f);
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

#ifdef MM_HAS_BF16_DOT

// Returns 2^x for x <= 0 with a relative error of 3e-6; 0 below -150, NaN for NaN. Uses the minimax
// polynomial of degree 4 on [-1/2, 1/2].
inline __m512 exp2_of_negative(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-200.0f), x);
    const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 r = _mm512_sub_ps(x, n);
    __m512 y = _mm512_set1_ps(0.00958285294f);
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(0.0559064262f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(0.240240991f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(0.693124175f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(y, n);
}

// Returns the mask of the lanes `first` .. `first` + 15 that are in from .. to.
inline __mmask16 lanes_within(int64_t first, int64_t from, int64_t to) {
    const int64_t low = std::min<int64_t>(std::max<int64_t>(from - first, 0), BLOCK);
    const int64_t high = std::min<int64_t>(std::max<int64_t>(to - first, low), BLOCK);
    return __mmask16((1u << high) - (1u << low));
}

// IS_WHOLE: all columns are visible.
template <bool IS_WHOLE, bool IS_INT8>
inline float weigh_lanes(const float* scores, int64_t from, int64_t to, int64_t columns,
                         float scale, const float* value_scales, RunningSoftmax& row,
                         bf16* weights) {
    const auto seen = [&](int64_t c) {
        return IS_WHOLE ? __mmask16(0xffff) : lanes_within(c, from, to);
    };
    __m512 largest[2] = {_mm512_set1_ps(-INFINITY), _mm512_set1_ps(-INFINITY)};
    for (int64_t c = 0; c < columns; c += 2 * BLOCK) {
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            const int64_t at = c + half * BLOCK;
            const __m512 score = _mm512_mask_loadu_ps(largest[half], seen(at), scores + at);
            largest[half] = _mm512_max_ps(largest[half], score);
        }
    }
    const float before = row.maximum;
    row.maximum = std::max(
        before, _mm512_reduce_max_ps(_mm512_max_ps(largest[0], largest[1])) * scale);
    constexpr float LOG2_E = 1.44269504088896341f;
    const __m512 factor = _mm512_set1_ps(scale * LOG2_E);
    const __m512 offset = _mm512_set1_ps(row.maximum * LOG2_E);
    const __m512 correction = exp2_of_negative(_mm512_set1_ps((before - row.maximum) * LOG2_E));
    __m512 sums = _mm512_mul_ps(_mm512_load_ps(row.sums), correction);
    for (int64_t c = 0; c < columns; c += 2 * BLOCK) {
        __m512 two[2];
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            const int64_t at = c + half * BLOCK;
            const __m512 score = _mm512_maskz_loadu_ps(seen(at), scores + at);
            two[half] = exp2_of_negative(_mm512_fmsub_ps(score, factor, offset));
            if (!IS_WHOLE) two[half] = _mm512_maskz_mov_ps(seen(at), two[half]);
            sums = _mm512_add_ps(sums, two[half]);
            if (IS_INT8) {
                const __m512 scales = _mm512_maskz_loadu_ps(seen(at), value_scales + at);
                two[half] = _mm512_mul_ps(two[half], scales);
            }
        }
        _mm512_storeu_si512(weights + c, (__m512i)_mm512_cvtne2ps_pbh(two[1], two[0]));
    }
    _mm512_store_ps(row.sums, sums);
    return before == row.maximum ? 1.0f : _mm512_cvtss_f32(correction);
}

// Computes the same as the version for any T below; scale >= 0.
inline float weigh_row(float* scores, int64_t from, int64_t to, int64_t columns,
                       const Scaling& scaling, RunningSoftmax& row, bf16* weights) {
    scale_keys(scores, from, to, scaling);
    float scale = scaling.scale;
    if (scaling.softcap != 0.0f) {
        soften(scores + from, to - from, scale, scaling.softcap);
        scale = 1.0f;
    }
    const bool is_whole = from == 0 && to == columns;
    const bool is_int8 = scaling.value_scales != nullptr;
    const auto weigh = is_whole ? (is_int8 ? weigh_lanes<true, true> : weigh_lanes<true, false>)
                                : (is_int8 ? weigh_lanes<false, true> : weigh_lanes<false, false>);
    return weigh(scores, from, to, columns, scale, scaling.value_scales, row, weights);
}

#endif

// Computes weights = exp(scaled scores - maximum) of one row over `columns` keys (a multiple of
// 32), 0 for keys outside from .. to, which holds at least one. Returns the factor by which the
// row's earlier sums of weighted values must be multiplied.
template <typename T>
inline float weigh_row(float* scores, int64_t from, int64_t to, int64_t columns,
                       const Scaling& scaling, RunningSoftmax& row, T* weights) {
    scale_keys(scores, from, to, scaling);
    if (scaling.softcap != 0.0f) {
        soften(scores + from, to - from, scaling.scale, scaling.softcap);
    } else {
#pragma omp simd
        for (int64_t c = from; c < to; ++c) scores[c] *= scaling.scale;
    }
    float maximum = row.maximum;
#pragma omp simd reduction(max : maximum)
    for (int64_t c = from; c < to; ++c) maximum = std::max(maximum, scores[c]);
    for (int64_t c = 0; c < from; ++c) scores[c] = -INFINITY;
    for (int64_t c = to; c < columns; ++c) scores[c] = -INFINITY;
    const float correction = fast_exp(row.maximum - maximum);
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < columns; ++c) {
        const float weight = fast_exp(scores[c] - maximum);
        sum += weight;
        scores[c] = weight;
    }
    if (scaling.value_scales != nullptr) {
#pragma omp simd
        for (int64_t c = from; c < to; ++c) scores[c] *= scaling.value_scales[c];
    }
#pragma omp simd
    for (int64_t c = 0; c < columns; ++c) weights[c] = store<T>(scores[c]);
    row.sums[0] = row.sums[0] * correction + sum;
    row.maximum = maximum;
    return correction;
}

}  // namespace mm
