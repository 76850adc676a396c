// Codes times x of bf16 in the tiles of AMX, see codes.h and amx.h. A chunk of codes becomes pairs of bf16
// once for all rows, in the order of a panel of bf16, and steps of one scale are multiplied apart:
//
//     a step, 32 or 64 columns:  products [16 rows][16 columns] in a tile
//     sums += scale * products - offset * sum of x
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "amx.h"
#include "code_formats.h"
#include "code_rows.h"
#include "code_scales.h"
#include "gemm.h"

namespace mm {

// Whether codes of a format are multiplied in tiles. One step of a tile then has one scale: no groups of
// 16 columns.
template <typename Format>
bool in_tiles([[maybe_unused]] const Groups& groups) {
#ifdef MM_HAS_AMX
    return std::is_same_v<typename Format::X, bf16> && groups.step >= 2 * TILE_UNITS;
#else
    return false;
#endif
}

#ifdef MM_HAS_AMX

// What the steps of a chunk are added with. Pointers are to what belongs to the first step.
struct StepsInTiles {
    const float* less;  // minus the sums of x, of 16 rows; between steps `num_rows`
    int64_t num_rows;
    const float* scales;  // of 16 columns; PANEL further the offsets; between groups 2 PANEL
    int64_t group_left, group_steps;  // steps of the first group, and of others

    MM_INLINE void next() {
        less += num_rows;
        if (--group_left == 0) {
            scales += 2 * PANEL;
            group_left = group_steps;
        }
    }
};

// sums [16 rows][16 of 64 columns] = those of `units` units of pairs, or plus that, step by step of
// `step_units`. x: the first units; panel: the first of the columns.
inline void codes_in_tiles(const char* x, const char* panel, int64_t units, int64_t step_units,
                           StepsInTiles steps, float* sums, bool adds) {
    alignas(64) float products[2][TILE_ROWS_OF_X * 16];
    Floats all[TILE_ROWS_OF_X];
#pragma GCC unroll 16
    for (int r = 0; r < TILE_ROWS_OF_X; ++r) {
        all[r] = adds ? load_lanes<Floats>(sums + r * COLUMNS) : Floats{};
    }
    const auto start = [&](int64_t unit) {
        _tile_zero(0);
        const int64_t end = std::min(unit + step_units, units);
        for (int64_t own = unit; own < end; own += TILE_UNITS) {
            _tile_loadd(4, x + own / TILE_UNITS * TILE_BYTES, TILE_ROW_BYTES);
            _tile_loadd(6, panel + own * COLUMN_BYTES, COLUMN_BYTES);
            _tile_dpbf16ps(0, 4, 6);
        }
        _tile_stored(0, products[unit / step_units % 2], TILE_ROW_BYTES);
        asm volatile("" ::: "memory");
    };
    start(0);
    for (int64_t unit = 0; unit < units; unit += step_units) {
        // Is computed while the products of this step are added.
        if (unit + step_units < units) start(unit + step_units);
        const float* own = products[unit / step_units % 2];
        const Floats scale = load_lanes<Floats>(steps.scales);
        const Floats offset = load_lanes<Floats>(steps.scales + PANEL);
#pragma GCC unroll 16
        for (int r = 0; r < TILE_ROWS_OF_X; ++r) {
            all[r] = multiply_add((Floats)splat(steps.less + r), offset, all[r]);
            all[r] = multiply_add(load_lanes<Floats>(own + r * 16), scale, all[r]);
        }
        steps.next();
    }
#pragma GCC unroll 16
    for (int r = 0; r < TILE_ROWS_OF_X; ++r) store_lanes(sums + r * COLUMNS, all[r]);
}

// The same for `rows` rows of one tile and all 64 columns: few rows wait for products, of which four
// tiles are computed at the same time.
inline void codes_in_one_tile(const char* x, const char* panel, int64_t units, int64_t step_units,
                              StepsInTiles steps, int64_t rows, float* sums, bool adds) {
    alignas(64) float products[2][TILE_ROWS_OF_X * COLUMNS];
    const auto start = [&](int64_t unit) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        const int64_t end = std::min(unit + step_units, units);
        for (int64_t own = unit; own < end; own += TILE_UNITS) {
            const char* weights = panel + own * COLUMN_BYTES;
            _tile_loadd(4, x + own / TILE_UNITS * TILE_BYTES, TILE_ROW_BYTES);
            _tile_loadd(6, weights, COLUMN_BYTES);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, weights + 64, COLUMN_BYTES);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(6, weights + 128, COLUMN_BYTES);
            _tile_dpbf16ps(2, 4, 6);
            _tile_loadd(7, weights + 192, COLUMN_BYTES);
            _tile_dpbf16ps(3, 4, 7);
        }
        float* to = products[unit / step_units % 2];
        _tile_stored(0, to, COLUMN_BYTES);
        _tile_stored(1, to + 16, COLUMN_BYTES);
        _tile_stored(2, to + 32, COLUMN_BYTES);
        _tile_stored(3, to + 48, COLUMN_BYTES);
        asm volatile("" ::: "memory");
    };
    if (!adds) std::fill(sums, sums + rows * COLUMNS, 0.0f);
    start(0);
    for (int64_t unit = 0; unit < units; unit += step_units) {
        if (unit + step_units < units) start(unit + step_units);
        const float* own = products[unit / step_units % 2];
        for (int64_t r = 0; r < rows; ++r) {
            const Floats less = (Floats)splat(steps.less + r);
#pragma GCC unroll 4
            for (int64_t c = 0; c < COLUMNS; c += LANES) {
                float* to = sums + r * COLUMNS + c;
                Floats sum = multiply_add(less, load_lanes<Floats>(steps.scales + PANEL + c),
                                          load_lanes<Floats>(to));
                sum = multiply_add(load_lanes<Floats>(own + r * COLUMNS + c),
                                   load_lanes<Floats>(steps.scales + c), sum);
                store_lanes(to, sum);
            }
        }
        steps.next();
    }
}

#endif

}  // namespace mm
