// out = x w^T + bias, over weights that were laid out once: [n / 64][k / unit][64][unit], a unit
// being four bytes, 2 bf16 or 4 int8. Short or long, any number of rows runs the same code.
//
//     for blocks of rows (their x stays in the cache)        in parallel, with
//       for panels of 64 columns                             the panels
//         for parts of k (their weights stay in the cache)
//           for strips of 6 rows:  6 x 64 sums in registers
//
// int8: weights have a scale for each column and are kept as w + 128, the unsigned operand of
// vpdpbusd; x is quantized row by row and is the signed one:
//     sum a (w + 128) = sum a w + 128 sum a            the last term is taken off at the end
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "numbers.h"
#include "pack.h"
#include "parallel.h"

#if defined(__AVX512F__) && defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#include <immintrin.h>
#define MM_HAS_DOT 1
#endif

namespace mm {

constexpr int64_t PANEL = 64;
constexpr int64_t STRIP = 6;
constexpr int64_t ROW_BLOCK = 192;
constexpr int64_t PART_UNITS = 512;

struct Bf16Product {
    using Left = bf16;
    using Weight = bf16;
    using Sum = float;
    static constexpr int64_t UNIT = 2;
#ifdef MM_HAS_DOT
    static __m512i add(__m512i sum, __m512i weights, __m512i row) {
        return (__m512i)_mm512_dpbf16_ps((__m512)sum, (__m512bh)row, (__m512bh)weights);
    }
#endif
    static float product(bf16 a, bf16 w) { return load(a) * load(w); }
};

struct S8Product {
    using Left = int8_t;
    using Weight = uint8_t;
    using Sum = int32_t;
    static constexpr int64_t UNIT = 4;
#ifdef MM_HAS_DOT
    static __m512i add(__m512i sum, __m512i weights, __m512i row) {
        return _mm512_dpbusd_epi32(sum, weights, row);
    }
#endif
    static int32_t product(int8_t a, uint8_t w) { return int32_t(a) * int32_t(w); }
};

// sums [ROWS][64] += `units` units of ROWS rows times a part of a panel.
// Never inlined, so that the sums stay in registers whatever is around it.
template <typename P, int ROWS>
__attribute__((noinline)) void strip(const typename P::Left* a, int64_t a_stride, const typename P::Weight* panel,
                  int64_t units, typename P::Sum* out) {
#ifdef MM_HAS_DOT
    __m512i sums[ROWS][4];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
        for (int b = 0; b < 4; ++b) sums[r][b] = _mm512_loadu_si512(out + r * PANEL + b * 16);
    }
    for (int64_t unit = 0; unit < units; ++unit) {
        __m512i w[4];
#pragma GCC unroll 8
        for (int b = 0; b < 4; ++b) {
            w[b] = _mm512_loadu_si512(panel + (unit * PANEL + b * 16) * P::UNIT);
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
            int32_t four;
            std::memcpy(&four, a + r * a_stride + unit * P::UNIT, sizeof four);
            const __m512i row = _mm512_set1_epi32(four);
#pragma GCC unroll 8
            for (int b = 0; b < 4; ++b) sums[r][b] = P::add(sums[r][b], w[b], row);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
        for (int b = 0; b < 4; ++b) _mm512_storeu_si512(out + r * PANEL + b * 16, sums[r][b]);
    }
#else
    for (int r = 0; r < ROWS; ++r) {
        typename P::Sum* sums = out + r * PANEL;
        for (int64_t unit = 0; unit < units; ++unit) {
            const typename P::Left* left = a + r * a_stride + unit * P::UNIT;
            const typename P::Weight* w = panel + unit * PANEL * P::UNIT;
#pragma omp simd
            for (int64_t c = 0; c < PANEL; ++c) {
                typename P::Sum sum = 0;
                for (int64_t i = 0; i < P::UNIT; ++i) {
                    sum += P::product(left[i], w[c * P::UNIT + i]);
                }
                sums[c] += sum;
            }
        }
    }
#endif
}

template <typename P>
inline void strip_of(int64_t rows, const typename P::Left* a, int64_t a_stride,
                     const typename P::Weight* panel, int64_t units, typename P::Sum* out) {
    switch (rows) {
        case 1: return strip<P, 1>(a, a_stride, panel, units, out);
        case 2: return strip<P, 2>(a, a_stride, panel, units, out);
        case 3: return strip<P, 3>(a, a_stride, panel, units, out);
        case 4: return strip<P, 4>(a, a_stride, panel, units, out);
        case 5: return strip<P, 5>(a, a_stride, panel, units, out);
        default: return strip<P, 6>(a, a_stride, panel, units, out);
    }
}

// write(row, first column, sums of the row, how many) for every row and panel. a: [rows][k], with
// whole units in each row.
template <typename P, typename Write>
void multiply(const typename P::Left* a, int64_t a_stride, const typename P::Weight* packed,
              int64_t rows, int64_t n, int64_t units, int num_threads, const Write& write) {
    const int64_t panels = (n + PANEL - 1) / PANEL;
    const int64_t blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
    parallel_for(panels * blocks, num_threads, [&](int64_t task) {
        const int64_t block = task / panels, index = task % panels;
        const int64_t first_row = block * ROW_BLOCK;
        const int64_t num_rows = std::min(ROW_BLOCK, rows - first_row);
        const typename P::Weight* panel = packed + index * units * PANEL * P::UNIT;
        alignas(64) static thread_local typename P::Sum sums[ROW_BLOCK * PANEL];
        std::memset(sums, 0, num_rows * PANEL * sizeof sums[0]);
        for (int64_t unit = 0; unit < units; unit += PART_UNITS) {
            const int64_t count = std::min(PART_UNITS, units - unit);
            for (int64_t row = 0; row < num_rows; row += STRIP) {
                strip_of<P>(num_rows - row, a + (first_row + row) * a_stride + unit * P::UNIT,
                            a_stride, panel + unit * PANEL * P::UNIT, count, sums + row * PANEL);
            }
        }
        const int64_t first = index * PANEL, num = std::min(PANEL, n - first);
        for (int64_t row = 0; row < num_rows; ++row) {
            write(first_row + row, first, sums + row * PANEL, num);
        }
    });
}

// Four bytes at a time: w [n][units] -> [ceil(n / 64)][units][64], each xor `flip`; rows that are
// not there are 0 xor flip. `packed` may be `w` itself.
inline void pack_units(const uint32_t* w, int64_t n, int64_t units, uint32_t flip,
                       uint32_t* packed, int num_threads) {
    parallel_for((n + PANEL - 1) / PANEL, num_threads, [&](int64_t panel) {
        static thread_local std::vector<uint32_t> own;
        own.assign(units * PANEL, 0);
        const int64_t num = std::min(PANEL, n - panel * PANEL);
        std::memcpy(own.data(), w + panel * PANEL * units, num * units * sizeof own[0]);
        uint32_t* out = packed + panel * units * PANEL;
        for (int64_t column = 0; column < PANEL; column += 16) {
            const uint32_t* rows[16];
            for (int64_t i = 0; i < 16; ++i) rows[i] = own.data() + (column + i) * units;
            int64_t unit = 0;
#ifdef MM_HAS_BF16_DOT
            for (; unit + 16 <= units; unit += 16) {
                transpose_16(rows, unit, out + unit * PANEL + column, PANEL);
            }
#endif
            for (; unit < units; ++unit) {
                for (int64_t i = 0; i < 16; ++i) out[unit * PANEL + column + i] = rows[i][unit];
            }
        }
        if (flip != 0) {
            for (int64_t i = 0; i < units * PANEL; ++i) out[i] ^= flip;
        }
    });
}

// w [n][k], k even.
inline void pack_bf16(const bf16* w, int64_t n, int64_t k, bf16* packed, int num_threads) {
    pack_units(reinterpret_cast<const uint32_t*>(w), n, k / 2, 0,
               reinterpret_cast<uint32_t*>(packed), num_threads);
}

// w [n][k], k a multiple of 4. Adding 128 flips the highest bit.
inline void pack_s8(const int8_t* w, int64_t n, int64_t k, uint8_t* packed, int num_threads) {
    pack_units(reinterpret_cast<const uint32_t*>(w), n, k / 4, 0x80808080u,
               reinterpret_cast<uint32_t*>(packed), num_threads);
}

// x [rows][k], k even; bias [n] or null; out [rows][n].
inline void linear_bf16(const bf16* x, int64_t x_stride, const bf16* packed, const bf16* bias,
                        bf16* out, int64_t rows, int64_t n, int64_t k, int num_threads) {
    multiply<Bf16Product>(x, x_stride, packed, rows, n, k / 2, num_threads,
                          [&](int64_t row, int64_t first, const float* sums, int64_t num) {
        bf16* result = out + row * n + first;
        if (bias == nullptr) {
#pragma omp simd
            for (int64_t c = 0; c < num; ++c) result[c] = store<bf16>(sums[c]);
        } else {
#pragma omp simd
            for (int64_t c = 0; c < num; ++c) {
                result[c] = store<bf16>(sums[c] + load(bias[first + c]));
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

// w [n][k] -> int8 [n][k] and the scales of its rows.
template <typename T>
void quantize_rows(const T* w, int64_t n, int64_t k, int8_t* out, float* scales, int num_threads) {
    parallel_parts(n, num_threads, [&](int64_t begin, int64_t end) {
        int32_t sum;
        for (int64_t row = begin; row < end; ++row) {
            quantize_row(w + row * k, k, k, out + row * k, scales + row, &sum);
        }
    });
}

// x [rows][k], out [rows][n], scales and bias (or null) [n].
template <typename T>
void linear_s8(const T* x, int64_t x_stride, const uint8_t* packed, const float* scales,
               const T* bias, T* out, int64_t rows, int64_t n, int64_t k, int num_threads) {
    const int64_t units = (k + 3) / 4, width = units * 4;
    std::vector<int8_t> values(rows * width);
    std::vector<float> row_scales(rows);
    std::vector<int32_t> row_sums(rows);
    parallel_parts(rows, num_threads, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            quantize_row(x + row * x_stride, k, width, values.data() + row * width,
                         row_scales.data() + row, row_sums.data() + row);
        }
    });
    multiply<S8Product>(values.data(), width, packed, rows, n, units, num_threads,
                        [&](int64_t row, int64_t first, const int32_t* sums, int64_t num) {
        T* result = out + row * n + first;
        const int32_t excess = row_sums[row] * 128;
        const float scale = row_scales[row];
#pragma omp simd
        for (int64_t c = 0; c < num; ++c) {
            const float offset = bias == nullptr ? 0.0f : load(bias[first + c]);
            const float sum = float(sums[c] - excess);
            result[c] = store<T>(sum * scale * scales[first + c] + offset);
        }
    });
}

}  // namespace mm
