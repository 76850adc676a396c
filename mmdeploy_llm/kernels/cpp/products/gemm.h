// Computes out = x w^T + bias with weights that are packed once: [n / 64][k / unit][64][unit],
// where a unit is four bytes, 1 float, 2 bf16 or 4 int8. Any number of rows runs the same code, and
// every level too: they differ in their tiles, see tiles.h.
//
//     for blocks of rows (their x stays in the cache)        both loops
//       for panels of 64 columns                             in parallel
//         for chunks of k (their weights stay in the cache)
//           for strips of 6 rows:  tiles of sums in registers         32 rows in tiles of AMX,
//                                                                     and a task has four panels
//
// While the strips of a chunk are computed, the next chunk is prefetched from memory: with few rows
// a product takes the longer of the two times, not their sum.
//
// int8: weights have a scale for each column and are stored as w + 128, the unsigned operand of
// vpdpbusd (without it every second one, see WideS8Format; with NEON as w). x is the signed operand
// and has a scale for every 64 values of a row, so that one large value costs its neighbours little
// precision. Whole groups of 64 are rotated before they are rounded, those of the weights too, which
// leaves the sum as it is, see hadamard.h:
//     sum a (w + 128) = sum a w + 128 sum a            the last term is subtracted
// The range of a column's weights lies around a shift of its own, which the sum of x multiplies.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

#include "amx.h"
#include "dot.h"
#include "hadamard.h"
#include "numbers.h"
#include "pack.h"
#include "parallel.h"
#include "tiles.h"

namespace mm {

constexpr int64_t PANEL = 64;
constexpr int64_t ROW_BLOCK = 192;
// Largest number of units of a chunk: wide x takes twice the memory or more, and such levels have
// smaller caches.
constexpr int64_t PART_UNITS = MM_VECTOR_BYTES == 64 ? 512 : 256;
constexpr int64_t GROUP = ROTATED_VALUES;  // values of x with one scale
constexpr int64_t GROUP_UNITS = GROUP / 4;
constexpr int64_t UNIT_BYTES = PANEL * 4;
constexpr int64_t MOST_BESIDE = 16384;  // bytes
static_assert(PART_UNITS % GROUP_UNITS == 0, "a part has whole groups");

// How weights are read: in chunks of at most `units` units. A product of one strip of rows waits for
// memory; its chunks have at most `strip_units`, and after every `strip_every` of them the lines of as
// many units of the next chunk are prefetched.
struct Reading {
    int64_t units = PART_UNITS;
    int64_t strip_units = MM_VECTOR_BYTES == 64 ? 512 : 32;
    int64_t strip_every = MM_VECTOR_BYTES == 64 ? PREFETCH_UNITS : 1;
    // The scales of a panel's groups; one strip prefetches those of the next panel, or the first of them
    // if there are many, which would displace the codes from the cache.
    const char* beside = nullptr;
    int64_t beside_bytes = 0;
    int64_t unit_bytes = UNIT_BYTES;  // in memory, of a unit of a panel

    // Returns the units of a chunk, so that all are nearly equal and hold whole groups. is_strip:
    // whether all rows are one strip.
    int64_t chunk(int64_t all, bool is_strip) const {
        const int64_t largest = is_strip ? strip_units : units;
        const int64_t num = (all + largest - 1) / largest;
        return round_up((all + num - 1) / num, GROUP_UNITS);
    }
    void prefetch_beside(int64_t panel) const {
        const char* own = beside + panel * beside_bytes;
        const int64_t num = std::min(beside_bytes, MOST_BESIDE);
        for (int64_t i = 0; i < num; i += 64) __builtin_prefetch(own + i, 0, 2);
    }
};

// How products are cut: a task has ROWS rows and PANELS panels at most, and its rows are strips of MOST
// at most, which begin at multiples of ALIGNED. A thread has a Setup while it computes one.
struct Strips {
    static constexpr int64_t MOST = STRIP, ALIGNED = 1, ROWS = ROW_BLOCK, PANELS = 1;
    struct Setup {};
};

#ifdef MM_HAS_AMX
// Tiles are multiplied faster than memory is read: a chunk of weights is read for more rows, and one of
// x for several panels.
struct TileStrips {
    static constexpr int64_t MOST = 2 * TILE_ROWS_OF_X, ALIGNED = TILE_ROWS_OF_X;
    static constexpr int64_t ROWS = 2 * ROW_BLOCK, PANELS = 4;
    using Setup = TileSetup;
};
static_assert(ROW_BLOCK % TILE_ROWS_OF_X == 0 && PANEL == COLUMNS, "tiles fit into sums");
static_assert(GROUP_UNITS == TILE_UNITS, "chunks hold whole tiles");
#endif

// Calls tile(first column) for the tiles of a panel, each REGISTERS wide. Each prefetches its share of
// `prefetch`.
template <int REGISTERS, typename Tile>
inline void for_tiles(Prefetch& prefetch, const Tile& tile) {
    constexpr int64_t STEP = REGISTERS * LANES, NUM = PANEL / STEP;
    prefetch.num = (prefetch.num + NUM - 1) / NUM;
    for (int64_t column = 0; column < PANEL; column += STEP) tile(column);
}

// sums [ROWS][64] = rows of x times a chunk of a panel, or plus that.
template <typename Format, int ROWS>
void float_strip(const typename Format::X* x, int64_t x_stride, const char* panel, int64_t units,
                 Prefetch prefetch, float* sums, bool adds) {
    for_tiles<tile_registers(ROWS)>(prefetch, [&](int64_t column) {
        float_tile<Format, ROWS, tile_registers(ROWS)>(x, x_stride, panel + column * 4, PANEL,
                                                       units, prefetch, sums + column, PANEL, adds);
    });
}

// Rows of x quantized to int8: the values of the format, and for each group their scale and what its
// integer sums start with, minus 128 times the values whose weights are stored as w + 128; the total of
// each row, scales included.
struct QuantizedRows {
    using Value = S8Format::X;
    int64_t groups;
#ifdef MM_HAS_AMX
    TiledRows values;
    static constexpr int64_t LINES = TILE_ROWS_OF_X;  // rows whose groups lie side by side
#else
    std::vector<Value> values;
    static constexpr int64_t LINES = 1;
#endif
    int64_t width;
    std::vector<float> scales;
    std::vector<int32_t> starts;
    std::vector<float> totals;

#ifdef MM_HAS_AMX
    QuantizedRows(int64_t rows, int64_t k)
        : groups((k + GROUP - 1) / GROUP),
          values(rows, groups * GROUP_UNITS),
          width(TILE_ROW_BYTES),
          scales(round_up(rows, LINES) * groups),
          starts(scales.size()),
          totals(rows) {
        values.fill_up();
    }
    Value* at(int64_t row, int64_t group) {
        return reinterpret_cast<Value*>(values.at(row, group));
    }
#else
    QuantizedRows(int64_t rows, int64_t k)
        : groups((k + GROUP - 1) / GROUP),
          values(rows * round_up(k, 4)),
          width(round_up(k, 4)),
          scales(rows * groups),
          starts(scales.size()),
          totals(rows) {}
    Value* at(int64_t row, int64_t group) { return values.data() + row * width + group * GROUP; }
#endif
    // Where the scale and the start of a group are. Those of the next row are `row_step` further.
    int64_t place(int64_t row, int64_t group) const {
        return (row / LINES * groups + group) * LINES + row % LINES;
    }
    int64_t row_step() const { return LINES == 1 ? groups : 1; }
};

// sums [ROWS][64] = rows from `row` on, over units `unit` .. `unit + units`, or plus that, in whole
// groups except at the end.
template <int ROWS>
void s8_strip(QuantizedRows& x, int64_t row, int64_t unit, const char* panel, int64_t units,
              Prefetch prefetch, float* sums, bool adds) {
    for_tiles<s8_tile_registers(ROWS)>(prefetch, [&](int64_t column) {
        for (int64_t done = 0; done < units; done += GROUP_UNITS) {
            const int64_t count = std::min(GROUP_UNITS, units - done);
            const int64_t group = (unit + done) / GROUP_UNITS, place = x.place(row, group);
            s8_tile<ROWS, s8_tile_registers(ROWS)>(
                x.at(row, group), x.width, panel + done * UNIT_BYTES + column * 4, PANEL, count,
                x.starts.data() + place, x.scales.data() + place, x.row_step(), prefetch,
                sums + column, PANEL, adds || done > 0);
        }
    });
}

#ifdef MM_HAS_AMX

// The same in tiles, with the same bits: for more rows than one strip of registers.
inline void s8_tiled_strip(int64_t rows, QuantizedRows& x, int64_t row, int64_t unit,
                           const char* panel, int64_t units, Prefetch prefetch, float* sums,
                           bool adds) {
    const LastUnits last(panel, units);
    const int64_t steps = units / TILE_UNITS, tiles = (rows + TILE_ROWS_OF_X - 1) / TILE_ROWS_OF_X;
    const int64_t all_steps = (units + TILE_UNITS - 1) / TILE_UNITS * tiles * (COLUMNS / 16);
    prefetch = spread(prefetch, units, all_steps);
    for (int64_t column = 0; column < COLUMNS; column += 16) {
        for (int64_t first = 0; first < rows; first += TILE_ROWS_OF_X) {
            const auto add = [&](int64_t group, const char* weights, int64_t num, bool adds_own) {
                const int64_t place = x.place(row + first, group);
                s8_tiles(x.values.at(row + first, group), weights + column * 4, num,
                         x.scales.data() + place, x.starts.data() + place, prefetch,
                         sums + first * PANEL + column, adds_own);
            };
            const int64_t group = unit / GROUP_UNITS;
            if (steps > 0) add(group, panel, steps, adds);
            if (last.exist()) add(group + steps, last.at(), 1, adds || steps > 0);
        }
    }
}

#endif

// The weights of the product that comes next; null when it is not known.
struct Next {
    const char* weights = nullptr;
    int64_t panel_bytes = 0;
};

// Returns what to prefetch of the `next_bytes` of the next chunk while one of `num_strips` strips
// computes `units` units: some lines for every `every` of them.
inline Prefetch prefetch_of(const char* next, int64_t next_bytes, int64_t strip, int64_t num_strips,
                      int64_t units, int64_t every) {
    if (next == nullptr) return {nullptr, 0};
    const int64_t lines = next_bytes / 64, times = (units + every - 1) / every;
    const int64_t num = (lines + num_strips * times - 1) / (num_strips * times);
    const int64_t done = strip * num * times;
    return {next + done * 64, done < lines ? num : 0, every};
}

// Returns the memory for the sums of a task, one for all products of a thread.
inline float* sums_of_thread() {
#ifdef MM_HAS_AMX
    using Largest = TileStrips;
#else
    using Largest = Strips;
#endif
    alignas(64) static thread_local float sums[Largest::PANELS * Largest::ROWS * PANEL];
    return sums;
}

// Multiplies all rows by all panels of `packed`.
// strip(rows, row, unit, weights of the chunk, units, prefetch, sums, adds): computes the sums
// [rows][64], or adds to them. With Strips, rows are a constant.
// write(row, first column, sums of the row, number of columns): stores them.
template <typename Cut = Strips, typename Strip, typename Write>
void multiply(const void* packed, int64_t rows, int64_t n, int64_t units, int num_threads,
              const Next& next_product, const Strip& strip, const Write& write,
              const Reading& reading = {}) {
    if (rows == 0) return;
    const int64_t panels = (n + PANEL - 1) / PANEL;
    const int64_t blocks = (rows + Cut::ROWS - 1) / Cut::ROWS;
    const int64_t block_rows = round_up((rows + blocks - 1) / blocks, Cut::MOST);
    int64_t most_panels = rows <= Cut::MOST ? 1 : Cut::PANELS;
    const auto num_groups = [&] { return (panels + most_panels - 1) / most_panels; };
    while (most_panels > 1 && num_groups() * blocks < 4 * num_threads) most_panels /= 2;
    const int64_t groups = num_groups(), tasks = groups * blocks;
    const int64_t chunk = reading.chunk(units, rows <= Cut::MOST);
    const int64_t panel_bytes = units * reading.unit_bytes;
    const char* weights = static_cast<const char*>(packed);
    parallel_with_next(tasks, num_threads, [&](int64_t task, int64_t next_task) {
        const int64_t panel = task % groups * most_panels, first_row = task / groups * block_rows;
        const int64_t num_panels = std::min(most_panels, panels - panel);
        const int64_t num_rows = std::min(block_rows, rows - first_row);
        const int64_t num_strips = (num_rows + Cut::MOST - 1) / Cut::MOST;
        [[maybe_unused]] const typename Cut::Setup setup;
        const int64_t every = num_strips == 1 ? reading.strip_every : PREFETCH_UNITS;
        const int64_t next_panel = next_task % groups * most_panels;
        if (num_strips == 1 && next_task < tasks) reading.prefetch_beside(next_panel);
        const char* after = weights + next_panel * panel_bytes;
        if (next_task >= tasks) {
            after = next_product.weights;
            if (after != nullptr) after += (next_task - tasks) * next_product.panel_bytes;
        }
        float* sums = sums_of_thread();
        for (int64_t unit = 0, i = 0; unit < units;) {  // panel i of the task
            const int64_t count = std::min(chunk, units - unit), end = unit + count;
            const char* part = weights + (panel + i) * panel_bytes + unit * reading.unit_bytes;
            const bool is_last = i + 1 == num_panels;
            const char* next = part + panel_bytes;
            int64_t next_count = count;
            if (is_last && end < units) {
                next = weights + panel * panel_bytes + end * reading.unit_bytes;
                next_count = std::min(chunk, units - end);
            } else if (is_last) {
                next = after;
                next_count = std::min(chunk, units);
            }
            float* own_sums = sums + i * Cut::ROWS * PANEL;
            for (int64_t strip_index = 0, row = 0; strip_index < num_strips; ++strip_index) {
                // Nearly equal strips.
                const int64_t until =
                    round_up(num_rows * (strip_index + 1) / num_strips, Cut::ALIGNED);
                const int64_t own_rows = std::min(until, num_rows) - row;
                const auto own_strip = [&](auto num) {
                    strip(num, first_row + row, unit, part, count,
                          prefetch_of(next, next_count * reading.unit_bytes, strip_index, num_strips,
                                      count, every),
                          own_sums + row * PANEL, unit > 0);
                };
                if constexpr (std::is_same_v<Cut, Strips>) {
                    with_rows(own_rows, own_strip);
                } else {
                    own_strip(own_rows);
                }
                const int64_t first = (panel + i) * PANEL, num = std::min(PANEL, n - first);
                for (int64_t r = row; end == units && r < row + own_rows; ++r) {
                    write(first_row + r, first, own_sums + r * PANEL, num);
                }
                row += own_rows;
            }
            i = is_last ? 0 : i + 1;
            if (is_last) unit = end;
        }
    });
}

// Packs units of four bytes: w [n][units] -> [ceil(n / 64)][units][64], each replaced by `change` of
// it; the units of padding rows are `change` of 0. `packed` may be `w` itself.
template <typename Change>
inline void pack_units(const uint32_t* w, int64_t n, int64_t units, Change change,
                       uint32_t* packed, int num_threads) {
    parallel_for((n + PANEL - 1) / PANEL, num_threads, [&](int64_t panel) {
        static thread_local std::vector<uint32_t> own;
        own.assign(units * PANEL, 0);
        const int64_t num = std::min(PANEL, n - panel * PANEL);
        std::memcpy(own.data(), w + panel * PANEL * units, num * units * sizeof own[0]);
        uint32_t* out = packed + panel * units * PANEL;
        for (int64_t column = 0; column < PANEL; column += LANES) {
            for (int64_t unit = 0; unit < units; unit += LANES) {
                const char* rows[LANES];
                for (int64_t i = 0; i < LANES; ++i) {
                    const uint32_t* row = own.data() + (column + i) * units + unit;
                    rows[i] = reinterpret_cast<const char*>(row);
                }
                transpose(rows, out + unit * PANEL + column, PANEL, std::min(units - unit, LANES));
            }
        }
        for (int64_t i = 0; i < units * PANEL; ++i) out[i] = change(out[i]);
    });
}

// Returns the value `index` of a packed unit of 2 bf16 or 4 int8.
template <int VALUES>
MM_INLINE float widened(uint32_t unit, int index) {
    if constexpr (VALUES == 2) return bits_to_float(index == 0 ? unit << 16 : unit & 0xffff0000u);
    return float(int8_t((unit ^ S8Format::FLIP) >> (8 * index)));
}

// Widens packed weights of VALUES per unit to the rows of k of a float matrix,
// [VALUES * units][panels * 64].
template <int VALUES>
void widen_panels(const uint32_t* packed, int64_t panels, int64_t units, float* out,
                  int num_threads) {
    parallel_for(panels, num_threads, [&](int64_t panel) {
        for (int64_t unit = 0; unit < units; ++unit) {
            const uint32_t* from = packed + (panel * units + unit) * PANEL;
            for (int value = 0; value < VALUES; ++value) {
                float* to = out + ((unit * VALUES + value) * panels + panel) * PANEL;
#pragma omp simd
                for (int64_t i = 0; i < PANEL; ++i) to[i] = widened<VALUES>(from[i], value);
            }
        }
    });
}

// Packs w [n][k], k a multiple of 4. Flipping the highest bit of a byte adds 128.
inline void pack_s8(const int8_t* w, int64_t n, int64_t k, uint8_t* packed, int num_threads) {
    const auto flip = [](uint32_t unit) { return unit ^ S8Format::FLIP; };
    pack_units(reinterpret_cast<const uint32_t*>(w), n, k / 4, flip,
               reinterpret_cast<uint32_t*>(packed), num_threads);
}

// Rows of x in the type that the format reads: x itself, or a wide copy.
template <typename X, typename T>
struct RowsOf {
    std::unique_ptr<X[]> wide;
    const X* values;
    int64_t stride;

    RowsOf(const T* x, int64_t x_stride, int64_t rows, int64_t k, int num_threads) {
        if constexpr (std::is_same_v<X, T>) {
            values = x;
            stride = x_stride;
        } else {
            wide.reset(new X[rows * k]);
            values = wide.get();
            stride = k;
            parallel_parts(rows, num_threads, [&](int64_t begin, int64_t end) {
                for (int64_t row = begin; row < end; ++row) {
                    const T* from = x + row * x_stride;
                    X* to = wide.get() + row * k;
#pragma omp simd
                    for (int64_t c = 0; c < k; ++c) to[c] = load(from[c]);
                }
            });
        }
    }
};

// Where a product is written: [rows][n] in T, or in float32, which keeps what T would round away.
template <typename T>
struct Result {
    void* values;
    bool is_float;

    // Calls write(pointer to value `first` of a row).
    template <typename Write>
    MM_INLINE void at(int64_t first, const Write& write) const {
        if (is_float) return write(static_cast<float*>(values) + first);
        write(static_cast<T*>(values) + first);
    }
};

// out [num] = sums times `scale`, plus `bias` unless it is null.
template <typename Out, typename T>
MM_INLINE void write_row(Out* out, const float* sums, const T* bias, int64_t num, float scale = 1.0f) {
    if (bias == nullptr) {
#pragma omp simd
        for (int64_t c = 0; c < num; ++c) out[c] = store<Out>(sums[c] * scale);
    } else {
#pragma omp simd
        for (int64_t c = 0; c < num; ++c) out[c] = store<Out>(sums[c] * scale + load(bias[c]));
    }
}

// x [rows][k], k a multiple of a unit's values; bias [n] or null; out [rows][n].
template <typename Format, typename T>
void linear(const T* x, int64_t x_stride, const void* packed, const T* bias, const Result<T>& out,
            int64_t rows, int64_t n, int64_t k, int num_threads, const Next& next = {}) {
    constexpr int64_t VALUES = Format::PARTS * 4 / sizeof(typename Format::X);  // of a unit
    const auto write = [&](int64_t row, int64_t first, const float* sums, int64_t num) {
        out.at(row * n + first, [&](auto* to) {
            write_row(to, sums, bias == nullptr ? nullptr : bias + first, num);
        });
    };
#ifdef MM_HAS_AMX
    if constexpr (std::is_same_v<T, bf16>) {
        const Bf16Rows tiled(x, x_stride, rows, k, num_threads);
        const auto tiles = [&](int64_t num, int64_t row, int64_t unit, const char* part,
                               int64_t count, Prefetch prefetch, float* sums, bool adds) {
            const int64_t step = unit / TILE_UNITS, steps = (count + TILE_UNITS - 1) / TILE_UNITS;
            const int64_t passes = num <= TILE_ROWS_OF_X ? 1 : 2;
            const TileOfX first = tiled.at(row, step);
            prefetch = spread(prefetch, count, passes * steps);
            if (passes == 1) {
                bf16_tiles(first, part, count, prefetch, sums, adds);
            } else {
                const TileOfX second = tiled.at(row + TILE_ROWS_OF_X, step);
                bf16_tile_pairs(first, second, part, count, prefetch, sums, adds);
            }
        };
        return multiply<TileStrips>(packed, rows, n, k / VALUES, num_threads, next, tiles, write);
    }
#endif
    const RowsOf<typename Format::X, T> own(x, x_stride, rows, k, num_threads);
    const auto strip = [&](auto num, int64_t row, int64_t unit, const char* part, int64_t count,
                           Prefetch prefetch, float* sums, bool adds) {
        float_strip<Format, num>(own.values + row * own.stride + unit * VALUES, own.stride,
                                 part, count, prefetch, sums, adds);
    };
    multiply(packed, rows, n, k / VALUES, num_threads, next, strip, write);
}

// Writes `count` values, a multiple of 4, as WideS8Format reads them.
inline void arrange(const int8_t* values, int64_t count, int16_t* out) {
    for (int64_t i = 0; i < count; i += 4) {
        for (int64_t c = 0; c < 2; ++c) {
            const int16_t first = values[i + 2 * c];
            out[i + c] = first;
            out[i + 2 + c] = int16_t(values[i + 2 * c + 1] - 256 * first);
        }
    }
}

// Quantizes a row of weights, w = scale * out + shift: the range of its values and 0 becomes that of
// int8, and 0 stays 0.
template <typename T>
MM_INLINE void quantize_range(const T* w, int64_t count, int8_t* out, float* scale, float* shift) {
    float low = 0.0f, high = 0.0f;
#pragma omp simd reduction(min : low) reduction(max : high)
    for (int64_t i = 0; i < count; ++i) {
        const float value = load(w[i]);
        low = value < low ? value : low;
        high = value > high ? value : high;
    }
    *scale = (high - low) / 255.0f;
    const float inverse = *scale > 0.0f ? 1.0f / *scale : 0.0f;
    const float zero = std::nearbyint(-low * inverse) - 128.0f;
    *shift = -zero * *scale;
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
        const float code = std::nearbyint(load(w[i]) * inverse) + zero;
        out[i] = int8_t(int32_t(code < -128.0f ? -128.0f : (code > 127.0f ? 127.0f : code)));
    }
}

// Quantizes w [n][k] to int8 [n][k]; scales: those of the rows and their shifts, [2][n].
template <typename T>
void quantize_rows(const T* w, int64_t n, int64_t k, int8_t* out, float* scales, int num_threads) {
    parallel_parts(n, num_threads, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            quantize_range(w + row * k, k, out + row * k, scales + row, scales + n + row);
        }
    });
}

// Returns the sum of every STEP-th of the values.
template <int64_t STEP>
MM_INLINE int32_t sum_of_each(const int8_t* values, int64_t count) {
    int32_t sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; i += STEP) sum += values[i];
    return sum;
}

// Rotates a whole group of x and quantizes it to registers of integers. Returns the scale, NaN if a value
// is not finite.
template <typename T>
MM_INLINE float quantize_block(const T* x, Ints* out) {
    Block block = Block::at(x);
    const float none = block.none();
    block.change_signs();
    block.rotate();
    const float largest = block.largest();
    const Floats inverse = all_lanes(inverse_of(largest));
    unrolled<Block::NUM>([&](auto i) MM_ALWAYS { out[i] = to_nearest_ints(block.of[i] * inverse); });
    return largest / 127.0f + none;
}

MM_INLINE void store_bytes_of_block(int8_t* to, const Ints* block) {
    unrolled<Block::NUM / 4>([&](auto i) MM_ALWAYS {
        store_bytes(to + i * 4 * LANES, block + i * 4);
    });
}

// Rotates `count` values of x, one group at most, and quantizes them. Returns the scale, NaN if a value
// is not finite.
template <typename T>
MM_INLINE float quantize_rotated(const T* x, int64_t count, int8_t* out) {
    if (count < GROUP) {
        float none = 0.0f;
        for (int64_t i = 0; i < count; ++i) none += load(x[i]) * 0.0f;
        return quantize(x, count, out) + none;
    }
    Ints block[Block::NUM];
    const float scale = quantize_block(x, block);
    store_bytes_of_block(out, block);
    return scale;
}

// Stores the values of a block as the format reads them. Returns the sum of those whose weights are
// stored as w + 128.
MM_INLINE int32_t store_block(int8_t* to, const Ints* block, int32_t sum) {
    store_bytes_of_block(to, block);
    return sum;
}
MM_INLINE int32_t store_block(int16_t* to, const Ints* block, int32_t) {
#if MM_VECTOR_BYTES == 32
    Ints firsts{};
    unrolled<Block::NUM / 2>([&](auto i) MM_ALWAYS {
        __m256i pairs[2];
        for (int j = 0; j < 2; ++j) {
            const __m256i own = (__m256i)block[2 * i + j];
            const __m256i first = _mm256_slli_epi64(own, 32);  // of a pair, where the second one is
            firsts += (Ints)first;
            const __m256i less = _mm256_sub_epi32(own, _mm256_slli_epi32(first, 8));
            pairs[j] = _mm256_shuffle_epi32(less, 0xd8);
        }
        const __m256i packed = _mm256_packs_epi32(pairs[0], pairs[1]);
        store_lanes(to + i * 2 * LANES, _mm256_permute4x64_epi64(packed, 0xd8));
    });
    return sum_of_lanes(firsts);
#else
    int8_t own[GROUP];
    store_bytes_of_block(own, block);
    arrange(own, GROUP, to);
    return sum_of_each<2>(own, GROUP);
#endif
}

// Quantizes `count` values of x, rotated, one group at most, to the format's type. Returns what integer
// sums start with, and adds the sum of all, times the scale, to `total`.
template <typename T, typename Value>
MM_INLINE int32_t quantize_group(const T* x, int64_t count, Value* values, float* scale,
                                 float* total) {
    constexpr bool IS_WIDE = sizeof(Value) == 2;
    int8_t own[IS_WIDE ? GROUP : 1] = {};
    int8_t* rounded = own;
    if constexpr (!IS_WIDE) rounded = values;
    if (count == GROUP) {
        Ints block[Block::NUM], sums{};
        *scale = quantize_block(x, block);
        unrolled<Block::NUM>([&](auto i) MM_ALWAYS { sums += block[i]; });
        const int32_t sum = sum_of_lanes(sums);
        *total += *scale * float(sum);
        return -S8Format::EXCESS * store_block(values, block, sum);
    }
    *scale = quantize_rotated(x, count, rounded);
    *total += *scale * float(sum_of_each<1>(rounded, count));
    if constexpr (IS_WIDE) arrange(rounded, round_up(count, 4), values);
    return -S8Format::EXCESS * sum_of_each<IS_WIDE ? 2 : 1>(rounded, count);
}

template <typename T>
void quantize_groups(const T* x, int64_t k, int64_t row, QuantizedRows& out) {
    for (int64_t group = 0; group < out.groups; ++group) {
        const int64_t first = group * GROUP, at = out.place(row, group);
        const int64_t count = std::min(GROUP, k - first);
        QuantizedRows::Value* values = out.at(row, group);
#ifdef MM_HAS_AMX
        if (count < GROUP) std::memset(values, 0, GROUP);
#endif
        out.starts[at] = quantize_group(x + first, count, values, out.scales.data() + at,
                                      out.totals.data() + row);
    }
}

// Calls run(row, first column, number of columns) for the groups of all rows.
template <typename Run>
void each_group(int64_t rows, int64_t k, int num_threads, const Run& run) {
    parallel_parts(rows, num_threads, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            for (int64_t first = 0; first < k; first += GROUP) {
                run(row, first, std::min(GROUP, k - first));
            }
        }
    });
}

// Rotates and rounds x [rows][k] as linear_s8 does, and multiplies by the scales again: out [rows][k].
template <typename T>
void round_groups(const T* x, int64_t x_stride, int64_t rows, int64_t k, float* out,
                  int num_threads) {
    each_group(rows, k, num_threads, [&](int64_t row, int64_t first, int64_t count) {
        int8_t values[GROUP];
        const float scale = quantize_rotated(x + row * x_stride + first, count, values);
        float* to = out + row * k + first;
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) to[i] = float(values[i]) * scale;
    });
}

// Rotates whole groups of x [rows][k] as linear_s8 does, or back: out [rows][k].
template <typename T>
void rotate_groups(const T* x, int64_t rows, int64_t k, bool is_back, float* out, int num_threads) {
    each_group(rows, k, num_threads, [&](int64_t row, int64_t first, int64_t count) {
        const T* from = x + row * k + first;
        float* to = out + row * k + first;
        if (is_back) {
            rotate_back(from, count, to);
        } else {
            rotate_group(from, count, to);
        }
    });
}

// x [rows][k], out [rows][n], row_scales [2][n] as of quantize_rows, bias (or null) [n].
template <typename T>
void linear_s8(const T* x, int64_t x_stride, const uint8_t* packed, const float* row_scales,
               const T* bias, const Result<T>& out, int64_t rows, int64_t n, int64_t k,
               int num_threads, const Next& next = {}) {
    QuantizedRows quantized(rows, k);
    parallel_parts(rows, num_threads, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            quantize_groups(x + row * x_stride, k, row, quantized);
        }
    });
    const int64_t units = (k + 3) / 4;
    const auto strip = [&](auto num, int64_t row, int64_t unit, const char* part, int64_t count,
                           Prefetch prefetch, float* sums, bool adds) {
        s8_strip<num>(quantized, row, unit, part, count, prefetch, sums, adds);
    };
    const auto write = [&](int64_t row, int64_t first, const float* sums, int64_t num) {
        const float *scales = row_scales + first, *shifts = row_scales + n + first;
        const float total = quantized.totals[row];
        out.at(row * n + first, [&](auto* to) {
            using Out = std::remove_reference_t<decltype(*to)>;
#pragma omp simd
            for (int64_t c = 0; c < num; ++c) {
                const float offset = bias == nullptr ? 0.0f : load(bias[first + c]);
                to[c] = store<Out>(sums[c] * scales[c] + (total * shifts[c] + offset));
            }
        });
    };
#ifdef MM_HAS_AMX
    if (rows > STRIP) {
        const auto tiles = [&](int64_t num, int64_t row, int64_t unit, const char* part,
                               int64_t count, Prefetch prefetch, float* sums, bool adds) {
            s8_tiled_strip(num, quantized, row, unit, part, count, prefetch, sums, adds);
        };
        return multiply<TileStrips>(packed, rows, n, units, num_threads, next, tiles, write);
    }
#endif
    multiply(packed, rows, n, units, num_threads, next, strip, write);
}

}  // namespace mm
