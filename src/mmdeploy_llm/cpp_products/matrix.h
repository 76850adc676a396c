// Products of int8 with SMMLA, which multiplies two rows of x with two columns of weights, eight
// bytes of each, at twice the rate of SDOT. The panels stay as they are: two adjacent units of four
// columns are interleaved in registers, which all rows share.
//
//     units 0, 1 of columns a b c d:  a0 b0 c0 d0, a1 b1 c1 d1  ->  a0 a1 b0 b1, c0 c1 d0 d1
//     sums of rows r, s:              ra rb sa sb, rc rd sc sd  <-> ra rb rc rd, sa sb sc sd
#pragma once

#include <cstdint>

#include "lanes.h"

#ifdef __ARM_FEATURE_MATMUL_INT8

namespace mm {

// One register of the sums of two rows and four columns, split by columns.
struct PairSums {
    int32x4_t left, right;
};

MM_INLINE PairSums paired(Ints row, Ints other) {
    const auto a = (int64x2_t)row, b = (int64x2_t)other;
    return {(int32x4_t)vzip1q_s64(a, b), (int32x4_t)vzip2q_s64(a, b)};
}

// Returns eight bytes of one row, then eight of another.
MM_INLINE int8x16_t two_rows(const int8_t* row, const int8_t* other) {
    return vcombine_s8(vld1_s8(row), vld1_s8(other));
}

// sums += two units of ROWS rows of x, times as many of NUM registers of columns. The last row of an
// odd number is multiplied twice and kept once.
template <int ROWS, int NUM>
MM_INLINE void add_two_units(const int8_t* x, int64_t x_stride, const char* weights, int64_t columns,
                             PairSums (&sums)[(ROWS + 1) / 2][NUM]) {
#pragma GCC unroll 8
    for (int b = 0; b < NUM; ++b) {
        const char* at = weights + b * MM_VECTOR_BYTES;
        const auto first = (int32x4_t)load_lanes<Ints>(at);
        const auto second = (int32x4_t)load_lanes<Ints>(at + columns * 4);
        const auto left = (int8x16_t)vzip1q_s32(first, second);
        const auto right = (int8x16_t)vzip2q_s32(first, second);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r += 2) {
            const int8_t* row = x + r * x_stride;
            const int8x16_t both = two_rows(row, r + 1 < ROWS ? row + x_stride : row);
            PairSums& pair = sums[r / 2][b];
            pair.left = vmmlaq_s32(pair.left, both, left);
            pair.right = vmmlaq_s32(pair.right, both, right);
        }
    }
}

}  // namespace mm

#endif
