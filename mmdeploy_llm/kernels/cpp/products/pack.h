// Packs keys and values of a tile into the layout of dot.h.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "dot.h"
#include "numbers.h"

namespace mm {

constexpr int64_t MAX_HEAD_DIM = 512;

inline int64_t round_up(int64_t value, int64_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

// Transposes LANES rows of `num` dwords each (1 to LANES) to `num` columns. out_stride: in dwords.
inline void transpose_few(const char* const* rows, uint32_t* out, int64_t out_stride, int64_t num) {
    for (int64_t unit = 0; unit < num; ++unit) {
        for (int64_t i = 0; i < LANES; ++i) {
            std::memcpy(out + unit * out_stride + i, rows[i] + unit * 4, 4);
        }
    }
}

#if MM_VECTOR_BYTES == 64

MM_INLINE void transpose(const char* const* rows, uint32_t* out, int64_t out_stride,
                            int64_t num) {
    __m512i a[16], b[16];
    const __mmask16 there = __mmask16((1u << num) - 1);
    if (num == 16) {  // masked loads are slow when the data are not in the cache
        for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(rows[i]);
    } else {
        for (int i = 0; i < 16; ++i) a[i] = _mm512_maskz_loadu_epi32(there, rows[i]);
    }
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    // Register 4 g + c holds, in its 128-bit lane l, column 4 l + c of rows 4 g .. 4 g + 3.
    for (int c = 0; c < 4; ++c) {
        const __m512i low = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88);
        const __m512i high = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xdd);
        const __m512i low2 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88);
        const __m512i high2 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xdd);
        const __m512i columns[4] = {
            _mm512_shuffle_i32x4(low, low2, 0x88), _mm512_shuffle_i32x4(high, high2, 0x88),
            _mm512_shuffle_i32x4(low, low2, 0xdd), _mm512_shuffle_i32x4(high, high2, 0xdd)};
        for (int i = 0; i < 4; ++i) {
            const int column = 4 * i + c;
            if (column < num) _mm512_storeu_si512(out + column * out_stride, columns[i]);
        }
    }
}

#elif MM_VECTOR_BYTES == 32

MM_INLINE void transpose(const char* const* rows, uint32_t* out, int64_t out_stride,
                            int64_t num) {
    if (num < LANES) return transpose_few(rows, out, out_stride, num);
    __m256i a[8], b[8];
    for (int i = 0; i < 8; ++i) a[i] = load_lanes<__m256i>(rows[i]);
    for (int i = 0; i < 8; i += 2) {
        b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        a[i] = _mm256_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm256_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm256_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    // Register 4 g + c holds, in its 128-bit lane l, column 4 l + c of rows 4 g .. 4 g + 3.
    for (int c = 0; c < 4; ++c) {
        store_lanes(out + c * out_stride, _mm256_permute2x128_si256(a[c], a[4 + c], 0x20));
        store_lanes(out + (4 + c) * out_stride, _mm256_permute2x128_si256(a[c], a[4 + c], 0x31));
    }
}

#else

MM_INLINE void transpose(const char* const* rows, uint32_t* out, int64_t out_stride,
                            int64_t num) {
    transpose_few(rows, out, out_stride, num);
}

#endif

#if MM_VECTOR_BYTES == 64

// The order of values that alternates between two registers of 32 values each.
struct PairOrder {
    uint16_t at[64];
    constexpr PairOrder() : at{} {
        for (int i = 0; i < 64; ++i) at[i] = uint16_t(i / 2 + i % 2 * 32);
    }
};

// Interleaves two rows to [columns][2]. columns: depth rounded up to 16; the padding is 0.
MM_INLINE void interleave(const bf16* first, const bf16* second, int64_t depth, bf16* out,
                       int64_t columns) {
    int64_t c = 0;
    alignas(64) static constexpr PairOrder ORDER;
    const __m512i lower = _mm512_load_si512(ORDER.at);
    const __m512i upper = _mm512_load_si512(ORDER.at + 32);
    for (; c + 32 <= depth; c += 32) {
        const __m512i one = _mm512_loadu_si512(first + c), two = _mm512_loadu_si512(second + c);
        _mm512_storeu_si512(out + c * 2, _mm512_permutex2var_epi16(one, lower, two));
        _mm512_storeu_si512(out + c * 2 + 32, _mm512_permutex2var_epi16(one, upper, two));
    }
    for (; c < columns; c += 16) {
        const int64_t num = depth - c < 16 ? depth - c : 16;
        const __mmask16 there = __mmask16((1u << num) - 1);
        const __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, first + c));
        const __m512i high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, second + c));
        _mm512_storeu_si512(out + c * 2, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
}

#else

// Interleaves two rows to [columns][2]. The padding past `depth` is 0.
MM_INLINE void interleave(const bf16* first, const bf16* second, int64_t depth, bf16* out,
                       int64_t columns) {
    int64_t c = 0;
#if MM_VECTOR_BYTES == 32
    for (; c + 16 <= depth; c += 16) {
        const __m256i one = load_lanes<__m256i>(first + c), two = load_lanes<__m256i>(second + c);
        const __m256i low = _mm256_unpacklo_epi16(one, two), high = _mm256_unpackhi_epi16(one, two);
        store_lanes(out + c * 2, _mm256_permute2x128_si256(low, high, 0x20));
        store_lanes(out + c * 2 + 16, _mm256_permute2x128_si256(low, high, 0x31));
    }
#endif
    for (; c < depth; ++c) {
        out[c * 2] = first[c];
        out[c * 2 + 1] = second[c];
    }
    if (columns > depth) std::memset(out + depth * 2, 0, (columns - depth) * 2 * sizeof(bf16));
}

#endif

// Packs rows[0 .. count] of `units` dwords to [units][columns] dwords, columns a multiple of 16 that
// is not less than count. Columns past `count` repeat the last row; their results are unused.
template <typename T>
inline void pack_keys(const T* const* rows, int64_t count, int64_t units, T* packed,
                      int64_t columns) {
    for (int64_t unit = 0; unit < units; unit += LANES) {
        const int64_t num = std::min(units - unit, LANES);
        for (int64_t column = 0; column < columns; column += LANES) {
            const char* some[LANES];
            for (int64_t i = 0; i < LANES; ++i) {
                const T* row = rows[column + i < count ? column + i : count - 1];
                some[i] = reinterpret_cast<const char*>(row) + unit * 4;
            }
            uint32_t* out = reinterpret_cast<uint32_t*>(packed) + unit * columns + column;
            transpose(some, out, columns, num);
        }
    }
}

// Packs rows[0 .. count] of `depth` channels to [ceil(count / unit)][columns][unit], columns = depth
// rounded up to 16; the padding is 0.
inline void pack_values(const float* const* rows, int64_t count, int64_t depth, float* packed,
                        int64_t columns) {
    for (int64_t row = 0; row < count; ++row) {
        float* out = packed + row * columns;
        std::memcpy(out, rows[row], depth * sizeof(float));
        std::fill(out + depth, out + columns, 0.0f);
    }
}

inline void pack_values(const bf16* const* rows, int64_t count, int64_t depth, bf16* packed,
                        int64_t columns) {
    static constexpr bf16 ZEROS[MAX_HEAD_DIM] = {};
    for (int64_t pair = 0; pair < (count + 1) / 2; ++pair) {
        const bf16* second = pair * 2 + 1 < count ? rows[pair * 2 + 1] : ZEROS;
        interleave(rows[pair * 2], second, depth, packed + pair * columns * 2, columns);
    }
}

}  // namespace mm
