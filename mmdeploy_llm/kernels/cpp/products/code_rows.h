// Rows of x as products with codes read them, see codes.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <vector>

#include "code_scales.h"
#include "gemm.h"
#include "numbers.h"

namespace mm {

constexpr float TINY = 0x1p-90f;  // magnitudes below are 0 where a format flushes them
constexpr uint32_t MAX_POWER = 20;  // of 2, which a group's scale is less by than that of its row

// Rows of x in the order of the format: values [rows][width]; for each step of a row the sum of its
// values, and if they are rounded their scale (times FLOAT_OF_0 with FLOAT_BITS) and what their integer
// sums start with.
template <typename Format>
struct ArrangedRows {
    using X = typename Format::X;
    static constexpr int64_t VALUES = Format::PARTS * 4 / sizeof(X);  // of a unit
    int64_t width;
    int64_t num;  // rows
    std::unique_ptr<X[]> values;
    std::vector<float> scales;
    std::vector<float> row_scales;
    std::vector<float> less;  // minus the sums
    std::vector<int32_t> starts;

    ArrangedRows(int64_t rows, int64_t k, int64_t step)
        : width(round_up(k, VALUES)),
          num(rows),
          values(new X[rows * width]),
          scales(Format::ROUNDS ? rows * num_steps(k, step) : 0),
          row_scales(Format::POWERS ? rows : 0),
          less(rows * num_steps(k, step)),
          starts(Format::SECOND_EXCESS != 0 || Format::ZEROS_FIRST ? less.size() : 0) {}

    template <typename T>
    void fill(const T* x, int64_t row, int64_t k, int64_t step) {
        const float largest = Format::POWERS ? largest_of(x, k) : 0.0f;
        if constexpr (Format::POWERS) row_scales[row] = largest / 127.0f;
        for (int64_t first = 0; first < k; first += GROUP) {
            const int64_t count = std::min(GROUP, k - first);
            X* to = values.get() + row * width + first;
            if constexpr (std::is_same_v<X, int8_t>) {
                static_assert(Format::column(1) == 1, "bytes are read in their order");
                const float scale = round(x + first, count, largest, to);
                std::fill(to + count, to + round_up(count, VALUES), X{});
                add_steps(row, first, count, step, to, scale);
            } else if constexpr (Format::ROUNDS) {
                int8_t rounded[GROUP] = {};
                const float scale = round(x + first, count, largest, rounded);
                add_steps(row, first, count, step, rounded, scale);
                if constexpr (Format::SECOND_EXCESS != 0) {
                    mm::arrange(rounded, round_up(count, VALUES), to);
                } else {
                    arrange(rounded, count, to);
                }
            } else {
                add_steps(row, first, count, step, x + first, 1.0f);
                arrange(x + first, count, to);
            }
        }
    }

  private:
    static int64_t num_steps(int64_t k, int64_t step) { return (k + step - 1) / step; }
    // Rounds a group and returns its scale. With POWERS that is a power of two, without the scale of the
    // row, in which `largest_of_row` is 127: the least that makes no value larger.
    template <typename T>
    static MM_INLINE float round(const T* x, int64_t count, float largest_of_row, int8_t* to) {
        if constexpr (!Format::POWERS) return quantize(x, count, to);
        const float ratio = largest_of_row / largest_of(x, count);
        const uint32_t exponent = (float_to_bits(ratio) >> 23) & 0xffu;
        const uint32_t power = std::min(exponent, 127u + MAX_POWER);
        round_times(x, count, inverse_of(largest_of_row) * bits_to_float(power << 23), to);
        return bits_to_float((254u - power) << 23);
    }
    // Sums `count` values from column `first` on by steps.
    template <typename V>
    void add_steps(int64_t row, int64_t first, int64_t count, int64_t step, const V* from,
                   float scale) {
        for (int64_t at = 0; at < count; at += step) {
            const int64_t own = std::min(step, count - at), index = (first + at) / step * num + row;
            const float sum = sum_of(from + at, own);
            less[index] = -sum * scale;
            if constexpr (Format::ZEROS_FIRST) starts[index] = -int32_t(sum);
            if constexpr (Format::ROUNDS) scales[index] = scale * (Format::FLOAT_BITS ? FLOAT_OF_0 : 1);
            if constexpr (Format::SECOND_EXCESS != 0) {
                starts[index] = Format::SECOND_EXCESS * sum_of_each<2>(from + at + 1, own - 1);
            }
        }
    }
    // Writes `count` values in the order of the format.
    template <typename V>
    static void arrange(const V* from, int64_t count, X* to) {
        for (int64_t unit = 0; unit < count; unit += VALUES) {
#pragma GCC unroll 8
            for (int64_t i = 0; i < VALUES; ++i) {
                const int64_t column = unit + Format::column(i);
                to[unit + i] = column < count ? as_x(from[column], int(i)) : X{};
            }
        }
    }
    static MM_INLINE float sum_of(const int8_t* values, int64_t num) {
        int32_t sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < num; ++i) sum += values[i];
        return float(sum);
    }
    template <typename V>
    static MM_INLINE float sum_of(const V* values, int64_t num) {
        float sum = 0.0f;
        for (int64_t i = 0; i < num; ++i) sum += flushed(values[i]);
        return sum;
    }
    template <typename V>
    static MM_INLINE float flushed(V value) {
        const float own = load(value);
        return Format::FLUSHES && std::fabs(own) < TINY ? 0.0f : own;
    }
    static MM_INLINE X as_x(int8_t value, int) {
        if constexpr (std::is_integral_v<X>) {
            return X(value);
        } else {
            return X{};
        }
    }
    template <typename V>
    static MM_INLINE X as_x(V value, int i) {
        if constexpr (std::is_integral_v<X>) {
            return X{};
        } else if constexpr (std::is_same_v<X, float>) {
            return flushed(value) * Format::factor(i);
        } else if constexpr (Format::FLUSHES) {
            return store<X>(flushed(value));
        } else {
            return convert<X>(value);
        }
    }
};

}  // namespace mm
