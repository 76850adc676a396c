// Layers that keep a state of each sequence: a short causal convolution, and the gated delta rule
// with its norm. The tokens of a sequence are computed one after the other, so that a result does not
// depend on how a prompt is cut into steps.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../cpp_layers/calls.h"
#include "../cpp_layers/rows.h"
#include "../cpp_products/lanes.h"
#include "../cpp_products/numbers.h"
#include "../cpp_products/parallel.h"

namespace mm {

// The sequences of a step. starts: [num + 1], the first token of each, and the number of tokens.
// read, write: [num], the rows of the states before and after the step.
struct StateRows {
    int64_t num;
    const int64_t* starts;
    const int64_t* read;
    const int64_t* write;
};

constexpr int64_t CONV_CHANNELS = 256;  // that one task convolves
constexpr int64_t MAX_TAPS = 8;

constexpr int64_t PREFETCH_ROWS = 4;  // tokens whose values are prefetched

// Only some values of each token belong to a task, which the processor's own prefetcher does not
// follow from token to token.
template <typename T>
MM_INLINE void prefetch_row(const T* row, int64_t size) {
    const char* bytes = reinterpret_cast<const char*>(row);
    for (int64_t at = 0; at < size * int64_t(sizeof(T)); at += 64) __builtin_prefetch(bytes + at);
}

// columns [num][CONV_CHANNELS] = the rows `from` [channels][num]. NUM: num, or 0 where
// the compiler does not know it.
template <int NUM, typename T>
MM_INLINE void to_columns(const T* from, int64_t channels, int64_t num,
                          float (*columns)[CONV_CHANNELS]) {
    if constexpr (NUM > 0) {  // all values of a channel at once: loads without gaps
#pragma omp simd
        for (int64_t c = 0; c < channels; ++c) {
#pragma GCC unroll 8
            for (int i = 0; i < NUM; ++i) columns[i][c] = load(from[c * NUM + i]);
        }
        return;
    }
    for (int64_t i = 0; i < num; ++i) {
#pragma omp simd
        for (int64_t c = 0; c < channels; ++c) columns[i][c] = load(from[c * num + i]);
    }
}

// The reverse: rows `to` [channels][num] = the columns.
template <int NUM, typename T>
MM_INLINE void from_columns(const float* const* columns, int64_t channels, int64_t num, T* to) {
    if constexpr (NUM > 0) {
#pragma omp simd
        for (int64_t c = 0; c < channels; ++c) {
#pragma GCC unroll 8
            for (int i = 0; i < NUM; ++i) to[c * NUM + i] = store<T>(columns[i][c]);
        }
        return;
    }
    for (int64_t c = 0; c < channels; ++c) {
        for (int64_t i = 0; i < num; ++i) to[c * num + i] = store<T>(columns[i][c]);
    }
}

// out [num] = the sum of by_tap[i] * inputs[i], then the bias, if there is one, and silu.
template <int TAPS, typename T>
MM_INLINE void conv_token(const float (*by_tap)[CONV_CHANNELS], const float* const* inputs,
                          const T* bias, T* out, int64_t num, int64_t taps, bool has_silu) {
    alignas(64) float sums[CONV_CHANNELS] = {};
    const int64_t count = TAPS > 0 ? 1 : taps;
    constexpr int64_t TOGETHER = TAPS > 0 ? TAPS : 1;  // taps of one loop over the channels
    for (int64_t i = 0; i < count; ++i) {
#pragma omp simd
        for (int64_t c = 0; c < num; ++c) {
            float sum = TAPS > 0 ? 0.0f : sums[c];
#pragma GCC unroll 8
            for (int64_t j = i; j < i + TOGETHER; ++j) sum += by_tap[j][c] * inputs[j][c];
            sums[c] = sum;
        }
    }
    for (int64_t c = 0; bias != nullptr && c < num; ++c) {
        sums[c] = rounded<T>(sums[c]) + load(bias[c]);
    }
    if (!has_silu) {
#pragma omp simd
        for (int64_t c = 0; c < num; ++c) out[c] = store<T>(sums[c]);
        return;
    }
#pragma omp simd
    for (int64_t c = 0; c < num; ++c) sums[c] = rounded<T>(sums[c]);
    for_activated<SILU, T>(sums, num, [&](int64_t c, float value) { out[c] = store<T>(value); });
}

// One task of short_conv: `num` channels from `first` on of a sequence.
template <int TAPS, typename T>
void conv_channels(const T* x, int64_t x_stride, const T* weights, const T* bias, T* states, T* out,
                   const StateRows& rows, int64_t channels, int64_t taps, bool has_silu,
                   int64_t sequence, int64_t first) {
    taps = TAPS == 0 ? taps : TAPS;
    const int64_t num = std::min(CONV_CHANNELS, channels - first), kept = taps - 1;
    constexpr int KEPT = TAPS == 0 ? 0 : TAPS - 1;
    alignas(64) float inputs[MAX_TAPS][CONV_CHANNELS], by_tap[MAX_TAPS][CONV_CHANNELS];
    const T* before = states + (rows.read[sequence] * channels + first) * kept;
    to_columns<TAPS>(weights + first * taps, num, taps, by_tap);
    to_columns<KEPT>(before, num, kept, inputs);
    const int64_t begin = rows.starts[sequence], end = rows.starts[sequence + 1];
    const float* last[MAX_TAPS];  // the inputs of a token, then those that are kept
    for (int64_t i = 0; i < taps; ++i) last[i] = inputs[i];
    for (int64_t token = begin; token < end; ++token) {
        float* own = inputs[(token - begin + kept) % taps];  // where the oldest one lay
        const T* from = x + token * x_stride + first;
        if (token + PREFETCH_ROWS < end) prefetch_row(from + PREFETCH_ROWS * x_stride, num);
#pragma omp simd
        for (int64_t c = 0; c < num; ++c) own[c] = load(from[c]);
        if (token > begin) std::rotate(last, last + 1, last + taps);
        conv_token<TAPS>(by_tap, last, bias == nullptr ? nullptr : bias + first,
                         out + token * channels + first, num, taps, has_silu);
    }
    from_columns<KEPT>(last + 1, num, kept,
                       states + (rows.write[sequence] * channels + first) * kept);
}

// out [tokens][channels] = sum of taps[channel][i] * input i, the last of `taps` inputs being the
// token's own; then the bias, if any, and silu. states: [rows][channels][taps - 1], the last inputs.
template <typename T>
void short_conv(const T* x, int64_t x_stride, const T* weights, const T* bias, T* states, T* out,
                const StateRows& rows, int64_t channels, int64_t taps, bool has_silu,
                int num_threads) {
    const int64_t parts = (channels + CONV_CHANNELS - 1) / CONV_CHANNELS;
    const auto run = taps == 4   ? conv_channels<4, T>
                     : taps == 3 ? conv_channels<3, T>
                                 : conv_channels<0, T>;
    parallel_for(rows.num * parts, num_threads, [&](int64_t task) {
        run(x, x_stride, weights, bias, states, out, rows, channels, taps, has_silu, task / parts,
            task % parts * CONV_CHANNELS);
    });
}

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
// read next, or null; a row of it is prefetched for each row written.
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
            if constexpr (has_last) {
                state = multiply_add(last_key, changes[b], state * decay);
                if constexpr (is_streamed) {
                    const int64_t at = row * to.stride + b * LANES;
                    if (next_matrix != nullptr) __builtin_prefetch(next_matrix + at, 0, 2);
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

// Computes all tokens for NUM registers of columns: each pass but the first changes the matrix for
// one token and reads it for the next one. Between passes it lies in `kept`, which stays in the
// cache. value(token): the token's values of these columns. out: [tokens][stride].
template <int NUM, bool is_streamed = false, typename Value>
void delta_columns(const std::vector<DeltaToken>& tokens, int64_t key_dim, DeltaColumns before,
                   DeltaColumns after, DeltaColumns kept, const Value& value, float* out,
                   int64_t stride, const float* next_matrix = nullptr) {
    alignas(64) float known[NUM * LANES], seen[NUM * LANES], change[NUM * LANES];
    const int64_t count = tokens.size();
    DeltaColumns own = before;
    delta_pass<NUM, false, true>(own, own, key_dim, nullptr, nullptr, &tokens[0], known, seen);
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

// The gated delta rule of one head of one sequence, and its norm. next_first: the matrix that the
// thread reads afterwards; null when it is not known.
template <typename T>
void delta_head(const DeltaRule& args, int64_t sequence, int64_t head, const float* next_first) {
    const int64_t keys = args.key_dim, values = args.value_dim, size = keys * values;
    const int64_t begin = args.starts[sequence], count = args.starts[sequence + 1] - begin;
    const DeltaTokens tokens(args, begin, count, head, T());
    std::vector<float> out(count * values);
    alignas(64) static thread_local float kept[MAX_KEYS * NARROW * LANES];
    alignas(64) float own[MAX_COLUMNS];
    float* first = args.matrices + (args.read[sequence] * args.value_heads + head) * size;
    float* state = args.matrices + (args.write[sequence] * args.value_heads + head) * size;
    const bool is_aligned = reinterpret_cast<uintptr_t>(state) % MM_VECTOR_BYTES == 0;
    // The states of few sequences stay in the last cache until the next step.
    const bool is_few = args.num_sequences < 4;
    const bool is_streamed = count == 1 && !is_few && is_aligned && values % MAX_COLUMNS == 0;
    const int64_t value_at = 2 * args.key_heads * keys + head * values;
    const auto run = [&](auto columns, int64_t num, int64_t column, const float* next_matrix) {
        const auto value = [&](int64_t token) {
            const T* row = static_cast<const T*>(args.qkv) + (begin + token) * args.qkv_stride;
            const T* from = row + value_at + column;
            for (int64_t c = 0; c < num * LANES; ++c) own[c] = load(from[c]);
            return own;
        };
        columns(tokens.all, keys, DeltaColumns{first + column, values},
                DeltaColumns{state + column, values}, DeltaColumns{kept, num * LANES}, value,
                out.data() + column, values, next_matrix);
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
        const int64_t row = args.read[task / args.value_heads];
        const int64_t matrix = row * args.value_heads + task % args.value_heads;
        return args.matrices + matrix * args.key_dim * args.value_dim;
    };
    parallel_with_next(tasks, args.num_threads, [&](int64_t task, int64_t next) {
        delta_head<T>(args, task / args.value_heads, task % args.value_heads, first_of(next));
    });
}

}  // namespace mm
