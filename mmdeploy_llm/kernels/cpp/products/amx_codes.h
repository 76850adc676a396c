// Products of codes in the tiles of AMX, with rows of x that are rounded to int8 or of bf16: see codes.h
// and amx.h. The bits are those of CodeTile, which multiplies few rows.
#pragma once

#include <algorithm>
#include <cstdint>

#include "code_formats.h"
#include "code_rows.h"
#include "code_tile.h"
#include "gemm.h"

#ifdef MM_HAS_AMX

namespace mm {

// The format of codes in tiles.
template <typename Format>
struct TiledFormat {
    using Type = Format;
};
template <int BITS>
struct TiledFormat<HalvedCodes<BITS>> {
    using Type = PairedCodes<BITS>;
};
template <>
struct TiledFormat<HalvedFloat8s> {
    using Type = PairedFloat8s;
};

// x, whose scales are no bits of floats: sums in tiles are integers.
template <typename Format>
struct OfTiles : Format {
    static constexpr bool FLOAT_BITS = false, FLUSHES = !Format::ROUNDS;
};

// Rows of x in tiles: each step of a row in lines of its own, two of them for 64 values of bf16.
template <typename Format, typename T>
struct TiledSteps {
    using Arranged = ArrangedRows<OfTiles<Format>>;
    static constexpr int64_t VALUE_BYTES = sizeof(typename Format::X);
    Arranged arranged;
    int64_t line_bytes, step_lines;
    TiledRows lines;

    TiledSteps(const T* x, int64_t x_stride, int64_t rows, int64_t k, int64_t step, int num_threads)
        : arranged(round_up(rows, TILE_ROWS_OF_X), k, step),
          line_bytes(std::min(step * VALUE_BYTES, TILE_ROW_BYTES)),
          step_lines(step * VALUE_BYTES / line_bytes),
          lines(rows, (row_bytes() + line_bytes - 1) / line_bytes * TILE_UNITS) {
        parallel_parts(rows, num_threads, [&](int64_t begin, int64_t end) {
            for (int64_t row = begin; row < end; ++row) {
                arranged.fill(x + row * x_stride, row, k, step);
                lines.copy(row, arranged.values.get() + row * arranged.width, row_bytes(), line_bytes);
            }
        });
        lines.fill_up();
    }
    int64_t row_bytes() const { return arranged.width * VALUE_BYTES; }
};

// Computes 16 x 16 products of one step. lines: of x, which a step has; units: of the codes that are left.
template <bool ROUNDS>
MM_INLINE void multiply_step(const char* x, const char* codes, int64_t lines, int64_t units, void* to) {
    _tile_zero(0);
    if constexpr (ROUNDS) {
        _tile_loadd(4, x, TILE_ROW_BYTES);
        _tile_loadd(6, codes, COLUMN_BYTES);
        _tile_dpbsud(0, 4, 6);
    } else {
        for (int64_t line = 0; line < lines && line * TILE_UNITS < units; ++line) {
            _tile_loadd(4, x + line * TILE_BYTES, TILE_ROW_BYTES);
            _tile_loadd(6, codes + line * TILE_UNITS * COLUMN_BYTES, COLUMN_BYTES);
            _tile_dpbf16ps(0, 4, 6);
        }
    }
    _tile_stored(0, to, TILE_ROW_BYTES);
    asm volatile("" ::: "memory");
}

// Adds to sums [16][16 of 64 columns] for each step, or begins them: the products with its operands,
// times the scales of x and of the weights, less the offsets. The units of a step lie one after the other
// in `steps.codes`, where those of 16 can be read. lines: of x for a step.
template <bool ROUNDS, bool HAS_OFFSETS, typename X>
inline void code_tiles(CodeSteps<X> steps, int64_t lines, Prefetch& prefetch, bool adds) {
    using Sums = std::conditional_t<ROUNDS, Ints, Floats>;
    alignas(64) int32_t products[2][TILE_ROWS_OF_X * 16];
    const char* x = reinterpret_cast<const char*>(steps.x);
    const float *x_scales = steps.x_scales + steps.place, *less = steps.less + steps.place;
    const int32_t* starts = steps.starts + steps.place;
    asm volatile("" ::: "memory");  // operands and x are stored before tiles are loaded
    Floats all[TILE_ROWS_OF_X];
    unrolled<TILE_ROWS_OF_X>([&](auto r) MM_ALWAYS {
        all[r] = adds ? load_lanes<Floats>(steps.out + r * PANEL) : Floats{};
    });
    int64_t units = steps.units;
    const auto start = [&](int64_t step) {
        multiply_step<ROUNDS>(x, steps.codes, lines, units, products[step % 2]);
        x += lines * TILE_BYTES;
        steps.codes += steps.step_units * COLUMN_BYTES;
        units -= steps.step_units;
    };
    const int64_t num = (steps.units + steps.step_units - 1) / steps.step_units;
    start(0);
    for (int64_t step = 0; step < num; ++step) {
        prefetch.next();
        if (step + 1 < num) start(step + 1);  // is computed while that of `step` is added
        const int32_t* own = products[step % 2];
        const Floats scales = load_lanes<Floats>(steps.scales);
        const Ints second = load_lanes<Ints>(steps.scales + PANEL);
        unrolled<TILE_ROWS_OF_X>([&](auto r) MM_ALWAYS {
            const Sums sum = load_lanes<Sums>(own + r * 16);
            Floats value;
            if constexpr (ROUNDS) {
                Ints whole = sum;
                if (!HAS_OFFSETS) whole = add_pairs_at_once<true>(whole, second, splat(starts + r));
                value = to_floats(whole) * (Floats)splat(x_scales + r);
            } else {
                value = sum;
            }
            if (HAS_OFFSETS) {
                all[r] = multiply_add((Floats)splat(less + r), (Floats)second, all[r]);
            }
            all[r] = multiply_add(value, scales, all[r]);
        });
        x_scales += steps.num_rows;
        less += steps.num_rows;
        starts += steps.num_rows;
        if (--steps.group_left == 0) {
            steps.scales += 2 * PANEL;
            steps.group_left = steps.group_steps;
        }
    }
    unrolled<TILE_ROWS_OF_X>([&](auto r) MM_ALWAYS { store_lanes(steps.out + r * PANEL, all[r]); });
}

// sums [rows][64] = rows from `row` on, over a chunk whose codes are operands, or plus that.
template <typename Format, typename T>
void code_tiled_strip(int64_t rows, const TiledSteps<Format, T>& x, int64_t row,
                      const ChunkOfCodes& chunk, const Groups& groups, Prefetch prefetch, float* sums,
                      bool adds) {
    using X = typename Format::X;
    constexpr int64_t VALUES = ArrangedRows<Format>::VALUES;
    const int64_t tiles = (rows + TILE_ROWS_OF_X - 1) / TILE_ROWS_OF_X;
    const int64_t num_steps = (chunk.units * VALUES + groups.step - 1) / groups.step;
    const int64_t step = chunk.unit * VALUES / groups.step;
    CodeSteps<X> steps{};
    steps.x_scales = x.arranged.scales.data();
    steps.less = x.arranged.less.data();
    steps.starts = x.arranged.starts.data();
    steps.num_rows = x.arranged.num;
    steps.units = chunk.units * Format::PARTS;
    steps.step_units = groups.step * int64_t(sizeof(X)) / 4;
    steps.group_steps = (groups.group + groups.step - 1) / groups.step;
    steps.group_left = steps.group_steps - step % steps.group_steps;
    prefetch = spread(prefetch, chunk.units, num_steps * tiles * (PANEL / 16));
    for (int64_t column = 0; column < PANEL; column += 16) {
        for (int64_t first = 0; first < rows; first += TILE_ROWS_OF_X) {
            steps.x = reinterpret_cast<const X*>(x.lines.at(row + first, step * x.step_lines));
            steps.place = step * x.arranged.num + row + first;
            steps.codes = chunk.codes + column * 4;
            steps.scales = chunk.scales + column;
            steps.out = sums + first * PANEL + column;
            if (Format::ZEROS_FIRST && !groups.has_offsets) {
                code_tiles<Format::ROUNDS, false>(steps, x.step_lines, prefetch, adds);
            } else {
                code_tiles<Format::ROUNDS, true>(steps, x.step_lines, prefetch, adds);
            }
        }
    }
}

}  // namespace mm

#endif
