// Number formats: values are loaded as float, computed in float, and rounded to nearest even when
// they are stored, as torch does. The compiler vectorises loops over these functions.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

// A function that a loop calls for each value must be inlined for the loop to be vectorised. Left to
// itself, the compiler stops inlining when a file has grown by some percentage.
#define MM_INLINE inline __attribute__((always_inline))

namespace mm {

struct bf16 {
    uint16_t bits;
};

MM_INLINE float bits_to_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

MM_INLINE uint32_t float_to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

// A float of which a unit in the last place is 1: an integer below 2^22 that is added to its bits is
// added to its value. The same holds of multiples when both are multiplied by a power of two.
constexpr float FLOAT_OF_0 = 12582912.0f;  // 1.5 * 2^23

MM_INLINE float load(float value) { return value; }
MM_INLINE float load(bf16 value) { return bits_to_float(uint32_t(value.bits) << 16); }

template <typename T>
MM_INLINE T store(float value);

template <>
MM_INLINE float store<float>(float value) {
    return value;
}

template <>
MM_INLINE bf16 store<bf16>(float value) {
    const uint32_t bits = float_to_bits(value);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
    return bf16{uint16_t(is_nan ? 0x7fc0 : rounded)};
}

// Converts a value to T, rounding it only if T is the smaller type.
template <typename T>
MM_INLINE T convert(float value) {
    return store<T>(value);
}
template <typename T>
MM_INLINE T convert(bf16 value) {
    if constexpr (sizeof(T) == sizeof value) {
        return value;
    } else {
        return load(value);
    }
}

// Converts a small integer, which both formats hold exactly.
template <typename T>
MM_INLINE T exact(int8_t value);

template <>
MM_INLINE float exact<float>(int8_t value) {
    return float(value);
}

template <>
MM_INLINE bf16 exact<bf16>(int8_t value) {
    return bf16{uint16_t(float_to_bits(float(value)) >> 16)};
}

// Returns `value` rounded to the precision of T.
template <typename T>
MM_INLINE float rounded(float value) {
    return load(store<T>(value));
}

// Returns the largest integer <= x, |x| < 2^31; vectorised on processors without a rounding
// instruction too.
MM_INLINE float floor_of(float x) {
#if defined(__SSE2__) && !defined(__SSE4_1__)
    const float whole = float(int32_t(x));
    return whole > x ? whole - 1.0f : whole;
#else
    return std::floor(x);
#endif
}

// Returns exp(x) to 2 units in the last place; 0 or infinity where the result is not a normal
// number. Uses Cephes' polynomial of degree 5 on [-ln 2 / 2, ln 2 / 2].
MM_INLINE float fast_exp(float x) {
    const float limited = x < -87.3f ? -87.3f : (x > 88.3f ? 88.3f : x);
    const float n = floor_of(limited * 1.44269504088896341f + 0.5f);
    const float r = (limited - n * 0.693359375f) + n * 2.12194440e-4f;
    float y = 1.9875691500e-4f;
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    const float power = bits_to_float(uint32_t(int32_t(n) + 127) << 23);
    return x < -87.3f ? 0.0f : (x > 88.3f ? INFINITY : y * power);
}

MM_INLINE float fast_tanh(float x) { return 1.0f - 2.0f / (fast_exp(2.0f * x) + 1.0f); }

// Returns the largest magnitude, NaN if there is one: as integers, bits without a sign have the order
// infinity and NaN after all numbers.
template <typename T>
MM_INLINE float largest_of(const T* x, int64_t count) {
    int32_t largest = 0;
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < count; ++i) {
        const int32_t bits = int32_t(float_to_bits(load(x[i])) & 0x7fffffffu);
        largest = bits > largest ? bits : largest;
    }
    return bits_to_float(uint32_t(largest));
}

// Returns 0 for magnitudes so small that their inverse is no number, and for NaN: they are rounded
// to 0.
MM_INLINE float inverse_of(float largest) { return largest > 1e-36f ? 127.0f / largest : 0.0f; }

template <typename T>
MM_INLINE void round_times(const T* x, int64_t count, float inverse, int8_t* out) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
        out[i] = int8_t(int32_t(std::nearbyint(load(x[i]) * inverse)));
    }
}

// Quantizes symmetrically: the largest magnitude becomes 127. Returns the scale, NaN if a value is not
// finite: then all that is computed with it is NaN too.
template <typename T>
MM_INLINE float quantize(const T* x, int64_t count, int8_t* out) {
    const float largest = largest_of(x, count);
    round_times(x, count, inverse_of(largest), out);
    return largest / 127.0f;
}

}  // namespace mm
