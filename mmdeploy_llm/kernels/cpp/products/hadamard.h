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

#include "lanes.h"
#include "numbers.h"
#include "tiles.h"

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

// The signs of the values of a group, by the first bits of the fraction of pi.
struct Signs {
    alignas(64) float of[ROTATED_VALUES];
    constexpr Signs() : of{} {
        constexpr uint64_t BITS = 0x243f6a8885a308d3u;
        for (int64_t i = 0; i < ROTATED_VALUES; ++i) of[i] = BITS >> i & 1 ? -1.0f : 1.0f;
    }
};
static constexpr Signs SIGNS;

// A whole block in registers.
struct Block {
    static constexpr int NUM = ROTATED_VALUES / LANES;
    Floats of[NUM];

    template <typename T>
    static MM_INLINE Block at(const T* x) {
        Block block;
        unrolled<NUM>([&](auto i) MM_ALWAYS { block.of[i] = load_floats(x + i * LANES); });
        return block;
    }
    MM_INLINE void store(float* to) const {
        unrolled<NUM>([&](auto i) MM_ALWAYS { store_lanes(to + i * LANES, of[i]); });
    }
    // Returns 0, or NaN if a value is not finite.
    MM_INLINE float none() const {
        Floats sum{};
        unrolled<NUM>([&](auto i) MM_ALWAYS { sum = multiply_add(of[i], Floats{}, sum); });
        return lanes_of((Ints)(sum != sum)) == 0 ? 0.0f : NAN;
    }
    // Returns the largest magnitude of those that are numbers.
    MM_INLINE float largest() const {
        Floats found{};
        unrolled<NUM>([&](auto i) MM_ALWAYS {
            found = larger((Floats)((Ints)of[i] & splat_word(0x7fffffffu)), found);
        });
        return largest_lane(found);
    }
    MM_INLINE void change_signs() {
        unrolled<NUM>([&](auto i) MM_ALWAYS { of[i] *= load_lanes<Floats>(SIGNS.of + i * LANES); });
    }
    // The same sums as those of rotate_values.
    MM_INLINE void rotate() {
        add_halves_of<ROTATED_VALUES / 2>();
        unrolled<NUM>([&](auto i) MM_ALWAYS { of[i] *= 1.0f / 8; });
    }

  private:
    static_assert(ROTATED_VALUES == 64, "8 is its root");
    // 1 in lanes that are first of a pair H apart, -1 in others.
    template <int H, int... I>
    static MM_INLINE Floats signs(std::integer_sequence<int, I...>) {
        return Floats{(I & H ? -1.0f : 1.0f)...};
    }
    // Replaces values H apart by their sum and difference, then those H / 2 apart, and so on.
    template <int H>
    MM_INLINE void add_halves_of() {
        unrolled<NUM>([&](auto i) MM_ALWAYS {
            constexpr int APART = H / LANES;
            if constexpr (APART == 0) {
                const Floats other = exchanged<H>(of[i]);
                of[i] = multiply_add(of[i], signs<H>(std::make_integer_sequence<int, LANES>()), other);
            } else if constexpr ((i & APART) == 0) {
                const Floats one = of[i], other = of[i + APART];
                of[i] = one + other;
                of[i + APART] = one - other;
            }
        });
        if constexpr (H > 1) add_halves_of<H / 2>();
    }
};

// Does the same as rotate_values.
MM_INLINE void rotate_block(float* x, int64_t size) {
    if (size != ROTATED_VALUES) return rotate_values(x, size);
    Block block = Block::at(x);
    block.rotate();
    block.store(x);
}

// Writes a group of x, a block with other signs and rotated. Values at the end of a row that are no
// whole block, `count` of them, stay as they are.
template <typename T>
MM_INLINE void rotate_group(const T* x, int64_t count, float* out) {
    if (count < ROTATED_VALUES) {
        for (int64_t i = 0; i < count; ++i) out[i] = load(x[i]);
        return;
    }
    Block block = Block::at(x);
    block.change_signs();
    block.rotate();
    block.store(out);
}

// Undoes rotate_group.
template <typename T>
MM_INLINE void rotate_back(const T* x, int64_t count, float* out) {
    if (count < ROTATED_VALUES) return rotate_group(x, count, out);
    Block block = Block::at(x);
    block.rotate();
    block.change_signs();
    block.store(out);
}

}  // namespace mm
