// The functions that Python calls, by name. dtype: 0 is float, 1 is bf16. All pointers are to host
// memory, all strides count values. The caller checks the arguments; nothing is checked here.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "attention.h"
#include "codes.h"
#include "gemm.h"
#include "numbers.h"
#include "pixels.h"
#include "rows.h"
#include "runtime.h"
#include "sample.h"
#include "states.h"
#include "threads.h"

using mm::bf16;

namespace {

constexpr int32_t FLOAT = 0;

// cache_dtype: 2 is int8, 3 is int4; else the cache has the dtype of the call.
template <typename T>
void attend_over(const mm::AttentionArgs& args, int32_t cache_dtype) {
    if (cache_dtype == 2) {
        mm::attend<T, int8_t>(args);
    } else if (cache_dtype == 3) {
        mm::attend<T, mm::int4_pair>(args);
    } else {
        mm::attend<T, T>(args);
    }
}

template <typename T>
void write_to(const void* rows, int64_t row_stride, void* cache, void* scales,
              const int64_t* slots, int64_t tokens, int64_t num_kv_heads, int64_t head_dim,
              int32_t cache_dtype, int32_t num_threads) {
    const auto write = [&](auto* pages) {
        mm::write_cache(static_cast<const T*>(rows), row_stride, pages, scales, slots, tokens,
                        num_kv_heads, head_dim, num_threads);
    };
    if (cache_dtype == 2) {
        write(static_cast<int8_t*>(cache));
    } else if (cache_dtype == 3) {
        write(static_cast<mm::int4_pair*>(cache));
    } else {
        write(static_cast<T*>(cache));
    }
}

mm::Next next_of(const void* packed, int64_t row_bytes) {
    return {static_cast<const char*>(packed), row_bytes * mm::PANEL};
}

template <typename T>
void activate_by(int32_t kind, void* values, int64_t rows, int64_t size, int32_t num_threads) {
    T* x = static_cast<T*>(values);
    switch (kind) {
        case mm::GELU: return mm::activate<mm::GELU>(x, rows, size, num_threads);
        case mm::GELU_TANH: return mm::activate<mm::GELU_TANH>(x, rows, size, num_threads);
        case mm::QUICK_GELU: return mm::activate<mm::QUICK_GELU>(x, rows, size, num_threads);
        default: return mm::activate<mm::SILU>(x, rows, size, num_threads);
    }
}

// bits: of a code. group: columns of a group. with_offsets, rounds, is_float8: see codes.h.
struct CodeFormat {
    int32_t bits;
    bool has_offsets;
    bool rounds;
    bool is_float8;
};

// number: bits + 16 (has offsets) + 32 (x is rounded to int8) + 128 (codes are floats).
CodeFormat code_format(int32_t number) {
    return {number & 15, (number & 16) != 0, (number & 32) != 0, (number & 128) != 0};
}

template <typename T>
void linear_codes_by(CodeFormat format, const void* x, int64_t x_stride, const void* codes,
                     const void* facts, int64_t group, const void* bias, void* out, int64_t rows,
                     int64_t n, int64_t k, int32_t num_threads, const mm::Next& next) {
    const mm::Groups groups(k, group, format.has_offsets);
    mm::with_codes<T>(format.bits, format.is_float8, format.rounds, [&](auto of) {
        mm::linear_codes<decltype(of)>(static_cast<const T*>(x), x_stride, codes,
                                       static_cast<const uint32_t*>(facts), groups,
                                       static_cast<const T*>(bias), static_cast<T*>(out), rows, n,
                                       k, num_threads, next);
    });
}

template <typename T>
void look_up_codes_in(int32_t number, const int64_t* ids, const void* codes, const void* facts,
                      int64_t group, int64_t n, int64_t k, void* out, int64_t tokens,
                      int32_t num_threads) {
    const CodeFormat format = code_format(number);
    const mm::Groups groups(k, group, format.has_offsets);
    const auto run = format.bits == 4 ? mm::look_up_codes<4, T> : mm::look_up_codes<8, T>;
    run(ids, static_cast<const uint32_t*>(codes), static_cast<const uint32_t*>(facts), groups,
        format.is_float8, (number & 256) != 0, n, k, static_cast<T*>(out), tokens, num_threads);
}

// A recorded call: the function's index in RECORDABLE and its arguments, eight bytes each.
struct Call {
    int64_t function;
    int64_t arguments[14];
};

template <typename T>
T argument(int64_t value) {
    if constexpr (std::is_pointer_v<T>) {
        return reinterpret_cast<T>(value);
    } else if constexpr (std::is_same_v<T, float>) {
        T out;
        std::memcpy(&out, &value, sizeof out);
        return out;
    } else {
        return T(value);
    }
}

template <typename... Args, size_t... I>
void call(void (*function)(Args...), const int64_t* arguments, std::index_sequence<I...>) {
    function(argument<Args>(arguments[I])...);
}

template <typename... Args>
constexpr auto numbers_of(void (*)(Args...)) {
    return std::index_sequence_for<Args...>();
}

template <auto function>
void recorded(const int64_t* arguments) {
    call(function, arguments, numbers_of(function));
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

void mm_look_up(const int64_t* ids, const void* weights, int64_t n, int64_t row_bytes,
                int64_t panel, void* out, int64_t tokens, int32_t num_threads) {
    mm::look_up(ids, static_cast<const char*>(weights), n, row_bytes, panel,
                static_cast<char*>(out), tokens, num_threads);
}

// format: of the codes, see code_format; plus 64 if out is bf16, 256 if codes are those of mm_pack_s8.
void mm_look_up_codes(int32_t format, const int64_t* ids, const void* codes, const void* facts,
                      int64_t group, int64_t n, int64_t k, void* out, int64_t tokens,
                      int32_t num_threads) {
    const auto run = (format & 64) == 0 ? look_up_codes_in<float> : look_up_codes_in<bf16>;
    run(format, ids, codes, facts, group, n, k, out, tokens, num_threads);
}

void mm_take_columns(int32_t dtype, const int64_t* columns, const void* x, int64_t x_stride,
                     void* out, int64_t rows, int64_t size, int32_t num_threads) {
    if (dtype == FLOAT) {
        mm::take_columns(columns, static_cast<const float*>(x), x_stride, static_cast<float*>(out),
                         rows, size, num_threads);
    } else {
        mm::take_columns(columns, static_cast<const bf16*>(x), x_stride, static_cast<bf16*>(out),
                         rows, size, num_threads);
    }
}

void mm_angles(const int64_t* positions, int64_t stride, const int64_t* axes,
               const float* frequencies, const bool* is_long, float scale, float* cosines,
               float* sines, int64_t tokens, int64_t pairs, int32_t num_threads) {
    mm::angles(positions, stride, axes, frequencies, is_long, scale, cosines, sines, tokens, pairs,
               num_threads);
}

void mm_rms_norm(int32_t dtype, const void* x, int64_t x_stride, void* residual,
                 const void* weight, void* out, int64_t rows, int64_t size, float eps,
                 int32_t is_centred, int32_t num_threads) {
    if (dtype == FLOAT) {
        mm::rms_norm(static_cast<const float*>(x), x_stride, static_cast<float*>(residual),
                     static_cast<const float*>(weight), static_cast<float*>(out), rows, size, eps,
                     is_centred != 0, num_threads);
    } else {
        mm::rms_norm(static_cast<const bf16*>(x), x_stride, static_cast<bf16*>(residual),
                     static_cast<const bf16*>(weight), static_cast<bf16*>(out), rows, size, eps,
                     is_centred != 0, num_threads);
    }
}

void mm_silu_mul(int32_t dtype, const void* gate, int64_t gate_stride, const void* up,
                 int64_t up_stride, void* out, int64_t rows, int64_t size, int32_t num_threads) {
    if (dtype == FLOAT) {
        mm::silu_mul(static_cast<const float*>(gate), gate_stride, static_cast<const float*>(up),
                     up_stride, static_cast<float*>(out), rows, size, num_threads);
    } else {
        mm::silu_mul(static_cast<const bf16*>(gate), gate_stride, static_cast<const bf16*>(up),
                     up_stride, static_cast<bf16*>(out), rows, size, num_threads);
    }
}

// kind: mm::Activation. x: [rows][size], changed in place.
void mm_activate(int32_t dtype, int32_t kind, void* x, int64_t rows, int64_t size,
                 int32_t num_threads) {
    if (dtype == FLOAT) {
        activate_by<float>(kind, x, rows, size, num_threads);
    } else {
        activate_by<bf16>(kind, x, rows, size, num_threads);
    }
}

void mm_norm_heads(int32_t dtype, void* x, int64_t row_stride, int64_t heads, int64_t head_stride,
                   const void* weight, int64_t rows, int64_t size, float eps, int32_t is_centred,
                   int32_t num_threads) {
    if (dtype == FLOAT) {
        mm::norm_heads(static_cast<float*>(x), row_stride, heads, head_stride,
                       static_cast<const float*>(weight), rows, size, eps, is_centred != 0,
                       num_threads);
    } else {
        mm::norm_heads(static_cast<bf16*>(x), row_stride, heads, head_stride,
                       static_cast<const bf16*>(weight), rows, size, eps, is_centred != 0,
                       num_threads);
    }
}

// x: [rows][heads][size], changed in place.
void mm_gate_heads(int32_t dtype, void* x, const void* gate, int64_t gate_stride,
                   int64_t gate_head_stride, int64_t rows, int64_t heads, int64_t size,
                   int32_t num_threads) {
    if (dtype == FLOAT) {
        mm::gate_heads(static_cast<float*>(x), static_cast<const float*>(gate), gate_stride,
                       gate_head_stride, rows, heads, size, num_threads);
    } else {
        mm::gate_heads(static_cast<bf16*>(x), static_cast<const bf16*>(gate), gate_stride,
                       gate_head_stride, rows, heads, size, num_threads);
    }
}

void mm_rotate(int32_t dtype, void* x, int64_t row_stride, int64_t heads, int64_t head_stride,
               const float* cosines, const float* sines, int64_t rows, int64_t pairs,
               int32_t is_interleaved, int32_t num_threads) {
    if (dtype == FLOAT) {
        mm::rotate(static_cast<float*>(x), row_stride, heads, head_stride, cosines, sines, rows,
                   pairs, is_interleaved != 0, num_threads);
    } else {
        mm::rotate(static_cast<bf16*>(x), row_stride, heads, head_stride, cosines, sines, rows,
                   pairs, is_interleaved != 0, num_threads);
    }
}

void mm_attend(int32_t dtype, int32_t cache_dtype, const mm::AttentionArgs* args) {
    if (dtype == FLOAT) {
        attend_over<float>(*args, cache_dtype);
    } else {
        attend_over<bf16>(*args, cache_dtype);
    }
}

// starts: [num + 1]; read, write: [num]; see StateRows.
void mm_short_conv(int32_t dtype, const void* x, int64_t x_stride, const void* weights,
                   const void* bias, void* states, void* out, const int64_t* starts,
                   const int64_t* read, const int64_t* write, int64_t num, int64_t channels,
                   int32_t taps_and_silu, int32_t num_threads) {
    const mm::StateRows rows{num, starts, read, write};
    const int64_t taps = taps_and_silu & 15;
    const bool has_silu = (taps_and_silu & 16) != 0;
    if (dtype == FLOAT) {
        mm::short_conv(static_cast<const float*>(x), x_stride, static_cast<const float*>(weights),
                       static_cast<const float*>(bias), static_cast<float*>(states),
                       static_cast<float*>(out), rows, channels, taps, has_silu, num_threads);
    } else {
        mm::short_conv(static_cast<const bf16*>(x), x_stride, static_cast<const bf16*>(weights),
                       static_cast<const bf16*>(bias), static_cast<bf16*>(states),
                       static_cast<bf16*>(out), rows, channels, taps, has_silu, num_threads);
    }
}

void mm_delta_rule(int32_t dtype, const mm::DeltaArgs* args) {
    if (dtype == FLOAT) {
        mm::delta_rule<float>(*args);
    } else {
        mm::delta_rule<bf16>(*args);
    }
}

void mm_write_cache(int32_t dtype, int32_t cache_dtype, const void* rows, int64_t row_stride,
                    void* cache, void* scales, const int64_t* slots, int64_t tokens,
                    int64_t num_kv_heads, int64_t head_dim, int32_t num_threads) {
    if (dtype == FLOAT) {
        write_to<float>(rows, row_stride, cache, scales, slots, tokens, num_kv_heads, head_dim,
                        cache_dtype, num_threads);
    } else {
        write_to<bf16>(rows, row_stride, cache, scales, slots, tokens, num_kv_heads, head_dim,
                       cache_dtype, num_threads);
    }
}

// weights: [n][units], units of four bytes: 1 float, 2 bf16 or codes. in_words: whether these are 8
// codes of 4 bits with the first in the lowest bits of a word, which become units as codes.h has them.
void mm_pack_units(const void* weights, int64_t n, int64_t units, int32_t in_words, void* packed,
                   int32_t num_threads) {
    const uint32_t* from = static_cast<const uint32_t*>(weights);
    uint32_t* to = static_cast<uint32_t*>(packed);
    if (in_words != 0) {
        mm::pack_units(from, n, units, mm::unit_of_word, to, num_threads);
    } else {
        mm::pack_units(from, n, units, [](uint32_t unit) { return unit; }, to, num_threads);
    }
}

// next_packed: weights of the linear layer that comes next, or null; next_row_bytes: of its rows.
void mm_linear_bf16(const void* x, int64_t x_stride, const void* packed, const void* bias,
                    void* out, int64_t rows, int64_t n, int64_t k, int32_t num_threads,
                    const void* next_packed, int64_t next_row_bytes) {
    mm::linear<mm::Bf16Format>(static_cast<const bf16*>(x), x_stride, packed,
                               static_cast<const bf16*>(bias), static_cast<bf16*>(out), rows, n, k,
                               num_threads, next_of(next_packed, next_row_bytes));
}

void mm_linear_f32(const void* x, int64_t x_stride, const void* packed, const void* bias, void* out,
                   int64_t rows, int64_t n, int64_t k, int32_t num_threads, const void* next_packed,
                   int64_t next_row_bytes) {
    mm::linear<mm::FloatFormat>(static_cast<const float*>(x), x_stride, packed,
                                static_cast<const float*>(bias), static_cast<float*>(out), rows, n,
                                k, num_threads, next_of(next_packed, next_row_bytes));
}

// packed: weights in panels, 2 bf16 or 4 int8 per unit; out: [values of a unit * units][panels * 64].
void mm_widen_panels(int32_t unit_values, const void* packed, int64_t panels, int64_t units,
                     float* out, int32_t num_threads) {
    const uint32_t* from = static_cast<const uint32_t*>(packed);
    if (unit_values == 2) {
        mm::widen_panels<2>(from, panels, units, out, num_threads);
    } else {
        mm::widen_panels<4>(from, panels, units, out, num_threads);
    }
}

void mm_round_groups(int32_t dtype, const void* x, int64_t x_stride, int64_t rows, int64_t k,
                     float* out, int32_t num_threads) {
    if (dtype == FLOAT) {
        mm::round_groups(static_cast<const float*>(x), x_stride, rows, k, out, num_threads);
    } else {
        mm::round_groups(static_cast<const bf16*>(x), x_stride, rows, k, out, num_threads);
    }
}

void mm_pack_s8(const int8_t* weights, int64_t n, int64_t k, uint8_t* packed,
                int32_t num_threads) {
    mm::pack_s8(weights, n, k, packed, num_threads);
}

void mm_quantize_rows(int32_t dtype, const void* weights, int64_t n, int64_t k, int8_t* out,
                      float* facts, int32_t num_threads) {
    if (dtype == FLOAT) {
        mm::quantize_rows(static_cast<const float*>(weights), n, k, out, facts, num_threads);
    } else {
        mm::quantize_rows(static_cast<const bf16*>(weights), n, k, out, facts, num_threads);
    }
}

void mm_linear_s8(int32_t dtype, const void* x, int64_t x_stride, const uint8_t* packed,
                  const float* facts, const void* bias, void* out, int64_t rows, int64_t n,
                  int64_t k, int32_t num_threads, const void* next_packed,
                  int64_t next_row_bytes) {
    const mm::Next next = next_of(next_packed, next_row_bytes);
    if (dtype == FLOAT) {
        mm::linear_s8(static_cast<const float*>(x), x_stride, packed, facts,
                      static_cast<const float*>(bias), static_cast<float*>(out), rows, n, k,
                      num_threads, next);
    } else {
        mm::linear_s8(static_cast<const bf16*>(x), x_stride, packed, facts,
                      static_cast<const bf16*>(bias), static_cast<bf16*>(out), rows, n, k,
                      num_threads, next);
    }
}

// format: of the codes, see code_format; plus 64 if x is bf16.
void mm_linear_codes(int32_t format, const void* x, int64_t x_stride, const void* codes,
                     const void* facts, int64_t group, const void* bias, void* out, int64_t rows,
                     int64_t n, int64_t k, int32_t num_threads, const void* next_packed,
                     int64_t next_row_bytes) {
    const mm::Next next = next_of(next_packed, next_row_bytes);
    const auto run = (format & 64) == 0 ? linear_codes_by<float> : linear_codes_by<bf16>;
    run(code_format(format), x, x_stride, codes, facts, group, bias, out, rows, n, k, num_threads,
        next);
}

void mm_round_codes(int32_t dtype, const void* weights, int64_t n, int64_t k, int32_t bits,
                    int64_t group, void* units, float* scales, uint8_t* zeros,
                    int32_t num_threads) {
    uint8_t* out = static_cast<uint8_t*>(units);
    if (dtype == FLOAT) {
        mm::round_codes(static_cast<const float*>(weights), n, k, bits, group, out, scales, zeros,
                        num_threads);
    } else {
        mm::round_codes(static_cast<const bf16*>(weights), n, k, bits, group, out, scales, zeros,
                        num_threads);
    }
}

void mm_largest(int32_t dtype, const void* logits, int64_t stride, int64_t rows, int64_t size,
                int64_t num, float* values, int64_t* ids, int32_t num_threads) {
    if (dtype == FLOAT) {
        mm::largest(static_cast<const float*>(logits), stride, rows, size, num, values, ids,
                    num_threads);
    } else {
        mm::largest(static_cast<const bf16*>(logits), stride, rows, size, num, values, ids,
                    num_threads);
    }
}

void mm_first_largest(int32_t dtype, const void* logits, int64_t stride, int64_t rows,
                      int64_t size, int64_t* ids, void* peaks, int32_t num_threads) {
    if (dtype == FLOAT) {
        mm::first_largest(static_cast<const float*>(logits), stride, rows, size, ids,
                          static_cast<float*>(peaks), num_threads);
    } else {
        mm::first_largest(static_cast<const bf16*>(logits), stride, rows, size, ids,
                          static_cast<bf16*>(peaks), num_threads);
    }
}

void mm_temper(int32_t dtype, const void* logits, int64_t stride, int64_t rows, int64_t size,
               const float* temperatures, float* out, int32_t num_threads) {
    if (dtype == FLOAT) {
        mm::temper(static_cast<const float*>(logits), stride, rows, size, temperatures, out,
                   num_threads);
    } else {
        mm::temper(static_cast<const bf16*>(logits), stride, rows, size, temperatures, out,
                   num_threads);
    }
}

void mm_cut(const float* z, const float* probs, int64_t rows, int64_t size, const float* least,
            const int64_t* top_k, const double* top_p, float* cuts, int32_t num_threads) {
    mm::cut(z, probs, rows, size, least, top_k, top_p, cuts, num_threads);
}

void mm_invert(const float* probs, int64_t rows, int64_t size, const double* uniforms,
               int64_t* tokens, int32_t num_threads) {
    mm::invert(probs, rows, size, uniforms, tokens, num_threads);
}

// pixels: bytes; see pixels.h. Runs on the calling thread only: many images are prepared at once.
void mm_patchify(const uint8_t* pixels, int64_t height, int64_t width, int64_t patch,
                 int64_t merge, const float* table, int64_t frames, int64_t first, int64_t count,
                 float* out) {
    mm::patchify(pixels, height, width, patch, merge, table, frames, first, count, out);
}

int32_t mm_place_threads(const int32_t* cpus, int32_t num_cpus, const int32_t* pinned,
                         int32_t num_pinned, int32_t node, int32_t num_threads) {
    return mm::place_threads(cpus, num_cpus, pinned, num_pinned, node, num_threads);
}

int32_t mm_vector_bytes() { return MM_VECTOR_BYTES; }

// In the order of RECORDABLE in recording.py.
void (*const RECORDABLE[])(const int64_t*) = {
    recorded<mm_rms_norm>,    recorded<mm_norm_heads>,  recorded<mm_silu_mul>,
    recorded<mm_rotate>,      recorded<mm_attend>,      recorded<mm_write_cache>,
    recorded<mm_linear_bf16>, recorded<mm_linear_s8>,   recorded<mm_linear_f32>,
    recorded<mm_look_up>,     recorded<mm_angles>,      recorded<mm_linear_codes>,
    recorded<mm_short_conv>,  recorded<mm_delta_rule>,  recorded<mm_take_columns>,
    recorded<mm_gate_heads>,  recorded<mm_look_up_codes>,
};

void mm_run(const Call* calls, int64_t num) {
    for (int64_t i = 0; i < num; ++i) RECORDABLE[calls[i].function](calls[i].arguments);
}

}  // extern "C"
#pragma GCC visibility pop
