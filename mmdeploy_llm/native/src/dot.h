// Products of small tiles, the inner loops of attention: 16 results side by side in a register
// where the processor has AVX-512 with bf16, else loops that the compiler vectorises.
//
// Both operands lie in pairs of channels, as vdpbf16ps takes them:
//     left  [rows][depth / 2][2]           row by row
//     right [depth / 2][columns][2]        columns a multiple of 16
#pragma once

#include <cstdint>

#include "numbers.h"

#if defined(__AVX512BF16__) && defined(__AVX512F__)
#include <immintrin.h>
#define MM_HAS_BF16_DOT 1
#endif

namespace mm {

constexpr int64_t LANES = 16;

#ifdef MM_HAS_BF16_DOT

// ROWS x (16 * BLOCKS) results: out += left * right.
template <int ROWS, int BLOCKS>
__attribute__((noinline)) void dot_tile(const bf16* left, int64_t left_stride, const bf16* right, int64_t columns,
                     int64_t depth, float* out, int64_t out_stride) {
    __m512 sums[ROWS][BLOCKS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
        for (int b = 0; b < BLOCKS; ++b) {
            sums[r][b] = _mm512_loadu_ps(out + r * out_stride + b * LANES);
        }
    }
    for (int64_t pair = 0; pair < depth / 2; ++pair) {
        __m512bh columns_of[BLOCKS];
#pragma GCC unroll 8
        for (int b = 0; b < BLOCKS; ++b) {
            const void* at = right + (pair * columns + b * LANES) * 2;
            columns_of[b] = (__m512bh)_mm512_loadu_si512(at);
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
            int32_t two;
            std::memcpy(&two, left + r * left_stride + pair * 2, sizeof two);
            const __m512bh row = (__m512bh)_mm512_set1_epi32(two);
#pragma GCC unroll 8
            for (int b = 0; b < BLOCKS; ++b) {
                sums[r][b] = _mm512_dpbf16_ps(sums[r][b], row, columns_of[b]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
        for (int b = 0; b < BLOCKS; ++b) {
            _mm512_storeu_ps(out + r * out_stride + b * LANES, sums[r][b]);
        }
    }
}

template <int BLOCKS>
inline void dot_columns(const bf16* left, int64_t left_stride, const bf16* right, int64_t columns,
                        int64_t depth, float* out, int64_t out_stride, int64_t rows) {
    int64_t r = 0;
    for (; r + 6 <= rows; r += 6) {
        dot_tile<6, BLOCKS>(left + r * left_stride, left_stride, right, columns, depth,
                            out + r * out_stride, out_stride);
    }
    for (; r + 2 <= rows; r += 2) {
        dot_tile<2, BLOCKS>(left + r * left_stride, left_stride, right, columns, depth,
                            out + r * out_stride, out_stride);
    }
    for (; r < rows; ++r) {
        dot_tile<1, BLOCKS>(left + r * left_stride, left_stride, right, columns, depth,
                            out + r * out_stride, out_stride);
    }
}

inline void dot(const bf16* left, int64_t left_stride, const bf16* right, int64_t columns,
                int64_t depth, float* out, int64_t out_stride, int64_t rows) {
    int64_t c = 0;
    for (; c + 4 * LANES <= columns; c += 4 * LANES) {
        dot_columns<4>(left, left_stride, right + c * 2, columns, depth, out + c, out_stride, rows);
    }
    for (; c < columns; c += LANES) {
        dot_columns<1>(left, left_stride, right + c * 2, columns, depth, out + c, out_stride, rows);
    }
}

#endif

// out += left * right, for any T; the loop over columns is vectorised.
template <typename T>
inline void dot(const T* left, int64_t left_stride, const T* right, int64_t columns, int64_t depth,
                float* out, int64_t out_stride, int64_t rows) {
    for (int64_t r = 0; r < rows; ++r) {
        float* sums = out + r * out_stride;
        for (int64_t pair = 0; pair < depth / 2; ++pair) {
            const float a = load(left[r * left_stride + pair * 2]);
            const float b = load(left[r * left_stride + pair * 2 + 1]);
            const T* at = right + pair * columns * 2;
#pragma omp simd
            for (int64_t c = 0; c < columns; ++c) {
                sums[c] += a * load(at[c * 2]) + b * load(at[c * 2 + 1]);
            }
        }
    }
}

}  // namespace mm
