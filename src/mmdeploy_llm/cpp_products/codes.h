// Computes out = x w^T + bias with weights that are stored in 4 or 8 bits: groups of columns of a row
// have a scale and an offset,
//     w = scale * code - offset        code: 0 .. 15, or 0 .. 255
// so that over the columns i of a group
//
//     sum x_i w_i  =  scale * sum x_i code_i  -  offset * sum x_i
//                             code_tile adds             once for each row, ArrangedRows::sums
//
//     codes    [n / 64][unit][64]   a unit is four bytes: 4 codes of 8 bits, or 8 codes of 4 bits
//     scales   [n / 64][group][64]  scales as floats; the lowest 8 bits of each are the code that
//                                   stands for 0. With offsets: two such rows, scales and offsets
//
//     a unit of 4 bits       byte         0   1   2   3         code j is at bit 8 j, and
//                            high bits    4   5   6   7         code 4 + j at bit 8 j + 4
//                            low bits     0   1   2   3
//
// Codes of 8 bits may be floats of 8 bits (e4m3fn), which have a scale and no offset.
//
// x is multiplied as it is, or rounded to int8 with a scale for every 128 values of a row: then
// x_i = x_scale * a_i, and the sum over a_i code_i is one of integers. Codes
// become operands of the level's best product in registers: bf16 pairs, bytes, or floats. Parts of a
// unit come in the order that is cheapest to extract, and x is arranged in that order.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "code_formats.h"
#include "gemm.h"
#include "numbers.h"
#include "parallel.h"
#include "tiles.h"

namespace mm {

MM_INLINE Floats as_floats(Floats sums) { return sums; }
MM_INLINE Floats as_floats(Ints sums) { return to_floats(sums); }

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
    int64_t rows() const { return has_offsets ? 2 * num : num; }  // of words of scales
};

// Rows of x in the order of the format: values [rows][width]; for each step of a row the sum of its
// values, and if they are rounded their scale.
template <typename Format>
struct ArrangedRows {
    using X = typename Format::X;
    static constexpr int64_t VALUES = Format::PARTS * 4 / sizeof(X);  // of a unit
    int64_t width;
    int64_t steps;
    std::unique_ptr<X[]> values;
    std::vector<float> scales;
    std::vector<float> sums;

    ArrangedRows(int64_t rows, int64_t k, int64_t step)
        : width(round_up(k, VALUES)),
          steps((k + step - 1) / step),
          values(new X[rows * width]),
          scales(Format::ROUNDS ? rows * steps : 0),
          sums(rows * steps) {}

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
                int8_t rounded[GROUP];
                const float scale = quantize(x + first, count, rounded);
                add_steps(row, first, count, step, rounded, scale);
                arrange(rounded, count, to);
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
            sums[index] = sum_of(from + at, num) * scale;
            if constexpr (Format::ROUNDS) scales[index] = scale;
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

// Adds to out [ROWS][NUM registers] one step: the products with `units` units of codes, times the
// scales of x and of the weights, less the offsets. x_scales, x_sums: point to the first row's step;
// the next row's is `steps` further. scales, offsets: of the columns.
template <typename Format, int ROWS, int NUM>
__attribute__((noinline)) void code_tile(const typename Format::X* x, int64_t x_stride,
                                         const void* codes, int64_t units, const float* x_scales,
                                         const float* x_sums, int64_t steps, const float* scales,
                                         const float* offsets, Prefetch& prefetch, float* out,
                                         bool adds) {
    typename Format::Sums sums[ROWS][NUM] = {};
    add_units<Format, ROWS, NUM>(x, x_stride, codes, PANEL, units, prefetch, sums);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
        const Floats x_sum = all_lanes(-x_sums[r * steps]);
        const Floats x_scale = all_lanes(Format::ROUNDS ? x_scales[r * steps] : 1.0f);
#pragma GCC unroll 8
        for (int b = 0; b < NUM; ++b) {
            float* to = out + r * PANEL + b * LANES;
            Floats sum = as_floats(sums[r][b]);
            if (Format::ROUNDS) sum = sum * x_scale;
            // out = old + scale * x_scale * sum - offset * x_sum
            const Floats old = adds ? load_lanes<Floats>(to) : Floats{};
            const Floats less = multiply_add(load_lanes<Floats>(offsets + b * LANES), x_sum, old);
            store_lanes(to, multiply_add(load_lanes<Floats>(scales + b * LANES), sum, less));
        }
    }
}

// What the operands of a format are smaller by than the codes.
template <typename Format>
constexpr int32_t LESS = 0;
#ifdef MM_HAS_S8_DOT
template <>
constexpr int32_t LESS<S8Codes<8>> = HAS_SIGNED_WEIGHTS ? 128 : 0;
#endif

// Reads the scales and offsets of a group of a panel, for codes from which LESS is subtracted.
template <int32_t LESS>
MM_INLINE void read_scales(const uint32_t* words, bool has_offsets, float* scales, float* offsets) {
    if (has_offsets) {
        std::memcpy(scales, words, PANEL * sizeof(float));
        std::memcpy(offsets, words + PANEL, PANEL * sizeof(float));
        if constexpr (LESS != 0) {
#pragma omp simd
            for (int64_t c = 0; c < PANEL; ++c) offsets[c] -= scales[c] * LESS;
        }
        return;
    }
#pragma omp simd
    for (int64_t c = 0; c < PANEL; ++c) {
        scales[c] = bits_to_float(words[c] & 0xffffff00u);
        offsets[c] = scales[c] * float(int32_t(words[c] & 0xffu) - LESS);
    }
}

// Codes as operands, which many strips of rows read: each unit has become PARTS units.
template <typename Format>
struct Unpacked {
    struct Operands : Format {  // hides what unpacking has done
        static constexpr int PARTS = 1;
        static constexpr bool RELOADS = false;
        static MM_INLINE Ints widen(Ints words, int) { return words; }
    };
    int64_t product = 0;  // the call that this chunk belongs to
    const char* codes = nullptr;
    std::vector<uint32_t> words;

    // Unpacks a chunk, unless it is there already.
    const char* of(int64_t own_product, const char* own, int64_t units) {
        if (product != own_product || codes != own) {
            product = own_product;
            codes = own;
            words.resize(units * Format::PARTS * PANEL);
            for (int64_t unit = 0; unit < units; ++unit) {
                for (int part = 0; part < Format::PARTS; ++part) {
                    uint32_t* to = words.data() + (unit * Format::PARTS + part) * PANEL;
                    for (int64_t c = 0; c < PANEL; c += LANES) {
                        const Ints from = load_lanes<Ints>(own + unit * UNIT_BYTES + c * 4);
                        store_lanes(to + c, Format::widen(from, part));
                    }
                }
            }
        }
        return reinterpret_cast<const char*>(words.data());
    }
};

constexpr int64_t UNPACKED_ROWS = 2 * STRIP + 1;  // from which chunks are unpacked first
constexpr int64_t UNPACKED_UNITS = 128;  // of a chunk, whose operands stay in the cache

// Whether chunks are unpacked for many rows. With bytes of VNNI and 512 bits a unit is divided by a
// shift and two masks, which takes less time than to read operands of twice the length.
template <typename Format>
constexpr bool UNPACKS = Format::PARTS > 1;
#if defined(MM_HAS_S8_DOT) && MM_VECTOR_BYTES == 64
template <>
constexpr bool UNPACKS<S8Codes<4>> = false;
#endif

// Returns the largest number of units of a chunk. Without unpacking few rows are fastest where a
// chunk stays in the first cache, and many rows where its sums are written less often.
template <typename Format>
constexpr int64_t code_part_units(int64_t rows) {
    const bool is_small = Format::PARTS > 1 && !UNPACKS<Format> && rows <= 48;
    return is_small ? GROUP_UNITS : UNPACKED_UNITS;
}

// sums [ROWS][64] = rows from `row` on, over units `unit` .. `unit + units`, or plus that, in whole
// steps except at the end. words: the scales of the panel. Operands: the format that multiplies
// `codes`, which have `expansion` units for one.
template <typename Format, typename Operands, int ROWS>
void code_strip(const ArrangedRows<Format>& x, int64_t row, int64_t unit, const char* codes,
                const uint32_t* words, const Groups& groups, int64_t units, Prefetch prefetch,
                float* sums, bool adds) {
    constexpr int64_t VALUES = ArrangedRows<Format>::VALUES;
    constexpr int64_t EXPANSION = Format::PARTS / Operands::PARTS;
    alignas(64) float scales[PANEL], offsets[PANEL];
    const int64_t step_units = groups.step / VALUES;
    constexpr int64_t COLUMNS = tile_registers(ROWS) * LANES;
    // Of PANEL / COLUMNS tiles each prefetches its share, spread over EXPANSION times the units.
    prefetch.num = (prefetch.num * COLUMNS + EXPANSION * PANEL - 1) / (EXPANSION * PANEL);
    int64_t read = -1;
    for (int64_t done = 0; done < units; done += step_units) {
        const int64_t count = std::min(step_units, units - done), first = (unit + done) * VALUES;
        const int64_t group = first / groups.group, at = row * x.steps + first / groups.step;
        if (group != read) {
            const int64_t index = groups.has_offsets ? 2 * group : group;  // row of words
            read_scales<LESS<Format>>(words + index * PANEL, groups.has_offsets, scales, offsets);
            read = group;
        }
        for (int64_t column = 0; column < PANEL; column += COLUMNS) {
            code_tile<Operands, ROWS, tile_registers(ROWS)>(
                x.values.get() + row * x.width + first, x.width,
                codes + done * EXPANSION * UNIT_BYTES + column * 4, count * EXPANSION, x.scales.data() + at,
                x.sums.data() + at, x.steps, scales + column, offsets + column, prefetch,
                sums + column, adds || done > 0);
        }
    }
}

// x [rows][k], out [rows][n], bias [n] or null.
template <typename Format, typename T>
void linear_codes(const T* x, int64_t x_stride, const void* codes, const uint32_t* scales,
                  const Groups& groups, const T* bias, T* out, int64_t rows, int64_t n, int64_t k,
                  int num_threads, const Next& next = {}) {
    constexpr int64_t VALUES = ArrangedRows<Format>::VALUES;
    static std::atomic<int64_t> num_products{0};
    const int64_t product = ++num_products;
    ArrangedRows<Format> arranged(rows, k, groups.step);
    parallel_parts(rows, num_threads, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            arranged.fill(x + row * x_stride, row, k, groups.step);
        }
    });
    const int64_t units = arranged.width / VALUES;
    const auto strip = [&](auto num, int64_t row, int64_t unit, const char* part, int64_t count,
                           Prefetch prefetch, float* sums, bool adds) {
        const int64_t panel = (part - static_cast<const char*>(codes)) / (units * UNIT_BYTES);
        const uint32_t* own = scales + panel * groups.rows() * PANEL;
        if (!UNPACKS<Format> || rows < UNPACKED_ROWS) {
            code_strip<Format, Format, num>(arranged, row, unit, part, own, groups, count, prefetch,
                                            sums, adds);
        } else {
            static thread_local Unpacked<Format> unpacked;
            const char* words = unpacked.of(product, part, count);
            code_strip<Format, typename Unpacked<Format>::Operands, num>(
                arranged, row, unit, words, own, groups, count, prefetch, sums, adds);
        }
    };
    const auto write = [&](int64_t row, int64_t first, const float* sums, int64_t num) {
        write_row(out + row * n + first, sums, bias == nullptr ? nullptr : bias + first, num);
    };
    multiply(codes, rows, n, units, num_threads, next, strip, write,
             code_part_units<Format>(rows));
}

// out [tokens][k] = rows `ids` of a weight [n][k], dequantised: scale * (code - zero), or scale * code
// less the offset. An id that the weight does not have gives NaN. is_s8: codes are those of S8Format,
// and scales those of quantize_rows, [2][n].
template <int BITS, typename T>
void look_up_codes(const int64_t* ids, const uint32_t* codes, const uint32_t* scales,
                   const Groups& groups, bool is_float8, bool is_s8, int64_t n, int64_t k, T* out,
                   int64_t tokens, int num_threads) {
    constexpr int64_t VALUES = 32 / BITS;
    const int64_t units = (k + VALUES - 1) / VALUES;
    const uint32_t flip = is_s8 ? S8Format::FLIP ^ 0x80808080u : 0;  // leaves 128 + int8
    const auto write_group = [&](const uint32_t* own, const uint32_t* word, int64_t first,
                                 int64_t end, T* to) {
        const bool has_zero = !groups.has_offsets && !is_s8;
        const float scale = bits_to_float(has_zero ? *word & 0xffffff00u : *word);
        const float zero = is_s8 ? 128.0f : has_zero ? float(int32_t(*word & 0xffu)) : 0.0f;
        float offset = groups.has_offsets ? bits_to_float(word[PANEL]) : 0.0f;
        if (is_s8) offset = -bits_to_float(word[n]);
        for (int64_t unit = first / VALUES; unit * VALUES < end; ++unit) {
            const uint32_t packed = own[unit * PANEL] ^ flip;
            for (int i = 0; i < VALUES; ++i) {
                const int64_t column = unit * VALUES + column_of<BITS>(i);
                if (column >= end) continue;
                const uint32_t code = packed >> (BITS * i) & ((1u << BITS) - 1);
                const float value = is_float8 ? float_of_float8(code) : float(int32_t(code));
                to[column] = store<T>((value - zero) * scale - offset);
            }
        }
    };
    parallel_parts(tokens, num_threads, [&](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; ++token) {
            const int64_t id = ids[token], panel = id / PANEL, at = id % PANEL;
            T* to = out + token * k;
            if (id < 0 || id >= n) {
                std::memset(to, 0xff, k * sizeof(T));
                continue;
            }
            const uint32_t* word = scales + panel * groups.rows() * PANEL + at;
            for (int64_t first = 0; first < k; first += groups.group) {
                write_group(codes + panel * units * PANEL + at, word, first,
                            std::min(k, first + groups.group), to);
                word += groups.has_offsets ? 2 * PANEL : PANEL;
            }
        }
    });
}

// Calls run with the format that multiplies x of type T by codes of `bits` bits, or by floats of 8
// bits, for which x is not rounded.
template <typename T, typename Run>
void with_codes(int32_t bits, bool is_float8, bool rounds, const Run& run) {
    using Float8 = std::conditional_t<std::is_same_v<T, float>, Float8s, Bf16Float8s>;
    using Four = std::conditional_t<std::is_same_v<T, float>, FloatCodes<4>, Bf16Codes<4>>;
    using Eight = std::conditional_t<std::is_same_v<T, float>, FloatCodes<8>, Bf16Codes<8>>;
    if (is_float8) return run(Float8());
    if (bits == 4) return rounds ? run(S8Codes<4>()) : run(Four());
    return rounds ? run(S8Codes<8>()) : run(Eight());
}

}  // namespace mm
