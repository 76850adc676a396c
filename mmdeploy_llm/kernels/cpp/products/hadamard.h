// Rotates blocks of values by a Hadamard matrix, whose entries are 1 and -1 over the root of their
// number in a row. It spreads one large value over its block, so that rounding the block to few bits
// loses less of the others (QuaRot, arXiv:2404.00456). The matrix is its own inverse.
//
// Its first row adds all values of a block, which would make one large value of those that have a
// common mean, as behind a ReLU. So rows of products change the sign of half of the values first.
#pragma once

#include <cmath>
#include <cstdint>
#include <utility>

#include "numbers.h"

namespace mm {

constexpr int64_t ROTATED_VALUES = 64;  // of a block, at most, as kernels/plain.py has them

// to [size] = sums and differences of the first and the second half of `from`, in turn.
MM_INLINE void add_halves(const float* from, int64_t size, float* to) {
    const float* second = from + size / 2;
#pragma omp simd
    for (int64_t i = 0; i < size / 2; ++i) {
        const float one = from[i], other = second[i];
        to[2 * i] = one + other;
        to[2 * i + 1] = one - other;
    }
}

// Multiplies x [size] by the Hadamard matrix: a pass for each doubling up to `size`, a power of two.
MM_INLINE void rotate_values(float* x, int64_t size) {
    alignas(64) float other[ROTATED_VALUES];
    float *from = x, *to = other;
    for (int64_t done = 1; done < size; done *= 2) {
        add_halves(from, size, to);
        std::swap(from, to);
    }
    const float factor = 1.0f / std::sqrt(float(size));
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) x[i] = from[i] * factor;
}

// Does the same; of a whole block the compiler knows the size.
MM_INLINE void rotate_block(float* x, int64_t size) {
    if (size == ROTATED_VALUES) return rotate_values(x, ROTATED_VALUES);
    rotate_values(x, size);
}

// The signs of the values of a group, by the first bits of the fraction of pi.
struct Signs {
    float of[ROTATED_VALUES];
    constexpr Signs() : of{} {
        constexpr uint64_t BITS = 0x243f6a8885a308d3u;
        for (int64_t i = 0; i < ROTATED_VALUES; ++i) of[i] = BITS >> i & 1 ? -1.0f : 1.0f;
    }
};
static constexpr Signs SIGNS;

MM_INLINE void change_signs(float* x) {
#pragma omp simd
    for (int64_t i = 0; i < ROTATED_VALUES; ++i) x[i] *= SIGNS.of[i];
}

// Writes `count` values of x, at most a group, with other signs and rotated; a group that is not whole
// stays as it is. Returns 0, or NaN if a value is not finite.
template <typename T>
MM_INLINE float rotate_group(const T* x, int64_t count, float* out) {
    float none = 0.0f;
#pragma omp simd reduction(+ : none)
    for (int64_t i = 0; i < count; ++i) {
        out[i] = load(x[i]);
        none += out[i] * 0.0f;
    }
    if (count < ROTATED_VALUES) return none;
    change_signs(out);
    rotate_block(out, ROTATED_VALUES);
    return none;
}

// Undoes rotate_group.
template <typename T>
MM_INLINE void rotate_back(const T* x, int64_t count, float* out) {
    for (int64_t i = 0; i < count; ++i) out[i] = load(x[i]);
    if (count < ROTATED_VALUES) return;
    rotate_block(out, ROTATED_VALUES);
    change_signs(out);
}

}  // namespace mm
