// out = x w^T for int8 weights with a scale for each row of w, and activations quantized row by row.
//
// weights packed [n / 64][k / 4][64][4] as w + 128, so that they are the unsigned operand of
// vpdpbusd and the activations, broadcast from memory, the signed one:
//     sum a (w + 128) = sum a w + 128 sum a          the last term is taken off at the end
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "numbers.h"
#include "parallel.h"

#if defined(__AVX512VNNI__) && defined(__AVX512F__)
#include <immintrin.h>
#define MM_HAS_S8_DOT 1
#endif

namespace mm {

constexpr int64_t PANEL = 64;     // columns of the result that are computed together
constexpr int64_t STRIP = 6;      // rows of the result that are computed together
constexpr int64_t ROW_BLOCK = 96;  // rows whose activations stay in the cache meanwhile

// w [n][k] int8 -> packed [ceil(n / 64)][ceil(k / 4)][64][4], what has no value being 128, i.e. 0.
inline void pack_s8(const int8_t* w, int64_t n, int64_t k, uint8_t* packed, int num_threads) {
    const int64_t quads = (k + 3) / 4;
    parallel_for((n + PANEL - 1) / PANEL, num_threads, [&](int64_t panel) {
        uint8_t* out = packed + panel * quads * PANEL * 4;
        std::memset(out, 128, quads * PANEL * 4);
        for (int64_t c = 0; c < PANEL && panel * PANEL + c < n; ++c) {
            const int8_t* row = w + (panel * PANEL + c) * k;
            for (int64_t i = 0; i < k; ++i) {
                out[(i / 4) * PANEL * 4 + c * 4 + i % 4] = uint8_t(int(row[i]) + 128);
            }
        }
    });
}


// Symmetric, one scale for each row: its largest value becomes 127.
template <typename T>
void quantize_row(const T* x, int64_t k, int64_t width, int8_t* out, float* scale, int32_t* sum) {
    float largest = 0.0f;
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < k; ++i) {
        const float value = std::fabs(load(x[i]));
        largest = value > largest ? value : largest;
    }
    *scale = largest / 127.0f;
    const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
    int32_t total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < k; ++i) {
        const int32_t value = int32_t(std::nearbyint(load(x[i]) * inverse));
        out[i] = int8_t(value);
        total += value;
    }
    std::memset(out + k, 0, width - k);
    *sum = total;
}

#ifdef MM_HAS_S8_DOT

template <int ROWS>
inline void strip_s8(const int8_t* a, int64_t width, const uint8_t* panel, int64_t quads,
                     int32_t* out) {
    __m512i sums[ROWS][4];
    for (int r = 0; r < ROWS; ++r) {
        for (int b = 0; b < 4; ++b) sums[r][b] = _mm512_setzero_si512();
    }
    for (int64_t quad = 0; quad < quads; ++quad) {
        __m512i w[4];
        for (int b = 0; b < 4; ++b) w[b] = _mm512_loadu_si512(panel + quad * PANEL * 4 + b * 64);
        for (int r = 0; r < ROWS; ++r) {
            int32_t four;
            std::memcpy(&four, a + r * width + quad * 4, sizeof four);
            const __m512i row = _mm512_set1_epi32(four);
            for (int b = 0; b < 4; ++b) sums[r][b] = _mm512_dpbusd_epi32(sums[r][b], w[b], row);
        }
    }
    for (int r = 0; r < ROWS; ++r) {
        for (int b = 0; b < 4; ++b) _mm512_storeu_si512(out + r * PANEL + b * 16, sums[r][b]);
    }
}

#else

template <int ROWS>
inline void strip_s8(const int8_t* a, int64_t width, const uint8_t* panel, int64_t quads,
                     int32_t* out) {
    for (int r = 0; r < ROWS; ++r) {
        int32_t* sums = out + r * PANEL;
        for (int64_t c = 0; c < PANEL; ++c) sums[c] = 0;
        for (int64_t quad = 0; quad < quads; ++quad) {
            const int8_t* four = a + r * width + quad * 4;
            const uint8_t* w = panel + quad * PANEL * 4;
#pragma omp simd
            for (int64_t c = 0; c < PANEL; ++c) {
                int32_t sum = 0;
                for (int i = 0; i < 4; ++i) sum += int32_t(four[i]) * int32_t(w[c * 4 + i]);
                sums[c] += sum;
            }
        }
    }
}

#endif

inline void strip_s8_of(int64_t rows, const int8_t* a, int64_t width, const uint8_t* panel,
                        int64_t quads, int32_t* out) {
    switch (rows) {
        case 1: return strip_s8<1>(a, width, panel, quads, out);
        case 2: return strip_s8<2>(a, width, panel, quads, out);
        case 3: return strip_s8<3>(a, width, panel, quads, out);
        case 4: return strip_s8<4>(a, width, panel, quads, out);
        case 5: return strip_s8<5>(a, width, panel, quads, out);
        default: return strip_s8<6>(a, width, panel, quads, out);
    }
}

// x [rows][k] T, out [rows][n] T, scales and bias (or null) [n].
template <typename T>
void linear_s8(const T* x, int64_t x_stride, const uint8_t* packed, const float* scales,
               const T* bias, T* out, int64_t rows, int64_t n, int64_t k, int num_threads) {
    const int64_t quads = (k + 3) / 4, width = quads * 4;
    const int64_t panels = (n + PANEL - 1) / PANEL;
    std::vector<int8_t> values(rows * width);
    std::vector<float> row_scales(rows);
    std::vector<int32_t> row_sums(rows);
    parallel_parts(rows, num_threads, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            quantize_row(x + row * x_stride, k, width, values.data() + row * width,
                         row_scales.data() + row, row_sums.data() + row);
        }
    });
    const int64_t blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
    parallel_for(panels * blocks, num_threads, [&](int64_t task) {
        const int64_t panel = task / blocks, first_row = task % blocks * ROW_BLOCK;
        const int64_t last_row = std::min(rows, first_row + ROW_BLOCK);
        const int64_t first = panel * PANEL, num = std::min(PANEL, n - first);
        alignas(64) int32_t sums[STRIP * PANEL];
        for (int64_t row = first_row; row < last_row; row += STRIP) {
            const int64_t count = std::min(STRIP, last_row - row);
            strip_s8_of(count, values.data() + row * width, width,
                        packed + panel * quads * PANEL * 4, quads, sums);
            for (int64_t r = 0; r < count; ++r) {
                const int32_t excess = row_sums[row + r] * 128;
                const float scale = row_scales[row + r];
                T* result = out + (row + r) * n + first;
#pragma omp simd
                for (int64_t c = 0; c < num; ++c) {
                    const float sum = float(sums[r * PANEL + c] - excess);
                    const float offset = bias == nullptr ? 0.0f : load(bias[first + c]);
                    result[c] = store<T>(sum * scale * scales[first + c] + offset);
                }
            }
        }
    });
}

}  // namespace mm
