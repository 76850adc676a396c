// Chooses the experts of a token by its scores.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include "../layers/calls.h"
#include "../products/numbers.h"
#include "../products/parallel.h"

namespace mm {

enum RouteScores : int32_t { SOFTMAX, SOFTMAX_OF_CHOSEN, SIGMOID };

// values [num] = softmax of values.
inline void softmax(float* values, int64_t num) {
    const float largest = *std::max_element(values, values + num);
    float sum = 0.0f;
    for (int64_t i = 0; i < num; ++i) sum += values[i] = std::exp(values[i] - largest);
    for (int64_t i = 0; i < num; ++i) values[i] /= sum;
}

// Takes the first of the largest values [num] that are not taken, and returns its index. One must be
// left.
inline int64_t take_largest(float* values, bool* is_taken, int64_t num) {
    int64_t found = -1;
    for (int64_t i = 0; i < num; ++i) {
        if (is_taken[i]) continue;
        if (found < 0 || values[i] > values[found]) found = i;
    }
    is_taken[found] = true;
    return found;
}

// The experts of one token after another, with memory to choose in.
class Chooser {
  public:
    explicit Chooser(const Route& args)
        : args(args), scores(args.experts), choice(args.experts), chosen(args.top_k),
          is_taken(new bool[args.experts]) {}

    template <typename T, typename Out>
    void choose(const T* logits, const Out* factors, Out* weights, int64_t* ids) {
        const auto round = [&](float x) { return args.rounds != 0 ? rounded<T>(x) : x; };
        const int64_t num = args.experts;
        for (int64_t e = 0; e < num; ++e) scores[e] = load(logits[e]);
        if (args.kind == SOFTMAX) softmax(scores.data(), num);
        if (args.kind == SIGMOID) {
            for (float& score : scores) score = round(1.0f / (1.0f + std::exp(-score)));
        }
        choice = scores;
        for (int64_t e = 0; args.bias != nullptr && e < num; ++e) choice[e] += args.bias[e];
        if (args.used_groups < args.groups) leave_groups_out();
        std::fill(is_taken.get(), is_taken.get() + num, false);
        for (int64_t i = 0; i < args.top_k; ++i) {
            ids[i] = take_largest(choice.data(), is_taken.get(), num);
            chosen[i] = scores[ids[i]];
        }
        if (args.kind == SOFTMAX_OF_CHOSEN) softmax(chosen.data(), args.top_k);
        if (args.is_normed != 0) {
            float sum = 0.0f;
            for (float score : chosen) sum += score;
            sum = round(sum);
            if (sum < args.norm_min) sum = args.norm_min;  // not if it is no number
            sum = round(sum + args.norm_more);
            for (float& score : chosen) score = round(score / sum);
        }
        for (int64_t i = 0; i < args.top_k; ++i) {
            float weight = rounded<Out>(chosen[i] * args.factor);
            if (factors != nullptr) weight *= load(factors[ids[i]]);
            weights[i] = store<Out>(weight);
        }
    }

  private:
    // Lets only the experts of the best groups be chosen.
    void leave_groups_out() {
        const int64_t size = args.experts / args.groups;
        std::vector<float> sums(args.groups);
        std::unique_ptr<bool[]> is_used(new bool[args.groups]());
        for (int64_t g = 0; g < args.groups; ++g) {
            float first = -INFINITY, second = -INFINITY;
            for (int64_t e = g * size; e < (g + 1) * size; ++e) {
                second = std::max(second, std::min(first, choice[e]));
                first = std::max(first, choice[e]);
            }
            sums[g] = first + second;
        }
        for (int64_t i = 0; i < args.used_groups; ++i) {
            take_largest(sums.data(), is_used.get(), args.groups);
        }
        for (int64_t e = 0; e < args.experts; ++e) {
            if (!is_used[e / size]) choice[e] = -INFINITY;
        }
    }

    const Route& args;
    std::vector<float> scores, choice, chosen;
    std::unique_ptr<bool[]> is_taken;
};

template <typename T, typename Out>
void route(const Route& args, const T* logits, const Out* factors, Out* weights) {
    parallel_parts(args.tokens, args.num_threads, [&](int64_t begin, int64_t end) {
        Chooser chooser(args);
        for (int64_t token = begin; token < end; ++token) {
            chooser.choose(logits + token * args.experts, factors, weights + token * args.top_k,
                           args.ids + token * args.top_k);
        }
    });
}

}  // namespace mm
