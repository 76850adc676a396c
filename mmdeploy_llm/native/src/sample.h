// What the sampler does over a whole vocabulary, value for value as plain torch does it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

#include "numbers.h"
#include "parallel.h"

namespace mm {

// Integers in the order of the floats; NaN is beyond infinity.
inline int32_t order_of(float value) {
    const int32_t bits = int32_t(float_to_bits(value));
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

inline float of_order(int32_t order) {
    return bits_to_float(uint32_t(order ^ ((order >> 31) & 0x7fffffff)));
}

// The `num` largest values of each row, falling, and where they are; num <= size.
template <typename T>
void largest(const T* logits, int64_t stride, int64_t rows, int64_t size, int64_t num,
             float* values, int64_t* ids, int num_threads) {
    constexpr int64_t BLOCK = 128;
    const int64_t blocks = (size + BLOCK - 1) / BLOCK;
    parallel_for(rows, num_threads, [&](int64_t row) {
        struct Found {
            int32_t order;
            int32_t id;
            bool operator<(const Found& other) const { return order > other.order; }
        };
        const T* in = logits + row * stride;
        static thread_local std::vector<int32_t> maxima, sorted;
        static thread_local std::vector<Found> found;
        maxima.resize(blocks);
        for (int64_t block = 0; block < blocks; ++block) {
            int32_t most = INT32_MIN;
#pragma omp simd reduction(max : most)
            for (int64_t c = block * BLOCK; c < std::min((block + 1) * BLOCK, size); ++c) {
                most = std::max(most, order_of(load(in[c])));
            }
            maxima[block] = most;
        }
        // As many values as there are blocks with a maximum of `least` or more are that large.
        int32_t least = INT32_MIN;
        if (num <= blocks) {
            sorted = maxima;
            std::nth_element(sorted.begin(), sorted.begin() + (num - 1), sorted.end(),
                             std::greater<int32_t>());
            least = sorted[num - 1];
        }
        found.clear();
        for (int64_t block = 0; block < blocks; ++block) {
            if (maxima[block] < least) continue;
            for (int64_t c = block * BLOCK; c < std::min((block + 1) * BLOCK, size); ++c) {
                const int32_t order = order_of(load(in[c]));
                if (order >= least) found.push_back({order, int32_t(c)});
            }
        }
        std::partial_sort(found.begin(), found.begin() + num, found.end());
        for (int64_t i = 0; i < num; ++i) {
            values[row * num + i] = of_order(found[i].order);
            ids[row * num + i] = found[i].id;
        }
    });
}

// out = (logits - largest logit) / temperature, row by row.
template <typename T>
void temper(const T* logits, int64_t stride, int64_t rows, int64_t size, const float* temperatures,
            float* out, int num_threads) {
    parallel_for(rows, num_threads, [&](int64_t row) {
        const T* in = logits + row * stride;
        float largest = -INFINITY;
#pragma omp simd reduction(max : largest)
        for (int64_t c = 0; c < size; ++c) {
            const float value = load(in[c]);
            largest = value > largest ? value : largest;
        }
        const float temperature = temperatures[row];
        float* to = out + row * size;
#pragma omp simd
        for (int64_t c = 0; c < size; ++c) to[c] = (load(in[c]) - largest) / temperature;
    });
}

// For each row of probabilities in whole units of 2^-50: the first token at which their running sum
// passes uniform * their sum. Sums are exact in any order, they stay below 2^53.
inline void invert(const float* probs, int64_t rows, int64_t size, const double* uniforms,
                   int64_t* tokens, int num_threads) {
    constexpr int64_t BLOCK = 1024;
    constexpr float UNITS = 1125899906842624.0f;
    parallel_for(rows, num_threads, [&](int64_t row) {
        const float* in = probs + row * size;
        const auto mass = [&](int64_t begin) {
            const int64_t end = std::min(begin + BLOCK, size);
            double sum = 0.0;
#pragma omp simd reduction(+ : sum)
            for (int64_t c = begin; c < end; ++c) sum += double(std::floor(in[c] * UNITS));
            return sum;
        };
        double total = 0.0;
        for (int64_t begin = 0; begin < size; begin += BLOCK) total += mass(begin);
        const double target = std::floor(uniforms[row] * total);
        double sum = 0.0;
        int64_t token = 0;
        for (; token < size; token += BLOCK) {
            const double next = sum + mass(token);
            if (next > target) break;
            sum = next;
        }
        for (; token < size; ++token) {
            sum += double(std::floor(in[token] * UNITS));
            if (sum > target) break;
        }
        tokens[row] = std::min(token, size - 1);
    });
}

}  // namespace mm
