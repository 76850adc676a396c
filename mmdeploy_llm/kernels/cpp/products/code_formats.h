// How the codes of a unit, see codes.h, become operands of a product: a format for each kind of code
// and of x. A format has
//     X, Sums              the types of the values of x and of the sums
//     PARTS                the operands that a unit becomes, one after the other
//     RELOADS              whether each part loads the weights again
//     ROUNDS               whether x is rounded to int8
//     POWERS               whether the scales of x are one for each row, times powers of two for groups
//     ZEROS_FIRST          whether sums start with what zeros of weights subtract, instead of offsets
//     FLOAT_BITS           whether sums are the bits of floats, see FLOAT_OF_0
//     CODE_BITS            the bits that codes have at most
//     FLUSHES              whether tiny values of x are taken for 0
//     SECOND_EXCESS        what each second operand is smaller by than its code; sums start with it
//     column(i)            the column, within a unit, of the i-th value of x in the order of the format
//     widen(words, part)   makes operands of one part of the units in a register
//     add(sums, x, w)      adds products
#pragma once

#include <cstdint>

#include "lanes.h"
#include "numbers.h"

namespace mm {

// What most formats have.
struct PlainCodes {
    static constexpr bool ROUNDS = false, POWERS = false, ZEROS_FIRST = false;
    static constexpr bool FLOAT_BITS = false, FLUSHES = false;
    static constexpr int32_t SECOND_EXCESS = 0;
    static constexpr int CODE_BITS = 8;
};

template <int BITS>
MM_INLINE Ints code_of(Ints words, int part) {
    constexpr uint32_t MASK = (1u << BITS) - 1;
    return (Ints)((Words)words >> uint32_t(BITS * part)) & splat_word(MASK);
}

// Returns the column, within its unit, of the code that starts at bit BITS * index.
template <int BITS>
constexpr int64_t column_of(int index) {
    if (BITS == 8) return index;
    return index % 2 == 0 ? index / 2 : 4 + index / 2;
}

// Codes as floats: one of each unit at a time. A code stays where it is in its word, which is
// 2^(BITS * part) times the code, and x is divided by that, which is exact. Only NEON converts unsigned
// integers: elsewhere the last code of a word, which has the bit of the sign, is moved.
template <int BITS>
struct FloatCodes : PlainCodes {
    using X = float;
    using Sums = Floats;
    static constexpr int PARTS = 32 / BITS;
    static constexpr bool RELOADS = true;
    static constexpr int64_t column(int64_t i) { return column_of<BITS>(int(i)); }
#if defined(__aarch64__)
    static constexpr bool is_moved(int) { return false; }
    static MM_INLINE Ints to_floats_of(Ints words) {
        return (Ints)vcvtq_f32_u32((uint32x4_t)words);
    }
#else
    static constexpr bool is_moved(int part) { return part == PARTS - 1; }
    static MM_INLINE Ints to_floats_of(Ints words) { return (Ints)to_floats(words); }
#endif
    static constexpr float factor(int part) {  // of the x of a part
        return is_moved(part) ? 1.0f : 1.0f / float(1u << (BITS * part));
    }
    static MM_INLINE Ints widen(Ints words, int part) {
        if (is_moved(part)) return to_floats_of((Ints)((Words)words >> uint32_t(32 - BITS)));
        const Words mask = (Words)splat_word((1u << BITS) - 1) << uint32_t(BITS * part);
        return to_floats_of((Ints)((Words)words & mask));
    }
    static MM_INLINE Floats add(Floats sums, Ints x, Ints w) {
        return multiply_add((Floats)x, (Floats)w, sums);
    }
};

// A format where it multiplies several rows.
template <typename Format>
struct OfRows : Format {};

// Sums take all registers then but those of operands. A mask in one more would have GCC keep a sum in
// memory, which each product with it waits for, and the tile takes twice the time.
template <int BITS>
struct OfRows<FloatCodes<BITS>> : FloatCodes<BITS> {
    static MM_INLINE Ints widen(Ints words, int part) {
        if (FloatCodes<BITS>::is_moved(part)) return FloatCodes<BITS>::widen(words, part);
        const Ints mask = mask_of_memory<(1u << BITS) - 1>(BITS * part);
        return FloatCodes<BITS>::to_floats_of(words & mask);
    }
};

// Floats of 8 bits: sign, 4 bits of exponent (bias 7), 3 of mantissa. Their seven lowest bits, moved
// to bit 20, are a float whose exponent (bias 127) is 120 too small, subnormal numbers included:
// it is multiplied by 2^120. No code is read as NaN.
struct Float8s : FloatCodes<8> {
    static constexpr float factor(int) { return 1.0f; }
    static MM_INLINE Ints widen(Ints words, int part) {
        const Ints code = code_of<8>(words, part);
        const Ints sign = (Ints)((Words)(code & splat_word(0x80u)) << 24);
        const Ints magnitude = (Ints)((Words)(code & splat_word(0x7fu)) << 20);
        return (Ints)((Floats)(sign | magnitude) * all_lanes(bits_to_float((127u + 120u) << 23)));
    }
};

// Returns the value of one such code.
MM_INLINE float float_of_float8(uint32_t code) {
    const uint32_t bits = (code & 0x80u) << 24 | (code & 0x7fu) << 20;
    return bits_to_float(bits) * bits_to_float((127u + 120u) << 23);
}

// The halves of a 32-bit lane hold the codes at the bits BITS * part and 16 + BITS * part of a unit.
template <int BITS>
struct PairsOfCodes : PlainCodes {
    static constexpr int PARTS = 16 / BITS;
    static constexpr int64_t column(int64_t i) {
        return column_of<BITS>(int(i / 2 + i % 2 * PARTS));
    }
    static MM_INLINE Ints pairs(Ints words, int part) {
        constexpr uint32_t MASK = BITS == 4 ? 0x000f000fu : 0x00ff00ffu;
        return (Ints)((Words)words >> uint32_t(BITS * part)) & splat_word(MASK);
    }
};

#if defined(MM_HAS_BF16_DOT) && MM_VECTOR_BYTES == 64
template <int BITS>
struct PairedCodes : PairsOfCodes<BITS> {
    using X = bf16;
    using Sums = Floats;
    static constexpr bool RELOADS = false;
    static MM_INLINE Ints widen(Ints words, int part) {
        const Ints pairs = PairsOfCodes<BITS>::pairs(words, part);
        if constexpr (BITS == 4) {
            return (Ints)_mm512_permutexvar_epi16((__m512i)pairs, bf16_of_codes());
        } else {
            const Words low = (Words)to_floats(pairs & splat_word(0xffffu));
            const Words high = (Words)to_floats((Ints)((Words)pairs >> 16));
            return (Ints)((low >> 16) | high);  // the lower half of `high` is 0: 8 bits are exact
        }
    }
    static MM_INLINE Floats add(Floats sums, Ints x, Ints w) { return add_bf16_pairs(sums, x, w); }

  private:
    // 0 .. 15 in bf16, by index.
    static MM_INLINE __m512i bf16_of_codes() {
        return _mm512_castsi256_si512(_mm256_setr_epi16(
            0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120,
            0x4130, 0x4140, 0x4150, 0x4160, 0x4170));
    }
};

struct PairedFloat8s : PairedCodes<8> {
    static MM_INLINE Ints widen(Ints words, int part) {
        const __m512i codes = (__m512i)pairs(words, part);
        const __m512i sign = _mm512_slli_epi16(_mm512_and_si512(codes, all(0x80)), 8);
        const __m512i bits = _mm512_slli_epi16(_mm512_and_si512(codes, all(0x7f)), 4);
        const __m512i normal = _mm512_add_epi16(bits, all(120 << 7));
        const __mmask32 is_subnormal = _mm512_testn_epi16_mask(codes, all(0x78));
        const __m512i magnitude =
            _mm512_mask_permutexvar_epi16(normal, is_subnormal, codes, subnormals());
        return (Ints)_mm512_or_si512(sign, magnitude);
    }

  private:
    static MM_INLINE __m512i all(int value) { return _mm512_set1_epi16(short(value)); }
    // 0 .. 7 times 2^-9 in bf16, by the three lowest bits of the index, of which bits 3 and 4 are 0.
    static MM_INLINE __m512i subnormals() {
        return _mm512_castsi128_si512(
            _mm_setr_epi16(0x0000, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
    }
};
#endif

#if defined(MM_HAS_FAST_BF16_DOT) && MM_VECTOR_BYTES == 64
template <int BITS>
using Bf16Codes = PairedCodes<BITS>;
using Bf16Float8s = PairedFloat8s;
#elif defined(__AMX_BF16__)
// The tiles of AMX multiply many rows by codes in pairs of bf16, see amx_codes.h. Few rows have the same
// bits: floats are added in the order of the tiles. The first codes of pairs, which lie in the lower half
// of a unit, and the second ones have sums of their own, which are added after 32 columns.
struct HalvedSums {
    Floats low, high;
};

// x: its tiny values are 0, as subnormal numbers are in tiles; then no sum is subnormal.
template <int BITS>
struct HalvedCodes : FloatCodes<BITS> {
    using Sums = HalvedSums;
    static constexpr bool FLUSHES = true;
};

struct HalvedFloat8s : Float8s {
    using Sums = HalvedSums;
    static constexpr bool FLUSHES = true;
};

template <int BITS>
struct OfRows<HalvedCodes<BITS>> : HalvedCodes<BITS> {
    static MM_INLINE Ints widen(Ints words, int part) {
        return OfRows<FloatCodes<BITS>>::widen(words, part);
    }
};

template <int BITS>
using Bf16Codes = HalvedCodes<BITS>;
using Bf16Float8s = HalvedFloat8s;
#elif defined(MM_HAS_FAST_BF16_DOT)
template <int BITS>
struct Bf16Codes : PairsOfCodes<BITS> {
    using X = bf16;
    using Sums = Floats;
    static constexpr bool RELOADS = false;
    static MM_INLINE Ints widen(Ints words, int part) {
        constexpr int STEP = PairsOfCodes<BITS>::PARTS;
        return halves(to_floats(code_of<BITS>(words, part)),
                      to_floats(code_of<BITS>(words, part + STEP)));
    }
    // Pairs of floats that bf16 holds exactly.
    static MM_INLINE Ints halves(Floats low, Floats high) {
        return (Ints)((Words)low >> 16) | (Ints)high;
    }
    static MM_INLINE Floats add(Floats sums, Ints x, Ints w) { return add_bf16_pairs(sums, x, w); }
};

// The bytes of 16 codes are looked up at once, which makes two parts: codes 0, 1 and 2, 3 of units,
// or 4, 5 and 6, 7.
template <>
struct Bf16Codes<4> : PlainCodes {
    using X = bf16;
    using Sums = Floats;
    static constexpr int PARTS = 4;
    static constexpr bool RELOADS = false;
    static constexpr int64_t column(int64_t i) { return i; }
    static MM_INLINE Ints widen(Ints words, int part) {
        const uint8x16_t bytes = (uint8x16_t)words;
        const uint8x16_t codes = part < 2 ? vandq_u8(bytes, vdupq_n_u8(15)) : vshrq_n_u8(bytes, 4);
        const uint8x16_t low = vqtbl1q_u8(load_lanes<uint8x16_t>(LOW), codes);
        const uint8x16_t high = vqtbl1q_u8(load_lanes<uint8x16_t>(HIGH), codes);
        const auto first = (int32x4_t)vzip1q_u8(low, high), second = (int32x4_t)vzip2q_u8(low, high);
        return part % 2 == 0 ? (Ints)vuzp1q_s32(first, second) : (Ints)vuzp2q_s32(first, second);
    }
    static MM_INLINE Floats add(Floats sums, Ints x, Ints w) { return add_bf16_pairs(sums, x, w); }

  private:
    // The bytes of 0 .. 15 in bf16.
    alignas(16) static constexpr uint8_t LOW[16] = {0x00, 0x80, 0x00, 0x40, 0x80, 0xa0, 0xc0, 0xe0,
                                                    0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70};
    alignas(16) static constexpr uint8_t HIGH[16] = {0x00, 0x3f, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40,
                                                     0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41};
};

struct Bf16Float8s : Bf16Codes<8> {
    static MM_INLINE Ints widen(Ints words, int part) {
        return halves((Floats)Float8s::widen(words, part),
                      (Floats)Float8s::widen(words, part + PARTS));
    }
};
#else
template <int BITS>
using Bf16Codes = FloatCodes<BITS>;
using Bf16Float8s = Float8s;
#endif

// Codes times rounded x. Bytes are multiplied as they are where the level can: all of them with VNNI,
// those of 4 bits with AVX2. Where the operands of bytes are both signed, those of NEON, codes of 8
// bits become code - 128, and the offsets 128 scales less:
// scale * code - offset = scale * (code - 128) - (offset - 128 * scale).
template <int BITS>
struct S8Codes : PairsOfCodes<BITS> {
    using X = int16_t;
    using Sums = Ints;
    static constexpr bool RELOADS = true;
    static constexpr bool ROUNDS = true, POWERS = BITS == 4;
    static MM_INLINE Ints widen(Ints words, int part) {
        return PairsOfCodes<BITS>::pairs(words, part);
    }
    static MM_INLINE Ints add(Ints sums, Ints x, Ints w) { return add_pairs(sums, x, w); }
};

#ifdef MM_HAS_SMALL_DOT
template <>
struct S8Codes<4> : PlainCodes {
    using X = int8_t;
    using Sums = SmallSums;
    static constexpr int PARTS = 2;
    static constexpr bool RELOADS = NUM_REGISTERS == 16;
    static constexpr bool ROUNDS = true, POWERS = true;
    static constexpr int CODE_BITS = 4;
    static constexpr bool ZEROS_FIRST = HAS_PAIRS_BESIDE_QUADRUPLES, FLOAT_BITS = ZEROS_FIRST;
    static constexpr int64_t column(int64_t i) { return i; }
    static MM_INLINE Ints widen(Ints words, int part) {
        return (Ints)((Words)words >> uint32_t(4 * part)) & splat_word(0x0f0f0f0fu);
    }
    static MM_INLINE Sums add(Sums sums, Ints x, Ints w) {
        return add_small_quadruples(sums, w, x);
    }
};
#endif

#if defined(MM_HAS_SMALL_DOT) && !defined(MM_HAS_S8_DOT)
// Codes in units of those of 8 bits that have 5 or 6.
template <int BITS>
struct S8FewCodes : PlainCodes {
    using X = int8_t;
    using Sums = SmallSums;
    static constexpr int PARTS = 1;
    static constexpr bool RELOADS = false;
    static constexpr bool ROUNDS = true;
    static constexpr int CODE_BITS = BITS;
    static constexpr int64_t column(int64_t i) { return i; }
    static MM_INLINE Ints widen(Ints words, int) { return words; }
    static MM_INLINE Sums add(Sums sums, Ints x, Ints w) {
        return add_small_quadruples(sums, w, x);
    }
};
#endif

#ifndef MM_HAS_S8_DOT
// Codes of 8 bits for many rows: pairs of bytes as WideS8Format has them, which are divided by one
// shift. The second code of each pair is 128 less, which the number that sums start with brings back.
struct S8PairCodes : PlainCodes {
    using X = int16_t;
    using Sums = Ints;
    static constexpr int PARTS = 2;
    static constexpr int32_t SECOND_EXCESS = 128;
    static constexpr bool RELOADS = false;
    static constexpr bool ROUNDS = true;
    static MM_INLINE Ints flipped(Ints words) { return words ^ mask_of_memory<0x80008000u>(); }
    static MM_INLINE Ints widen(Ints words, int part) {
        return part == 0 ? flipped(words) : (Ints)((SignedHalves)flipped(words) >> 8);
    }
    static MM_INLINE Ints add(Ints sums, Ints x, Ints w) { return add_pairs(sums, x, w); }
};
#else
template <>
struct S8Codes<8> : PlainCodes {
    using X = int8_t;
    using Sums = Ints;
    static constexpr int PARTS = 1;
    static constexpr bool ZEROS_FIRST = HAS_PAIRS_BESIDE_QUADRUPLES;
    static constexpr bool RELOADS = false;
    static constexpr bool ROUNDS = true;
    static constexpr int64_t column(int64_t i) { return i; }
    static MM_INLINE Ints widen(Ints words, int) {
        return HAS_SIGNED_WEIGHTS ? words ^ splat_word(0x80808080u) : words;
    }
    static MM_INLINE Ints add(Ints sums, Ints x, Ints w) { return add_quadruples(sums, w, x); }
};

using S8PairCodes = S8Codes<8>;
#endif

// Codes of a format after unpacking: each unit has become UNITS units.
template <typename Format>
struct Operands : Format {
    static constexpr int UNITS = Format::PARTS;
    static constexpr int PARTS = 1;
    static constexpr bool RELOADS = false;
    static MM_INLINE Ints unpacked(Ints words, int part) { return Format::widen(words, part); }
    static MM_INLINE Ints widen(Ints words, int) { return words; }
};

#ifndef MM_HAS_S8_DOT
template <>
struct Operands<S8PairCodes> : S8PairCodes {
    static constexpr int UNITS = 1;
    static MM_INLINE Ints unpacked(Ints words, int) { return flipped(words); }
    static MM_INLINE Ints widen(Ints words, int part) {
        return part == 0 ? words : (Ints)((SignedHalves)words >> 8);
    }
};
#endif

// Moves the four codes of 4 bits in the lower half of a word to the lower halves of its bytes.
MM_INLINE uint32_t apart(uint32_t word) {
    word = (word | word << 8) & 0x00ff00ffu;
    return (word | word << 4) & 0x0f0f0f0fu;
}

// Returns the unit of eight codes of 4 bits, of which the first is in the lowest bits of `word`.
MM_INLINE uint32_t unit_of_word(uint32_t word) {
    return apart(word & 0xffffu) | apart(word >> 16) << 4;
}

}  // namespace mm
