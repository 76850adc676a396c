// Computes out = x w^T + bias with weights that are packed once: [n / 64][k / unit][64][unit],
// where a unit is four bytes, 2 bf16 or 4 int8. Any number of rows runs the same code.
//
//     for blocks of rows (their x stays in the cache)        both loops
//       for panels of 64 columns                             in parallel
//         for chunks of k (their weights stay in the cache)
//           for strips of 6 rows:  6 x 64 sums in registers
//
// While the strips of a chunk are computed, the next chunk is prefetched from memory: with few rows
// a product takes the longer of the two times, not their sum.
//
// int8: weights have a scale for each column and are stored as w + 128, the unsigned operand of
// vpdpbusd. x is the signed operand and has a scale for every 128 values of a row, so that one
// large value costs its neighbours little precision:
//     sum a (w + 128) = sum a w + 128 sum a            the last term is subtracted
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
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
constexpr int64_t GROUP = 128;  // values of x with one scale
constexpr int64_t GROUP_UNITS = GROUP / 4;
constexpr int64_t UNIT_BYTES = PANEL * 4;
constexpr int64_t AHEAD_UNITS = 8;
static_assert(PART_UNITS % GROUP_UNITS == 0, "a part has whole groups");

// What a strip prefetches: `num` cache lines for every 8 units that it computes.
struct Ahead {
    const char* lines;
    int64_t num;
};

#ifdef MM_HAS_DOT

inline __m512i add_products(__m512i sums, const bf16*, __m512i row, __m512i weights) {
    return (__m512i)_mm512_dpbf16_ps((__m512)sums, (__m512bh)row, (__m512bh)weights);
}

inline __m512i add_products(__m512i sums, const int8_t*, __m512i row, __m512i weights) {
    return _mm512_dpbusd_epi32(sums, weights, row);
}

// sums += `units` units of ROWS rows of a, times as many units of a panel. Always inlined, so that
// the sums stay in the caller's registers.
template <int ROWS, typename A>
__attribute__((always_inline)) inline void add_units(const A* a, int64_t a_stride,
                                                     const void* panel, int64_t units,
                                                     Ahead& ahead, __m512i (&sums)[ROWS][4]) {
    constexpr int64_t UNIT = 4 / sizeof(A);
    const uint32_t* weights = static_cast<const uint32_t*>(panel);
    for (int64_t unit = 0; unit < units; ++unit) {
        if (unit % AHEAD_UNITS == 0) {
            for (int64_t i = 0; i < ahead.num; ++i) _mm_prefetch(ahead.lines + i * 64, _MM_HINT_T1);
            ahead.lines += ahead.num * 64;
        }
        __m512i w[4];
#pragma GCC unroll 8
        for (int b = 0; b < 4; ++b) w[b] = _mm512_loadu_si512(weights + unit * PANEL + b * 16);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
            int32_t four;
            std::memcpy(&four, a + r * a_stride + unit * UNIT, sizeof four);
            const __m512i row = _mm512_set1_epi32(four);
#pragma GCC unroll 8
            for (int b = 0; b < 4; ++b) sums[r][b] = add_products(sums[r][b], a, row, w[b]);
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
            for (int b = 0; b < 4; ++b) asm("" : "+v"(sums[r][b]));
        }
    }
}

#endif

// out [ROWS][64] += rows of a times a chunk of a panel. Never inlined, so that the sums stay in
// registers whatever code calls it.
template <int ROWS>
__attribute__((noinline)) void strip_bf16(const bf16* a, int64_t a_stride, const bf16* panel,
                                          int64_t units, Ahead ahead, float* out) {
#ifdef MM_HAS_DOT
    __m512i sums[ROWS][4];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
        for (int b = 0; b < 4; ++b) sums[r][b] = _mm512_loadu_si512(out + r * PANEL + b * 16);
    }
    add_units<ROWS>(a, a_stride, panel, units, ahead, sums);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
        for (int b = 0; b < 4; ++b) _mm512_storeu_si512(out + r * PANEL + b * 16, sums[r][b]);
    }
#else
    for (int r = 0; r < ROWS; ++r) {
        for (int64_t unit = 0; unit < units; ++unit) {
            const float first = load(a[r * a_stride + unit * 2]);
            const float second = load(a[r * a_stride + unit * 2 + 1]);
            const bf16* w = panel + unit * PANEL * 2;
            float* sums = out + r * PANEL;
#pragma omp simd
            for (int64_t c = 0; c < PANEL; ++c) {
                sums[c] += first * load(w[c * 2]) + second * load(w[c * 2 + 1]);
            }
        }
    }
#endif
}

// Rows of x quantized to int8: values [rows][width], scales and sums [rows][groups].
struct QuantizedRows {
    int64_t width;
    int64_t groups;
    std::vector<int8_t> values;
    std::vector<float> scales;
    std::vector<int32_t> sums;

    QuantizedRows(int64_t rows, int64_t k)
        : width((k + 3) / 4 * 4),
          groups((k + GROUP - 1) / GROUP),
          values(rows * width),
          scales(rows * groups),
          sums(rows * groups) {}
};

// out [ROWS][64] += `units` units, at most one group, of rows of a times a panel, each row times
// its scale. row_sums, scales: point to the first row's group; the next row's is `groups` further.
// Never inlined, as strip_bf16.
template <int ROWS>
__attribute__((noinline)) void group_s8(const int8_t* a, int64_t a_stride, const uint8_t* panel,
                                        int64_t units, const int32_t* row_sums, const float* scales,
                                        int64_t groups, Ahead& ahead, float* out) {
#ifdef MM_HAS_DOT
    __m512i sums[ROWS][4];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
        const __m512i excess = _mm512_set1_epi32(-128 * row_sums[r * groups]);
#pragma GCC unroll 8
        for (int b = 0; b < 4; ++b) sums[r][b] = excess;
    }
    add_units<ROWS>(a, a_stride, panel, units, ahead, sums);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
        const __m512 scale = _mm512_set1_ps(scales[r * groups]);
#pragma GCC unroll 8
        for (int b = 0; b < 4; ++b) {
            float* to = out + r * PANEL + b * 16;
            const __m512 product = _mm512_cvtepi32_ps(sums[r][b]);
            _mm512_storeu_ps(to, _mm512_fmadd_ps(product, scale, _mm512_loadu_ps(to)));
        }
    }
#else
    for (int r = 0; r < ROWS; ++r) {
        int32_t sums[PANEL];
        for (int64_t c = 0; c < PANEL; ++c) sums[c] = -128 * row_sums[r * groups];
        for (int64_t unit = 0; unit < units; ++unit) {
            const int8_t* four = a + r * a_stride + unit * 4;
            const uint8_t* w = panel + unit * PANEL * 4;
#pragma omp simd
            for (int64_t c = 0; c < PANEL; ++c) {
                int32_t sum = 0;
                for (int i = 0; i < 4; ++i) sum += int32_t(four[i]) * int32_t(w[c * 4 + i]);
                sums[c] += sum;
            }
        }
#pragma omp simd
        for (int64_t c = 0; c < PANEL; ++c) {
            out[r * PANEL + c] += float(sums[c]) * scales[r * groups];
        }
    }
#endif
}

// out [ROWS][64] += rows from `row` on, over units `unit` .. `unit + units`, in whole groups except
// at the end.
template <int ROWS>
void strip_s8(const QuantizedRows& x, int64_t row, int64_t unit, const uint8_t* panel,
              int64_t units, Ahead ahead, float* out) {
    const int8_t* a = x.values.data() + row * x.width + unit * 4;
    for (int64_t done = 0; done < units; done += GROUP_UNITS) {
        const int64_t count = std::min(GROUP_UNITS, units - done);
        const int64_t group = row * x.groups + (unit + done) / GROUP_UNITS;
        group_s8<ROWS>(a + done * 4, x.width, panel + done * UNIT_BYTES, count,
                       x.sums.data() + group, x.scales.data() + group, x.groups, ahead, out);
    }
}

// Calls strip with the number of rows, 6 at most, as a compile-time constant.
template <typename Strip>
inline void with_rows(int64_t rows, const Strip& strip) {
    switch (rows) {
        case 1: return strip(std::integral_constant<int, 1>());
        case 2: return strip(std::integral_constant<int, 2>());
        case 3: return strip(std::integral_constant<int, 3>());
        case 4: return strip(std::integral_constant<int, 4>());
        case 5: return strip(std::integral_constant<int, 5>());
        default: return strip(std::integral_constant<int, 6>());
    }
}

// The weights of the product that comes next; null when it is not known.
struct Next {
    const char* weights = nullptr;
    int64_t panel_bytes = 0;
};

// Returns what to prefetch while one of `num_strips` strips computes `units` units.
inline Ahead ahead_of(const char* next, int64_t strip, int64_t num_strips, int64_t units) {
    if (next == nullptr) return {nullptr, 0};
    constexpr int64_t LINES = AHEAD_UNITS * UNIT_BYTES / 64;
    const int64_t num = (LINES + num_strips - 1) / num_strips;
    const int64_t done = strip * num * ((units + AHEAD_UNITS - 1) / AHEAD_UNITS);
    return {next + done * 64, done * 64 < units * UNIT_BYTES ? num : 0};
}

// Multiplies all rows by all panels of `packed`.
// strip(ROWS, row, unit, weights of the chunk, units, ahead, sums): adds to the sums [rows][64].
// write(row, first column, sums of the row, number of columns): stores them.
template <typename Strip, typename Write>
void multiply(const void* packed, int64_t rows, int64_t n, int64_t units, int num_threads,
              const Next& next_product, const Strip& strip, const Write& write) {
    const int64_t panels = (n + PANEL - 1) / PANEL;
    const int64_t blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
    const char* weights = static_cast<const char*>(packed);
    parallel_ahead(panels * blocks, num_threads, [&](int64_t task, int64_t next_task) {
        const int64_t panel = task % panels, first_row = task / panels * ROW_BLOCK;
        const int64_t num_rows = std::min(ROW_BLOCK, rows - first_row);
        const int64_t num_strips = (num_rows + STRIP - 1) / STRIP;
        const char* own = weights + panel * units * UNIT_BYTES;
        const int64_t tasks = panels * blocks;
        const char* behind = weights + next_task % panels * units * UNIT_BYTES;
        if (next_task >= tasks) {
            behind = next_product.weights;
            if (behind != nullptr) behind += (next_task - tasks) * next_product.panel_bytes;
        }
        alignas(64) static thread_local float sums[ROW_BLOCK * PANEL];
        std::memset(sums, 0, num_rows * PANEL * sizeof sums[0]);
        for (int64_t unit = 0; unit < units; unit += PART_UNITS) {
            const int64_t count = std::min(PART_UNITS, units - unit);
            const char* part = own + unit * UNIT_BYTES;
            const char* next = unit + count < units ? part + count * UNIT_BYTES : behind;
            for (int64_t i = 0; i < num_strips; ++i) {  // nearly equal strips of at most 6 rows
                const int64_t row = num_rows * i / num_strips;
                with_rows(num_rows * (i + 1) / num_strips - row, [&](auto num) {
                    strip(num, first_row + row, unit, part, count,
                          ahead_of(next, i, num_strips, count), sums + row * PANEL);
                });
            }
        }
        const int64_t first = panel * PANEL, num = std::min(PANEL, n - first);
        for (int64_t row = 0; row < num_rows; ++row) {
            write(first_row + row, first, sums + row * PANEL, num);
        }
    });
}

// Packs units of four bytes: w [n][units] -> [ceil(n / 64)][units][64], each xor `flip`; padding
// rows are 0 xor flip. `packed` may be `w` itself.
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

// Packs w [n][k], k even.
inline void pack_bf16(const bf16* w, int64_t n, int64_t k, bf16* packed, int num_threads) {
    pack_units(reinterpret_cast<const uint32_t*>(w), n, k / 2, 0,
               reinterpret_cast<uint32_t*>(packed), num_threads);
}

// Packs w [n][k], k a multiple of 4. Flipping the highest bit adds 128.
inline void pack_s8(const int8_t* w, int64_t n, int64_t k, uint8_t* packed, int num_threads) {
    pack_units(reinterpret_cast<const uint32_t*>(w), n, k / 4, 0x80808080u,
               reinterpret_cast<uint32_t*>(packed), num_threads);
}

// x [rows][k], k even; bias [n] or null; out [rows][n].
inline void linear_bf16(const bf16* x, int64_t x_stride, const bf16* packed, const bf16* bias,
                        bf16* out, int64_t rows, int64_t n, int64_t k, int num_threads,
                        const Next& next = {}) {
    const int64_t units = k / 2;
    const auto strip = [&](auto num, int64_t row, int64_t unit, const char* part, int64_t count,
                           Ahead ahead, float* sums) {
        strip_bf16<num>(x + row * x_stride + unit * 2, x_stride,
                        reinterpret_cast<const bf16*>(part), count, ahead, sums);
    };
    const auto write = [&](int64_t row, int64_t first, const float* sums, int64_t num) {
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
    };
    multiply(packed, rows, n, units, num_threads, next, strip, write);
}

// Quantizes symmetrically: the largest magnitude becomes 127. Returns the scale.
template <typename T>
inline float quantize(const T* x, int64_t count, int8_t* out) {
    float largest = 0.0f;
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < count; ++i) {
        const float value = std::fabs(load(x[i]));
        largest = value > largest ? value : largest;
    }
    const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
        out[i] = int8_t(int32_t(std::nearbyint(load(x[i]) * inverse)));
    }
    return largest / 127.0f;
}

// Quantizes w [n][k] to int8 [n][k] with one scale per row.
template <typename T>
void quantize_rows(const T* w, int64_t n, int64_t k, int8_t* out, float* scales, int num_threads) {
    parallel_parts(n, num_threads, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            scales[row] = quantize(w + row * k, k, out + row * k);
        }
    });
}

template <typename T>
void quantize_groups(const T* x, int64_t k, int64_t row, QuantizedRows& out) {
    int8_t* values = out.values.data() + row * out.width;
    for (int64_t group = 0; group < out.groups; ++group) {
        const int64_t first = group * GROUP, count = std::min(GROUP, k - first);
        out.scales[row * out.groups + group] = quantize(x + first, count, values + first);
        int32_t sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = first; i < first + count; ++i) sum += values[i];
        out.sums[row * out.groups + group] = sum;
    }
}

// x [rows][k], out [rows][n], scales and bias (or null) [n].
template <typename T>
void linear_s8(const T* x, int64_t x_stride, const uint8_t* packed, const float* scales,
               const T* bias, T* out, int64_t rows, int64_t n, int64_t k, int num_threads,
               const Next& next = {}) {
    QuantizedRows quantized(rows, k);
    parallel_parts(rows, num_threads, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            quantize_groups(x + row * x_stride, k, row, quantized);
        }
    });
    const int64_t units = quantized.width / 4;
    const auto strip = [&](auto num, int64_t row, int64_t unit, const char* part, int64_t count,
                           Ahead ahead, float* sums) {
        strip_s8<num>(quantized, row, unit, reinterpret_cast<const uint8_t*>(part), count, ahead,
                      sums);
    };
    const auto write = [&](int64_t row, int64_t first, const float* sums, int64_t num) {
        T* result = out + row * n + first;
#pragma omp simd
        for (int64_t c = 0; c < num; ++c) {
            const float offset = bias == nullptr ? 0.0f : load(bias[first + c]);
            result[c] = store<T>(sums[c] * scales[first + c] + offset);
        }
    };
    multiply(packed, rows, n, units, num_threads, next, strip, write);
}

}  // namespace mm
