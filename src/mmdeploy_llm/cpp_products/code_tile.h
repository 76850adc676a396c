// A tile of a product with codes, and the scales that it multiplies by, see codes.h.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "code_formats.h"
#include "code_rows.h"
#include "lanes.h"
#include "numbers.h"
#include "tiles.h"

namespace mm {

// The sums of a tile over the units of a step. Those of 16 bits hold few products, and are added to
// others of 32 bits in memory meanwhile.
template <typename Format, int ROWS, int NUM>
struct TileSums {
    using Sums = typename Format::Sums;
    static constexpr bool ARE_SHORT = std::is_same_v<Sums, SignedHalves>;
    static constexpr int64_t LIMIT = ARE_SHORT ? SMALL_QUADRUPLES / Format::PARTS : 1;  // units
    Sums sums[ROWS][NUM] = {};
    Ints wide[ARE_SHORT ? ROWS : 1][NUM];

    // Whether sums of 16 bits do not hold the products of as many units.
    static constexpr bool spills(int64_t units) { return ARE_SHORT && units > LIMIT; }
    // starts: of the sums of the first row; the next row's is `steps` further. zeros: of the columns.
    MM_INLINE void start(const int32_t* starts, int64_t steps, const float* zeros) {
        each([&](int r, int b) {
            const Ints own = splat(starts + r * steps);
            sums[r][b] = Format::ZEROS_FIRST
                             ? add_pairs(Ints{}, load_lanes<Ints>(zeros + b * LANES), own)
                             : own;
        });
    }
    MM_INLINE void fill(const typename Format::X* x, int64_t x_stride, const void* codes,
                        int64_t units, Prefetch& prefetch) {
        int64_t done = 0;
        if constexpr (ARE_SHORT) {
            if (units > LIMIT) {
                add_units<Format, ROWS, NUM>(x, x_stride, codes, PANEL, LIMIT, prefetch, sums);
                each([&](int r, int b) { wide[r][b] = whole<false>(r, b), sums[r][b] = Sums{}; });
                done = LIMIT;
            }
            for (; units - done > LIMIT; done += LIMIT) {
                add_units<Format, ROWS, NUM>(x, x_stride, codes, PANEL, done + LIMIT, prefetch, sums,
                                             done);
                each([&](int r, int b) { wide[r][b] = whole<true>(r, b), sums[r][b] = Sums{}; });
            }
        }
        add_units<Format, ROWS, NUM>(x, x_stride, codes, PANEL, units, prefetch, sums, done);
    }
    // Adds the sums to out [ROWS][PANEL], times the scales of x and of the columns, less the offsets:
    // out += scale * x_scale * sum - offset * x_sum. less: -x_sum.
    template <bool SPILLED, bool HAS_OFFSETS>
    MM_INLINE void add_to(float* out, const float* x_scales, const float* less, int64_t steps,
                          const float* scales) const {
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
            const Floats x_sum = all_lanes(less[r * steps]);
            const Floats x_scale = all_lanes(Format::ROUNDS ? x_scales[r * steps] : 1.0f);
#pragma GCC unroll 8
            for (int b = 0; b < NUM; ++b) {
                float* to = out + r * PANEL + b * LANES;
                const float* own = scales + b * LANES;
                Floats sum = at<SPILLED>(r, b);
                if (Format::ROUNDS) sum = sum * x_scale;
                Floats base = load_lanes<Floats>(to);
                if (HAS_OFFSETS) base = multiply_add_at(x_sum, own + PANEL, base);
                store_lanes(to, multiply_add_at(sum, own, base));
            }
        }
    }

  private:
    template <bool SPILLED>
    MM_INLINE Floats at(int r, int b) const {
        if constexpr (std::is_same_v<Sums, Floats>) {
            return sums[r][b];
        } else {
            return to_floats(whole<SPILLED>(r, b));
        }
    }
    template <bool SPILLED>
    MM_INLINE Ints whole(int r, int b) const {
        const Ints own = as_ints(sums[r][b]);
        return SPILLED ? wide[r][b] + own : own;
    }
    template <typename Body>
    static MM_INLINE void each(const Body& body) {
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
            for (int b = 0; b < NUM; ++b) body(r, b);
        }
    }
};

// Adds to out [ROWS][NUM registers] one step, number `step` of rows from `row` on: the products with
// `units` units of codes, times the scales of x and of the weights, less the offsets. scales: of the
// columns, and PANEL further their offsets, or zeros as integers.
template <typename Format, typename Own, int ROWS, int NUM>
__attribute__((noinline)) void code_tile(const ArrangedRows<Format>& rows, int64_t row, int64_t step,
                                         int64_t column, const void* codes, int64_t units,
                                         const float* scales, bool has_offsets, Prefetch& prefetch,
                                         float* out) {
    using Tile = TileSums<Own, ROWS, NUM>;
    const int64_t steps = rows.steps, first = row * steps + step;
    Tile sums;
    if constexpr (Format::SECOND_EXCESS != 0) sums.start(rows.starts.data() + first, steps, nullptr);
    if constexpr (Format::ZEROS_FIRST) {
        if (!has_offsets) sums.start(rows.starts.data() + first, steps, scales + PANEL);
    }
    sums.fill(rows.values.get() + row * rows.width + column, rows.width, codes, units, prefetch);
    const float *x_scales = rows.scales.data() + first, *less = rows.less.data() + first;
    if constexpr (Format::ZEROS_FIRST) {
        if (!has_offsets) return sums.template add_to<false, false>(out, x_scales, less, steps, scales);
    }
    if (Tile::spills(units)) {
        sums.template add_to<Tile::ARE_SHORT, true>(out, x_scales, less, steps, scales);
    } else {
        sums.template add_to<false, true>(out, x_scales, less, steps, scales);
    }
}

// What the operands of a format are smaller by than the codes.
template <typename Format>
constexpr int32_t LESS = 0;
#ifdef MM_HAS_S8_DOT
template <>
constexpr int32_t LESS<S8Codes<8>> = HAS_SIGNED_WEIGHTS ? 128 : 0;
#endif

// Reads the scales and offsets of a group of a panel, [2][PANEL], for codes from which LESS is
// subtracted; zeros as integers in place of offsets that come from them where ZEROS_FIRST.
template <int32_t LESS, bool ZEROS_FIRST>
MM_INLINE void read_scales(const uint32_t* words, bool has_offsets, float* scales) {
    float* offsets = scales + PANEL;
    if (has_offsets) {
        std::memcpy(scales, words, 2 * PANEL * sizeof(float));
        if constexpr (LESS != 0) {
#pragma omp simd
            for (int64_t c = 0; c < PANEL; ++c) offsets[c] -= scales[c] * LESS;
        }
        return;
    }
#pragma omp simd
    for (int64_t c = 0; c < PANEL; ++c) {
        scales[c] = bits_to_float(words[c] & 0xffffff00u);
        const int32_t zero = int32_t(words[c] & 0xffu) - LESS;
        offsets[c] = ZEROS_FIRST ? bits_to_float(uint32_t(zero)) : scales[c] * float(zero);
    }
}

}  // namespace mm
