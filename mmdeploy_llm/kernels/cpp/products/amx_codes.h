// Products of codes with rows of x that are rounded to int8, in the tiles of AMX: see codes.h and amx.h.
// The bits are those of CodeTile, which multiplies few rows.
#pragma once

#include <algorithm>
#include <cstdint>

#include "code_formats.h"
#include "code_rows.h"
#include "code_tile.h"
#include "gemm.h"

#ifdef MM_HAS_AMX

namespace mm {

// x, whose scales are no bits of floats: sums in tiles are integers.
template <typename Format>
struct OfTiles : Format {
    static constexpr bool FLOAT_BITS = false;
};

// Rows of x in tiles, one step of a row in each line.
template <typename Format, typename T>
struct TiledSteps {
    ArrangedRows<OfTiles<Format>> arranged;
    TiledRows lines;

    TiledSteps(const T* x, int64_t x_stride, int64_t rows, int64_t k, int64_t step, int num_threads)
        : arranged(round_up(rows, TILE_ROWS_OF_X), k, step),
          lines(rows, (k + step - 1) / step * TILE_UNITS) {
        parallel_parts(rows, num_threads, [&](int64_t begin, int64_t end) {
            for (int64_t row = begin; row < end; ++row) {
                arranged.fill(x + row * x_stride, row, k, step);
                lines.copy(row, arranged.values.get() + row * arranged.width, arranged.width, step);
            }
        });
        lines.fill_up();
    }
};

// Adds to sums [16][16 of 64 columns] for each step, or begins them: the products with its operands,
// times the scales of x and of the weights, less the offsets. The units of a step lie one after the other
// in `steps.codes`, where those of 16 can be read.
template <bool HAS_OFFSETS>
inline void code_tiles(CodeSteps<int8_t> steps, Prefetch& prefetch, bool adds) {
    alignas(64) int32_t products[2][TILE_ROWS_OF_X * 16];
    const char* x = reinterpret_cast<const char*>(steps.x);
    const float *x_scales = steps.x_scales + steps.place, *less = steps.less + steps.place;
    const int32_t* starts = steps.starts + steps.place;
    asm volatile("" ::: "memory");  // operands and x are stored before tiles are loaded
    Floats all[TILE_ROWS_OF_X];
    unrolled<TILE_ROWS_OF_X>([&](auto r) MM_ALWAYS {
        all[r] = adds ? load_lanes<Floats>(steps.out + r * PANEL) : Floats{};
    });
    const auto start = [&](int64_t step) {
        _tile_zero(0);
        _tile_loadd(4, x, TILE_ROW_BYTES);
        _tile_loadd(6, steps.codes, COLUMN_BYTES);
        _tile_dpbsud(0, 4, 6);
        _tile_stored(0, products[step % 2], TILE_ROW_BYTES);
        asm volatile("" ::: "memory");
        x += TILE_BYTES;
        steps.codes += steps.step_units * COLUMN_BYTES;
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
            Ints sum = load_lanes<Ints>(own + r * 16);
            if (!HAS_OFFSETS) sum = add_pairs_at_once<true>(sum, second, splat(starts + r));
            const Floats value = to_floats(sum) * (Floats)splat(x_scales + r);
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
    constexpr int64_t VALUES = ArrangedRows<Format>::VALUES;
    const int64_t tiles = (rows + TILE_ROWS_OF_X - 1) / TILE_ROWS_OF_X;
    const int64_t num_steps = (chunk.units * VALUES + groups.step - 1) / groups.step;
    const int64_t step = chunk.unit * VALUES / groups.step;
    CodeSteps<int8_t> steps{};
    steps.x_scales = x.arranged.scales.data();
    steps.less = x.arranged.less.data();
    steps.starts = x.arranged.starts.data();
    steps.num_rows = x.arranged.num;
    steps.units = chunk.units * Format::PARTS;
    steps.step_units = groups.step / 4;
    steps.group_steps = (groups.group + groups.step - 1) / groups.step;
    steps.group_left = steps.group_steps - step % steps.group_steps;
    prefetch = spread(prefetch, chunk.units, num_steps * tiles * (PANEL / 16));
    for (int64_t column = 0; column < PANEL; column += 16) {
        for (int64_t first = 0; first < rows; first += TILE_ROWS_OF_X) {
            steps.x = reinterpret_cast<const int8_t*>(x.lines.at(row + first, step));
            steps.place = step * x.arranged.num + row + first;
            steps.codes = chunk.codes + column * 4;
            steps.scales = chunk.scales + column;
            steps.out = sums + first * PANEL + column;
            groups.has_offsets ? code_tiles<true>(steps, prefetch, adds)
                               : code_tiles<false>(steps, prefetch, adds);
        }
    }
}

}  // namespace mm

#endif
