// Computes out = x w^T + bias with weights that are stored in 4 or 8 bits: groups of columns of a row
// have a scale and an offset,
//     w = scale * code - offset        code: 0 .. 15, or 0 .. 255
// so that over the columns i of a group
//
//     sum x_i w_i  =  scale * sum x_i code_i  -  offset * sum x_i
//                             code_tile adds             once for each row, ArrangedRows::sums
//
//     codes    [n / 64][unit][64]   a unit is four bytes: 4 codes of 8 bits, or 8 codes of 4 bits;
//                                   codes of 8 bits may lie in fewer, see stored_codes.h
//     scales   [n / 64][row of words][64]  see code_scales.h
//
//     a unit of 4 bits       byte         0   1   2   3         code j is at bit 8 j, and
//                            high bits    4   5   6   7         code 4 + j at bit 8 j + 4
//                            low bits     0   1   2   3
//
// Codes of 8 bits may be floats of 8 bits (e4m3fn), which have a scale and no offset.
//
// x is multiplied as it is, or rounded to int8 with a scale for every 64 values of a row: then
// x_i = x_scale * a_i, and the sum over a_i code_i is one of integers. Codes
// become operands of the level's best product in registers: bf16 pairs, bytes, or floats. Parts of a
// unit come in the order that is cheapest to extract, and x is arranged in that order.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "amx_codes.h"
#include "code_formats.h"
#include "code_rows.h"
#include "code_scales.h"
#include "code_tile.h"
#include "gemm.h"
#include "numbers.h"
#include "parallel.h"
#include "stored_codes.h"
#include "tiles.h"

namespace mm {

// A chunk of a panel as many strips of rows read it: the scales of its groups, and codes as operands, if
// they are unpacked: each unit has become PARTS units.
template <typename Format>
struct Chunk {
    int64_t product = 0;  // the call that the chunk belongs to
    const char* codes = nullptr;
    std::vector<PanelScales> scales;  // of the groups
    std::vector<uint32_t> whole, words;

    // Whether this is the chunk; afterwards it is said to be.
    bool is(int64_t own_product, const char* own) {
        const bool same = product == own_product && codes == own;
        product = own_product;
        codes = own;
        return same;
    }
    // Reads the scales of `units` units from `unit` on. panel: the words of all of the panel.
    void read_scales_of(const uint32_t* panel, const Groups& groups, int64_t unit, int64_t units) {
        constexpr int64_t VALUES = ArrangedRows<Format>::VALUES;
        const int64_t first = unit * VALUES / groups.group;
        const int64_t end = ((unit + units) * VALUES - 1) / groups.group + 1;
        const int64_t num = std::min(end, groups.num) - first;
        scales.resize(num);
        read_scales<LESS<Format>, Format::ZEROS_FIRST>(panel, groups, first, num, scales.data());
    }
    // Makes codes whole that lie in fewer bits. Returns where codes are then.
    const char* expand(const StoredCodes& stored, int64_t units) {
        whole.resize(units * PANEL);
        stored.expand(codes, units, whole.data());
        return reinterpret_cast<const char*>(whole.data());
    }
    // others: words after them that can be read.
    void unpack(const char* from_codes, int64_t units, int64_t others = 0) {
        constexpr int UNITS = Operands<Format>::UNITS;
        words.resize(units * UNITS * PANEL + others);
        for (int64_t unit = 0; unit < units; ++unit) {
            for (int part = 0; part < UNITS; ++part) {
                uint32_t* to = words.data() + (unit * UNITS + part) * PANEL;
                for (int64_t c = 0; c < PANEL; c += LANES) {
                    const Ints from = load_lanes<Ints>(from_codes + unit * UNIT_BYTES + c * 4);
                    store_lanes(to + c, Operands<Format>::unpacked(from, part));
                }
            }
        }
    }
};

constexpr int64_t NEVER = INT64_MAX;

// From which number of rows chunks are unpacked first. Dividing a unit by shifts and masks takes less
// time than reading operands of twice the length or more where registers are wide.
template <typename Format>
constexpr int64_t UNPACKED_ROWS = Format::PARTS > 1 ? 2 * STRIP + 1 : NEVER;
#if MM_VECTOR_BYTES >= 32
template <>
constexpr int64_t UNPACKED_ROWS<S8Codes<4>> = NEVER;
template <int BITS>
constexpr int64_t UNPACKED_ROWS<FloatCodes<BITS>> = NEVER;
#endif
#if defined(MM_HAS_FAST_BF16_DOT) && MM_VECTOR_BYTES == 64
template <int BITS>
constexpr int64_t UNPACKED_ROWS<PairedCodes<BITS>> = BITS == 4 ? NEVER : 4 * STRIP;
#elif defined(MM_HAS_AMX)  // which multiplies more rows in tiles
template <int BITS>
constexpr int64_t UNPACKED_ROWS<HalvedCodes<BITS>> = NEVER;
template <>
constexpr int64_t UNPACKED_ROWS<HalvedFloat8s> = NEVER;
#endif
#ifndef MM_HAS_S8_DOT
template <>
constexpr int64_t UNPACKED_ROWS<S8PairCodes> = 8 * STRIP + 1;
#endif
// Operands of a chunk stay in the cache, the smallest one with AVX2. One strip of rows takes longer for
// a unit of codes than for one of another product, and reads it faster line by line, a few kilobytes in
// advance.
constexpr Reading CODE_READING = MM_VECTOR_BYTES == 64 ? Reading{128, 64, 2} : Reading{64, 32, 1};

// Returns the number of registers of columns in a tile.
template <typename Format>
constexpr int code_registers(int rows) {
    if (SumsOfParts<typename Format::Sums>::ARE_HALVED) return rows <= 2 ? 4 : 2;
    if (MM_VECTOR_BYTES == 64 && (Format::PARTS > 1 || Format::ZEROS_FIRST)) return rows <= 4 ? 4 : 2;
    return Format::ROUNDS ? s8_tile_registers(rows) : tile_registers(rows);
}

// sums [ROWS][64] = rows from `row` on, over a chunk, or plus that, in whole steps except at the end.
// Own: the format that multiplies the codes, which have EXPANSION units for one.
template <typename Format, typename Own, int ROWS>
void code_strip(const ArrangedRows<Format>& x, int64_t row, const ChunkOfCodes& chunk,
                const Groups& groups, Prefetch prefetch, float* sums, bool adds) {
    using X = typename Format::X;
    constexpr int64_t VALUES = ArrangedRows<Format>::VALUES;
    constexpr int64_t EXPANSION = Format::PARTS / Own::PARTS;
    constexpr int NUM = code_registers<Own>(ROWS);
    constexpr int64_t COLUMNS = NUM * LANES;
    // A single strip reads the scales of so many groups at a time, and codes in the order of memory.
    constexpr int64_t READ_GROUPS = COLUMNS == PANEL ? 8 : 1;
    PanelScales own[READ_GROUPS];
    if (!adds) std::fill(sums, sums + ROWS * PANEL, 0.0f);
    const int64_t group_steps = (groups.group + groups.step - 1) / groups.step;
    CodeSteps<X> steps;
    put(steps.x_stride, x.width);
    put(steps.x_scales, x.scales.data());
    put(steps.less, x.less.data());
    put(steps.starts, x.starts.data());
    put(steps.num_rows, x.num);
    put(steps.step_units, groups.step / VALUES * EXPANSION);
    put(steps.group_steps, group_steps);
    put(steps.prefetch.lines, prefetch.lines);
    put(steps.prefetch.every, prefetch.every);
    // Of PANEL / COLUMNS tiles each prefetches its share, spread over EXPANSION times the units.
    put(steps.prefetch.num, (prefetch.num * COLUMNS + EXPANSION * PANEL - 1) / (EXPANSION * PANEL));
    for (int64_t done = 0, count; done < chunk.units; done += count) {
        const int64_t first = (chunk.unit + done) * VALUES, step = first / groups.step;
        const int64_t group_left = group_steps - step % group_steps;
        const float* scales = chunk.scales;
        count = chunk.units - done;
        if (scales == nullptr) {
            const int64_t group = first / groups.group, num = std::min(READ_GROUPS, groups.num - group);
            read_scales<LESS<Format>, Format::ZEROS_FIRST>(chunk.words, groups, group, num, own);
            scales = own[0].values;
            count = std::min(count, (group_left + (num - 1) * group_steps) * groups.step / VALUES);
        }
        for (int64_t column = 0; column < PANEL; column += COLUMNS) {
            put<const X*>(steps.x, x.values.get() + row * x.width + first);
            put(steps.place, step * x.num + row);
            put(steps.codes, chunk.codes + done * EXPANSION * UNIT_BYTES + column * 4);
            put(steps.units, count * EXPANSION);
            put(steps.scales, scales + column);
            put(steps.group_left, group_left);
            put(steps.out, sums + column);
            if (Format::ZEROS_FIRST && !groups.has_offsets) {
                code_tile<Own, ROWS, NUM, false>(steps);
            } else {
                code_tile<Own, ROWS, NUM, true>(steps);
            }
        }
    }
}

// How a product reads its codes, and which scales it prefetches.
inline Reading reading_of(const StoredCodes& codes, const uint32_t* scales, const Groups& groups) {
    Reading reading = CODE_READING;
    reading.beside = reinterpret_cast<const char*>(scales);
    reading.beside_bytes = groups.rows() * PANEL * int64_t(sizeof *scales);
    reading.unit_bytes = codes.unit_bytes();
    return reading;
}

#ifdef MM_HAS_AMX

// From which number of rows codes are multiplied in tiles: before, unpacking takes what tiles save.
template <typename Format>
constexpr int64_t LEAST_TILED_ROWS =
    Format::ROUNDS ? 2 * TILE_ROWS_OF_X + 1
                   : (SumsOfParts<typename Format::Sums>::ARE_HALVED ? STRIP + 1 : NEVER);

// linear_codes in tiles, with the same bits.
template <typename Format, typename T, typename Write>
void linear_tiled_codes(const T* x, int64_t x_stride, const StoredCodes& codes, const uint32_t* scales,
                        const Groups& groups, int64_t product, int64_t rows, int64_t n, int64_t k,
                        int num_threads, const Next& next, const Write& write) {
    using Own = typename TiledFormat<Format>::Type;
    constexpr int64_t VALUES = ArrangedRows<Own>::VALUES;
    const TiledSteps<Own, T> tiled(x, x_stride, rows, k, groups.step, num_threads);
    const int64_t units = tiled.arranged.width / VALUES;
    const auto strip = [&](int64_t num, int64_t row, int64_t unit, const char* part, int64_t count,
                           Prefetch prefetch, float* sums, bool adds) {
        static thread_local Chunk<Own> chunk;
        if (!chunk.is(product, part)) {
            const int64_t panel = (part - codes.data) / (units * codes.unit_bytes());
            chunk.read_scales_of(scales + panel * groups.rows() * PANEL, groups, unit, count);
            const char* whole = codes.form == WHOLE ? part : chunk.expand(codes, count);
            chunk.unpack(whole, count, TILE_UNITS * PANEL);
        }
        const char* operands = reinterpret_cast<const char*>(chunk.words.data());
        code_tiled_strip<Own>(num, tiled, row, {operands, unit, count, nullptr, chunk.scales[0].values},
                         groups, prefetch, sums, adds);
    };
    multiply<TileStrips>(codes.data, rows, n, units, num_threads, next, strip,
                         [&](int64_t row, int64_t first, const float* sums, int64_t num) {
                             write(tiled.arranged, row, first, sums, num);
                         },
                         reading_of(codes, scales, groups));
}

#endif

// x [rows][k], out [rows][n], bias [n] or null.
template <typename Format, typename T>
void linear_codes(const T* x, int64_t x_stride, const StoredCodes& codes, const uint32_t* scales,
                  const Groups& groups, const T* bias, const Result<T>& out, int64_t rows,
                  int64_t n, int64_t k, int num_threads, const Next& next = {}) {
    constexpr int64_t VALUES = ArrangedRows<Format>::VALUES;
    static std::atomic<int64_t> num_products{0};
    const int64_t product = ++num_products;
    const auto write = [&](const auto& x_rows, int64_t row, int64_t first, const float* sums,
                           int64_t num) {
        out.at(row * n + first, [&](auto* to) {
            write_row(to, sums, bias == nullptr ? nullptr : bias + first, num,
                      Format::POWERS ? x_rows.row_scales[row] : 1.0f);
        });
    };
#ifdef MM_HAS_AMX
    if constexpr (LEAST_TILED_ROWS<Format> != NEVER) {
        if (rows >= LEAST_TILED_ROWS<Format>) {
            return linear_tiled_codes<Format>(x, x_stride, codes, scales, groups, product, rows, n, k,
                                              num_threads, next, write);
        }
    }
#endif
    ArrangedRows<Format> arranged(rows, k, groups.step);
    parallel_parts(rows, num_threads, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            arranged.fill(x + row * x_stride, row, k, groups.step);
        }
    });
    const int64_t units = arranged.width / VALUES;
    const auto strip = [&](auto num, int64_t row, int64_t unit, const char* part, int64_t count,
                           Prefetch prefetch, float* sums, bool adds) {
        const int64_t panel = (part - codes.data) / (units * codes.unit_bytes());
        const uint32_t* words = scales + panel * groups.rows() * PANEL;
        ChunkOfCodes own{part, unit, count, words, nullptr};
        static thread_local Chunk<Format> chunk;
        const bool is_new = !chunk.is(product, part);
        if (codes.form != WHOLE) {
            if (is_new) chunk.expand(codes, count);
            own.codes = reinterpret_cast<const char*>(chunk.whole.data());
        }
        if (rows <= STRIP) {
            return code_strip<Format, Format, num>(arranged, row, own, groups, prefetch, sums, adds);
        }
        const bool unpacks = rows >= UNPACKED_ROWS<Format>;
        if (is_new) {
            chunk.read_scales_of(words, groups, unit, count);
            if (unpacks) chunk.unpack(own.codes, count);
        }
        own.scales = chunk.scales[0].values;
        if constexpr (UNPACKED_ROWS<Format> != NEVER) {
            if (unpacks) {
                own.codes = reinterpret_cast<const char*>(chunk.words.data());
                return code_strip<Format, Operands<Format>, num>(arranged, row, own, groups,
                                                                 prefetch, sums, adds);
            }
        }
        code_strip<Format, Format, num>(arranged, row, own, groups, prefetch, sums, adds);
    };
    const auto write_all = [&](int64_t row, int64_t first, const float* sums, int64_t num) {
        write(arranged, row, first, sums, num);
    };
    multiply(codes.data, rows, n, units, num_threads, next, strip, write_all,
             reading_of(codes, scales, groups));
}

// out [tokens][k] = rows `ids` of a weight [n][k], dequantised: scale * (code - zero), or scale * code
// less the offset. An id that the weight does not have gives NaN. is_s8: codes are those of S8Format,
// and scales those of quantize_rows, [2][n].
template <int BITS, typename T>
void look_up_codes(const int64_t* ids, const StoredCodes& codes, const uint32_t* scales,
                   const Groups& groups, bool is_float8, bool is_s8, int64_t n, int64_t k, T* out,
                   int64_t tokens, int num_threads) {
    constexpr int64_t VALUES = 32 / BITS;
    const int64_t units = (k + VALUES - 1) / VALUES;
    const uint32_t flip = is_s8 ? S8Format::FLIP ^ 0x80808080u : 0;  // leaves 128 + int8
    const auto write_group = [&](const uint32_t* own, const uint32_t* words, int64_t first,
                                 int64_t end, T* to) {
        GroupScale scale{bits_to_float(*words), is_s8 ? -bits_to_float(words[n]) : 0.0f, 128};
        if (!is_s8) scale = scale_of(groups, words, first / groups.group);
        for (int64_t unit = first / VALUES; unit * VALUES < end; ++unit) {
            const uint32_t packed = codes.unit(own, unit) ^ flip;
            for (int i = 0; i < VALUES; ++i) {
                const int64_t column = unit * VALUES + column_of<BITS>(i);
                if (column >= end) continue;
                const uint32_t code = packed >> (BITS * i) & ((1u << BITS) - 1);
                const float value = is_float8 ? float_of_float8(code) : float(int32_t(code));
                to[column] = store<T>((value - float(scale.zero)) * scale.scale - scale.offset);
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
            const uint32_t* words = scales + panel * groups.rows() * PANEL + at;
            const char* first_unit = codes.data + panel * units * codes.unit_bytes();
            for (int64_t first = 0; first < k; first += groups.group) {
                write_group(reinterpret_cast<const uint32_t*>(first_unit) + at, words, first,
                            std::min(k, first + groups.group), to);
            }
        }
    });
}

// Calls run with the format that multiplies `rows` rows of x of type T by codes of `bits` bits that lie
// in `form`, or by floats of 8 bits, for which x is not rounded. Sums of integers are the same in every
// format.
template <typename T, typename Run>
void with_codes(int32_t bits, CodeForm form, bool is_float8, bool rounds, int64_t rows,
                const Run& run) {
    using Float8 = std::conditional_t<std::is_same_v<T, float>, Float8s, Bf16Float8s>;
    using Four = std::conditional_t<std::is_same_v<T, float>, FloatCodes<4>, Bf16Codes<4>>;
    using Eight = std::conditional_t<std::is_same_v<T, float>, FloatCodes<8>, Bf16Codes<8>>;
    if (is_float8) return run(Float8());
    if (bits == 4) return rounds ? run(S8Codes<4>()) : run(Four());
    if (!rounds) return run(Eight());
#if defined(MM_HAS_SMALL_DOT) && !defined(MM_HAS_S8_DOT)
    if (form == FIVE) return run(S8FewCodes<5>());
    if (form == SIX) return run(S8FewCodes<6>());
#endif
    return rows > STRIP ? run(S8PairCodes()) : run(S8Codes<8>());
}

}  // namespace mm
