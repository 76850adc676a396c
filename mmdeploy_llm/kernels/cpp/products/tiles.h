// The inner loops of products: a few rows times some columns, with the sums in registers. A unit is
// four bytes of weights, 1 float, 2 bf16 or 4 int8, and units of adjacent columns are adjacent.
//
// A format says how one unit is multiplied. Formats that have no instruction of their own widen the
// weights in registers; x then has the wide type already. Every sum is formed in the order of k,
// however many rows and columns a tile has, so that no result depends on other rows.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "lanes.h"
#include "matrix.h"
#include "numbers.h"

namespace mm {

constexpr int STRIP = 6;  // largest number of rows of a tile
constexpr int64_t PREFETCH_UNITS = 8;

// What a tile prefetches: `num` cache lines for every `every` units that it computes, a power of two.
struct Prefetch {
    const char* lines;
    int64_t num;
    int64_t every = PREFETCH_UNITS;

    MM_INLINE void next(int64_t times = 1) {
        for (int64_t i = 0; i < num * times; ++i) __builtin_prefetch(lines + i * 64, 0, 2);
        lines += num * times * 64;
    }
};

// Calls run(i) for i from 0 to N - 1, each a constant. Within two loops GCC does not keep an array in
// registers that variables index.
template <typename Run, int... I>
MM_INLINE void run_each(const Run& run, std::integer_sequence<int, I...>) {
    (run(std::integral_constant<int, I>()), ...);
}
template <int N, typename Run>
MM_INLINE void unrolled(const Run& run) {
    run_each(run, std::make_integer_sequence<int, N>());
}
#define MM_ALWAYS __attribute__((always_inline))  // of a lambda

struct FloatFormat {
    using X = float;
    using Sums = Floats;
    static constexpr int PARTS = 1;  // products of a unit
    static constexpr bool RELOADS = false;  // whether each part loads the weights again
    static MM_INLINE Ints widen(Ints weights, int) { return weights; }
    static MM_INLINE Floats add(Floats sums, Ints x, Ints w) {
        return multiply_add((Floats)x, (Floats)w, sums);
    }
};

// A bf16 is the upper half of a float.
struct WideBf16Format {
    using X = float;
    using Sums = Floats;
    static constexpr int PARTS = 2;
    static constexpr bool RELOADS = true;
    static MM_INLINE Ints widen(Ints weights, int part) {
        return part == 0 ? (Ints)((Words)weights << 16) : weights & mask_of_memory<0xffff0000u>();
    }
    static MM_INLINE Floats add(Floats sums, Ints x, Ints w) {
        return multiply_add((Floats)x, (Floats)w, sums);
    }
};

// A unit of weights is two pairs of bytes: the first of a pair is stored as w + 128, the second as w.
// Each pair is multiplied as one 16-bit integer, first + 256 second, and then its second byte is,
// by an x from which 256 times the first one's is subtracted:
//     x0 (w0 + 256 w1) + (x1 - 256 x0) w1 = x0 w0 + x1 w1
// All of it fits: x is at most 127, and a group has 32 units. Units of x are
// x0, x2, x1 - 256 x0, x3 - 256 x2.
struct WideS8Format {
    using X = int16_t;
    using Sums = Ints;
    static constexpr int PARTS = 2;
    static constexpr bool RELOADS = false;
    static constexpr uint32_t FLIP = 0x00800080u;
    static constexpr int32_t EXCESS = 128;  // of the weights whose x are summed
    static MM_INLINE Ints widen(Ints weights, int part) {
        return part == 0 ? weights : (Ints)((SignedHalves)weights >> 8);
    }
    static MM_INLINE Ints add(Ints sums, Ints x, Ints w) { return add_pairs(sums, x, w); }
};

#ifdef MM_HAS_BF16_DOT
struct Bf16Format {
    using X = bf16;
    using Sums = Floats;
    static constexpr int PARTS = 1;
    static constexpr bool RELOADS = false;
    static MM_INLINE Ints widen(Ints weights, int) { return weights; }
    static MM_INLINE Floats add(Floats sums, Ints x, Ints w) { return add_bf16_pairs(sums, x, w); }
};
#else
using Bf16Format = WideBf16Format;
#endif

#ifdef MM_HAS_S8_DOT
struct S8Format {
    using X = int8_t;
    using Sums = Ints;
    static constexpr int PARTS = 1;
    static constexpr bool RELOADS = false;
    static constexpr uint32_t FLIP = HAS_SIGNED_WEIGHTS ? 0 : 0x80808080u;  // adds 128 to every byte
    static constexpr int32_t EXCESS = HAS_SIGNED_WEIGHTS ? 0 : 128;
    static MM_INLINE Ints widen(Ints weights, int) { return weights; }
    static MM_INLINE Ints add(Ints sums, Ints x, Ints w) { return add_quadruples(sums, w, x); }
};
#else
using S8Format = WideS8Format;
#endif

// Returns the number of registers of columns in a tile: as many sums as the registers hold beside
// the weights, and enough of them to hide the latency of a product.
constexpr int tile_registers(int rows) {
    return NUM_REGISTERS == 32 ? 4 : rows == 1 ? 8 : rows <= 3 ? 4 : 2;
}

// The same for int8. Pairs need registers for their products too, which three rows of four lack; and
// they have less latency to hide: only the sum of a product waits for the one before it.
constexpr int s8_tile_registers(int rows) {
    const bool lacks = NUM_REGISTERS == 16 && S8Format::PARTS == 2 && rows == 3;
    return lacks ? 2 : tile_registers(rows);
}

#ifdef __ARM_FEATURE_MATMUL_INT8

// sums += units `begin` .. `units` of two rows of x or more, times as many units of weights, as
// products of matrices: of two parts of a unit, or of two units, of which one may be left. Returns
// where that ends. The last row of an odd number is multiplied twice and kept once.
template <typename Format, int ROWS, int NUM>
MM_INLINE int64_t add_as_matrices(const typename Format::X* x, int64_t x_stride, const void* weights,
                                  int64_t columns, int64_t units, Prefetch& prefetch,
                                  typename Format::Sums (&sums)[ROWS][NUM], int64_t begin) {
    constexpr int PAIRS = (ROWS + 1) / 2;
    constexpr int64_t STEP = Format::PARTS == 1 ? 2 : 1, X_BYTES = Format::PARTS * 4;
    const auto after = [](int r) { return r + 1 < ROWS ? r + 1 : r; };
    const int64_t end = units - (units - begin) % STEP, mask = prefetch.every - 1;
    const int64_t num_lines = prefetch.num * (prefetch.every < STEP ? STEP : 1);
    const char* lines = prefetch.lines;
    const char* at = static_cast<const char*>(weights) + begin * columns * 4;
    Halved<typename Format::Sums> pairs[PAIRS][NUM];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r += 2) {
#pragma GCC unroll 8
        for (int b = 0; b < NUM; ++b) pairs[r / 2][b] = paired(sums[r][b], sums[after(r)][b]);
    }
    for (int64_t unit = begin; unit < end; unit += STEP, at += STEP * columns * 4) {
        if ((unit & mask) == 0) {
            for (int64_t i = 0; i < num_lines; ++i) __builtin_prefetch(lines + i * 64, 0, 2);
            lines += num_lines * 64;
        }
#pragma GCC unroll 2
        for (int part = 0; part < Format::PARTS; part += 2) {
            Ints both[PAIRS];
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r += 2) {
                const auto row_at = [&](int row) {
                    const char* own = reinterpret_cast<const char*>(x + row * x_stride);
                    return own + unit * X_BYTES + part * 4;
                };
                both[r / 2] = two_rows(row_at(r), row_at(after(r)));
            }
#pragma GCC unroll 8
            for (int b = 0; b < NUM; ++b) {
                const char* own = at + b * MM_VECTOR_BYTES;
                const char* next = STEP == 2 ? own + columns * 4 : own;
                const Halved<Ints> w =
                    interleaved(Format::widen(load_lanes<Ints>(own), part),
                                Format::widen(load_lanes<Ints>(next), STEP == 2 ? part : part + 1));
#pragma GCC unroll 8
                for (int r = 0; r < PAIRS; ++r) {
                    pairs[r][b].left = add_matrices(pairs[r][b].left, both[r], w.left);
                    pairs[r][b].right = add_matrices(pairs[r][b].right, both[r], w.right);
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
        for (int b = 0; b < NUM; ++b) {
            const auto rows = paired(pairs[r / 2][b].left, pairs[r / 2][b].right);
            sums[r][b] = r % 2 == 0 ? rows.left : rows.right;
        }
    }
    prefetch.lines = lines;
    return end;
}

#endif

// sums += units `begin` .. `units` of ROWS rows of x, times as many units of `columns` columns of
// weights. Always inlined, so that the sums stay in the caller's registers.
template <typename Format, int ROWS, int NUM>
MM_INLINE void add_units(const typename Format::X* x, int64_t x_stride, const void* weights,
                         int64_t columns, int64_t units, Prefetch& prefetch,
                         typename Format::Sums (&sums)[ROWS][NUM], int64_t begin = 0) {
#ifdef __ARM_FEATURE_MATMUL_INT8
    if constexpr (ROWS > 1 && IN_MATRICES<typename Format::X>) {
        begin = add_as_matrices<Format, ROWS, NUM>(x, x_stride, weights, columns, units, prefetch,
                                                   sums, begin);
        if (begin == units) return;
    }
#endif
    const char* at = static_cast<const char*>(weights) + begin * columns * 4;
    constexpr int64_t X_BYTES = Format::PARTS * 4;
    const char* lines = prefetch.lines;
    const int64_t num_lines = prefetch.num, mask = prefetch.every - 1;
    for (int64_t unit = begin; unit < units; ++unit) {
        if ((unit & mask) == 0) {
            for (int64_t i = 0; i < num_lines; ++i) __builtin_prefetch(lines + i * 64, 0, 2);
            lines += num_lines * 64;
        }
#pragma GCC unroll 2
        for (int part = 0; part < Format::PARTS; ++part) {
            Ints w[NUM];
#pragma GCC unroll 8
            for (int b = 0; b < NUM; ++b) {
                w[b] = Format::widen(load_lanes<Ints>(at + b * MM_VECTOR_BYTES), part);
            }
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) {
                const char* row = reinterpret_cast<const char*>(x + r * x_stride);
                const Ints four = splat(row + unit * X_BYTES + part * 4);
#pragma GCC unroll 8
                for (int b = 0; b < NUM; ++b) sums[r][b] = Format::add(sums[r][b], four, w[b]);
                MM_IN_ORDER();
            }
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
                for (int b = 0; b < NUM; ++b) MM_KEEP(sums[r][b]);
            }
            // Makes the next part load the weights again, which is cheaper than to keep them.
            if (Format::RELOADS) asm("" : "+r"(at));
        }
        at += columns * 4;
    }
    prefetch.lines = lines;
}

// Computes out [ROWS][NUM registers] = rows of x times `units` units of weights, or adds that to
// out. Never inlined, so that the sums stay in registers whatever code calls it.
template <typename Format, int ROWS, int NUM>
__attribute__((noinline)) void float_tile(const typename Format::X* x, int64_t x_stride,
                                          const void* weights, int64_t columns, int64_t units,
                                          Prefetch& prefetch, float* out, int64_t out_stride,
                                          bool adds) {
    Floats sums[ROWS][NUM] = {};
#pragma GCC unroll 8
    for (int r = 0; adds && r < ROWS; ++r) {
#pragma GCC unroll 8
        for (int b = 0; b < NUM; ++b) {
            sums[r][b] = load_lanes<Floats>(out + r * out_stride + b * LANES);
        }
    }
    add_units<Format, ROWS, NUM>(x, x_stride, weights, columns, units, prefetch, sums);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
        for (int b = 0; b < NUM; ++b) {
            store_lanes(out + r * out_stride + b * LANES, sums[r][b]);
        }
    }
}

// The same for integers of at most one group, each row times its scale. starts, scales: point to the
// first row's group; the next row's is `groups` further. starts: what the integers are added to.
template <int ROWS, int NUM>
__attribute__((noinline)) void s8_tile(const S8Format::X* x, int64_t x_stride,
                                       const void* weights, int64_t columns, int64_t units,
                                       const int32_t* starts, const float* scales, int64_t groups,
                                       Prefetch& prefetch, float* out, int64_t out_stride, bool adds) {
    Ints sums[ROWS][NUM];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
        const Ints start = splat(starts + r * groups);
#pragma GCC unroll 8
        for (int b = 0; b < NUM; ++b) sums[r][b] = start;
    }
    add_units<S8Format, ROWS, NUM>(x, x_stride, weights, columns, units, prefetch, sums);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
        const Floats scale = (Floats)splat(scales + r * groups);
#pragma GCC unroll 8
        for (int b = 0; b < NUM; ++b) {
            float* to = out + r * out_stride + b * LANES;
            const Floats old = adds ? load_lanes<Floats>(to) : Floats{};
            store_lanes(to, multiply_add(to_floats(sums[r][b]), scale, old));
        }
    }
}

}  // namespace mm
