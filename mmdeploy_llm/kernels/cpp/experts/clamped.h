// A gated activation whose inputs are clamped.
#pragma once

#include <cstdint>

#include "../products/numbers.h"
#include "../products/parallel.h"

namespace mm {

// out [rows][size] from gate and up in turn, both [rows][2 * size]: (up + 1) * gate *
// sigmoid(alpha * gate), with gate at most `limit` and up within it; rounded to T after each
// operation.
template <typename T>
void clamped_mul(const T* both, T* out, int64_t rows, int64_t size, float alpha, float limit,
                 int num_threads) {
    parallel_parts(rows, num_threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin * size; i < end * size; ++i) {
            float gate = load(both[2 * i]), up = load(both[2 * i + 1]);
            gate = gate > limit ? limit : gate;
            up = up > limit ? limit : up;
            up = up < -limit ? -limit : up;
            const float open = 1.0f / (1.0f + fast_exp(-rounded<T>(gate * alpha)));
            const float kept = rounded<T>(gate * rounded<T>(open));
            out[i] = store<T>(rounded<T>(up + 1.0f) * kept);
        }
    });
}

}  // namespace mm
