// Kernels over the rows of a step: lookup of embeddings, angles of positions, norm with residual,
// activations, rotary embedding. A value depends on its own row only, and on its column: every row
// runs the same code.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../products/hadamard.h"
#include "../products/numbers.h"
#include "../products/parallel.h"
#include "calls.h"

namespace mm {

// out [tokens][row_bytes] = rows `ids` of a matrix of n rows. It lies in panels of `panel` rows,
// [n / panel][row_bytes / 4][panel] units of four bytes, or row by row where panel is 1. An id that
// the matrix does not have gives NaN.
inline void look_up(const int64_t* ids, const char* weights, int64_t n, int64_t row_bytes,
                    int64_t panel, char* out, int64_t tokens, int num_threads) {
    parallel_parts(tokens, num_threads, [&](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; ++token) {
            const int64_t id = ids[token];
            char* to = out + token * row_bytes;
            if (id < 0 || id >= n) {
                std::memset(to, 0xff, row_bytes);
            } else if (panel == 1) {
                std::memcpy(to, weights + id * row_bytes, row_bytes);
            } else {
                const char* from = weights + id / panel * panel * row_bytes + id % panel * 4;
                for (int64_t at = 0; at < row_bytes; at += 4) {
                    std::memcpy(to + at, from + at * panel, 4);
                }
            }
        }
    });
}

// out [rows][size]: values `columns` of each row of x.
template <typename T>
void take_columns(const int64_t* columns, const T* x, int64_t x_stride, T* out, int64_t rows,
                  int64_t size, int num_threads) {
    parallel_parts(rows, num_threads, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            const T* from = x + row * x_stride;
            T* to = out + row * size;
            for (int64_t c = 0; c < size; ++c) to[c] = from[columns[c]];
        }
    });
}

// cosines, sines [tokens][pairs] of position * frequency, times `scale`. positions: [tokens], or one
// row per axis, `stride` apart, with the axis of each pair in `axes`. frequencies: [pairs], or with
// `is_long` [2][pairs], the second row for the tokens that it marks.
inline void angles(const int64_t* positions, int64_t stride, const int64_t* axes,
                   const float* frequencies, const bool* is_long, float scale, float* cosines,
                   float* sines, int64_t tokens, int64_t pairs, int num_threads) {
    parallel_parts(tokens, num_threads, [&](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; ++token) {
            const bool has_long = is_long != nullptr && is_long[token];
            const float* own = frequencies + (has_long ? pairs : 0);
            for (int64_t c = 0; c < pairs; ++c) {
                const int64_t axis = axes == nullptr ? 0 : axes[c];
                const float angle = float(positions[axis * stride + token]) * own[c];
                cosines[token * pairs + c] = std::cos(angle) * scale;
                sines[token * pairs + c] = std::sin(angle) * scale;
            }
        }
    });
}

// Returns 1 / rms(in).
template <typename T>
inline float inverse_rms(const T* in, int64_t size, float eps) {
    float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
    for (int64_t c = 0; c < size; ++c) squares += load(in[c]) * load(in[c]);
    return 1.0f / std::sqrt(squares / float(size) + eps);
}

// out = norm(in) * weight, or without a weight norm(in); `out` may be `in`. The normed value is
// rounded to T before the weight is applied, as in transformers' modules. centre: times
// centre + weight, and rounded only at the end; none where it is negative.
template <typename T>
inline void norm_row(const T* in, const T* weight, T* out, int64_t size, float eps,
                     float centre) {
    const float scale = inverse_rms(in, size, eps);
    if (weight == nullptr) {
#pragma omp simd
        for (int64_t c = 0; c < size; ++c) out[c] = store<T>(load(in[c]) * scale);
        return;
    }
    if (centre >= 0.0f) {
#pragma omp simd
        for (int64_t c = 0; c < size; ++c) {
            out[c] = store<T>(load(in[c]) * scale * (centre + load(weight[c])));
        }
        return;
    }
#pragma omp simd
    for (int64_t c = 0; c < size; ++c) {
        out[c] = store<T>(rounded<T>(load(in[c]) * scale) * load(weight[c]));
    }
}

// residual += x, unless there is none, and then norm(row of the sum, or of x, row of out).
template <typename T, typename Norm>
void add_and_norm(const T* x, int64_t x_stride, T* residual, T* out, int64_t rows, int64_t size,
                  int num_threads, const Norm& norm) {
    parallel_parts(rows, num_threads, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            const T* in = x + row * x_stride;
            T* sum = residual == nullptr ? nullptr : residual + row * size;
            if (sum != nullptr) {
#pragma omp simd
                for (int64_t c = 0; c < size; ++c) sum[c] = store<T>(load(in[c]) + load(sum[c]));
                in = sum;
            }
            norm(in, out + row * size);
        }
    });
}

// out = (in - mean) / deviation * weight + bias, rounded once; without a weight times 1, without a
// bias plus 0. is_centred: times 1 + weight, which is rounded to T as torch rounds it.
template <typename T>
inline void layer_norm_row(const T* in, const T* weight, const T* bias, T* out, int64_t size,
                           float eps, bool is_centred) {
    float sum = 0.0f, squares = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < size; ++c) sum += load(in[c]);
    const float mean = sum / float(size);
#pragma omp simd reduction(+ : squares)
    for (int64_t c = 0; c < size; ++c) squares += (load(in[c]) - mean) * (load(in[c]) - mean);
    const float scale = 1.0f / std::sqrt(squares / float(size) + eps);
    const float more = is_centred ? 1.0f : 0.0f;
#pragma omp simd
    for (int64_t c = 0; c < size; ++c) {
        const float factor = weight == nullptr ? 1.0f : rounded<T>(load(weight[c]) + more);
        const float shift = bias == nullptr ? 0.0f : load(bias[c]);
        out[c] = store<T>((load(in[c]) - mean) * scale * factor + shift);
    }
}

// sum = (sum + norm of norm_row) * factor, rounded to T after each operation; no factor is 1.
template <typename T>
void add_norm(const T* x, int64_t x_stride, const T* weight, const T* factor, T* sum, int64_t rows,
              int64_t size, float eps, float centre, int num_threads) {
    const float last = factor == nullptr ? 1.0f : load(*factor);
    parallel_parts(rows, num_threads, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            const T* in = x + row * x_stride;
            T* to = sum + row * size;
            const float scale = inverse_rms(in, size, eps);
#pragma omp simd
            for (int64_t c = 0; c < size; ++c) {
                const float value = load(in[c]) * scale, own = load(weight[c]);
                const float normed = rounded<T>(centre < 0.0f ? rounded<T>(value) * own
                                                              : value * (centre + own));
                to[c] = store<T>(rounded<T>(load(to[c]) + normed) * last);
            }
        }
    });
}

// out = norm(x) * weight for every head of x [rows, heads, size], with one weight [size]; `out` may
// be `x`. See norm_row.
template <typename T>
void norm_heads(const T* x, int64_t row_stride, int64_t heads, int64_t head_stride,
                const T* weight, T* out, int64_t out_row_stride, int64_t out_head_stride,
                int64_t rows, int64_t size, float eps, float centre, int num_threads) {
    parallel_parts(rows, num_threads, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            for (int64_t head = 0; head < heads; ++head) {
                norm_row(x + row * row_stride + head * head_stride, weight,
                         out + row * out_row_stride + head * out_head_stride, size, eps,
                         centre);
            }
        }
    });
}

// See MixHeads.
template <typename T>
void mix_heads(const MixHeads& args) {
    const T* x = static_cast<const T*>(args.x);
    T* out = static_cast<T*>(args.out);
    const int64_t sharing = args.heads / args.groups;
    parallel_parts(args.rows * args.heads, args.num_threads, [&](int64_t begin, int64_t end) {
        alignas(64) float values[ROTATED_VALUES];
        for (int64_t at = begin; at < end; ++at) {
            const int64_t row = at / args.heads, head = at % args.heads;
            const T* from = x + row * args.row_stride + head * args.head_stride;
            for (int64_t first = 0; first < args.size; first += args.block) {
                const int64_t own = head / sharing * args.size + first;
                for (int64_t c = 0; c < args.block; ++c) {
                    const float centre = args.centres == nullptr ? 0.0f : args.centres[own + c];
                    const float factor = args.factors == nullptr ? 1.0f : args.factors[own + c];
                    values[c] = (load(from[first + c]) - centre) * factor;
                }
                rotate_block(values, args.block);
                T* to = out + at * args.size + first;
#pragma omp simd
                for (int64_t c = 0; c < args.block; ++c) to[c] = store<T>(values[c]);
            }
        }
    });
}

// x [rows][heads][size] = x * sigmoid(gate), the sigmoid rounded to T as torch rounds it.
template <typename T>
void gate_heads(T* x, const T* gate, int64_t gate_stride, int64_t gate_head_stride, int64_t rows,
                int64_t heads, int64_t size, int num_threads) {
    parallel_parts(rows, num_threads, [&](int64_t begin, int64_t end) {
        for (int64_t at = begin * heads; at < end * heads; ++at) {
            const T* g = gate + at / heads * gate_stride + at % heads * gate_head_stride;
            T* values = x + at * size;
#pragma omp simd
            for (int64_t c = 0; c < size; ++c) {
                const float open = rounded<T>(1.0f / (1.0f + fast_exp(-load(g[c]))));
                values[c] = store<T>(load(values[c]) * open);
            }
        }
    });
}

// out [values] = x in float.
inline void widen(const bf16* x, float* out, int64_t values, int num_threads) {
    parallel_parts(values, num_threads, [&](int64_t begin, int64_t end) {
#pragma omp simd
        for (int64_t i = begin; i < end; ++i) out[i] = load(x[i]);
    });
}

// sum [rows][size] += x, or with a gate for each row x * sigmoid(gate); rounded to T after each
// operation.
template <typename T>
void add_rows(const T* x, int64_t x_stride, const T* gate, T* sum, int64_t rows, int64_t size,
              int num_threads) {
    parallel_parts(rows, num_threads, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            const T* in = x + row * x_stride;
            T* to = sum + row * size;
            float open = 1.0f;
            if (gate != nullptr) open = rounded<T>(1.0f / (1.0f + std::exp(-load(gate[row]))));
#pragma omp simd
            for (int64_t c = 0; c < size; ++c) {
                to[c] = store<T>(load(to[c]) + rounded<T>(load(in[c]) * open));
            }
        }
    });
}

enum Activation : int32_t { GELU, GELU_TANH, QUICK_GELU, SILU, RELU, RELU2, IDENTITY };

// Returns the error function, up to 1.5e-7 (Abramowitz and Stegun, 7.1.26).
MM_INLINE float fast_erf(float x) {
    const float size = std::fabs(x);
    const float t = 1.0f / (1.0f + 0.3275911f * size);
    float y = 1.061405429f;
    y = y * t - 1.453152027f;
    y = y * t + 1.421413741f;
    y = y * t - 0.284496736f;
    y = y * t + 0.254829592f;
    const float found = 1.0f - y * t * fast_exp(-size * size);
    return x < 0.0f ? -found : found;
}

template <int32_t KIND>
MM_INLINE float activated(float x) {
    if constexpr (KIND == GELU) return 0.5f * x * (1.0f + fast_erf(x * 0.70710678118654752f));
    if constexpr (KIND == GELU_TANH) {
        return 0.5f * x * (1.0f + fast_tanh(0.79788456080286536f * (x + 0.044715f * x * x * x)));
    }
    if constexpr (KIND == RELU) return x < 0.0f ? 0.0f : x;
    if constexpr (KIND == RELU2) return x < 0.0f ? 0.0f : x * x;
    if constexpr (KIND == IDENTITY) return x;
    if constexpr (KIND == QUICK_GELU) return x / (1.0f + fast_exp(-1.702f * x));
    return x / (1.0f + fast_exp(-x));
}

// Calls write(c, activated x[c]) for `size` values of x, which are computed for results of type T.
// GCC would divide once for each case of the exponential, if that was in the same loop; for floats
// that is the faster way.
template <int32_t KIND, typename T, typename X, typename Write>
MM_INLINE void for_activated(const X* x, int64_t size, const Write& write) {
    if constexpr (KIND != SILU || std::is_same_v<T, float>) {
#pragma omp simd
        for (int64_t c = 0; c < size; ++c) write(c, activated<KIND>(load(x[c])));
        return;
    }
    constexpr int64_t BLOCK = 256;
    alignas(64) float values[BLOCK], exps[BLOCK];
    for (int64_t first = 0; first < size; first += BLOCK) {
        const int64_t num = std::min(BLOCK, size - first);
#pragma omp simd
        for (int64_t c = 0; c < num; ++c) {
            values[c] = load(x[first + c]);
            exps[c] = fast_exp(-values[c]);
        }
#pragma omp simd
        for (int64_t c = 0; c < num; ++c) write(first + c, values[c] / (1.0f + exps[c]));
    }
}

// Calls function(std::integral_constant<int32_t, kind>()).
template <typename Function>
void by_kind(int32_t kind, const Function& function) {
    switch (kind) {
        case GELU: return function(std::integral_constant<int32_t, GELU>());
        case GELU_TANH: return function(std::integral_constant<int32_t, GELU_TANH>());
        case QUICK_GELU: return function(std::integral_constant<int32_t, QUICK_GELU>());
        case RELU: return function(std::integral_constant<int32_t, RELU>());
        case RELU2: return function(std::integral_constant<int32_t, RELU2>());
        case IDENTITY: return function(std::integral_constant<int32_t, IDENTITY>());
        default: return function(std::integral_constant<int32_t, SILU>());
    }
}

// x [rows][size] = activated x.
template <int32_t KIND, typename T>
void activate(T* x, int64_t rows, int64_t size, int num_threads) {
    parallel_parts(rows, num_threads, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            T* values = x + row * size;
            for_activated<KIND, T>(values, size,
                                   [&](int64_t c, float value) { values[c] = store<T>(value); });
        }
    });
}

// out = activated gate * up, the activated value rounded to T.
template <int32_t KIND, typename T>
void gated_mul(const T* gate, int64_t gate_stride, const T* up, int64_t up_stride, T* out,
               int64_t rows, int64_t size, int num_threads) {
    parallel_parts(rows, num_threads, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            const T* g = gate + row * gate_stride;
            const T* u = up + row * up_stride;
            T* result = out + row * size;
            for_activated<KIND, T>(g, size, [&](int64_t c, float value) {
                result[c] = store<T>(rounded<T>(value) * load(u[c]));
            });
        }
    });
}

// x [values] = table[x], of the bits of bf16.
inline void map_values(uint16_t* x, const uint16_t* table, int64_t values, int num_threads) {
    parallel_parts(values, num_threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) x[i] = table[x[i]];
    });
}

// x [values] *= factor.
template <typename T>
void scale(T* x, float factor, int64_t values, int num_threads) {
    parallel_parts(values, num_threads, [&](int64_t begin, int64_t end) {
#pragma omp simd
        for (int64_t i = begin; i < end; ++i) x[i] = store<T>(load(x[i]) * factor);
    });
}

// Rotates the first 2 * pairs channels of every head of x [rows, heads, head_dim] in place.
// cosines, sines: [rows, pairs]. Pairs of channels are (c, c + pairs), or (2 c, 2 c + 1).
template <typename T>
void rotate(T* x, int64_t row_stride, int64_t heads, int64_t head_stride, const float* cosines,
            const float* sines, int64_t rows, int64_t pairs, bool is_interleaved,
            int num_threads) {
    const int64_t step = is_interleaved ? 2 : 1;
    const int64_t across = is_interleaved ? 1 : pairs;
    parallel_parts(rows, num_threads, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            const float* cosine = cosines + row * pairs;
            const float* sine = sines + row * pairs;
            for (int64_t head = 0; head < heads; ++head) {
                T* first = x + row * row_stride + head * head_stride;
#pragma omp simd
                for (int64_t c = 0; c < pairs; ++c) {
                    T* a = first + c * step;
                    T* b = a + across;
                    const float low = load(*a), high = load(*b);
                    *a = store<T>(low * cosine[c] - high * sine[c]);
                    *b = store<T>(high * cosine[c] + low * sine[c]);
                }
            }
        }
    });
}

}  // namespace mm
