// A random draw from each row of logits, as engine/runner/sampling/draw.py defines it, without
// sorting them.
//
//     block maxima --> peak, and a threshold that the largest logits reach
//     top_k, min_p:  the tokens from that threshold on are collected
//     top_p alone:   a sample of the others tells where about the border is; one pass sums the masses
//                    above it and of all tokens, and collects the tokens near it
//     the collected  --> the border, exactly --> the token, by running sums in the order of ids
//
// Sums of masses are integers, so that the border and the token do not depend on which tokens were
// collected: a sample that misled costs another pass.
#pragma once

#include <algorithm>
#include <functional>
#include <vector>

#include "../products/parallel.h"
#include "masses.h"

namespace mm {

// What is kept: z >= least, the top_k largest (0: all), and of these top_p of the mass.
struct DrawRules {
    float least;
    int64_t top_k;
    double top_p;
    double uniform;
};

struct Weighed {
    float z;
    float mass;
    int32_t id;
};

// Returns the z at which the running sum of masses, in falling order of z, reaches `goal`.
inline float border_of(Weighed* first, Weighed* last, int64_t goal) {
    constexpr int64_t BINS = 1024, FEW = 48;
    int64_t sums[BINS];
    while (last - first > FEW) {
        float low = first->z, high = first->z;
        for (const Weighed* one = first; one < last; ++one) {
            low = std::min(low, one->z), high = std::max(high, one->z);
        }
        const float scale = float(BINS - 1) / (high - low);
        if (!(scale < INFINITY)) {  // all are equal, or differ by less than a float can divide
            if (low == high) return low;
            break;
        }
        const auto bin_of = [&](const Weighed& one) {
            return std::min(int64_t((high - one.z) * scale), BINS - 1);
        };
        std::fill(sums, sums + BINS, 0);
        for (const Weighed* one = first; one < last; ++one) sums[bin_of(*one)] += int64_t(one->mass);
        int64_t bin = 0;
        while (bin < BINS - 1 && sums[bin] < goal) goal -= sums[bin++];
        last = std::partition(first, last, [&](const Weighed& one) { return bin_of(one) == bin; });
    }
    std::sort(first, last, [](const Weighed& a, const Weighed& b) { return a.z > b.z; });
    while (last - first > 1 && int64_t(first->mass) < goal) goal -= int64_t(first++->mass);
    return first->z;
}

// Not inlined, since GCC vectorises the loops of large functions or not, as their other lines are.
template <typename T>
__attribute__((noinline)) float peak_of(const T* logits, int64_t size) {
    float most = -INFINITY;
#pragma omp simd reduction(max : most)
    for (int64_t c = 0; c < size; ++c) {
        const float value = load(logits[c]);
        most = value > most ? value : most;
    }
    return most;
}

template <typename T>
__attribute__((noinline)) void temper(const T* logits, int64_t size, float peak, float temperature,
                                      float* z) {
#pragma omp simd
    for (int64_t c = 0; c < size; ++c) z[c] = (load(logits[c]) - peak) / temperature;
}

template <typename T>
class RowDraw {
   public:
    // Returns the token of a row; 0 where the largest logit is not finite.
    int64_t token(const T* logits, int64_t size, float temperature, const DrawRules& rules) {
        logits_ = logits, size_ = size, temperature_ = temperature;
        find_peak();
        if (!(std::abs(peak_) < INFINITY)) return 0;
        above_.assign((size + BLOCK - 1) / BLOCK, 0);
        float cut = rules.least;
        if (rules.top_k > 0 || cut > -INFINITY) {
            collect(rules.top_k > 0 ? std::max(cut, reached_by(rules.top_k)) : cut);
            if (rules.top_k > 0) cut = std::max(cut, z_of_rank(std::min(rules.top_k, size)));
            if (rules.top_p < 1.0) {
                cut = std::max(cut, border_from(cut, goal_of(rules.top_p, mass_from(cut))));
            }
        } else if (rules.top_p < 1.0) {
            cut = border_of_all(rules.top_p);
        } else {
            weigh({-INFINITY, -INFINITY});
        }
        return pick(cut, rules.uniform);
    }

   private:
    static constexpr int64_t BLOCK = 512, PEAK_BLOCK = 128, SAMPLED = 32, HEAD = 64;
    static constexpr int32_t BINS = 512;
    static constexpr double DEVIATIONS = 3.0;  // of a sample, at each side of the border

    // Tokens of from <= z < below are collected, those of below <= z summed.
    struct Range {
        float from;
        float below;
    };

    struct Sums {
        int64_t all;
        int64_t above;
    };

    void find_peak() {
        maxima_.clear();
        for (int64_t begin = 0; begin < size_; begin += PEAK_BLOCK) {
            const int64_t end = std::min(begin + PEAK_BLOCK, size_);
            maxima_.push_back(peak_of(logits_ + begin, end - begin));
        }
        peak_ = *std::max_element(maxima_.begin(), maxima_.end());
    }

    float z_of(float logit) const { return (logit - peak_) / temperature_; }

    // Returns a z that the `num` largest logits reach, and not many others.
    float reached_by(int64_t num) {
        if (num > int64_t(maxima_.size())) return -INFINITY;
        sorted_ = maxima_;
        std::nth_element(sorted_.begin(), sorted_.begin() + (num - 1), sorted_.end(),
                         std::greater<float>());
        return z_of(sorted_[num - 1]);
    }

    // Computes z and masses of `num` tokens, a multiple of LANES from `begin` on where there are so
    // many. Tokens past the end have z = -inf.
    void load_block(int64_t begin, int64_t num) {
        const int64_t own = std::min(num, size_ - begin);
        temper(logits_ + begin, own, peak_, temperature_, z_);
        std::fill(z_ + own, z_ + num, -INFINITY);
#pragma GCC unroll 4
        for (int64_t c = 0; c < num; c += LANES) {
            store_lanes(masses_ + c, masses_of(load_lanes<Floats>(z_ + c)));
        }
    }

    void append(int64_t begin, int64_t num, Range range) {
        const Floats from = all_lanes(range.from), below = all_lanes(range.below);
        int32_t places[BLOCK + LANES];
        int64_t count = 0;
        for (int64_t c = 0; c < num; c += LANES) {
            const Floats z = load_lanes<Floats>(z_ + c);
            count += store_places(places + count, lanes_of((z >= from) & (z < below)), int32_t(c));
        }
        for (int64_t i = 0; i < count; ++i) {
            const int32_t at = places[i];
            found_.push_back({z_[at], masses_[at], int32_t(begin) + at});
        }
    }

    // Collects all tokens of z >= from.
    void collect(float from) {
        found_.clear();
        for (int64_t block = 0; block < int64_t(maxima_.size()); ++block) {
            if (z_of(maxima_[block]) < from) continue;
            load_block(block * PEAK_BLOCK, PEAK_BLOCK);
            append(block * PEAK_BLOCK, PEAK_BLOCK, {from, INFINITY});
        }
    }

    // Sums masses, those of below <= z by blocks in above_, too, and collects tokens in the range.
    Sums weigh(Range range) {
        found_.clear();
        Sums sums = {0, 0};
        const bool is_split = std::abs(range.below) < INFINITY;
        for (int64_t begin = 0; begin < size_; begin += BLOCK) {
            load_block(begin, BLOCK);
            double all = 0.0, above = 0.0;  // exact: below 2^53
            if (is_split) {
                const float below = range.below;
#pragma omp simd reduction(+ : all, above)
                for (int64_t c = 0; c < BLOCK; ++c) {
                    all += masses_[c];
                    above += z_[c] >= below ? masses_[c] : 0.0f;
                }
            } else {
#pragma omp simd reduction(+ : all)
                for (int64_t c = 0; c < BLOCK; ++c) all += masses_[c];
                above = range.below < INFINITY ? all : 0.0;
            }
            sums.all += int64_t(all), sums.above += int64_t(above);
            above_[begin / BLOCK] = int64_t(above);
            if (range.from < range.below) append(begin, BLOCK, range);
        }
        return sums;
    }

    float z_of_rank(int64_t rank) {
        sorted_.clear();
        for (const Weighed& one : found_) sorted_.push_back(one.z);
        if (rank > int64_t(sorted_.size())) return -INFINITY;
        std::nth_element(sorted_.begin(), sorted_.begin() + (rank - 1), sorted_.end(),
                         std::greater<float>());
        return sorted_[rank - 1];
    }

    // Returns the mass of the collected tokens of z >= cut.
    int64_t mass_from(float cut) const {
        int64_t sum = 0;
        for (const Weighed& one : found_) sum += one.z >= cut ? int64_t(one.mass) : 0;
        return sum;
    }

    // Returns the z at which the mass of the collected tokens of z >= cut reaches `goal`.
    float border_from(float cut, int64_t goal) {
        kept_.clear();
        for (const Weighed& one : found_) {
            if (one.z >= cut && one.z > FAR) kept_.push_back(one);
        }
        return border_of(kept_.data(), kept_.data() + kept_.size(), goal);
    }

    static int64_t goal_of(double top_p, int64_t mass) {
        const int64_t goal = int64_t(std::ceil(top_p * double(mass)));
        return std::max<int64_t>(std::min(goal, mass), 1);
    }

    // Returns the z at which the mass of all tokens reaches top_p of it.
    float border_of_all(double top_p) {
        Range range = range_of_border(top_p);
        for (;;) {
            const Sums sums = weigh(range);
            const int64_t goal = goal_of(top_p, sums.all), near = mass_from(range.from);
            if (goal <= sums.above) {
                range = {range.below, INFINITY};
            } else if (goal > sums.above + near) {
                range = {FAR, range.from};
            } else {
                return border_from(range.from, goal - sums.above);
            }
        }
    }

    // Returns a range that nearly always has the border, from a sample of the tokens but for the
    // largest, whose mass is known.
    Range range_of_border(double top_p) {
        const float head = reached_by(HEAD);
        if (!(head > FAR) || size_ < BLOCK * SAMPLED) return {FAR, INFINITY};
        collect(head);
        constexpr double SHARE = double(BLOCK) / SAMPLED;
        const float scale = float(BINS - 1) / (head - load_sample(head));
        if (!(scale < INFINITY)) return {FAR, INFINITY};
        double bins[BINS] = {}, squares[BINS] = {};
        for (size_t at = 0; at < sample_.size(); at += 2 * SAMPLED) {
            for (int64_t c = 0; c < SAMPLED; ++c) {
                const int64_t bin = std::min(int32_t((head - sample_[at + c]) * scale), BINS - 1);
                const double mass = sample_[at + SAMPLED + c] * SHARE;
                bins[bin] += mass, squares[bin] += mass * mass;
            }
        }
        double above = double(mass_from(head)), above_square = 0.0, all = above, square = 0.0;
        for (int64_t bin = 0; bin < BINS; ++bin) all += bins[bin], square += squares[bin];
        Range range = {FAR, INFINITY};
        for (int64_t bin = 0; bin < BINS; ++bin) {  // `above` is the mass before this bin, nearly
            const double rest = all - above, distance = (above - top_p * all) * all;
            const double variance =
                above_square * rest * rest + (square - above_square) * above * above;
            const float z = head - float(bin) / scale;
            if (distance * distance > DEVIATIONS * DEVIATIONS * variance) {
                if (distance > 0.0) {
                    range.from = z;
                    break;
                }
                range.below = z;
            }
            above += bins[bin], above_square += squares[bin];
        }
        if (range.below == head) range.below = INFINITY;
        return range;
    }

    // Stores z and masses of the first tokens of each block, in turn; those from `head` on and those
    // without a mass count as `head` with none. Returns the smallest z.
    float load_sample(float head) {
        const int64_t num = size_ / BLOCK;
        sample_.resize(num * 2 * SAMPLED);
        float low = head;
        for (int64_t block = 0; block < num; ++block) {
            load_block(block * BLOCK, SAMPLED);
            float *z = &sample_[block * 2 * SAMPLED], *mass = z + SAMPLED;
#pragma omp simd reduction(min : low)
            for (int64_t c = 0; c < SAMPLED; ++c) {
                const bool is_in = z_[c] < head && z_[c] > FAR;
                z[c] = is_in ? z_[c] : head;
                mass[c] = is_in ? masses_[c] : 0.0f;
                low = z[c] < low ? z[c] : low;
            }
        }
        return low;
    }

    // Returns the first token at which the running sum of masses of z >= cut exceeds the uniform
    // number's share of all of it.
    int64_t pick(float cut, double uniform) {
        for (const Weighed& one : found_) {
            above_[one.id / BLOCK] += int64_t(one.mass) & -int64_t(one.z >= cut);  // no branch
        }
        int64_t kept = 0, sum = 0, block = 0;
        for (const int64_t own : above_) kept += own;
        const int64_t target = std::min(int64_t(std::floor(uniform * double(kept))), kept - 1);
        while (block < int64_t(above_.size()) - 1 && sum + above_[block] <= target) {
            sum += above_[block++];
        }
        load_block(block * BLOCK, BLOCK);
        int64_t at = 0;
        for (; at < BLOCK - 1; ++at) {
            sum += z_[at] >= cut ? int64_t(masses_[at]) : 0;
            if (sum > target) break;
        }
        return std::min(block * BLOCK + at, size_ - 1);
    }

    const T* logits_ = nullptr;
    int64_t size_ = 0;
    float peak_ = 0.0f, temperature_ = 1.0f;
    std::vector<float> maxima_, sorted_, sample_;
    std::vector<int64_t> above_;  // of each block, the mass of the tokens that are kept surely
    std::vector<Weighed> found_, kept_;  // the collected tokens, by ids, and some of them
    alignas(MM_VECTOR_BYTES) float z_[BLOCK], masses_[BLOCK];
};

// Draws a token for each row. temperatures, least (of z), top_k, top_p, uniforms: [rows].
template <typename T>
void draw(const T* logits, int64_t stride, int64_t rows, int64_t size, const float* temperatures,
          const float* least, const int64_t* top_k, const double* top_p, const double* uniforms,
          int64_t* tokens, int num_threads) {
    parallel_for(rows, num_threads, [&](int64_t row) {
        static thread_local RowDraw<T> own;
        const DrawRules rules = {least[row], top_k[row], top_p[row], uniforms[row]};
        tokens[row] = own.token(logits + row * stride, size, temperatures[row], rules);
    });
}

}  // namespace mm
