// The sampler's operations over a whole vocabulary, with exactly the values of the torch code.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

#include "../cpp_products/numbers.h"
#include "../cpp_products/parallel.h"

namespace mm {

// Maps floats to integers in the same order; a positive NaN is above infinity.
inline int32_t order_of(float value) {
    const int32_t bits = int32_t(float_to_bits(value));
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

inline float of_order(int32_t order) {
    return bits_to_float(uint32_t(order ^ ((order >> 31) & 0x7fffffff)));
}

// Finds the `num` largest values of each row, descending, and their indices; num <= size.
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
        // `num` blocks have a maximum of `least` or more, so `num` values are at least as large.
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
        std::nth_element(found.begin(), found.begin() + (num - 1), found.end());
        std::sort(found.begin(), found.begin() + num);
        for (int64_t i = 0; i < num; ++i) {
            values[row * num + i] = of_order(found[i].order);
            ids[row * num + i] = found[i].id;
        }
    });
}

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

template <typename T>
float largest_logit(const T* in, int64_t size) {
    float largest = -INFINITY;
#pragma omp simd reduction(max : largest)
    for (int64_t c = 0; c < size; ++c) {
        const float value = load(in[c]);
        largest = value > largest ? value : largest;
    }
    return largest;
}

// out = (logits - largest logit of the row) / temperature.
template <typename T>
void temper(const T* logits, int64_t stride, int64_t rows, int64_t size, const float* temperatures,
            float* out, int num_threads) {
    parallel_for(rows, num_threads, [&](int64_t row) {
        const T* in = logits + row * stride;
        const float largest = largest_logit(in, size), temperature = temperatures[row];
        float* to = out + row * size;
#pragma omp simd
        for (int64_t c = 0; c < size; ++c) to[c] = (load(in[c]) - largest) / temperature;
    });
}

// sums = the sum of exp((logit - largest) / temperature) of each row, nearly; tokens = what a draw
// without rules takes, or -1 where it may depend on how the softmax is rounded.
template <typename T>
void weigh(const T* logits, int64_t stride, int64_t rows, int64_t size, const float* temperatures,
           const double* uniforms, double* sums, int64_t* tokens, int num_threads) {
    constexpr int64_t BLOCK = 512;
    // An exponential of ours and one of torch, divided by its sum, are at most this far apart, and
    // so is a share of all of them: half of it comes from what is drawn, half from what is not.
    constexpr double ERROR = 1.0 / (1 << 21);
    parallel_for(rows, num_threads, [&](int64_t row) {
        const T* in = logits + row * stride;
        const float largest = largest_logit(in, size), temperature = temperatures[row];
        alignas(64) float exps[BLOCK];
        const auto weigh_block = [&](int64_t begin) {
            const int64_t num = std::min(BLOCK, size - begin);
            // GCC would divide once for each case of the exponential, if that was in the same loop.
#pragma omp simd
            for (int64_t c = 0; c < num; ++c) exps[c] = (load(in[begin + c]) - largest) / temperature;
#pragma omp simd
            for (int64_t c = 0; c < num; ++c) exps[c] = fast_exp(exps[c]);
            return num;
        };
        static thread_local std::vector<double> before;  // the sum of all blocks before each
        before.clear();
        double total = 0.0;
        for (int64_t begin = 0; begin < size; begin += BLOCK) {
            before.push_back(total);
            const int64_t num = weigh_block(begin);
            double sum = 0.0;
#pragma omp simd reduction(+ : sum)
            for (int64_t c = 0; c < num; ++c) sum += exps[c];
            total += sum;
        }
        sums[row] = total;
        const double target = uniforms[row] * total, margin = ERROR * total;
        const auto after = std::upper_bound(before.begin(), before.end(), target);
        const int64_t block = std::max<int64_t>(after - before.begin() - 1, 0);  // of NaN the first
        const int64_t num = weigh_block(block * BLOCK);
        double sum = before[block], last = sum;
        int64_t token = 0;
        for (; token < num; ++token) {
            last = sum;
            sum += exps[token];
            if (sum > target) break;
        }
        const bool is_sure = last + margin <= target && target + margin < sum;
        tokens[row] = is_sure ? block * BLOCK + token : -1;
    });
}

constexpr float UNITS = 1125899906842624.0f;  // 2^50

inline double mass_of(float prob) { return double(std::floor(prob * UNITS)); }

// Returns an integer that grows as z falls from 0.
inline uint32_t depth_of(float z) { return float_to_bits(z) & 0x7fffffff; }

// Finds the greatest depth of `size` items at which the sum of the amounts of all items of smaller
// depth is still below a threshold; 0 if there is none. Sums are exact in any order.
class DepthSearch {
   public:
    // depth(i), amount(i): of item i; the compiler vectorises loops over both.
    template <typename Depth, typename Amount>
    uint32_t find(int64_t size, double threshold, const Depth& depth, const Amount& amount) {
        sums_.assign(WAYS * COARSE, 0.0);
        has_items_.assign(COARSE, 0);
        uint32_t depths[BLOCK];
        double amounts[BLOCK];
        for (int64_t first = 0; first < size; first += BLOCK) {
            const int64_t num = std::min(int64_t(BLOCK), size - first);
#pragma omp simd
            for (int64_t i = 0; i < num; ++i) depths[i] = depth(first + i);
#pragma omp simd
            for (int64_t i = 0; i < num; ++i) amounts[i] = amount(first + i);
            // Neighbours often have one bin; a sum waits for the one before it.
            for (int64_t i = 0; i < num; ++i) {
                const uint32_t bin = depths[i] >> COARSE_SHIFT;
                sums_[i % WAYS * COARSE + bin] += amounts[i];
                has_items_[bin] = 1;
            }
        }
        for (int64_t bin = 0; bin < COARSE; ++bin) {
            for (int64_t way = 1; way < WAYS; ++way) sums_[bin] += sums_[way * COARSE + bin];
        }
        double before = 0.0;
        const uint32_t coarse = last_below(threshold, &before);
        if (int64_t(items_.size()) < size) items_.resize(size);
        Item* end = items_.data();
        for (int64_t i = 0; i < size; ++i) {  // without a branch that is hard to predict
            const uint32_t own = depth(i);
            *end = {own, int32_t(i)};
            end += own >> COARSE_SHIFT == coarse;
        }
        std::fill(sums_.begin(), sums_.begin() + FINE, 0.0);
        std::fill(has_items_.begin(), has_items_.end(), 0);
        for (const Item* item = items_.data(); item < end; ++item) {
            const uint32_t bin = item->depth >> FINE_SHIFT & (FINE - 1);
            sums_[bin] += amount(item->index);
            has_items_[bin] = 1;
        }
        const uint32_t fine = last_below(threshold, &before);
        end = std::remove_if(items_.data(), end, [&](const Item& item) {
            return (item.depth >> FINE_SHIFT & (FINE - 1)) != fine;
        });
        std::sort(items_.data(), end,
                  [](const Item& a, const Item& b) { return a.depth < b.depth; });
        uint32_t found = 0;
        for (const Item* item = items_.data(); item < end && before < threshold; ++item) {
            found = item->depth;
            before += amount(item->index);
        }
        return found;
    }

   private:
    struct Item {
        uint32_t depth;
        int32_t index;
    };
    static constexpr int64_t BLOCK = 512, WAYS = 4;
    static constexpr uint32_t COARSE = 4096, COARSE_SHIFT = 19, FINE = 1024, FINE_SHIFT = 9;

    // Returns the last bin with items for which the sum of all bins before it is below the
    // threshold, and stores that sum in *before.
    uint32_t last_below(double threshold, double* before) const {
        uint32_t last = 0;
        double sum = *before;
        for (uint32_t bin = 0; bin < COARSE && sum < threshold; ++bin) {
            if (has_items_[bin] == 0) continue;
            last = bin;
            *before = sum;
            sum += sums_[bin];
        }
        return last;
    }

    std::vector<double> sums_;
    std::vector<uint8_t> has_items_;  // whether a bin has some
    std::vector<Item> items_;
};

// Keeps of each row the values from the smallest z that min_p (as the logarithm `least`), top_k and
// top_p keep, in this order; the others become -inf. probs: of the whole vocabulary. top_k 0 and
// top_p 1 are off.
inline void cut(float* z, const float* probs, int64_t rows, int64_t size, const float* least,
                const int64_t* top_k, const double* top_p, int num_threads) {
    parallel_for(rows, num_threads, [&](int64_t row) {
        static thread_local DepthSearch search;
        float* in = z + row * size;
        const float* prob = probs + row * size;
        const auto depth = [&](int64_t i) { return depth_of(in[i]); };
        constexpr uint32_t FINITE = 0x7f7fffff;
        uint32_t deepest = std::min(FINITE, depth_of(least[row]));
        if (top_k[row] > 0) {
            const double threshold = double(std::min(top_k[row], size));
            const uint32_t last = search.find(size, threshold, depth, [](int64_t) { return 1.0; });
            deepest = std::min(deepest, last);
        }
        if (top_p[row] < 1.0) {
            double total = 0.0;
#pragma omp simd reduction(+ : total)
            for (int64_t i = 0; i < size; ++i) {
                total += depth(i) <= deepest ? mass_of(prob[i]) : 0.0;
            }
            const auto amount = [&](int64_t i) {
                return depth(i) <= deepest ? mass_of(prob[i]) : 0.0;
            };
            deepest = std::min(deepest, search.find(size, top_p[row] * total, depth, amount));
        }
        const float last = -bits_to_float(deepest);
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) in[i] = in[i] < last ? -INFINITY : in[i];
    });
}

// Finds for each row the first token at which the running sum of probabilities, in whole units of
// 2^-50, exceeds uniform * their total. Sums are exact in any order because they stay below 2^53.
inline void invert(const float* probs, int64_t rows, int64_t size, const double* uniforms,
                   int64_t* tokens, int num_threads) {
    constexpr int64_t BLOCK = 1024;
    parallel_for(rows, num_threads, [&](int64_t row) {
        const float* in = probs + row * size;
        const auto mass = [&](int64_t begin) {
            const int64_t end = std::min(begin + BLOCK, size);
            double sum = 0.0;
#pragma omp simd reduction(+ : sum)
            for (int64_t c = begin; c < end; ++c) sum += mass_of(in[c]);
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
            sum += mass_of(in[token]);
            if (sum > target) break;
        }
        tokens[row] = std::min(token, size - 1);
    });
}

}  // namespace mm
