// Mamba-2: the recurrence of a state space, and the norm of its gated output. The tokens of a
// sequence change its matrices one after the other, several in one pass over the matrix, so that a
// result does not depend on how a prompt is cut into steps.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "../layers/calls.h"
#include "../products/lanes.h"
#include "../products/numbers.h"
#include "../products/parallel.h"
#include "delta_rule.h"

namespace mm {

constexpr int64_t MAX_STATE = 256;               // rows of a matrix
constexpr int64_t MAX_HEAD = 256;                // columns of it
constexpr int SCANNED = 4;                       // tokens of one pass
constexpr int SCAN_COLUMNS = NUM_REGISTERS / 8;  // registers of columns of one pass

// One token of one head.
struct ScanToken {
    const float* b;       // [state_size]
    const float* c;       // [state_size]
    const float* change;  // dt x of the pass's columns
    float* out;           // of the same columns
    float decay;
};

// One pass over NUM registers of columns of a matrix for TOKENS tokens: `from` times the decay plus
// b change^T, of which each token reads `out` = c^T S; then it is `to`, which may be the same.
// is_streamed, next_matrix: see delta_pass.
template <int TOKENS, int NUM, bool is_streamed>
__attribute__((noinline)) void scan_pass(DeltaColumns from, DeltaColumns to, int64_t state_size,
                                         const ScanToken* tokens, const float* next_matrix) {
    Floats sums[TOKENS][NUM] = {};
    for (int64_t row = 0; row < state_size; ++row) {
        const float* own = from.values + row * from.stride;
        float* written = to.values + row * to.stride;
#pragma GCC unroll 8
        for (int i = 0; i < NUM; ++i) {
            Floats state = load_lanes<Floats>(own + i * LANES);
#pragma GCC unroll 8
            for (int t = 0; t < TOKENS; ++t) {
                const Floats change = load_lanes<Floats>(tokens[t].change + i * LANES);
                state = state * all_lanes(tokens[t].decay);
                state = multiply_add(all_lanes(tokens[t].b[row]), change, state);
                sums[t][i] = multiply_add(all_lanes(tokens[t].c[row]), state, sums[t][i]);
            }
            if constexpr (is_streamed) {
                const int64_t at = row * to.stride + i * LANES;
                if (next_matrix != nullptr) __builtin_prefetch(next_matrix + at, 0, 2);
                stream_lanes(written + i * LANES, state);
            } else {
                store_lanes(written + i * LANES, state);
            }
        }
    }
#pragma GCC unroll 8
    for (int t = 0; t < TOKENS; ++t) {
#pragma GCC unroll 8
        for (int i = 0; i < NUM; ++i) store_lanes(tokens[t].out + i * LANES, sums[t][i]);
    }
}

// The values of a few tokens of one head, in floats.
template <int TOKENS>
struct ScanValues {
    alignas(64) float b[TOKENS][MAX_STATE];
    alignas(64) float c[TOKENS][MAX_STATE];
    alignas(64) float change[TOKENS][MAX_HEAD];
    alignas(64) float out[TOKENS][MAX_HEAD];
    float decays[TOKENS];
};

// Fills in the values of tokens from row `first` on.
template <int TOKENS, typename T>
MM_INLINE void read_tokens(const Mamba2& args, int64_t first, int64_t head,
                           ScanValues<TOKENS>& values) {
    const int64_t states = args.state_size, size = args.head_dim, inner = args.heads * size;
    const int64_t group = head / (args.heads / args.groups);
    const float rate = std::exp(args.a_log[head]);
    for (int t = 0; t < TOKENS; ++t) {
        const int64_t row = first + t;
        const T* x = static_cast<const T*>(args.rows) + row * args.row_stride;
        const T* b = x + inner + group * states;
        const T* c = b + args.groups * states;
        x += head * size;
#pragma omp simd
        for (int64_t i = 0; i < states; ++i) values.b[t][i] = load(b[i]);
#pragma omp simd
        for (int64_t i = 0; i < states; ++i) values.c[t][i] = load(c[i]);
        const T raw = static_cast<const T*>(args.dt)[row * args.dt_stride + head];
        float dt = softplus(load(raw) + args.dt_bias[head]);
        dt = std::min(std::max(dt, args.dt_min), args.dt_max);
        values.decays[t] = std::exp(-rate * dt);
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) values.change[t][i] = load(x[i]) * dt;
    }
}

// Writes the outputs of tokens from row `first` on.
template <int TOKENS, typename T>
MM_INLINE void write_outputs(const Mamba2& args, int64_t first, int64_t head,
                             const ScanValues<TOKENS>& values) {
    const int64_t size = args.head_dim;
    const float skip = args.skip[head];
    for (int t = 0; t < TOKENS; ++t) {
        const T* x = static_cast<const T*>(args.rows) + (first + t) * args.row_stride + head * size;
        T* out = static_cast<T*>(args.out) + ((first + t) * args.heads + head) * size;
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) out[i] = store<T>(values.out[t][i] + skip * load(x[i]));
    }
}

// Computes TOKENS tokens of one head from row `first` on: `from` becomes `to`.
template <int TOKENS, typename T, bool is_streamed = false>
void scan_tokens(const Mamba2& args, int64_t first, int64_t head, const float* from, float* to,
                 const float* next_matrix = nullptr) {
    ScanValues<TOKENS> values;
    read_tokens<TOKENS, T>(args, first, head, values);
    const int64_t size = args.head_dim;
    const auto run = [&](auto pass, int64_t column) {
        ScanToken tokens[TOKENS];
        for (int t = 0; t < TOKENS; ++t) {
            tokens[t] = {values.b[t], values.c[t], values.change[t] + column,
                         values.out[t] + column, values.decays[t]};
        }
        pass(DeltaColumns{const_cast<float*>(from) + column, size},
             DeltaColumns{to + column, size}, args.state_size, tokens,
             next_matrix == nullptr ? nullptr : next_matrix + column);
    };
    // A single token needs few registers for its sums: whole rows of a matrix are written at once.
    constexpr int NUM = TOKENS == 1 ? 4 : SCAN_COLUMNS;
    int64_t column = 0;
    for (; column + NUM * LANES <= size; column += NUM * LANES) {
        run([](auto&&... a) { scan_pass<TOKENS, NUM, is_streamed>(a...); }, column);
    }
    for (; column < size; column += LANES) {
        run([](auto&&... a) { scan_pass<TOKENS, 1, is_streamed>(a...); }, column);
    }
    write_outputs<TOKENS, T>(args, first, head, values);
}

// Applies the last token, if has_last, to NUM registers of columns, and reads what the next one gives
// without storing it.
template <int NUM, bool has_last>
__attribute__((noinline)) void scan_in_place(DeltaColumns own, int64_t state_size,
                                             const ScanToken& last, const ScanToken& next,
                                             const float* next_matrix) {
    Floats sums[NUM] = {};
    const Floats decay = all_lanes(next.decay);
    Floats last_decay = {};
    if constexpr (has_last) last_decay = all_lanes(last.decay);
    for (int64_t row = 0; row < state_size; ++row) {
        Floats key = {};
        if constexpr (has_last) key = all_lanes(last.b[row]);
        const Floats b = all_lanes(next.b[row]), c = all_lanes(next.c[row]);
#pragma GCC unroll 8
        for (int i = 0; i < NUM; ++i) {
            const int64_t at = row * own.stride + i * LANES;
            Floats state = load_lanes<Floats>(own.values + at);
            if (next_matrix != nullptr) __builtin_prefetch(next_matrix + at, 0, 2);
            if constexpr (has_last) {
                const Floats change = load_lanes<Floats>(last.change + i * LANES);
                state = multiply_add(key, change, state * last_decay);
                store_lanes(own.values + at, state);
            }
            const Floats change = load_lanes<Floats>(next.change + i * LANES);
            sums[i] = multiply_add(c, multiply_add(b, change, state * decay), sums[i]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < NUM; ++i) store_lanes(next.out + i * LANES, sums[i]);
}

// What one head of one sequence has before and after a step.
struct ScanHead {
    float* from;
    float* to;
    LastToken last{};     // of the row before
    LastToken written{};  // of the row after
    float* applied = nullptr;        // of the matrix before
    float* applied_after = nullptr;  // of that after
    bool is_in_place = false;
    bool is_pending = false;  // whether `from` lacks the last token

    ScanHead(const Mamba2& args, int64_t sequence, int64_t head) {
        const int64_t size = args.state_size * args.head_dim;
        const auto matrix_of = [&](const int64_t* rows) { return rows[sequence] * args.heads + head; };
        from = args.matrices + matrix_of(args.source) * size;
        to = args.matrices + matrix_of(args.target) * size;
        if (args.last == nullptr) return;
        const auto last_of = [&](const int64_t* rows) {
            return last_token(args.last, matrix_of(rows), args.state_size, args.head_dim);
        };
        last = last_of(args.read);
        written = last_of(args.write);
        applied = last_of(args.source).applied;
        applied_after = last_of(args.target).applied;
        is_in_place = from == to;
        is_pending = *last.number > *applied;
    }

    // Of the columns from `column` on. out: where what nobody needs is written.
    ScanToken pending(int64_t column, float* out) const {
        return {last.key, last.key, last.change + column, out, is_pending ? *last.decay : 0.0f};
    }
};

// One token of a head whose matrix is changed in place, see delta_in_place.
template <typename T>
void scan_one(const Mamba2& args, int64_t token, int64_t head, const ScanHead& own,
              const float* next_first) {
    const int64_t size = args.head_dim;
    ScanValues<1> values;
    read_tokens<1, T>(args, token, head, values);
    const auto run = [&](auto num, int64_t column) {
        constexpr int NUM = decltype(num)::value;
        const ScanToken next{values.b[0], values.c[0], values.change[0] + column,
                             values.out[0] + column, values.decays[0]};
        const ScanToken last = own.pending(column, nullptr);
        const auto pass = own.is_pending ? scan_in_place<NUM, true> : scan_in_place<NUM, false>;
        pass(DeltaColumns{own.from + column, size}, args.state_size, last, next,
             next_first == nullptr ? nullptr : next_first + column);
    };
    int64_t column = 0;
    for (; column + 4 * LANES <= size; column += 4 * LANES) {
        run(std::integral_constant<int, 4>(), column);
    }
    for (; column < size; column += LANES) run(std::integral_constant<int, 1>(), column);
    write_outputs<1, T>(args, token, head, values);
    std::copy(values.b[0], values.b[0] + args.state_size, own.written.key);
    std::copy(values.change[0], values.change[0] + size, own.written.change);
    *own.written.decay = values.decays[0];
    *own.written.number = *own.last.number + 1.0f;
    *own.applied = *own.last.number;
}

// Writes the matrix before a step, to which its last token is applied, to where that after it will be.
inline void apply_last(const Mamba2& args, const ScanHead& own) {
    const int64_t size = args.head_dim;
    alignas(64) float unused[LANES];
    for (int64_t column = 0; column < size; column += LANES) {
        const ScanToken last = own.pending(column, unused);
        scan_pass<1, 1, false>(DeltaColumns{own.from + column, size},
                               DeltaColumns{own.to + column, size}, args.state_size, &last, nullptr);
    }
}

// The recurrence of one head of one sequence. next_first: see delta_head.
template <typename T>
void scan_head(const Mamba2& args, int64_t sequence, int64_t head, const float* next_first) {
    const int64_t end = args.starts[sequence + 1];
    int64_t token = args.starts[sequence];
    const ScanHead own(args, sequence, head);
    if (own.is_in_place) return scan_one<T>(args, token, head, own, next_first);
    const float* from = own.from;
    float* to = own.to;
    if (own.is_pending) {
        apply_last(args, own);
        from = to;
    }
    if (args.last != nullptr) *own.written.number = *own.applied_after = 0.0f;
    const bool is_aligned = reinterpret_cast<uintptr_t>(to) % MM_VECTOR_BYTES == 0;
    // The states of few sequences stay in the last cache until the next step.
    if (end - token == 1 && args.num_sequences >= 4 && is_aligned && from != to) {
        scan_tokens<1, T, true>(args, token, head, from, to, next_first);
        return end_streaming();
    }
    for (; token + SCANNED <= end; token += SCANNED) {
        scan_tokens<SCANNED, T>(args, token, head, from, to);
        from = to;
    }
    for (; token < end; ++token) {
        scan_tokens<1, T>(args, token, head, from, to);
        from = to;
    }
}

// out = norm(out * silu(gate)) * weight, the norm over each group of channels, for all tokens; without
// a weight there is no norm.
template <typename T>
void norm_groups(const Mamba2& args) {
    const int64_t inner = args.heads * args.head_dim, size = inner / args.groups;
    const int64_t tokens = args.starts[args.num_sequences];
    parallel_parts(tokens * args.groups, args.num_threads, [&](int64_t begin, int64_t end) {
        std::vector<float> opened(size);
        float* wide = opened.data();
        for (int64_t at = begin; at < end; ++at) {
            const int64_t token = at / args.groups, first = at % args.groups * size;
            const T* gate = static_cast<const T*>(args.z) + token * args.z_stride + first;
            T* out = static_cast<T*>(args.out) + token * inner + first;
            for_activated<SILU, T>(
                gate, size, [&](int64_t c, float open) { wide[c] = load(out[c]) * open; });
            if (args.norm_weight == nullptr) {
                for (int64_t c = 0; c < size; ++c) out[c] = store<T>(wide[c]);
                continue;
            }
            const T* weight = static_cast<const T*>(args.norm_weight) + first;
            float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
            for (int64_t c = 0; c < size; ++c) squares += wide[c] * wide[c];
            const float scale = 1.0f / std::sqrt(squares / float(size) + args.eps);
#pragma omp simd
            for (int64_t c = 0; c < size; ++c) {
                out[c] = store<T>(rounded<T>(wide[c] * scale) * load(weight[c]));
            }
        }
    });
}

template <typename T>
void mamba2(const Mamba2& args) {
    const int64_t tasks = args.num_sequences * args.heads;
    const auto first_of = [&](int64_t task) -> const float* {
        if (task >= tasks) return nullptr;
        const int64_t matrix = args.source[task / args.heads] * args.heads + task % args.heads;
        return args.matrices + matrix * args.state_size * args.head_dim;
    };
    parallel_with_next(tasks, args.num_threads, [&](int64_t task, int64_t next) {
        scan_head<T>(args, task / args.heads, task % args.heads, first_of(next));
    });
    norm_groups<T>(args);
}

}  // namespace mm
