// Rounds weights to codes of 4 or 8 bits with a scale and an integer zero for each group of columns,
// see codes.h. A scale has the precision of bf16. In 4 bits a group's range is cut where that makes the
// sum of its squared errors smaller, and a scale is 0 or at least what half a word holds: one smaller
// group, such as a row that training let die, would make all scales of the weight take a word.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "numbers.h"
#include "parallel.h"

namespace mm {

constexpr float LEAST_SCALE = 1.0f / (1 << 28);

// How a group is rounded: code - zero is the nearest integer to w / scale between low and high. scale
// may be 0 where all values are.
struct Range {
    float scale = 0.0f, inverse = 0.0f, low = 0.0f, high = 0.0f;

    Range() = default;
    Range(float smallest, float largest, float ratio, float levels)
        : scale(rounded<bf16>((largest - smallest) * ratio / levels)) {
        if (levels == 15.0f && scale > 0.0f && scale < LEAST_SCALE) scale = LEAST_SCALE;
        inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
        const float zero = scale > 0.0f ? std::nearbyint(-smallest * ratio / scale) : 0.0f;
        low = -(zero < 0.0f ? 0.0f : (zero > levels ? levels : zero));
        high = levels + low;
    }

    MM_INLINE float nearest(float w) const {
        const float code = std::nearbyint(w * inverse);
        return code < low ? low : (code > high ? high : code);
    }
};

// Returns the sum of the squared errors of one group, `count` values.
MM_INLINE float error_of(const float* w, int64_t count, const Range& range) {
    const Range own = range;
    float error = 0.0f;
#pragma omp simd reduction(+ : error)
    for (int64_t i = 0; i < count; ++i) {
        const float off = w[i] - own.nearest(w[i]) * own.scale;
        error += off * off;
    }
    return error;
}

constexpr float RATIOS[] = {1.0f, 0.95f, 0.9f, 0.85f, 0.8f, 0.75f};

// Rounds one group to `bits` bits with the best of these ranges, or the whole range of 8 bits. The
// codes are written once, when the range is known.
inline void round_best(const float* w, int64_t count, int32_t bits, uint8_t* codes, float* scale,
                       uint8_t* zero) {
    float low = 0.0f, high = 0.0f;
#pragma omp simd reduction(min : low) reduction(max : high)
    for (int64_t i = 0; i < count; ++i) {
        low = w[i] < low ? w[i] : low;
        high = w[i] > high ? w[i] : high;
    }
    const float levels = bits == 4 ? 15.0f : 255.0f;
    Range best(low, high, 1.0f, levels);
    float least = bits == 4 ? error_of(w, count, best) : 0.0f;
    for (int i = 1; i < (bits == 4 ? 6 : 1); ++i) {
        const Range range(low, high, RATIOS[i], levels);
        const float error = error_of(w, count, range);
        if (!(error < least)) continue;
        least = error;
        best = range;
    }
    *scale = best.scale;
    *zero = uint8_t(int32_t(-best.low));
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
        codes[i] = uint8_t(int32_t(best.nearest(w[i]) - best.low));
    }
}

// Rounds w [n][k] to codes of `bits` bits: units [n][units], scales and zeros [n][groups].
template <typename T>
void round_codes(const T* w, int64_t n, int64_t k, int32_t bits, int64_t group, uint8_t* units,
                 float* scales, uint8_t* zeros, int num_threads) {
    const int64_t per_unit = 32 / bits, num_units = (k + per_unit - 1) / per_unit;
    const int64_t groups = (k + group - 1) / group;
    parallel_parts(n, num_threads, [&](int64_t begin, int64_t end) {
        std::vector<float> wide(std::min(group, k));
        std::vector<uint8_t> codes(num_units * per_unit);
        for (int64_t row = begin; row < end; ++row) {
            for (int64_t g = 0; g < groups; ++g) {
                const int64_t first = g * group, count = std::min(group, k - first);
                for (int64_t i = 0; i < count; ++i) wide[i] = load(w[row * k + first + i]);
                round_best(wide.data(), count, bits, codes.data() + first,
                           scales + row * groups + g, zeros + row * groups + g);
            }
            uint8_t* out = units + row * num_units * 4;
            if (bits == 8) {
                std::copy_n(codes.data(), num_units * 4, out);
                continue;
            }
            for (int64_t unit = 0; unit < num_units; ++unit) {
                const uint8_t* own = codes.data() + unit * 8;
                for (int i = 0; i < 4; ++i) out[unit * 4 + i] = uint8_t(own[i] | own[i + 4] << 4);
            }
        }
    });
}

}  // namespace mm
