// Products of small tiles, the inner loops of attention.
//
// The right operand lies in units of four bytes, 1 float or 2 bf16, as those of a panel in gemm.h:
//     left  [rows][depth]                        in the type that the level multiplies, see tiles.h
//     right [depth / unit][columns][unit]        columns a multiple of 16
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "numbers.h"
#include "tiles.h"

namespace mm {

constexpr int64_t BLOCK = 16;  // numbers of columns are multiples of it

// How keys and values of type T are multiplied.
template <typename T>
using FormatOf = std::conditional_t<std::is_same_v<T, float>, FloatFormat, Bf16Format>;
// The type of the left operand.
template <typename T>
using Left = typename FormatOf<T>::X;
template <typename T>
constexpr int64_t UNIT_VALUES = 4 / sizeof(T);

// Returns the size of one of `parts` nearly equal parts; the first ones are larger by one.
MM_INLINE int64_t even_part(int64_t items, int64_t parts, int64_t part) {
    return items / parts + (part < items % parts ? 1 : 0);
}

// Calls run with the number of rows, STRIP at most, as a compile-time constant.
template <typename Run>
MM_INLINE void with_rows(int64_t rows, const Run& run) {
    switch (rows) {
        case 1: return run(std::integral_constant<int, 1>());
        case 2: return run(std::integral_constant<int, 2>());
        case 3: return run(std::integral_constant<int, 3>());
        case 4: return run(std::integral_constant<int, 4>());
        case 5: return run(std::integral_constant<int, 5>());
        default: return run(std::integral_constant<int, STRIP>());
    }
}

// Computes 1 to STRIP rows: out = left * right, or out += left * right. Columns are split into even
// groups, such as 80 into 48 + 32 where a tile has up to 64: each then has enough independent sums
// to hide the latency of a product.
template <typename T>
inline void dot(const Left<T>* left, int64_t left_stride, const T* right, int64_t columns,
                int64_t units, float* out, int64_t out_stride, int64_t rows, bool adds) {
    with_rows(rows, [&](auto num) {
        constexpr int LARGEST = tile_registers(num);
        constexpr int STEP = std::min<int>(LARGEST, BLOCK / LANES);
        constexpr int64_t STEPS = LARGEST / STEP;  // of the largest tile
        const int64_t steps = columns / (STEP * LANES), groups = (steps + STEPS - 1) / STEPS;
        Prefetch none{nullptr, 0};
        int64_t first = 0;
        for (int64_t group = 0; group < groups; ++group) {
            const int64_t count = even_part(steps, groups, group);
            const auto tile = [&](auto steps_of_tile) {
                float_tile<FormatOf<T>, num, std::min<int>(STEP * steps_of_tile, LARGEST)>(
                    left, left_stride, right + first * UNIT_VALUES<T>, columns, units, none,
                    out + first, out_stride, adds);
            };
            switch (count) {
                case 1: tile(std::integral_constant<int, 1>()); break;
                case 2: tile(std::integral_constant<int, 2>()); break;
                case 3: tile(std::integral_constant<int, 3>()); break;
                default: tile(std::integral_constant<int, 4>());
            }
            first += count * STEP * LANES;
        }
    });
}

}  // namespace mm
