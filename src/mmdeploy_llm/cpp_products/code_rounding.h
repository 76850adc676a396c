// Rounds weights to codes of 4 or 8 bits with a scale and an integer zero for each group of columns,
// see codes.h. A scale has the precision of bf16. In 4 bits a group's range is cut where that makes the
// sum of its squared errors smaller.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "numbers.h"
#include "parallel.h"

namespace mm {

// Writes the codes of one group, `count` values, and returns the sum of their squared errors. scale
// may be 0 where all values are.
MM_INLINE float round_group(const float* w, int64_t count, float scale, float zero, float largest,
                            uint8_t* codes) {
    const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    float error = 0.0f;
#pragma omp simd reduction(+ : error)
    for (int64_t i = 0; i < count; ++i) {
        float code = std::nearbyint(w[i] * inverse) + zero;
        code = code < 0.0f ? 0.0f : (code > largest ? largest : code);
        const float off = w[i] - (code - zero) * scale;
        codes[i] = uint8_t(int32_t(code));
        error += off * off;
    }
    return error;
}

constexpr float RATIOS[] = {1.0f, 0.95f, 0.9f, 0.85f, 0.8f, 0.75f};

// Rounds one group to `bits` bits with the best of these ranges, or the whole range of 8 bits.
// own: memory for as many codes.
inline void round_best(const float* w, int64_t count, int32_t bits, uint8_t* own, uint8_t* codes,
                       float* scale, uint8_t* zero) {
    float low = 0.0f, high = 0.0f;
#pragma omp simd reduction(min : low) reduction(max : high)
    for (int64_t i = 0; i < count; ++i) {
        low = w[i] < low ? w[i] : low;
        high = w[i] > high ? w[i] : high;
    }
    const float largest = bits == 4 ? 15.0f : 255.0f;
    float best = INFINITY;
    for (int ratio = 0; ratio < (bits == 4 ? 6 : 1); ++ratio) {
        const float step = rounded<bf16>((high - low) * RATIOS[ratio] / largest);
        const float at = step > 0.0f ? std::nearbyint(-low * RATIOS[ratio] / step) : 0.0f;
        const float limited = at < 0.0f ? 0.0f : (at > largest ? largest : at);
        const float error = round_group(w, count, step, limited, largest, own);
        if (ratio > 0 && !(error < best)) continue;
        best = error;
        *scale = step;
        *zero = uint8_t(int32_t(limited));
        std::memcpy(codes, own, count);
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
        std::vector<uint8_t> own(wide.size());
        std::vector<uint8_t> codes(num_units * per_unit);
        for (int64_t row = begin; row < end; ++row) {
            for (int64_t g = 0; g < groups; ++g) {
                const int64_t first = g * group, count = std::min(group, k - first);
                for (int64_t i = 0; i < count; ++i) wide[i] = load(w[row * k + first + i]);
                round_best(wide.data(), count, bits, own.data(), codes.data() + first,
                           scales + row * groups + g, zeros + row * groups + g);
            }
            uint8_t* out = units + row * num_units * 4;
            for (int64_t i = 0; i < num_units * 4; ++i) {
                const int64_t at = i / 4 * 8 + i % 4;
                out[i] = bits == 8 ? codes[i] : uint8_t(codes[at] | codes[at + 4] << 4);
            }
        }
    });
}

}  // namespace mm
