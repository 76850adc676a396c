// The first of the largest logits of each row.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "../products/numbers.h"
#include "../products/parallel.h"

namespace mm {

// Finds the first index of the largest value of each row, and the value. A NaN counts as largest.
template <typename T>
void first_largest(const T* logits, int64_t stride, int64_t rows, int64_t size, int64_t* ids,
                   T* peaks, int num_threads) {
    constexpr int64_t BLOCK = 1024;
    parallel_for(rows, num_threads, [&](int64_t row) {
        const T* in = logits + row * stride;
        float peak = -INFINITY;
        int64_t first = 0, end = std::min(BLOCK, size);  // the block with the peak
        for (int64_t block = 0; block < size; block += BLOCK) {
            const int64_t past = std::min(block + BLOCK, size);
            float most = -INFINITY;
            int32_t nans = 0;
#pragma omp simd reduction(max : most) reduction(+ : nans)
            for (int64_t c = block; c < past; ++c) {
                const float value = load(in[c]);
                most = value > most ? value : most;
                nans += value != value;
            }
            if (nans > 0 || most > peak) peak = most, first = block, end = past;
            if (nans > 0) {
                peak = NAN;
                break;
            }
        }
        const auto is_peak = [&](float value) {
            return peak != peak ? value != value : value == peak;
        };
        int64_t id = first;
        while (id < end - 1 && !is_peak(load(in[id]))) ++id;
        ids[row] = id;
        peaks[row] = in[id];
    });
}

}  // namespace mm
