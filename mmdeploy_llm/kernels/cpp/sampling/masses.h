// The masses of tokens, in whole units of 2^-42 of the largest logit's: their sums are exact in any
// order. engine/runner/sampling/draw.py computes the same bits with torch.
#pragma once

#include <cmath>
#include <cstdint>

#include "../products/lanes.h"

namespace mm {

constexpr float FAR = -30.0f;  // the mass of a z that is not above it is 0
constexpr float UNIT_BITS = 42.0f;

// Returns a * b, which is rounded: the compiler must not make one operation of it and of a sum.
MM_INLINE Floats product(Floats a, Floats b) {
    Floats value = a * b;
#if defined(__x86_64__) || defined(__aarch64__)
    MM_KEEP(value);
#else
    asm("" : "+m"(value));
#endif
    return value;
}

// Returns floor(exp(z) * 2^42), nearly; 0 for NaN. Cephes' polynomial, each step of it rounded.
MM_INLINE Floats masses_of(Floats z) {
    const auto all = [](float value) { return all_lanes(value); };
    const Floats x = larger(z, all(FAR));
    const Floats n = to_nearest(product(x, all(1.44269504f)));
    const Floats r = (x - product(n, all(0.693359375f))) + product(n, all(2.12194440e-4f));
    Floats y = all(1.9875691500e-4f);
    for (const float next : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f,
                             1.6666665459e-1f, 5.0000001201e-1f}) {
        y = product(y, r) + all(next);
    }
    y = (product(product(y, r), r) + r) + all(1.0f);
    return floors_of(times_power(y, n + all(UNIT_BITS)));
}

}  // namespace mm
