// Rotates blocks of values by a Hadamard matrix, whose entries are 1 and -1 over the root of their
// number in a row. It spreads one large value over its block, so that rounding the block to few bits
// loses less of the others (QuaRot, arXiv:2404.00456). The matrix is its own inverse.
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

// Multiplies x [size] by the Hadamard matrix, in as many passes as `size`, a power of two, has bits.
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

// The same with the number of a whole block known to the compiler.
MM_INLINE void rotate_block(float* x, int64_t size) {
    if (size == ROTATED_VALUES) return rotate_values(x, ROTATED_VALUES);
    rotate_values(x, size);
}

}  // namespace mm
