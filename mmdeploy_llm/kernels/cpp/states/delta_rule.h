// The gated delta rule with its norm. A step of one token may change a matrix in place: it applies the
// token before, and leaves its own to the next step.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "../layers/calls.h"
#include "../layers/rows.h"
#include "../products/lanes.h"
#include "../products/numbers.h"
#include "../products/parallel.h"
#include "states.h"

namespace mm {

// out [size] = x / sqrt(sum(x ** 2) + 1e-6) * scale.
template <typename T>
MM_INLINE void normalize(const T* x, int64_t size, float scale, float* out) {
    float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
    for (int64_t c = 0; c < size; ++c) squares += load(x[c]) * load(x[c]);
    const float factor = 1.0f / std::sqrt(squares + 1e-6f);
#pragma omp simd
    for (int64_t c = 0; c < size; ++c) out[c] = load(x[c]) * factor * scale;
}

// A token of one head: its query and key [key_dim], their product, decay and weight of the change.
struct DeltaToken {
    const float* q;
    const float* k;
    float qk;
    float decay;
    float beta;
};

// Columns of a head's matrix, [key_dim][stride].
struct DeltaColumns {
    float* values;
    int64_t stride;
};

// One pass over NUM registers of columns of the matrix `from`. With `last` they become `to`, which
// may be the same: times its decay, plus its key times `change`. With `next` the pass then returns
// what the matrix holds for its key and query: `known` = k^T S, `seen` = q^T S. is_streamed:
// whether `to` is written past the caches, which saves reading it first. next_matrix: the matrix that is
// read next, or null; a row of it is prefetched for each row of this one.
template <int NUM, bool has_last, bool has_next, bool is_streamed = false>
__attribute__((noinline)) void delta_pass(DeltaColumns from, DeltaColumns to, int64_t key_dim,
                                          const DeltaToken* last, const float* change,
                                          const DeltaToken* next, float* known, float* seen,
                                          const float* next_matrix = nullptr) {
    Floats changes[NUM] = {}, known_sums[NUM] = {}, seen_sums[NUM] = {}, decay = {};
    if constexpr (has_last) {
        decay = all_lanes(last->decay);
#pragma GCC unroll 8
        for (int b = 0; b < NUM; ++b) changes[b] = load_lanes<Floats>(change + b * LANES);
    }
    for (int64_t row = 0; row < key_dim; ++row) {
        const float* own = from.values + row * from.stride;
        float* written = to.values + row * to.stride;
        Floats last_key = {}, key = {}, query = {};
        if constexpr (has_last) last_key = all_lanes(last->k[row]);
        if constexpr (has_next) key = all_lanes(next->k[row]), query = all_lanes(next->q[row]);
#pragma GCC unroll 8
        for (int b = 0; b < NUM; ++b) {
            Floats state = load_lanes<Floats>(own + b * LANES);
            if (next_matrix != nullptr) {
                __builtin_prefetch(next_matrix + row * from.stride + b * LANES, 0, 2);
            }
            if constexpr (has_last) {
                state = multiply_add(last_key, changes[b], state * decay);
                if constexpr (is_streamed) {
                    stream_lanes(written + b * LANES, state);
                } else {
                    store_lanes(written + b * LANES, state);
                }
            }
            if constexpr (has_next) {
                known_sums[b] = multiply_add(key, state, known_sums[b]);
                seen_sums[b] = multiply_add(query, state, seen_sums[b]);
            }
        }
    }
    if constexpr (has_next) {
#pragma GCC unroll 8
        for (int b = 0; b < NUM; ++b) {
            store_lanes(known + b * LANES, known_sums[b]);
            store_lanes(seen + b * LANES, seen_sums[b]);
        }
    }
}

// change = (value - decay known) beta, out = decay seen + qk change, of `registers` registers.
MM_INLINE void delta_change(const DeltaToken& token, int64_t registers, const float* value,
                            const float* known, const float* seen, float* change, float* out) {
    const Floats decay = all_lanes(token.decay), beta = all_lanes(token.beta);
    for (int64_t at = 0; at < registers * LANES; at += LANES) {
        const Floats expected = load_lanes<Floats>(known + at);
        const Floats changed =
            multiply_add(expected, -decay, load_lanes<Floats>(value + at)) * beta;
        store_lanes(change + at, changed);
        const Floats kept = load_lanes<Floats>(seen + at) * decay;
        store_lanes(out + at, multiply_add(all_lanes(token.qk), changed, kept));
    }
}

MM_INLINE float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// out = norm(x) * weight * silu(gate), rounded to T after each of the three as transformers does.
template <typename T>
MM_INLINE void gated_norm(const float* x, const T* weight, const T* gate, T* out, int64_t size,
                          float eps) {
    float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
    for (int64_t c = 0; c < size; ++c) squares += rounded<T>(x[c]) * rounded<T>(x[c]);
    const float scale = 1.0f / std::sqrt(squares / float(size) + eps);
    for_activated<SILU, T>(gate, size, [&](int64_t c, float open) {
        const float normed = rounded<T>(rounded<T>(rounded<T>(x[c]) * scale) * load(weight[c]));
        out[c] = store<T>(normed * open);
    });
}

constexpr int64_t MAX_KEYS = 256;           // channels of a key
constexpr int NARROW = NUM_REGISTERS / 8;   // registers of columns that all tokens of a prompt pass
constexpr int WIDE = NUM_REGISTERS / 4;     // of a single token: a row of 128 values with AVX-512
constexpr int64_t MAX_COLUMNS = WIDE * LANES;

// The tokens of one head of one sequence.
struct DeltaTokens {
    std::vector<float> values;  // queries and keys
    std::vector<DeltaToken> all;

    template <typename T>
    DeltaTokens(const DeltaRule& args, int64_t begin, int64_t count, int64_t head, T)
        : values(2 * count * args.key_dim), all(count) {
        const int64_t keys = args.key_dim, key_size = args.key_heads * keys;
        const int64_t key_head = head / (args.value_heads / args.key_heads);
        const float rate = std::exp(args.a_log[head]), scale = 1.0f / std::sqrt(float(keys));
        for (int64_t token = 0; token < count; ++token) {
            const int64_t row = begin + token, at = row * args.ab_stride + head;
            const T* from = static_cast<const T*>(args.qkv) + row * args.qkv_stride;
            if (token + PREFETCH_ROWS < count) {
                const T* later = from + PREFETCH_ROWS * args.qkv_stride;
                prefetch_row(later + key_head * keys, keys);
                prefetch_row(later + key_size + key_head * keys, keys);
                prefetch_row(later + 2 * key_size + head * args.value_dim, args.value_dim);
            }
            float* q = values.data() + 2 * token * keys;
            float* k = q + keys;
            normalize(from + key_head * keys, keys, scale, q);
            normalize(from + key_size + key_head * keys, keys, 1.0f, k);
            float qk = 0.0f;
#pragma omp simd reduction(+ : qk)
            for (int64_t c = 0; c < keys; ++c) qk += q[c] * k[c];
            const float a = load(static_cast<const T*>(args.a)[at]);
            const float b = load(static_cast<const T*>(args.b)[at]);
            const float decay = std::exp(-rate * softplus(a + args.dt_bias[head]));
            all[token] = {q, k, qk, decay, 1.0f / (1.0f + std::exp(-b))};
        }
    }
};

// What a row keeps of its sequence's last token and a head: the matrix itself is that before the token
// if steps of one token change it in place. Of a step that is computed again some layers have changed
// it already, so the tokens are counted: those of the row, and those that its matrix holds.
struct LastToken {
    float* key;      // [key_dim]
    float* change;   // [value_dim]
    float* decay;
    float* number;   // of the row
    float* applied;  // of the matrix with this row's index
};

// That of the matrix with this index.
MM_INLINE LastToken last_token(float* last, int64_t matrix, int64_t key_dim, int64_t value_dim) {
    const int64_t size = key_dim + value_dim;
    float* at = last + matrix * (size + 3);
    return {at, at + key_dim, at + size, at + size + 1, at + size + 2};
}

// Reads NUM registers of columns of the matrix for `next`. A `last` token is applied first: `from`
// becomes `to`.
template <int NUM>
MM_INLINE void delta_read(DeltaColumns from, DeltaColumns to, int64_t key_dim,
                          const DeltaToken* last, const float* change, const DeltaToken& next,
                          float* known, float* seen, const float* next_matrix = nullptr) {
    if (last != nullptr) {
        delta_pass<NUM, true, true>(from, to, key_dim, last, change, &next, known, seen,
                                    next_matrix);
    } else {
        delta_pass<NUM, false, true>(from, from, key_dim, nullptr, nullptr, &next, known, seen,
                                     next_matrix);
    }
}

// Computes all tokens for NUM registers of columns: each pass but the first changes the matrix for
// one token and reads it for the next one. Between passes it lies in `kept`, which stays in the
// cache. pending: the token that `before` lacks, or null, and its change. value(token): the token's
// values of these columns. out: [tokens][stride].
template <int NUM, bool is_streamed = false, typename Value>
void delta_columns(const std::vector<DeltaToken>& tokens, int64_t key_dim, DeltaColumns before,
                   DeltaColumns after, DeltaColumns kept, const DeltaToken* pending,
                   const float* pending_change, const Value& value, float* out, int64_t stride,
                   const float* next_matrix = nullptr) {
    alignas(64) float known[NUM * LANES], seen[NUM * LANES], change[NUM * LANES];
    const int64_t count = tokens.size();
    delta_read<NUM>(before, kept, key_dim, pending, pending_change, tokens[0], known, seen);
    DeltaColumns own = pending == nullptr ? before : kept;
    for (int64_t token = 0; token < count; ++token) {
        const DeltaToken& last = tokens[token];
        delta_change(last, NUM, value(token), known, seen, change, out + token * stride);
        if (token + 1 == count) {
            delta_pass<NUM, true, false, is_streamed>(own, after, key_dim, &last, change, nullptr,
                                                      known, seen, next_matrix);
            return;
        }
        delta_pass<NUM, true, true>(own, kept, key_dim, &last, change, &tokens[token + 1], known,
                                    seen);
        own = kept;
    }
}

// The heads of a sequence in a step: their matrices before and after it, and what is kept of the last
// tokens.
struct DeltaHead {
    float* from;
    float* to;
    LastToken last;     // of the row before
    LastToken written;  // of the row after
    float* applied;     // of the matrix before
    float* applied_after;
    bool is_pending;    // whether `from` lacks the last token

    DeltaHead(const DeltaRule& args, int64_t sequence, int64_t head) {
        const int64_t size = args.key_dim * args.value_dim;
        const auto matrix_of = [&](const int64_t* rows) {
            return rows[sequence] * args.value_heads + head;
        };
        const auto last_of = [&](const int64_t* rows) {
            return last_token(args.last, matrix_of(rows), args.key_dim, args.value_dim);
        };
        from = args.matrices + matrix_of(args.source) * size;
        to = args.matrices + matrix_of(args.target) * size;
        last = last_of(args.read);
        written = last_of(args.write);
        applied = last_of(args.source).applied;
        applied_after = last_of(args.target).applied;
        is_pending = *last.number > *applied;
    }

    DeltaToken pending() const { return {nullptr, last.key, 0.0f, *last.decay, 0.0f}; }
};

// One token of a head whose matrix is changed in place: the last token is applied to it, and this one
// by the next step. That is one pass, which reads a matrix and writes it where it lies in the cache.
template <typename T>
void delta_in_place(const DeltaRule& args, const DeltaHead& own, const DeltaToken& token,
                    const T* value, float* out, const float* next_first) {
    const int64_t keys = args.key_dim, values = args.value_dim;
    alignas(64) float known[MAX_COLUMNS], seen[MAX_COLUMNS], wide[MAX_COLUMNS];
    const DeltaToken pending = own.pending();
    const auto run = [&](auto num, int64_t column) {
        constexpr int NUM = decltype(num)::value;
        const DeltaColumns columns{own.from + column, values};
        delta_read<NUM>(columns, columns, keys, own.is_pending ? &pending : nullptr,
                        own.last.change + column, token, known, seen,
                        next_first == nullptr ? nullptr : next_first + column);
        for (int64_t c = 0; c < NUM * LANES; ++c) wide[c] = load(value[column + c]);
        delta_change(token, NUM, wide, known, seen, own.written.change + column, out + column);
    };
    int64_t column = 0;
    for (; column + MAX_COLUMNS <= values; column += MAX_COLUMNS) {
        run(std::integral_constant<int, WIDE>(), column);
    }
    for (; column + NARROW * LANES <= values; column += NARROW * LANES) {
        run(std::integral_constant<int, NARROW>(), column);
    }
    for (; column < values; column += LANES) run(std::integral_constant<int, 1>(), column);
    std::copy(token.k, token.k + keys, own.written.key);
    *own.written.decay = token.decay;
    *own.written.number = *own.last.number + 1.0f;
    *own.applied = *own.last.number;
}

// The tokens of a head whose matrix after the step is another one.
template <typename T>
void delta_anew(const DeltaRule& args, const DeltaHead& head, const DeltaTokens& tokens,
                const T* value, float* out, const float* next_first) {
    const int64_t keys = args.key_dim, values = args.value_dim, count = tokens.all.size();
    alignas(64) static thread_local float kept[MAX_KEYS * NARROW * LANES];
    alignas(64) float own[MAX_COLUMNS];
    const bool is_aligned = reinterpret_cast<uintptr_t>(head.to) % MM_VECTOR_BYTES == 0;
    // The states of few sequences stay in the last cache until the next step.
    const bool is_few = args.num_sequences < 4;
    const bool is_streamed = count == 1 && !is_few && is_aligned && !head.is_pending &&
                             values % MAX_COLUMNS == 0;
    const DeltaToken pending = head.pending();
    const auto run = [&](auto columns, int64_t num, int64_t column, const float* next_matrix) {
        const auto value_of = [&](int64_t token) {
            const T* from = value + token * args.qkv_stride + column;
            for (int64_t c = 0; c < num * LANES; ++c) own[c] = load(from[c]);
            return own;
        };
        columns(tokens.all, keys, DeltaColumns{head.from + column, values},
                DeltaColumns{head.to + column, values}, DeltaColumns{kept, num * LANES},
                head.is_pending ? &pending : nullptr, head.last.change + column, value_of,
                out + column, values, next_matrix);
    };
    int64_t column = 0;
    for (; is_streamed && column < values; column += MAX_COLUMNS) {
        const float* next_matrix = next_first == nullptr ? nullptr : next_first + column;
        run([](auto&&... a) { delta_columns<WIDE, true>(a...); }, WIDE, column, next_matrix);
    }
    for (; column + NARROW * LANES <= values; column += NARROW * LANES) {
        run([](auto&&... a) { delta_columns<NARROW>(a...); }, NARROW, column, nullptr);
    }
    for (; column < values; column += LANES) {
        run([](auto&&... a) { delta_columns<1>(a...); }, 1, column, nullptr);
    }
    if (is_streamed) end_streaming();
}

// The gated delta rule of one head of one sequence, and its norm. next_first: the matrix that the
// thread reads afterwards; null when it is not known.
template <typename T>
void delta_head(const DeltaRule& args, int64_t sequence, int64_t head, const float* next_first) {
    const int64_t keys = args.key_dim, values = args.value_dim;
    const int64_t begin = args.starts[sequence], count = args.starts[sequence + 1] - begin;
    const DeltaTokens tokens(args, begin, count, head, T());
    std::vector<float> out(count * values);
    const DeltaHead own(args, sequence, head);
    const T* value = static_cast<const T*>(args.qkv) + begin * args.qkv_stride +
                     2 * args.key_heads * keys + head * values;
    if (own.from == own.to) {
        delta_in_place(args, own, tokens.all[0], value, out.data(), next_first);
    } else {
        delta_anew(args, own, tokens, value, out.data(), next_first);
        *own.written.number = 0.0f;
        *own.applied_after = 0.0f;
    }
    for (int64_t token = 0; token < count; ++token) {
        const int64_t at = begin + token;
        gated_norm(out.data() + token * values, static_cast<const T*>(args.norm_weight),
                   static_cast<const T*>(args.z) + at * args.z_stride + head * values,
                   static_cast<T*>(args.out) + (at * args.value_heads + head) * values, values,
                   args.eps);
    }
}

template <typename T>
void delta_rule(const DeltaRule& args) {
    const int64_t tasks = args.num_sequences * args.value_heads;
    const auto first_of = [&](int64_t task) -> const float* {
        if (task >= tasks) return nullptr;
        const int64_t row = args.source[task / args.value_heads];
        const int64_t matrix = row * args.value_heads + task % args.value_heads;
        return args.matrices + matrix * args.key_dim * args.value_dim;
    };
    parallel_with_next(tasks, args.num_threads, [&](int64_t task, int64_t next) {
        delta_head<T>(args, task / args.value_heads, task % args.value_heads, first_of(next));
    });
}

}  // namespace mm
