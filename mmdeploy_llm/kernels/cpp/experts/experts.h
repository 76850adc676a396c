// The experts of a small step. Their products are the calls that a loop over experts would make.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>
#if __has_include(<sys/mman.h>)
#include <sys/mman.h>
#endif

#include "../layers/calls.h"
#include "../layers/rows.h"
#include "clamped.h"

extern "C" {
void mm_linear(const void*);
void mm_linear_s8(const void*);
void mm_linear_codes(const void*);
void mm_low_rank(const void*);
}

namespace mm {

template <typename T>
const T* at(const void* values) {
    return static_cast<const T*>(values);
}
template <typename T>
T* at(void* values) {
    return static_cast<T*>(values);
}

// What one product of an expert reads and writes.
struct Product {
    const int64_t* matrix;  // its arguments, in the table of matrices
    const int64_t* change;  // a LowRank, in the table of changes, or null
    const int32_t* slots;   // of the rows, for the change
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

inline void multiply_rows(const Product& product) {
    switch (product.kind) {
        case 0: multiply_by<Linear>(mm_linear, product); break;
        case 1: multiply_by<LinearS8>(mm_linear_s8, product); break;
        default: multiply_by<LinearCodes>(mm_linear_codes, product);
    }
    if (product.change == nullptr || *product.change == 0) return;
    LowRank added = *reinterpret_cast<const LowRank*>(*product.change);
    added.x = product.x;
    added.x_stride = product.x_stride;
    added.out = product.out;
    added.out_stride = added.n;
    added.slots = product.slots;
    added.rows = product.rows;
    added.num_threads = product.num_threads;
    mm_low_rank(&added);
}

// The routes of a step: pairs of a token and one of its experts, sorted by expert.
struct Routes {
    std::vector<int64_t> starts, order, places, active;
    std::vector<int32_t> slots;  // in this order, where adapters change experts

    explicit Routes(const RunExperts& args)
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
        if (args.slots == nullptr) return;
        for (const int64_t route : order) slots.push_back(args.slots[route / args.top_k]);
    }
};

// Has the system read the experts of a step from their file, all at once and no others: where a
// product comes to a page that is not in memory, it waits for that, and more than it needs is read.
inline void read_pages(const RunExperts& args, const Routes& routes) {
#ifdef MADV_WILLNEED
    if (args.pages == nullptr) return;
    for (const int64_t expert : routes.active) {
        const int64_t* own = args.pages + expert * 2;
        madvise(reinterpret_cast<void*>(own[0]), size_t(own[1]), MADV_WILLNEED);
    }
#endif
}

// Computes one expert for the rows of all its tokens.
template <typename T>
void run_expert(const RunExperts& args, const Routes& routes, int64_t expert, int num_threads) {
    const int64_t first = routes.starts[expert], count = routes.starts[expert + 1] - first;
    const int64_t size = args.size, inner = args.inner;
    const int64_t* matrices = args.matrices + expert * 2;
    const bool has_changes = args.slots != nullptr;
    const int64_t* changes = has_changes ? args.changes + expert * 2 : nullptr;
    const int32_t* slots = has_changes ? routes.slots.data() + first : nullptr;
    T* rows = at<T>(args.rows) + first * size;
    const bool has_gate = args.activation >= -1;
    T* both = at<T>(args.both) + first * (has_gate ? 2 : 1) * inner;
    T* hidden = has_gate ? at<T>(args.hidden) + first * inner : both;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t token = routes.order[first + i] / args.top_k;
        std::copy_n(at<const T>(args.x) + token * args.x_stride, size, rows + i * size);
    }
    multiply_rows(
        {matrices, changes, slots, args.first_kind, rows, size, both, count, num_threads});
    if (!has_gate) {
        by_kind(-2 - args.activation, [&](auto kind) {
            activate<decltype(kind)::value>(both, count, inner, num_threads);
        });
    } else if (args.activation < 0) {
        clamped_mul(both, hidden, count, inner, args.alpha, args.limit, num_threads);
    } else {
        by_kind(args.activation, [&](auto kind) {
            gated_mul<decltype(kind)::value>(both, 2 * inner, both + inner, 2 * inner, hidden,
                                             count, inner, num_threads);
        });
    }
    T* outs = at<T>(args.outs) + first * size;
    multiply_rows({matrices + 1, has_changes ? changes + 1 : nullptr, slots, args.last_kind, hidden,
                   inner, outs, count, num_threads});
    if (args.weights_dtype != args.dtype) return;  // add_experts multiplies
    for (int64_t i = 0; i < count; ++i) {
        const float weight = load(at<const T>(args.weights)[routes.order[first + i]]);
        scale(outs + i * size, weight, size, 1);
    }
}

// out [size] = the sum of a token's weighted experts in the order in which they were chosen. The
// weights are multiplied elsewhere: one instruction for both would round once less.
template <typename T>
void add_experts(const RunExperts& args, const Routes& routes, int64_t token) {
    const int64_t* places = routes.places.data() + token * args.top_k;
    T* to = at<T>(args.out) + token * args.size;
    const bool is_scaled = args.weights_dtype == args.dtype;
    std::vector<float> sums(args.size), products(is_scaled ? 0 : args.size);
    for (int64_t i = 0; i < args.top_k; ++i) {
        const T* from = at<const T>(args.outs) + places[i] * args.size;
        float *sum = sums.data(), *product = products.data();
        if (is_scaled) {
#pragma omp simd
            for (int64_t c = 0; c < args.size; ++c) sum[c] += load(from[c]);
            continue;
        }
        for (int64_t c = 0; c < args.size; ++c) product[c] = load(from[c]);
        scale(product, at<const float>(args.weights)[token * args.top_k + i], args.size, 1);
#pragma omp simd
        for (int64_t c = 0; c < args.size; ++c) sum[c] += product[c];
    }
    for (int64_t c = 0; c < args.size; ++c) to[c] = store<T>(sums[c]);
}

// Enough experts are divided among the threads, which then never wait for each other; few are
// computed one after the other, by all threads together.
template <typename T>
void run_experts(const RunExperts& args) {
    const Routes routes(args);
    read_pages(args, routes);
    const int64_t num = int64_t(routes.active.size());
    const bool is_apart = num >= 2 * args.num_threads;
    parallel_for(num, is_apart ? args.num_threads : 1, [&](int64_t i) {
        run_expert<T>(args, routes, routes.active[i], is_apart ? 1 : args.num_threads);
    });
    parallel_for(args.tokens, args.num_threads,
                 [&](int64_t token) { add_experts<T>(args, routes, token); });
}

}  // namespace mm
