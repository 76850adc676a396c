// Products in the tiles of AMX: eight registers of 16 rows of 64 bytes. One instruction multiplies 16
// rows of x, 64 bytes of each, by 16 units of 16 columns of a panel, and adds to 16 x 16 sums:
//
//     tiles 4, 5: x [16 rows][16 units]     tiles 6, 7: weights [16 units][16 columns]
//     tiles 0 to 3: sums [16 rows][16 columns], floats or integers of 32 bits
//
// x is copied into such tiles first, with zeros where its rows or its columns end, unless it is bf16
// whose tiles can be read where they lie. Tiles are always full: then one setup of a thread serves every
// product, and a row alone loses little by it.
//
// The products of bf16 at even places of 32 columns are summed apart from those at odd places; both
// sums are then added, and that to the sum so far (TDPBF16PS in Intel's manual). So the order of a
// row's sums depends neither on other rows nor on the chunks of k. Subnormal values and sums are 0.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>

#include "numbers.h"
#include "parallel.h"
#include "tiles.h"

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define MM_HAS_AMX 1

namespace mm {

constexpr int64_t TILE_ROWS_OF_X = 16, TILE_UNITS = 16;
constexpr int64_t TILE_BYTES = 1024, TILE_ROW_BYTES = 64;
constexpr int64_t COLUMNS = 64;  // of a panel
constexpr int64_t COLUMN_BYTES = COLUMNS * 4;  // of a unit of a panel, and of a row of sums

// Sets up this thread's tiles, and at its end sets them up as they were: torch's own products use them
// too.
class TileSetup {
   public:
    TileSetup() {
        asm volatile("" ::: "memory");
        _tile_storeconfig(&before_);
        asm volatile("" ::: "memory");
        static constexpr Shapes OWN;
        _tile_loadconfig(&OWN);
    }
    ~TileSetup() {
        asm volatile("" ::: "memory");
        _tile_loadconfig(&before_);
    }
    TileSetup(const TileSetup&) = delete;
    TileSetup& operator=(const TileSetup&) = delete;

   private:
    struct alignas(64) Shapes {
        uint8_t palette = 1;
        uint8_t start_row = 0;
        uint8_t reserved[14] = {};
        uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    };
    Shapes before_;
};

// x [rows][units] of four bytes as tiles [rows / 16][units / 16][16][16].
class TiledRows {
   public:
    TiledRows(int64_t rows, int64_t units)
        : steps_((units + TILE_UNITS - 1) / TILE_UNITS),
          lines_(new Line[(rows + TILE_ROWS_OF_X - 1) / TILE_ROWS_OF_X * steps_ * TILE_ROWS_OF_X]),
          padding_begins_(rows) {}

    // Returns where the 64 bytes of a row are that step `step` multiplies.
    char* at(int64_t row, int64_t step) const {
        const int64_t tile = row / TILE_ROWS_OF_X * steps_ + step;
        return lines_[tile * TILE_ROWS_OF_X + row % TILE_ROWS_OF_X].values;
    }

    // Copies a row of `bytes`, of which a step multiplies `step_bytes`, and writes zeros after each.
    void copy(int64_t row, const void* from, int64_t bytes, int64_t step_bytes = TILE_ROW_BYTES) {
        const char* values = static_cast<const char*>(from);
        for (int64_t step = 0; step < steps_; ++step) {
            const int64_t done = step * step_bytes;
            put(at(row, step), values + done, std::min(step_bytes, bytes - done));
        }
    }

    // Writes zeros into the rows that fill the last tiles.
    void fill_up() {
        for (int64_t row = padding_begins_; row % TILE_ROWS_OF_X != 0; ++row) {
            for (int64_t step = 0; step < steps_; ++step) std::memset(at(row, step), 0, TILE_ROW_BYTES);
        }
    }

   private:
    struct alignas(64) Line {  // of the cache: a row that lies in two takes a fifth longer
        char values[TILE_ROW_BYTES];
    };

    static void put(char* to, const char* from, int64_t bytes) {
        if (bytes >= TILE_ROW_BYTES) {
            std::memcpy(to, from, TILE_ROW_BYTES);
        } else {
            std::memcpy(to, from, bytes);
            std::memset(to + bytes, 0, TILE_ROW_BYTES - bytes);
        }
    }

    int64_t steps_;
    std::unique_ptr<Line[]> lines_;
    int64_t padding_begins_;
};

// A tile of 16 rows of x: where its first step is, how far its rows are apart, and its steps.
struct TileOfX {
    const char* first;
    int64_t row_bytes, step_bytes;

    const char* at(int64_t step) const { return first + step * step_bytes; }
};

// Rows of bf16 for tiles: whole tiles are read where they lie if their rows begin with lines of the
// cache and end with a step, and do not all displace each other from it. All others are copied.
class Bf16Rows {
   public:
    Bf16Rows(const bf16* x, int64_t x_stride, int64_t rows, int64_t k, int num_threads)
        : x_(reinterpret_cast<const char*>(x)),
          row_bytes_(x_stride * int64_t(sizeof *x)),
          num_in_place_(can_stay(x, k) ? rows / TILE_ROWS_OF_X * TILE_ROWS_OF_X : 0),
          copies_(rows - num_in_place_, k / 2) {
        parallel_parts(rows - num_in_place_, num_threads, [&](int64_t begin, int64_t end) {
            for (int64_t row = begin; row < end; ++row) {
                copies_.copy(row, x_ + (num_in_place_ + row) * row_bytes_, k * int64_t(sizeof *x));
            }
        });
        copies_.fill_up();
    }
    // row: the first one of a tile.
    TileOfX at(int64_t row, int64_t step) const {
        if (row < num_in_place_) {
            return {x_ + row * row_bytes_ + step * TILE_ROW_BYTES, row_bytes_, TILE_ROW_BYTES};
        }
        return {copies_.at(row - num_in_place_, step), TILE_ROW_BYTES, TILE_BYTES};
    }

   private:
    bool can_stay(const bf16* x, int64_t k) const {
        const int64_t begin = int64_t(reinterpret_cast<uintptr_t>(x)), line = TILE_ROW_BYTES;
        const bool has_whole_steps = k * int64_t(sizeof *x) % line == 0;
        return has_whole_steps && begin % line == 0 && row_bytes_ % line == 0 &&
               row_bytes_ % PAGE != 0;
    }

    static constexpr int64_t PAGE = 4096;  // lines that are so far apart share a set of the cache
    const char* x_;
    int64_t row_bytes_, num_in_place_;
    TiledRows copies_;
};

// Returns what to prefetch with each of `steps` steps, instead of what is for `units` units.
MM_INLINE Prefetch spread(const Prefetch& prefetch, int64_t units, int64_t steps) {
    const int64_t lines = prefetch.num * ((units + prefetch.every - 1) / prefetch.every);
    return {prefetch.lines, (lines + steps - 1) / steps};
}

// The units of a chunk of a panel after its last whole step, completed by zeros: others, or nothing, may
// lie after them.
class LastUnits {
   public:
    LastUnits(const char* panel, int64_t units) : num_(units % TILE_UNITS) {
        if (num_ == 0) return;
        std::memcpy(units_, panel + (units - num_) * COLUMN_BYTES, num_ * COLUMN_BYTES);
        std::memset(units_ + num_ * COLUMN_BYTES, 0, (TILE_UNITS - num_) * COLUMN_BYTES);
        asm volatile("" ::: "memory");
    }
    bool exist() const { return num_ != 0; }
    const char* at() const { return units_; }

   private:
    int64_t num_;
    alignas(64) char units_[TILE_UNITS * COLUMN_BYTES];
};

// Calls run(step, units of the step in memory) for the steps of a chunk of a panel.
template <typename Run>
MM_INLINE void for_steps(const char* panel, int64_t units, const Run& run) {
    const int64_t whole = units / TILE_UNITS;
    for (int64_t step = 0; step < whole; ++step) {
        run(step, panel + step * TILE_UNITS * COLUMN_BYTES);
    }
    if (const LastUnits last(panel, units); last.exist()) run(whole, last.at());
}

// Loads NUM tiles of sums from at(0), at(1) and so on, or begins them with 0.
template <int NUM, typename Place>
MM_INLINE void begin_sums(const Place& at, int64_t stride, bool adds) {
    if (adds) {
        _tile_loadd(0, at(0), stride);
        if constexpr (NUM > 1) _tile_loadd(1, at(1), stride);
        if constexpr (NUM > 2) _tile_loadd(2, at(2), stride);
        if constexpr (NUM > 3) _tile_loadd(3, at(3), stride);
    } else {
        _tile_zero(0);
        if constexpr (NUM > 1) _tile_zero(1);
        if constexpr (NUM > 2) _tile_zero(2);
        if constexpr (NUM > 3) _tile_zero(3);
    }
}

template <int NUM, typename Place>
MM_INLINE void store_sums(const Place& at, int64_t stride) {
    _tile_stored(0, at(0), stride);
    if constexpr (NUM > 1) _tile_stored(1, at(1), stride);
    if constexpr (NUM > 2) _tile_stored(2, at(2), stride);
    if constexpr (NUM > 3) _tile_stored(3, at(3), stride);
}

// Adds 16 rows of left times 16 units of right to NUM tiles of sums, one for each 16 columns.
template <int NUM>
MM_INLINE void add_bf16_step(const char* left, int64_t left_stride, const char* right,
                             int64_t right_stride) {
    _tile_loadd(4, left, left_stride);
    _tile_loadd(6, right, right_stride);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (NUM > 1) {
        _tile_loadd(7, right + 64, right_stride);
        _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (NUM > 2) {
        _tile_loadd(6, right + 128, right_stride);
        _tile_dpbf16ps(2, 4, 6);
    }
    if constexpr (NUM > 3) {
        _tile_loadd(7, right + 192, right_stride);
        _tile_dpbf16ps(3, 4, 7);
    }
}

// sums [16][64] = a tile's rows of x times a chunk of a panel, or plus that. x: from the chunk's first
// step on.
inline void bf16_tiles(const TileOfX& x, const char* panel, int64_t units, Prefetch& prefetch,
                       float* sums, bool adds) {
    const auto at = [&](int tile) { return sums + tile * 16; };
    begin_sums<4>(at, COLUMN_BYTES, adds);
    for_steps(panel, units, [&](int64_t step, const char* weights) {
        prefetch.next();
        add_bf16_step<4>(x.at(step), x.row_bytes, weights, COLUMN_BYTES);
    });
    store_sums<4>(at, COLUMN_BYTES);
}

// The same for the rows of two tiles, sums [32][64]: half of the columns at a time, each tile of which
// is read for both.
inline void bf16_tile_pairs(const TileOfX& first, const TileOfX& second, const char* panel,
                            int64_t units, Prefetch& prefetch, float* sums, bool adds) {
    for (int64_t column = 0; column < COLUMNS; column += 32) {
        const auto at = [&](int tile) {
            return sums + column + tile % 2 * 16 + tile / 2 * TILE_ROWS_OF_X * COLUMNS;
        };
        begin_sums<4>(at, COLUMN_BYTES, adds);
        for_steps(panel, units, [&](int64_t step, const char* weights) {
            prefetch.next();
            add_bf16_step<2>(first.at(step), first.row_bytes, weights + column * 4, COLUMN_BYTES);
            _tile_loadd(5, second.at(step), second.row_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        });
        store_sums<4>(at, COLUMN_BYTES);
    }
}

// sums [16 rows][16 of 64 columns] = scale * (start + a tile's rows of signed bytes times units of
// unsigned bytes), or plus that, group by group of 64 values. x: the first step; panel: the first of the
// columns; scales, starts: [steps][16 rows].
inline void s8_tiles(const char* x, const char* panel, int64_t steps, const float* scales,
                     const int32_t* starts, Prefetch& prefetch, float* sums, bool adds) {
    alignas(64) int32_t products[2][TILE_ROWS_OF_X * 16];
    Floats all[TILE_ROWS_OF_X];
#pragma GCC unroll 16
    for (int r = 0; r < TILE_ROWS_OF_X; ++r) {
        all[r] = adds ? load_lanes<Floats>(sums + r * COLUMNS) : Floats{};
    }
    const auto start = [&](int64_t step) {
        _tile_zero(0);
        _tile_loadd(4, x + step * TILE_BYTES, TILE_ROW_BYTES);
        _tile_loadd(6, panel + step * TILE_UNITS * COLUMN_BYTES, COLUMN_BYTES);
        _tile_dpbsud(0, 4, 6);
        _tile_stored(0, products[step % 2], TILE_ROW_BYTES);
        asm volatile("" ::: "memory");
    };
    start(0);
    for (int64_t step = 0; step < steps; ++step) {
        prefetch.next();
        if (step + 1 < steps) start(step + 1);  // is computed while that of `step` is added
        const int32_t* own = products[step % 2];
#pragma GCC unroll 16
        for (int r = 0; r < TILE_ROWS_OF_X; ++r) {
            const Ints sum = load_lanes<Ints>(own + r * 16) + splat(starts + r);
            all[r] = multiply_add(to_floats(sum), (Floats)splat(scales + r), all[r]);
        }
        scales += TILE_ROWS_OF_X;
        starts += TILE_ROWS_OF_X;
    }
#pragma GCC unroll 16
    for (int r = 0; r < TILE_ROWS_OF_X; ++r) store_lanes(sums + r * COLUMNS, all[r]);
}

// Computes NUM tiles of 16 columns of: out [16][columns] = left [16][units] * right [units][columns], or
// plus out; written to `to`. Strides are in bytes.
template <int NUM>
MM_INLINE void dot_of_tiles(const char* left, int64_t left_stride, const char* right,
                            int64_t right_stride, int64_t steps, const float* out, float* to,
                            int64_t out_stride, bool adds) {
    begin_sums<NUM>([&](int tile) { return out + tile * 16; }, out_stride, adds);
    for (int64_t step = 0; step < steps; ++step) {
        add_bf16_step<NUM>(left + step * TILE_ROW_BYTES, left_stride,
                           right + step * TILE_UNITS * right_stride, right_stride);
    }
    store_sums<NUM>([&](int tile) { return to + tile * 16; }, out_stride);
}

// The same for all columns, a multiple of 16. `units` are completed to steps of 16: there the values of
// left or right are 0 and those of the other side finite. Strides are in values.
inline void dot_in_tiles(const bf16* left, int64_t left_stride, const bf16* right, int64_t columns,
                         int64_t units, const float* out, float* to, int64_t out_stride, bool adds) {
    const int64_t steps = (units + TILE_UNITS - 1) / TILE_UNITS;
    asm volatile("" ::: "memory");
    for (int64_t column = 0; column < columns; column += 64) {
        const auto run = [&](auto num) {
            dot_of_tiles<num>(reinterpret_cast<const char*>(left), left_stride * 2,
                              reinterpret_cast<const char*>(right + column * 2), columns * 4, steps,
                              out + column, to + column, out_stride * 4, adds);
        };
        switch (std::min<int64_t>(columns - column, 64) / 16) {
            case 1: run(std::integral_constant<int, 1>()); break;
            case 2: run(std::integral_constant<int, 2>()); break;
            case 3: run(std::integral_constant<int, 3>()); break;
            default: run(std::integral_constant<int, 4>());
        }
    }
    asm volatile("" ::: "memory");
}

}  // namespace mm

#endif
