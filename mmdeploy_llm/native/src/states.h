// Layers that keep a state of each sequence: a short causal convolution, and the gated delta rule
// with its norm. The tokens of a sequence are computed one after the other, so that a result does not
// depend on how a prompt is cut into steps.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "lanes.h"
#include "numbers.h"
#include "parallel.h"
#include "rows.h"

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

// out [tokens][channels] = sum of taps[channel][i] * input i, the last of `taps` inputs being the
// token's own; then the bias, if any, and silu. states: [rows][channels][taps - 1], the last inputs.
template <typename T>
void short_conv(const T* x, int64_t x_stride, const T* weights, const T* bias, T* states, T* out,
                const StateRows& rows, int64_t channels, int64_t taps, bool has_silu,
                int num_threads) {
    const int64_t parts = (channels + CONV_CHANNELS - 1) / CONV_CHANNELS, kept = taps - 1;
    parallel_for(rows.num * parts, num_threads, [&](int64_t task) {
        const int64_t sequence = task / parts, first = task % parts * CONV_CHANNELS;
        const int64_t num = std::min(CONV_CHANNELS, channels - first);
        float inputs[MAX_TAPS][CONV_CHANNELS], by_tap[MAX_TAPS][CONV_CHANNELS];
        const T* before = states + (rows.read[sequence] * channels + first) * kept;
        for (int64_t c = 0; c < num; ++c) {
            for (int64_t i = 0; i < taps; ++i) by_tap[i][c] = load(weights[(first + c) * taps + i]);
            for (int64_t i = 0; i < kept; ++i) inputs[i][c] = load(before[c * kept + i]);
        }
        const int64_t begin = rows.starts[sequence], end = rows.starts[sequence + 1];
        for (int64_t token = begin; token < end; ++token) {
            // The input of the token lies where the oldest one lay.
            const int64_t at = token - begin;
            float* own = inputs[(at + kept) % taps];
            const T* from = x + token * x_stride + first;
            T* to = out + token * channels + first;
            float sums[CONV_CHANNELS] = {};
#pragma omp simd
            for (int64_t c = 0; c < num; ++c) own[c] = load(from[c]);
            for (int64_t i = 0; i < taps; ++i) {
                const float* input = inputs[(at + i) % taps];
#pragma omp simd
                for (int64_t c = 0; c < num; ++c) sums[c] += by_tap[i][c] * input[c];
            }
            for (int64_t c = 0; bias != nullptr && c < num; ++c) {
                sums[c] = rounded<T>(sums[c]) + load(bias[first + c]);
            }
#pragma omp simd
            for (int64_t c = 0; c < num; ++c) {
                const float sum = rounded<T>(sums[c]);
                to[c] = store<T>(has_silu ? sum / (1.0f + fast_exp(-sum)) : sum);
            }
        }
        T* after = states + (rows.write[sequence] * channels + first) * kept;
        const int64_t count = end - begin;
        for (int64_t c = 0; c < num; ++c) {
            for (int64_t i = 0; i < kept; ++i) {
                after[c * kept + i] = store<T>(inputs[(count + i) % taps][c]);
            }
        }
    });
}

// Arguments of `delta_rule`; DeltaArgs of signatures.py. Strides count values.
struct DeltaArgs {
    const void* qkv;  // [tokens][qkv_stride]: queries, keys, values of all heads
    int64_t qkv_stride;
    const void* z;  // [tokens][z_stride]: gates of the output
    int64_t z_stride;
    const void* a;  // [tokens][ab_stride]: decays, before softplus
    const void* b;  // [tokens][ab_stride]: weights of the changes, before the sigmoid
    int64_t ab_stride;
    const float* a_log;    // [value_heads]
    const float* dt_bias;  // [value_heads]
    const void* norm_weight;  // [value_dim]
    float* matrices;          // [rows][value_heads][key_dim][value_dim]
    void* out;                // [tokens][value_heads][value_dim]
    const int64_t* starts;
    const int64_t* read;
    const int64_t* write;
    int64_t num_sequences;
    int64_t key_heads;
    int64_t value_heads;
    int64_t key_dim;
    int64_t value_dim;
    float eps;
    int32_t num_threads;
};

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

// One token for NUM registers of columns of a head's matrix: `before` [key_dim][stride] becomes
// `after`, which may be the same. q, k: [key_dim]. value, out: of these columns. is_streamed: whether
// `after` is written past the caches, which saves reading it first.
template <int NUM, bool is_streamed = false>
__attribute__((noinline)) void delta_columns(const float* before, float* after, int64_t key_dim,
                                             int64_t stride, const float* q, const float* k,
                                             const float* value, float decay, float beta,
                                             float* out) {
    Floats sums[NUM] = {};
    const Floats decays = all_lanes(decay);
    for (int64_t row = 0; row < key_dim; ++row) {
        const Floats key = all_lanes(k[row]);
#pragma GCC unroll 8
        for (int b = 0; b < NUM; ++b) {
            const int64_t at = row * stride + b * LANES;
            const Floats state = load_lanes<Floats>(before + at) * decays;
            if constexpr (!is_streamed) store_lanes(after + at, state);
            sums[b] = multiply_add(key, state, sums[b]);
        }
    }
    Floats changes[NUM];
#pragma GCC unroll 8
    for (int b = 0; b < NUM; ++b) {
        changes[b] = (load_lanes<Floats>(value + b * LANES) - sums[b]) * all_lanes(beta);
        sums[b] = Floats{};
    }
    for (int64_t row = 0; row < key_dim; ++row) {
        const Floats key = all_lanes(k[row]), query = all_lanes(q[row]);
#pragma GCC unroll 8
        for (int b = 0; b < NUM; ++b) {
            const int64_t at = row * stride + b * LANES;
            Floats state;
            if constexpr (is_streamed) {
                const Floats decayed = load_lanes<Floats>(before + at) * decays;
                stream_lanes(after + at, state = multiply_add(key, changes[b], decayed));
            } else {
                state = multiply_add(key, changes[b], load_lanes<Floats>(after + at));
                store_lanes(after + at, state);
            }
            sums[b] = multiply_add(query, state, sums[b]);
        }
    }
#pragma GCC unroll 8
    for (int b = 0; b < NUM; ++b) store_lanes(out + b * LANES, sums[b]);
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
#pragma omp simd
    for (int64_t c = 0; c < size; ++c) {
        const float normed = rounded<T>(rounded<T>(rounded<T>(x[c]) * scale) * load(weight[c]));
        const float open = load(gate[c]) / (1.0f + fast_exp(-load(gate[c])));
        out[c] = store<T>(normed * open);
    }
}

// The gated delta rule of one head of one sequence, and its norm.
template <typename T>
void delta_head(const DeltaArgs& args, int64_t sequence, int64_t head) {
    constexpr int NUM = 4, WIDE = NUM_REGISTERS / 4;  // a row of 128 values with AVX-512
    const int64_t keys = args.key_dim, values = args.value_dim;
    const int64_t begin = args.starts[sequence], count = args.starts[sequence + 1] - begin;
    const int64_t key_head = head / (args.value_heads / args.key_heads);
    const int64_t key_size = args.key_heads * keys;
    std::vector<float> q(count * keys), k(count * keys), out(count * values);
    std::vector<float> own(values), decay(count), beta(count);
    const auto row_of = [&](int64_t token) {
        return static_cast<const T*>(args.qkv) + (begin + token) * args.qkv_stride;
    };
    for (int64_t token = 0; token < count; ++token) {
        const T* row = row_of(token) + key_head * keys;
        normalize(row, keys, 1.0f / std::sqrt(float(keys)), q.data() + token * keys);
        normalize(row + key_size, keys, 1.0f, k.data() + token * keys);
        const int64_t at = (begin + token) * args.ab_stride + head;
        const float a = load(static_cast<const T*>(args.a)[at]);
        const float b = load(static_cast<const T*>(args.b)[at]);
        decay[token] = std::exp(-std::exp(args.a_log[head]) * softplus(a + args.dt_bias[head]));
        beta[token] = 1.0f / (1.0f + std::exp(-b));
    }
    const int64_t size = keys * values;
    const float* first = args.matrices + (args.read[sequence] * args.value_heads + head) * size;
    float* state = args.matrices + (args.write[sequence] * args.value_heads + head) * size;
    const bool is_aligned = reinterpret_cast<uintptr_t>(state) % MM_VECTOR_BYTES == 0;
    // The states of few sequences stay in the last cache until the next step.
    const bool is_few = args.num_sequences < 4;
    const bool is_streamed = count == 1 && !is_few && is_aligned && values % (WIDE * LANES) == 0;
    const int64_t columns_at_once = (is_streamed ? WIDE : NUM) * LANES;
    // A block of columns of the matrix stays in the cache while all tokens pass.
    for (int64_t column = 0; column < values; column += columns_at_once) {
        const int64_t registers = std::min(columns_at_once, values - column) / LANES;
        for (int64_t token = 0; token < count; ++token) {
            const T* from = row_of(token) + 2 * key_size + head * values + column;
            for (int64_t c = 0; c < registers * LANES; ++c) own[c] = load(from[c]);
            const auto run = [&](auto columns, int64_t at) {
                columns((token == 0 ? first : state) + column + at, state + column + at, keys,
                        values, q.data() + token * keys, k.data() + token * keys, own.data() + at,
                        decay[token], beta[token], out.data() + token * values + column + at);
            };
            if (is_streamed) {
                run(delta_columns<WIDE, true>, 0);
            } else if (registers == NUM) {
                run(delta_columns<NUM>, 0);
            } else {
                for (int64_t i = 0; i < registers; ++i) run(delta_columns<1>, i * LANES);
            }
        }
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
void delta_rule(const DeltaArgs& args) {
    parallel_for(args.num_sequences * args.value_heads, args.num_threads, [&](int64_t task) {
        delta_head<T>(args, task / args.value_heads, task % args.value_heads);
    });
}

}  // namespace mm
