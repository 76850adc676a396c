// The vector registers of the level that the library is built for, and the operations on them that
// the compiler's own vectors do not express.
//
//     level                         register   float32   bf16 pairs   int8 quadruples
//     AVX-512 with AMX              64 bytes   fma       tiles, see amx.h, which have s8 products too
//     AVX-512 with bf16 and VNNI    64 bytes   fma       vdpbf16ps    vpdpbusd
//     AVX-512                       64 bytes   fma       widened      vpdpbusd, else vpmaddwd
//     AVX2                          32 bytes   fma       widened      vpdpbusd, else vpmaddwd
//     NEON, matrices of bf16        16 bytes   fma       bfdot        sdot      bfmmla and smmla for
//     NEON, matrices of int8        16 bytes   fma       widened      sdot      2 rows or more
//     NEON, dot products            16 bytes   fma       widened      sdot
//     NEON                          16 bytes   fma       widened      smull, addp, sadalp
//     others                        16 bytes   as the compiler does
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "numbers.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#ifndef MM_VECTOR_BYTES
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#define MM_VECTOR_BYTES 64
#elif defined(__AVX2__) && defined(__FMA__)
#define MM_VECTOR_BYTES 32
#else
#define MM_VECTOR_BYTES 16
#endif
#endif

#if MM_VECTOR_BYTES == 64 && defined(__AVX512BF16__)
#define MM_HAS_BF16_DOT 1
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define MM_HAS_BF16_DOT 1
#endif

// Intel's processors take as long for VDPBF16PS as for FMAs of as many floats, or longer. Those with AMX
// multiply bf16 in its tiles, and codes as floats.
#if defined(MM_HAS_BF16_DOT) && !defined(__AMX_BF16__)
#define MM_HAS_FAST_BF16_DOT 1
#endif

#if MM_VECTOR_BYTES == 64 && defined(__AVX512VNNI__)
#define MM_HAS_S8_DOT 1
#elif MM_VECTOR_BYTES == 32 && (defined(__AVXVNNI__) || defined(__AVX512VNNI__))
#define MM_HAS_S8_DOT 1
#elif defined(__aarch64__)
#define MM_HAS_S8_DOT 1
#endif

// Keeps the compiler from moving an accumulator out of its register.
#if MM_VECTOR_BYTES == 64
#define MM_KEEP(value) asm("" : "+v"(value))
#elif defined(__x86_64__)
#define MM_KEEP(value) asm("" : "+x"(value))
#elif defined(__aarch64__)
#define MM_KEEP(value) asm("" : "+w"(value))
#else
#define MM_KEEP(value) (void)0
#endif

// Keeps GCC from loading the x of all rows before the first product: there are not enough registers.
#if defined(__aarch64__)
#define MM_IN_ORDER() asm volatile("")
#else
#define MM_IN_ORDER() (void)0
#endif

namespace mm {

constexpr int64_t LANES = MM_VECTOR_BYTES / 4;  // values of four bytes in a register
#if MM_VECTOR_BYTES == 64 || defined(__aarch64__)
constexpr int NUM_REGISTERS = 32;
#else
constexpr int NUM_REGISTERS = 16;
#endif

typedef float Floats __attribute__((vector_size(MM_VECTOR_BYTES)));
typedef int32_t Ints __attribute__((vector_size(MM_VECTOR_BYTES)));
typedef uint32_t Words __attribute__((vector_size(MM_VECTOR_BYTES)));
typedef uint16_t Halves __attribute__((vector_size(MM_VECTOR_BYTES)));
typedef int16_t SignedHalves __attribute__((vector_size(MM_VECTOR_BYTES)));
typedef uint16_t HalfRegister __attribute__((vector_size(MM_VECTOR_BYTES / 2)));

template <typename V>
MM_INLINE V load_lanes(const void* from) {
    V value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

// Loads LANES values as floats.
MM_INLINE Floats load_floats(const float* from) { return load_lanes<Floats>(from); }
MM_INLINE Floats load_floats(const bf16* from) {
    return (Floats)(__builtin_convertvector(load_lanes<HalfRegister>(from), Words) << 16);
}

template <typename V>
MM_INLINE void store_lanes(void* to, V value) {
    std::memcpy(to, &value, sizeof value);
}

// Stores past the caches, where the processor can: for values that are not read again soon. `to` is
// aligned to a register. Other threads see them after end_streaming().
MM_INLINE void stream_lanes(float* to, Floats value) {
#if MM_VECTOR_BYTES == 64
    _mm512_stream_ps(to, (__m512)value);
#elif MM_VECTOR_BYTES == 32
    _mm256_stream_ps(to, (__m256)value);
#else
    store_lanes(to, value);
#endif
}

MM_INLINE void end_streaming() {
#if MM_VECTOR_BYTES >= 32
    _mm_sfence();
#endif
}

// Returns a register whose lanes are all the four bytes at `from`.
MM_INLINE Ints splat(const void* from) {
    int32_t four;
    std::memcpy(&four, from, sizeof four);
#if MM_VECTOR_BYTES == 64
    return (Ints)_mm512_set1_epi32(four);
#elif MM_VECTOR_BYTES == 32
    return (Ints)_mm256_set1_epi32(four);
#else
    return Ints{four, four, four, four};
#endif
}

// Returns a register whose lanes are all `word`.
MM_INLINE Ints splat_word(uint32_t word) { return splat(&word); }

// A register of MASK << shift that is read from memory at each use: in a loop it would keep a register
// that the sums need.
template <uint32_t MASK>
MM_INLINE Ints mask_of_memory(int shift = 0) {
    struct Lanes {
        alignas(MM_VECTOR_BYTES) uint32_t at[32][LANES];
        constexpr Lanes() : at{} {
            for (int by = 0; by < 32; ++by) {
                for (int64_t i = 0; i < LANES; ++i) at[by][i] = MASK << by;
            }
        }
    };
    static constexpr Lanes LANES_OF_MASK;
    const uint32_t* mask = LANES_OF_MASK.at[shift];
    asm volatile("" : "+r"(mask));
    return load_lanes<Ints>(mask);
}

// Returns sums + a * b in one rounding where the level has such an instruction.
MM_INLINE Floats multiply_add(Floats a, Floats b, Floats sums) {
#if MM_VECTOR_BYTES == 64
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sums);
#elif MM_VECTOR_BYTES == 32
    // GCC would choose the forms that overwrite a factor, and then move the sums about.
    asm("vfmadd231ps %2, %1, %0" : "+x"(sums) : "x"(a), "x"(b));
    return sums;
#elif defined(__aarch64__)
    return (Floats)vfmaq_f32((float32x4_t)sums, (float32x4_t)a, (float32x4_t)b);
#else
    return sums + a * b;
#endif
}

// The same with the lanes at `b`. As an operand in memory they take no register, of which tiles of 16
// registers have none left.
MM_INLINE Floats multiply_add_at(Floats a, const float* b, Floats sums) {
#if MM_VECTOR_BYTES == 32
    asm("vfmadd231ps %2, %1, %0"
        : "+x"(sums)
        : "x"(a), "m"(*reinterpret_cast<const float(*)[LANES]>(b)));
    return sums;
#else
    return multiply_add(a, load_lanes<Floats>(b), sums);
#endif
}

// Returns 16 bytes as bytes_at reads them: repeated in the whole register.
MM_INLINE Ints sixteen_bytes(const uint8_t* bytes) {
    Ints found;
    for (int i = 0; i < MM_VECTOR_BYTES; i += 16) {
        std::memcpy(reinterpret_cast<char*>(&found) + i, bytes, 16);
    }
    return found;
}

// Returns for each byte of `places`, 0 to 15, the byte of `bytes` there.
MM_INLINE Ints bytes_at(Ints bytes, Ints places) {
#if MM_VECTOR_BYTES == 64
    return (Ints)_mm512_shuffle_epi8((__m512i)bytes, (__m512i)places);
#elif MM_VECTOR_BYTES == 32
    return (Ints)_mm256_shuffle_epi8((__m256i)bytes, (__m256i)places);
#elif defined(__aarch64__)
    return (Ints)vqtbl1q_u8((uint8x16_t)bytes, (uint8x16_t)places);
#else
    uint8_t from[16], at[16];
    std::memcpy(from, &bytes, 16);
    std::memcpy(at, &places, 16);
    for (uint8_t& place : at) place = from[place];
    std::memcpy(&places, at, 16);
    return places;
#endif
}

// Returns in each lane the products of its two 16-bit integers, added.
MM_INLINE Ints sum_of_pairs(Ints a, Ints b) {
#if MM_VECTOR_BYTES == 64
    return (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif MM_VECTOR_BYTES == 32
    return (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
    return (Ints)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
    return ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
}

// Adds to each lane the products of its two 16-bit integers.
MM_INLINE Ints add_pairs(Ints sums, Ints a, Ints b) {
#if MM_VECTOR_BYTES == 32
    // Left to itself GCC would put the sum into another register.
    const Ints products = sum_of_pairs(a, b);
    asm("vpaddd %1, %0, %0" : "+x"(sums) : "x"(products));
    return sums;
#else
    return sums + sum_of_pairs(a, b);
#endif
}

// The same in one instruction where there is one, and sums are not 0 if HAS_SUMS.
template <bool HAS_SUMS>
MM_INLINE Ints add_pairs_at_once(Ints sums, Ints a, Ints b) {
#if MM_VECTOR_BYTES == 64 && defined(__AVX512VNNI__)
    if (HAS_SUMS) return (Ints)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)a, (__m512i)b);
#elif MM_VECTOR_BYTES == 32 && defined(__AVXVNNI__)
    if (HAS_SUMS) return (Ints)_mm256_dpwssd_avx_epi32((__m256i)sums, (__m256i)a, (__m256i)b);
#endif
    return add_pairs(sums, a, b);
}

#ifdef MM_HAS_BF16_DOT

// Adds to each lane the products of its two bf16 values. Products are exact, and subnormal values and
// sums are 0. AVX-512 adds one product after the other and rounds to nearest; NEON adds the sum of
// both, and rounds both sums to odd: an error of less than one unit in the last place of a float, not
// of half of one, whose mean is 0 as well.
MM_INLINE Floats add_bf16_pairs(Floats sums, Ints a, Ints b) {
#if MM_VECTOR_BYTES == 64
    return (Floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b);
#else
    return (Floats)vbfdotq_f32((float32x4_t)sums, (bfloat16x8_t)a, (bfloat16x8_t)b);
#endif
}

// Rounds to nearest even and stores.
MM_INLINE void store_bf16(bf16* to, Floats first, Floats second) {
#if MM_VECTOR_BYTES == 64
    store_lanes(to, _mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
#else
    const bfloat16x8_t half = vcvtq_low_bf16_f32((float32x4_t)first);
    store_lanes(to, vcvtq_high_bf16_f32(half, (float32x4_t)second));
#endif
}

#endif

#ifdef MM_HAS_S8_DOT

#if defined(__aarch64__)
constexpr bool HAS_SIGNED_WEIGHTS = true;  // whether add_quadruples reads signed bytes of weights
#else
constexpr bool HAS_SIGNED_WEIGHTS = false;
#endif

// Adds to each lane the products of its four bytes of weights, signed or unsigned, and of its four
// bytes of x, signed and not -128.
MM_INLINE Ints add_quadruples(Ints sums, Ints weights, Ints x) {
#if MM_VECTOR_BYTES == 64
    return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, (__m512i)x);
#elif defined(__AVXVNNI__)
    return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)weights, (__m256i)x);
#elif MM_VECTOR_BYTES == 32
    return (Ints)_mm256_dpbusd_epi32((__m256i)sums, (__m256i)weights, (__m256i)x);
#elif defined(__ARM_FEATURE_DOTPROD)
    return (Ints)vdotq_s32((int32x4_t)sums, (int8x16_t)weights, (int8x16_t)x);
#else
    // The sum of two products, 2 * 128 * 127 at most, fits into 16 bits. Left to themselves, compilers
    // begin with the products of several sums, for which there are not enough registers.
    Halves low, high;
    asm("smull %1.8h, %3.8b, %4.8b\n\t"
        "smull2 %2.8h, %3.16b, %4.16b\n\t"
        "addp %1.8h, %1.8h, %2.8h\n\t"
        "sadalp %0.4s, %1.8h"
        : "+w"(sums), "=&w"(low), "=&w"(high)
        : "w"(weights), "w"(x));
    return sums;
#endif
}

#endif

// Whether there are instructions for add_pairs and for add_quadruples.
#if defined(MM_HAS_S8_DOT) && MM_VECTOR_BYTES >= 32
constexpr bool HAS_PAIRS_BESIDE_QUADRUPLES = true;
#else
constexpr bool HAS_PAIRS_BESIDE_QUADRUPLES = false;
#endif

// How many quadruples of products of codes of few bits and signed bytes, none of them -128, a sum of two
// halves of 16 bits holds: 8 * 2 * 15 * 127 < 2^15 for those of 4.
constexpr int64_t small_quadruples(int bits) { return INT16_MAX / (2 * 127 * ((1 << bits) - 1)); }

#if defined(MM_HAS_S8_DOT) || MM_VECTOR_BYTES >= 32
#define MM_HAS_SMALL_DOT 1

// Sums of such products, of codes of 4 to 6 bits. Without an instruction for four of them, two of 16
// bits for each lane: they take two instructions, where sums of 32 bits take three.
#ifdef MM_HAS_S8_DOT
using SmallSums = Ints;
#else
using SmallSums = SignedHalves;
#endif

// Adds to each lane the products of its four bytes of few bits and four signed bytes.
MM_INLINE SmallSums add_small_quadruples(SmallSums sums, Ints small, Ints signed_bytes) {
#ifdef MM_HAS_S8_DOT
    return add_quadruples(sums, small, signed_bytes);
#elif MM_VECTOR_BYTES == 64
    return sums + (SignedHalves)_mm512_maddubs_epi16((__m512i)small, (__m512i)signed_bytes);
#else
    return sums + (SignedHalves)_mm256_maddubs_epi16((__m256i)small, (__m256i)signed_bytes);
#endif
}

#endif

MM_INLINE Ints as_ints(Ints sums) { return sums; }
// Adds the two sums of each lane.
MM_INLINE Ints as_ints(SignedHalves sums) {
    return sum_of_pairs((Ints)sums, mask_of_memory<0x00010001u>());
}

MM_INLINE Floats to_floats(Ints values) {
#if MM_VECTOR_BYTES == 64
    return (Floats)_mm512_cvtepi32_ps((__m512i)values);
#elif MM_VECTOR_BYTES == 32
    return (Floats)_mm256_cvtepi32_ps((__m256i)values);
#elif defined(__SSE2__)
    return (Floats)_mm_cvtepi32_ps((__m128i)values);
#else
    return __builtin_convertvector(values, Floats);
#endif
}

// A lane is true or false.
#if MM_VECTOR_BYTES == 64
typedef __mmask16 Mask;
#else
typedef Ints Mask;
#endif

// Returns which of the lanes `first` .. `first` + LANES are in from .. to.
MM_INLINE Mask lanes_within(int64_t first, int64_t from, int64_t to) {
    const int64_t low = std::min<int64_t>(std::max<int64_t>(from - first, 0), LANES);
    const int64_t high = std::min<int64_t>(std::max<int64_t>(to - first, low), LANES);
#if MM_VECTOR_BYTES == 64
    return Mask((1u << high) - (1u << low));
#else
    Ints index;
    for (int i = 0; i < LANES; ++i) index[i] = i;
    return (index >= int32_t(low)) & (index < int32_t(high));
#endif
}

MM_INLINE Floats select(Mask mask, Floats yes, Floats no) {
#if MM_VECTOR_BYTES == 64
    return (Floats)_mm512_mask_mov_ps((__m512)no, mask, (__m512)yes);
#elif MM_VECTOR_BYTES == 32
    return (Floats)_mm256_blendv_ps((__m256)no, (__m256)yes, (__m256)mask);
#else
    return (Floats)(((Ints)yes & mask) | ((Ints)no & ~mask));
#endif
}

// Returns the lanes of `values`, of which those H apart have changed places.
template <int H, int... I>
MM_INLINE Floats exchanged(Floats values, std::integer_sequence<int, I...>) {
#if defined(__clang__)
    return __builtin_shufflevector(values, values, (I ^ H)...);
#else
    return __builtin_shuffle(values, Ints{(I ^ H)...});
#endif
}
template <int H>
MM_INLINE Floats exchanged(Floats values) {
    return exchanged<H>(values, std::make_integer_sequence<int, int(LANES)>());
}

MM_INLINE Floats all_lanes(float value) { return (Floats)splat(&value); }

// Returns the larger one of each lane; b where one of them is NaN.
MM_INLINE Floats larger(Floats a, Floats b) {
#if MM_VECTOR_BYTES == 64
    return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif MM_VECTOR_BYTES == 32
    return (Floats)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
    return (Floats)_mm_max_ps((__m128)a, (__m128)b);
#else
    return select(a > b, a, b);
#endif
}

MM_INLINE float largest_lane(Floats values) {
#if MM_VECTOR_BYTES == 64
    return _mm512_reduce_max_ps((__m512)values);
#else
    float largest = values[0];
    for (int i = 1; i < LANES; ++i) largest = values[i] > largest ? values[i] : largest;
    return largest;
#endif
}

MM_INLINE int32_t sum_of_lanes(Ints values) {
#if MM_VECTOR_BYTES == 64
    return _mm512_reduce_add_epi32((__m512i)values);
#else
    int32_t sum = 0;
    for (int i = 0; i < LANES; ++i) sum += values[i];
    return sum;
#endif
}

// Returns y * 2^n for integers n from -127 to 127, where 2^-127 counts as 0.
MM_INLINE Floats times_power(Floats y, Floats n) {
#if MM_VECTOR_BYTES == 64
    return (Floats)_mm512_scalef_ps((__m512)y, (__m512)n);
#else
    constexpr float MAGIC = 8388608.0f;  // 2^23: the lowest bits of the sum are the integer
    return y * (Floats)((Ints)(n + (MAGIC + 127.0f)) << 23);
#endif
}

// Returns the nearest integers, even ones of two; |x| < 2^22.
MM_INLINE Floats to_nearest(Floats x) {
#if MM_VECTOR_BYTES == 64
    return (Floats)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif MM_VECTOR_BYTES == 32
    return (Floats)_mm256_round_ps((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23
    return (x + MAGIC) - MAGIC;
#endif
}

// The same as integers.
MM_INLINE Ints to_nearest_ints(Floats x) {
#if MM_VECTOR_BYTES == 64
    return (Ints)_mm512_cvtps_epi32((__m512)x);
#elif MM_VECTOR_BYTES == 32
    return (Ints)_mm256_cvtps_epi32((__m256)x);
#elif defined(__SSE2__)
    return (Ints)_mm_cvtps_epi32((__m128)x);
#elif defined(__aarch64__)
    return (Ints)vcvtnq_s32_f32((float32x4_t)x);
#else
    return __builtin_convertvector(to_nearest(x), Ints);
#endif
}

// Stores the integers of four registers, -128 to 127, as bytes.
MM_INLINE void store_bytes(int8_t* to, const Ints* four) {
#if MM_VECTOR_BYTES == 64
    for (int i = 0; i < 4; ++i) {
        store_lanes(to + i * LANES, _mm512_cvtepi32_epi8((__m512i)four[i]));
    }
#elif MM_VECTOR_BYTES == 32
    const __m256i first = _mm256_packs_epi32((__m256i)four[0], (__m256i)four[1]);
    const __m256i second = _mm256_packs_epi32((__m256i)four[2], (__m256i)four[3]);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // halves are packed apart
    store_lanes(to, _mm256_permutevar8x32_epi32(_mm256_packs_epi16(first, second), order));
#elif defined(__SSE2__)
    const __m128i first = _mm_packs_epi32((__m128i)four[0], (__m128i)four[1]);
    const __m128i second = _mm_packs_epi32((__m128i)four[2], (__m128i)four[3]);
    store_lanes(to, _mm_packs_epi16(first, second));
#else
    for (int64_t i = 0; i < 4 * LANES; ++i) to[i] = int8_t(four[i / LANES][i % LANES]);
#endif
}

// Returns the largest integers <= x, 0 <= x < 2^63.
MM_INLINE Floats floors_of(Floats x) {
#if MM_VECTOR_BYTES == 64
    return (Floats)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#elif MM_VECTOR_BYTES == 32
    return (Floats)_mm256_floor_ps((__m256)x);
#elif defined(__aarch64__)
    return (Floats)vrndmq_f32((float32x4_t)x);
#else
    const Floats small = __builtin_convertvector(__builtin_convertvector(x, Ints), Floats);
    return select(x < all_lanes(8388608.0f), small, x);
#endif
}

// Returns which lanes of a comparison are true, as bits.
MM_INLINE uint32_t lanes_of(Ints truths) {
#if MM_VECTOR_BYTES == 64
    return _mm512_movepi32_mask((__m512i)truths);
#elif MM_VECTOR_BYTES == 32
    return uint32_t(_mm256_movemask_ps((__m256)truths));
#elif defined(__SSE2__)
    return uint32_t(_mm_movemask_ps((__m128)truths));
#else
    uint32_t bits = 0;
    for (int i = 0; i < LANES; ++i) bits |= uint32_t(truths[i] & 1) << i;
    return bits;
#endif
}

// Stores `first` + the number of each bit that is set, and returns how many are; has memory for LANES.
MM_INLINE int64_t store_places(int32_t* to, uint32_t bits, int32_t first) {
#if MM_VECTOR_BYTES == 64
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i places = _mm512_add_epi32(lanes, _mm512_set1_epi32(first));
    _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(__mmask16(bits), places));
    return __builtin_popcount(bits);
#else
    int64_t count = 0;
    for (; bits; bits &= bits - 1) to[count++] = first + __builtin_ctz(bits);
    return count;
#endif
}

}  // namespace mm
