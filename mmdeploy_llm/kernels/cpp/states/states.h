// Layers that keep a state of each sequence: a short causal convolution. The tokens of a sequence are
// computed one after the other, here and in the other files, so that a result does not depend on how a
// prompt is cut into steps.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../layers/rows.h"
#include "../products/numbers.h"
#include "../products/parallel.h"

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

}  // namespace mm
