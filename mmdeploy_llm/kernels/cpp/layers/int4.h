// Keys and values in four bits. The channels of a head are divided into groups of GROUP_CHANNELS; a
// head whose size is no multiple of it is one group. Each group has a scale and a lowest value in
// bf16, and a channel is lowest + code * scale, with a code from 0 to 15:
//
//     codes  [group][channels / 2]   byte i: channel i in its low bits, channel i + half in the others
//     ranges [group][2]              scale, lowest value
//
// code * scale has 12 bits and is exact in float, so that every level and plain torch, whether they
// fuse the addition or not, decode the same values.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "../products/lanes.h"
#include "../products/numbers.h"

namespace mm {

constexpr int64_t GROUP_CHANNELS = 32;  // as in layers/attention/int4.py

// Two codes.
struct int4_pair {
    uint8_t bits;
};

inline int64_t group_channels(int64_t head_dim) {
    return head_dim % GROUP_CHANNELS == 0 ? GROUP_CHANNELS : head_dim;
}

// Returns the number of values that the ranges of a head have.
inline int64_t num_ranges(int64_t head_dim) { return 2 * (head_dim / group_channels(head_dim)); }

// A value that is not finite makes the scale NaN, and so every value that is decoded.
template <typename T>
inline void encode_group(const T* row, int64_t half, int4_pair* codes, bf16* ranges) {
    float least = INFINITY, most = -INFINITY, odd = 0.0f;
#pragma omp simd reduction(min : least) reduction(max : most) reduction(+ : odd)
    for (int64_t c = 0; c < 2 * half; ++c) {
        const float x = load(row[c]);
        least = std::min(least, x);
        most = std::max(most, x);
        odd += x - x;
    }
    const float lowest = rounded<bf16>(least);
    const float scale = rounded<bf16>((most - lowest) / 15.0f + odd);
    const auto code_of = [&](float x) {  // 0 where the scale is 0 or NaN
        const float code = (x - lowest) / scale;
        return uint32_t((code > 0.0f ? (code < 15.0f ? code : 15.0f) : 0.0f) + 0.5f);
    };
#pragma omp simd
    for (int64_t i = 0; i < half; ++i) {
        codes[i].bits = uint8_t(code_of(load(row[i])) | code_of(load(row[i + half])) << 4);
    }
    ranges[0] = store<bf16>(scale);
    ranges[1] = store<bf16>(lowest);
}

template <typename T>
inline void encode_head(const T* row, int64_t head_dim, int4_pair* codes, bf16* ranges) {
    const int64_t channels = group_channels(head_dim);
    for (int64_t first = 0; first < head_dim; first += channels, ranges += 2) {
        encode_group(row + first, channels / 2, codes + first / 2, ranges);
    }
}

inline void decode_group(const int4_pair* codes, const bf16* ranges, int64_t half, float* out) {
    const float scale = load(ranges[0]), lowest = load(ranges[1]);
#pragma omp simd
    for (int64_t i = 0; i < half; ++i) {
        out[i] = lowest + float(codes[i].bits & 15) * scale;
        out[i + half] = lowest + float(codes[i].bits >> 4) * scale;
    }
}

#if defined(__SSSE3__)
#define MM_HAS_BYTE_TABLES 1

// A table of 16 values of two bytes.
class Table {
   public:
    explicit Table(const bf16* values) {
        const __m128i first = load_lanes<__m128i>(values), second = load_lanes<__m128i>(values + 8);
        const __m128i low = _mm_set1_epi16(0xff);
        low_ = _mm_packus_epi16(_mm_and_si128(first, low), _mm_and_si128(second, low));
        high_ = _mm_packus_epi16(_mm_srli_epi16(first, 8), _mm_srli_epi16(second, 8));
    }
    // Looks up the 16 low and the 16 high codes of 16 bytes.
    MM_INLINE void look_up(const int4_pair* codes, bf16* of_low, bf16* of_high) const {
        const __m128i bytes = load_lanes<__m128i>(codes), low = _mm_set1_epi8(15);
        put(_mm_and_si128(bytes, low), of_low);
        put(_mm_and_si128(_mm_srli_epi16(bytes, 4), low), of_high);
    }

   private:
    MM_INLINE void put(__m128i codes, bf16* out) const {
        const __m128i low = _mm_shuffle_epi8(low_, codes), high = _mm_shuffle_epi8(high_, codes);
        store_lanes(out, _mm_unpacklo_epi8(low, high));
        store_lanes(out + 8, _mm_unpackhi_epi8(low, high));
    }
    __m128i low_, high_;
};

#elif defined(__aarch64__)
#define MM_HAS_BYTE_TABLES 1

// A table of 16 values of two bytes.
class Table {
   public:
    explicit Table(const bf16* values) {
        const uint8x16_t first = load_lanes<uint8x16_t>(values);
        const uint8x16_t second = load_lanes<uint8x16_t>(values + 8);
        low_ = vuzp1q_u8(first, second);
        high_ = vuzp2q_u8(first, second);
    }
    // Looks up the 16 low and the 16 high codes of 16 bytes.
    MM_INLINE void look_up(const int4_pair* codes, bf16* of_low, bf16* of_high) const {
        const uint8x16_t bytes = load_lanes<uint8x16_t>(codes);
        put(vandq_u8(bytes, vdupq_n_u8(15)), of_low);
        put(vshrq_n_u8(bytes, 4), of_high);
    }

   private:
    MM_INLINE void put(uint8x16_t codes, bf16* out) const {
        const uint8x16_t low = vqtbl1q_u8(low_, codes), high = vqtbl1q_u8(high_, codes);
        store_lanes(out, vzip1q_u8(low, high));
        store_lanes(out + 8, vzip2q_u8(low, high));
    }
    uint8x16_t low_, high_;
};

#endif

// The 16 values that a group can have are rounded once, and then looked up.
inline void decode_group(const int4_pair* codes, const bf16* ranges, int64_t half, bf16* out) {
    const float scale = load(ranges[0]), lowest = load(ranges[1]);
    alignas(64) bf16 values[16];
#pragma omp simd
    for (int i = 0; i < 16; ++i) values[i] = store<bf16>(lowest + float(i) * scale);
    int64_t i = 0;
#ifdef MM_HAS_BYTE_TABLES
    const Table table(values);
    for (; i + 16 <= half; i += 16) table.look_up(codes + i, out + i, out + half + i);
#endif
    for (; i < half; ++i) {
        out[i] = values[codes[i].bits & 15];
        out[i + half] = values[codes[i].bits >> 4];
    }
}

template <typename T>
inline void decode_head(const int4_pair* codes, const bf16* ranges, int64_t head_dim, T* out) {
    const int64_t channels = group_channels(head_dim);
    for (int64_t first = 0; first < head_dim; first += channels, ranges += 2) {
        decode_group(codes + first / 2, ranges, channels / 2, out + first);
    }
}

}  // namespace mm
