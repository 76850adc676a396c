// Rows of x as products with codes read them, see codes.h.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <vector>

#include "gemm.h"
#include "numbers.h"

namespace mm {

// The groups of a weight [n][k]. group: columns of a group, a multiple of 16, or k or more.
struct Groups {
    int64_t group;
    int64_t num;
    // Columns that one call of a tile adds, which have one scale of the weight and one of x: GROUP, or
    // the largest power of two that divides the columns of a group.
    int64_t step;
    bool has_offsets;

    Groups(int64_t k, int64_t size, bool offsets)
        : group(size),
          num((k + size - 1) / size),
          step(size >= k || size % GROUP == 0 ? GROUP : size % 64 == 0 ? 64 : size % 32 == 0 ? 32 : 16),
          has_offsets(offsets) {}
    int64_t words() const { return has_offsets ? 2 : 1; }  // rows of words of a group
    int64_t rows() const { return words() * num; }
};

// Rows of x in the order of the format: values [rows][width]; for each step of a row the sum of its
// values, and if they are rounded their scale and what their integer sums start with.
template <typename Format>
struct ArrangedRows {
    using X = typename Format::X;
    static constexpr int64_t VALUES = Format::PARTS * 4 / sizeof(X);  // of a unit
    int64_t width;
    int64_t steps;
    std::unique_ptr<X[]> values;
    std::vector<float> scales;
    std::vector<float> less;  // minus the sums
    std::vector<int32_t> starts;

    ArrangedRows(int64_t rows, int64_t k, int64_t step)
        : width(round_up(k, VALUES)),
          steps((k + step - 1) / step),
          values(new X[rows * width]),
          scales(Format::ROUNDS ? rows * steps : 0),
          less(rows * steps),
          starts(Format::SECOND_EXCESS != 0 || Format::ZEROS_FIRST ? rows * steps : 0) {}

    template <typename T>
    void fill(const T* x, int64_t row, int64_t k, int64_t step) {
        for (int64_t first = 0; first < k; first += GROUP) {
            const int64_t count = std::min(GROUP, k - first);
            X* to = values.get() + row * width + first;
            if constexpr (std::is_same_v<X, int8_t>) {
                static_assert(Format::column(1) == 1, "bytes are read in their order");
                const float scale = quantize(x + first, count, to);
                std::fill(to + count, to + round_up(count, VALUES), X{});
                add_steps(row, first, count, step, to, scale);
            } else if constexpr (Format::ROUNDS) {
                int8_t rounded[GROUP] = {};
                const float scale = quantize(x + first, count, rounded);
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
    // Sums `count` values from column `first` on by steps.
    template <typename V>
    void add_steps(int64_t row, int64_t first, int64_t count, int64_t step, const V* from,
                   float scale) {
        for (int64_t at = 0; at < count; at += step) {
            const int64_t num = std::min(step, count - at), index = row * steps + (first + at) / step;
            const float sum = sum_of(from + at, num);
            less[index] = -sum * scale;
            if constexpr (Format::ZEROS_FIRST) starts[index] = -int32_t(sum);
            if constexpr (Format::ROUNDS) scales[index] = scale;
            if constexpr (Format::SECOND_EXCESS != 0) {
                starts[index] = Format::SECOND_EXCESS * sum_of_each<2>(from + at + 1, num - 1);
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
        for (int64_t i = 0; i < num; ++i) sum += load(values[i]);
        return sum;
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
            return load(value) * Format::factor(i);
        } else {
            return convert<X>(value);
        }
    }
};

}  // namespace mm
