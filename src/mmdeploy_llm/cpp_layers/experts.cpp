// The calls of a mixture of experts: which experts a token has, and the experts of a small step, whose
// products are the calls that a loop over experts would make.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include "dispatch.h"
#include "rows.h"

extern "C" {
void mm_linear(const void*);
void mm_linear_s8(const void*);
void mm_linear_codes(const void*);
}

namespace {

enum Scores : int32_t { SOFTMAX, SOFTMAX_OF_CHOSEN, SIGMOID };

// values [num] = softmax of values.
void softmax(float* values, int64_t num) {
    const float largest = *std::max_element(values, values + num);
    float sum = 0.0f;
    for (int64_t i = 0; i < num; ++i) sum += values[i] = std::exp(values[i] - largest);
    for (int64_t i = 0; i < num; ++i) values[i] /= sum;
}

// Takes the first of the largest values [num] that are not taken, and returns its index. One must be
// left.
int64_t take_largest(float* values, bool* is_taken, int64_t num) {
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
    explicit Chooser(const mm::Route& args)
        : args(args), scores(args.experts), choice(args.experts), chosen(args.top_k),
          is_taken(new bool[args.experts]) {}

    template <typename T, typename Out>
    void choose(const T* logits, const Out* factors, Out* weights, int64_t* ids) {
        const auto round = [&](float x) { return args.rounds != 0 ? mm::rounded<T>(x) : x; };
        const int64_t num = args.experts;
        for (int64_t e = 0; e < num; ++e) scores[e] = mm::load(logits[e]);
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
            float weight = mm::rounded<Out>(chosen[i] * args.factor);
            if (factors != nullptr) weight *= mm::load(factors[ids[i]]);
            weights[i] = mm::store<Out>(weight);
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

    const mm::Route& args;
    std::vector<float> scores, choice, chosen;
    std::unique_ptr<bool[]> is_taken;
};

void run(const mm::Route& args) {
    by_dtype(args.dtype, [&](auto of) {
        by_dtype(args.out_dtype, [&](auto out) {
            mm::parallel_parts(args.tokens, args.num_threads, [&](int64_t begin, int64_t end) {
                Chooser chooser(args);
                for (int64_t token = begin; token < end; ++token) {
                    chooser.choose(of.in(args.logits) + token * args.experts,
                                   out.in(args.factors),
                                   out.out(args.weights) + token * args.top_k,
                                   args.ids + token * args.top_k);
                }
            });
        });
    });
}

// What one product of an expert reads and writes.
struct Product {
    const int64_t* matrix;  // its arguments, in the table of matrices
    int32_t kind;
    const void* x;
    int64_t x_stride;
    void* out;
    int64_t rows;
    int num_threads;
};

template <typename Args>
void multiply_by(void (*call)(const void*), const Product& product) {
    Args args = *reinterpret_cast<const Args*>(*product.matrix);
    args.x = product.x;
    args.x_stride = product.x_stride;
    args.out = product.out;
    args.rows = product.rows;
    args.num_threads = product.num_threads;
    call(&args);
}

void multiply(const Product& product) {
    switch (product.kind) {
        case 0: return multiply_by<mm::Linear>(mm_linear, product);
        case 1: return multiply_by<mm::LinearS8>(mm_linear_s8, product);
        default: return multiply_by<mm::LinearCodes>(mm_linear_codes, product);
    }
}

// The routes of a step: pairs of a token and one of its experts, sorted by expert.
struct Routes {
    std::vector<int64_t> starts, order, places, active;

    explicit Routes(const mm::RunExperts& args)
        : starts(args.experts + 1), order(args.tokens * args.top_k), places(order.size()) {
        for (size_t i = 0; i < order.size(); ++i) ++starts[args.ids[i] + 1];
        for (int64_t e = 0; e < args.experts; ++e) {
            if (starts[e + 1] != 0) active.push_back(e);
            starts[e + 1] += starts[e];
        }
        std::vector<int64_t> next(starts.begin(), starts.end() - 1);
        for (size_t i = 0; i < order.size(); ++i) {
            places[i] = next[args.ids[i]]++;
            order[places[i]] = int64_t(i);
        }
    }
};

// Computes one expert for the rows of all its tokens.
template <typename T>
void run_expert(const mm::RunExperts& args, const Routes& routes, int64_t expert, int num_threads) {
    const int64_t first = routes.starts[expert], count = routes.starts[expert + 1] - first;
    const int64_t size = args.size, inner = args.inner;
    const int64_t* matrices = args.matrices + expert * 2;
    T* rows = Of<T>::out(args.rows) + first * size;
    T* both = Of<T>::out(args.both) + first * 2 * inner;
    T* hidden = Of<T>::out(args.hidden) + first * inner;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t token = routes.order[first + i] / args.top_k;
        std::copy_n(Of<T>::in(args.x) + token * args.x_stride, size, rows + i * size);
    }
    multiply({matrices, args.first_kind, rows, size, both, count, num_threads});
    if (args.activation < 0) {
        mm::clamped_mul(both, hidden, count, inner, args.alpha, args.limit, num_threads);
    } else {
        mm::by_kind(args.activation, [&](auto kind) {
            mm::gated_mul<decltype(kind)::value>(both, 2 * inner, both + inner, 2 * inner, hidden,
                                                 count, inner, num_threads);
        });
    }
    T* outs = Of<T>::out(args.outs) + first * size;
    multiply({matrices + 1, args.last_kind, hidden, inner, outs, count, num_threads});
    for (int64_t i = 0; i < count; ++i) {
        const float weight = mm::load(Of<T>::in(args.weights)[routes.order[first + i]]);
        mm::scale(outs + i * size, weight, size, 1);
    }
}

// out [size] = the sum of a token's weighted experts in the order in which they were chosen. The
// weights are multiplied elsewhere: one instruction for both would round once less.
template <typename T>
void add_experts(const mm::RunExperts& args, const Routes& routes, int64_t token) {
    const int64_t* places = routes.places.data() + token * args.top_k;
    T* to = Of<T>::out(args.out) + token * args.size;
    std::vector<float> sums(args.size);
    for (int64_t i = 0; i < args.top_k; ++i) {
        const T* from = Of<T>::in(args.outs) + places[i] * args.size;
        float* sum = sums.data();
#pragma omp simd
        for (int64_t c = 0; c < args.size; ++c) sum[c] += mm::load(from[c]);
    }
    for (int64_t c = 0; c < args.size; ++c) to[c] = mm::store<T>(sums[c]);
}

// Enough experts are divided among the threads, which then never wait for each other; few are
// computed one after the other, by all threads together.
void run(const mm::RunExperts& args) {
    const Routes routes(args);
    const int64_t num = int64_t(routes.active.size());
    const bool is_apart = num >= 2 * args.num_threads;
    by_dtype(args.dtype, [&](auto of) {
        using T = typename decltype(of)::Type;
        mm::parallel_for(num, is_apart ? args.num_threads : 1, [&](int64_t i) {
            run_expert<T>(args, routes, routes.active[i], is_apart ? 1 : args.num_threads);
        });
        mm::parallel_for(args.tokens, args.num_threads,
                         [&](int64_t token) { add_experts<T>(args, routes, token); });
    });
}

}  // namespace

MM_EACH_EXPERT_CALL(MM_DEFINE)
