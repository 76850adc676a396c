// Products of small tiles, the inner loops of attention: 16 results in one register where the
// processor has AVX-512 with bf16, else loops that the compiler vectorises.
//
// Both operands are stored in pairs of channels, as vdpbf16ps reads them:
//     left  [rows][depth / 2][2]           row by row
//     right [depth / 2][columns][2]        columns a multiple of 16
#pragma once

#include <cstdint>

#include "lanes.h"
#include "numbers.h"


namespace mm {

constexpr int64_t BLOCK = 16;  // columns are a multiple of it
constexpr int64_t STRIP_ROWS = 6;  // largest number of rows of `left` in a call of `dot`

// Returns the size of one of `parts` nearly equal parts; the first ones are larger by one.
inline int64_t even_part(int64_t items, int64_t parts, int64_t part) {
    return items / parts + (part < items % parts ? 1 : 0);
}

#ifdef MM_HAS_BF16_DOT

// Computes ROWS x (16 * BLOCKS) results: out = left * right, or out += left * right.
// Never inlined, so that the sums stay in registers whatever code calls it.
template <int ROWS, int BLOCKS>
__attribute__((noinline)) void dot_tile(const bf16* left, int64_t left_stride, const bf16* right,
                                        int64_t columns, int64_t depth, float* out,
                                        int64_t out_stride, bool adds) {
    __m512 sums[ROWS][BLOCKS];
    const __mmask16 old = adds ? 0xffff : 0;
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
        for (int b = 0; b < BLOCKS; ++b) {
            sums[r][b] = _mm512_maskz_loadu_ps(old, out + r * out_stride + b * BLOCK);
        }
    }
    for (int64_t pair = 0; pair < depth / 2; ++pair) {
        __m512bh columns_of[BLOCKS];
#pragma GCC unroll 8
        for (int b = 0; b < BLOCKS; ++b) {
            const void* at = right + (pair * columns + b * BLOCK) * 2;
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
            _mm512_storeu_ps(out + r * out_stride + b * BLOCK, sums[r][b]);
        }
    }
}

template <int ROWS>
inline void dot_blocks(int64_t blocks, const bf16* left, int64_t left_stride, const bf16* right,
                       int64_t columns, int64_t depth, float* out, int64_t out_stride, bool adds) {
    switch (blocks) {
        case 1: return dot_tile<ROWS, 1>(left, left_stride, right, columns, depth, out, out_stride,
                                         adds);
        case 2: return dot_tile<ROWS, 2>(left, left_stride, right, columns, depth, out, out_stride,
                                         adds);
        case 3: return dot_tile<ROWS, 3>(left, left_stride, right, columns, depth, out, out_stride,
                                         adds);
        default: return dot_tile<ROWS, 4>(left, left_stride, right, columns, depth, out,
                                          out_stride, adds);
    }
}

// Computes 1 to STRIP_ROWS rows. Columns are split into even groups of at most 64, such as 80 into
// 48 + 32: each then has enough independent sums to hide the latency of a product.
inline void dot(const bf16* left, int64_t left_stride, const bf16* right, int64_t columns,
                int64_t depth, float* out, int64_t out_stride, int64_t rows, bool adds) {
    const int64_t blocks = columns / BLOCK, groups = (blocks + 3) / 4;
    int64_t first = 0;
    for (int64_t group = 0; group < groups; ++group) {
        const int64_t count = even_part(blocks, groups, group);
        const bf16* part = right + first * BLOCK * 2;
        float* to = out + first * BLOCK;
        first += count;
        switch (rows) {
            case 1: dot_blocks<1>(count, left, left_stride, part, columns, depth, to, out_stride,
                                  adds); break;
            case 2: dot_blocks<2>(count, left, left_stride, part, columns, depth, to, out_stride,
                                  adds); break;
            case 3: dot_blocks<3>(count, left, left_stride, part, columns, depth, to, out_stride,
                                  adds); break;
            case 4: dot_blocks<4>(count, left, left_stride, part, columns, depth, to, out_stride,
                                  adds); break;
            case 5: dot_blocks<5>(count, left, left_stride, part, columns, depth, to, out_stride,
                                  adds); break;
            default: dot_blocks<6>(count, left, left_stride, part, columns, depth, to, out_stride,
                                   adds);
        }
    }
}

#endif

// The version for any T; the compiler vectorises the loop over columns.
template <typename T>
inline void dot(const T* left, int64_t left_stride, const T* right, int64_t columns, int64_t depth,
                float* out, int64_t out_stride, int64_t rows, bool adds) {
    for (int64_t r = 0; r < rows; ++r) {
        float* sums = out + r * out_stride;
        if (!adds) std::memset(sums, 0, columns * sizeof(float));
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
