// Products as matrices: SMMLA multiplies two rows of x with two columns of weights, eight bytes of
// each, at twice the rate of SDOT; BFMMLA does so with four values of bf16. The panels stay as they
// are: two adjacent units of four columns are interleaved in registers, which all rows share.
//
//     units 0, 1 of columns a b c d:  a0 b0 c0 d0, a1 b1 c1 d1  ->  a0 a1 b0 b1, c0 c1 d0 d1
//     sums of rows r, s:              ra rb sa sb, rc rd sc sd  <-> ra rb rc rd, sa sb sc sd
//
// BFMMLA adds the pair of unit 0 and then that of unit 1 as BFDOT does, see add_bf16_pairs. So a row
// has the same bits alone, where BFDOT adds, and with others.
//
// Why not BFMLALB and BFMLALT, which round as float32 does: they multiply four values at a time, no
// more than plain floats are; BFMMLA multiplies sixteen. A sum of k products is within
// (k / 2 + 1) * 2^-23 of the sum of their magnitudes, as one of floats is: twice the error, half as
// often. Rounding a result to bf16 loses 2^-8 of it.
#pragma once

#include <cstdint>

#include "lanes.h"

namespace mm {

// Whether values of a type are multiplied as matrices.
template <typename X>
constexpr bool IN_MATRICES = false;

#ifdef __ARM_FEATURE_MATMUL_INT8
template <>
constexpr bool IN_MATRICES<int8_t> = true;

MM_INLINE Ints add_matrices(Ints sums, Ints x, Ints w) {
    return (Ints)vmmlaq_s32((int32x4_t)sums, (int8x16_t)x, (int8x16_t)w);
}
#endif

#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
template <>
constexpr bool IN_MATRICES<bf16> = true;

MM_INLINE Floats add_matrices(Floats sums, Ints x, Ints w) {
    return (Floats)vbfmmlaq_f32((float32x4_t)sums, (bfloat16x8_t)x, (bfloat16x8_t)w);
}
#endif

#ifdef __ARM_FEATURE_MATMUL_INT8

// Two registers, such as the sums of two rows and four columns, divided by columns.
template <typename V>
struct Halved {
    V left, right;
};

template <typename V>
MM_INLINE Halved<V> paired(V row, V other) {
    const auto a = (int64x2_t)row, b = (int64x2_t)other;
    return {(V)vzip1q_s64(a, b), (V)vzip2q_s64(a, b)};
}

MM_INLINE Halved<Ints> interleaved(Ints unit, Ints next) {
    const auto a = (int32x4_t)unit, b = (int32x4_t)next;
    return {(Ints)vzip1q_s32(a, b), (Ints)vzip2q_s32(a, b)};
}

// Returns eight bytes of one row, then eight of another.
MM_INLINE Ints two_rows(const char* row, const char* other) {
    const auto bytes = [](const char* at) { return vld1_s8(reinterpret_cast<const int8_t*>(at)); };
    return (Ints)vcombine_s8(bytes(row), bytes(other));
}

#endif

}  // namespace mm
