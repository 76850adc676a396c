// Packs keys and values of a tile into the layout of dot.h.
#pragma once

#include <cstdint>
#include <cstring>

#include "dot.h"
#include "numbers.h"

namespace mm {

inline int64_t round_up(int64_t value, int64_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

#ifdef MM_HAS_BF16_DOT

// Transposes 16 rows of `num` dwords each (1 to 16), from `first` on, to `num` columns. out_stride:
// in dwords.
inline void transpose_16(const uint32_t* const* rows, int64_t first, uint32_t* out,
                         int64_t out_stride, int64_t num = 16) {
    __m512i a[16], b[16];
    const __mmask16 there = __mmask16((1u << num) - 1);
    if (num == 16) {  // masked loads are slow when the data are not in the cache
        for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(rows[i] + first);
    } else {
        for (int i = 0; i < 16; ++i) a[i] = _mm512_maskz_loadu_epi32(there, rows[i] + first);
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

// The order of values that alternates between two registers of 32 values each.
struct PairOrder {
    uint16_t at[64];
    constexpr PairOrder() : at{} {
        for (int i = 0; i < 64; ++i) at[i] = uint16_t(i / 2 + i % 2 * 32);
    }
};

// Interleaves two rows to [columns][2]. columns: depth rounded up to 16; the padding is 0.
inline void interleave(const bf16* first, const bf16* second, int64_t depth, bf16* out,
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

#endif

// Packs rows[0 .. count] of `depth` channels to [depth / 2][columns][2], columns a multiple of 16
// that is not less than count. Columns past `count` repeat the last row; their results are unused.
template <typename T>
inline void pack_keys(const T* const* rows, int64_t count, int64_t depth, T* packed,
                      int64_t columns) {
    int64_t pair = 0;
#ifdef MM_HAS_BF16_DOT
    if constexpr (sizeof(T) == 2) {
        for (; pair < depth / 2; pair += 16) {
            const int64_t num = depth / 2 - pair < 16 ? depth / 2 - pair : 16;
            for (int64_t column = 0; column < columns; column += 16) {
                const uint32_t* sixteen[16];
                for (int64_t i = 0; i < 16; ++i) {
                    const int64_t row = column + i < count ? column + i : count - 1;
                    sixteen[i] = reinterpret_cast<const uint32_t*>(rows[row]);
                }
                uint32_t* out = reinterpret_cast<uint32_t*>(packed) + pair * columns + column;
                transpose_16(sixteen, pair, out, columns, num);
            }
        }
    }
#endif
    for (; pair < depth / 2; ++pair) {
        T* out = packed + pair * columns * 2;
        for (int64_t column = 0; column < columns; ++column) {
            const T* row = rows[column < count ? column : count - 1];
            out[column * 2] = row[pair * 2];
            out[column * 2 + 1] = row[pair * 2 + 1];
        }
    }
}

// Packs rows[0 .. count] of `depth` channels to [ceil(count / 2)][columns][2], columns = depth
// rounded up to 16; the padding is 0.
template <typename T>
inline void pack_values(const T* const* rows, int64_t count, int64_t depth, T* packed,
                        int64_t columns) {
    for (int64_t pair = 0; pair < (count + 1) / 2; ++pair) {
        T* out = packed + pair * columns * 2;
        const T* first = rows[pair * 2];
        const bool has_second = pair * 2 + 1 < count;
#ifdef MM_HAS_BF16_DOT
        if constexpr (sizeof(T) == 2) {
            if (has_second) {
                interleave(first, rows[pair * 2 + 1], depth, out, columns);
                continue;
            }
        }
#endif
        for (int64_t c = 0; c < depth; ++c) {
            out[c * 2] = first[c];
            out[c * 2 + 1] = has_second ? rows[pair * 2 + 1][c] : store<T>(0.0f);
        }
        if (columns > depth) std::memset(out + depth * 2, 0, (columns - depth) * 2 * sizeof(T));
    }
}

}  // namespace mm
