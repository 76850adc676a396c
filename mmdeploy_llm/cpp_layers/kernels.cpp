// Defines the functions that Python calls, mm_NAME for each struct in calls.h, which says what its
// fields hold: `run` chooses the code for the types of its values.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../cpp_products/code_rounding.h"
#include "../cpp_products/codes.h"
#include "../cpp_products/gemm.h"
#include "../cpp_products/numbers.h"
#include "attention.h"
#include "calls.h"
#include "pixels.h"
#include "rows.h"
#include "runtime.h"
#include "sample.h"
#include "states.h"
#include "threads.h"

using mm::bf16;

namespace {

constexpr int32_t FLOAT = 0, INT8 = 2, INT4 = 3;

// The type T that a dtype names, for what pointers to void point to.
template <typename T>
struct Of {
    using Type = T;
    static const T* in(const void* values) { return static_cast<const T*>(values); }
    static T* out(void* values) { return static_cast<T*>(values); }
};

// Calls function(Of<T>()) for the type T of a dtype.
template <typename Function>
void by_dtype(int32_t dtype, const Function& function) {
    if (dtype == FLOAT) return function(Of<float>());
    function(Of<bf16>());
}

// The same for the type of a cache, which has the dtype of the call if it is not in few bits.
template <typename T, typename Function>
void by_cache_dtype(int32_t dtype, const Function& function) {
    if (dtype == INT8) return function(Of<int8_t>());
    if (dtype == INT4) return function(Of<mm::int4_pair>());
    function(Of<T>());
}

// The weights that the product after this one reads.
template <typename Args>
mm::Next next_of(const Args& args) {
    return {static_cast<const char*>(args.next_packed), args.next_row_bytes * mm::PANEL};
}

void run(const mm::LookUp& args) {
    mm::look_up(args.ids, Of<char>::in(args.weights), args.n, args.row_bytes, args.panel,
                Of<char>::out(args.out), args.tokens, args.num_threads);
}

void run(const mm::LookUpCodes& args) {
    const mm::Groups groups(args.k, args.group, args.has_offsets != 0);
    by_dtype(args.dtype, [&](auto of) {
        using T = typename decltype(of)::Type;
        const auto look_up = args.bits == 4 ? mm::look_up_codes<4, T> : mm::look_up_codes<8, T>;
        look_up(args.ids, Of<uint32_t>::in(args.codes), Of<uint32_t>::in(args.scales), groups,
                args.is_float8 != 0, args.is_s8 != 0, args.n, args.k, of.out(args.out),
                args.tokens, args.num_threads);
    });
}

void run(const mm::TakeColumns& args) {
    by_dtype(args.dtype, [&](auto of) {
        mm::take_columns(args.columns, of.in(args.x), args.x_stride, of.out(args.out), args.rows,
                         args.size, args.num_threads);
    });
}

void run(const mm::Angles& args) {
    mm::angles(args.positions, args.stride, args.axes, args.frequencies, args.is_long, args.scale,
               args.cosines, args.sines, args.tokens, args.pairs, args.num_threads);
}

void run(const mm::RmsNorm& args) {
    by_dtype(args.dtype, [&](auto of) {
        mm::rms_norm(of.in(args.x), args.x_stride, of.out(args.residual), of.in(args.weight),
                     of.out(args.out), args.rows, args.size, args.eps, args.is_centred != 0,
                     args.num_threads);
    });
}

void run(const mm::NormHeads& args) {
    by_dtype(args.dtype, [&](auto of) {
        mm::norm_heads(of.out(args.x), args.row_stride, args.heads, args.head_stride,
                       of.in(args.weight), args.rows, args.size, args.eps, args.is_centred != 0,
                       args.num_threads);
    });
}

void run(const mm::SiluMul& args) {
    by_dtype(args.dtype, [&](auto of) {
        mm::silu_mul(of.in(args.gate), args.gate_stride, of.in(args.up), args.up_stride,
                     of.out(args.out), args.rows, args.size, args.num_threads);
    });
}

void run(const mm::Activate& args) {
    by_dtype(args.dtype, [&](auto of) {
        auto* x = of.out(args.x);
        const int64_t rows = args.rows, size = args.size;
        switch (args.kind) {
            case mm::GELU: return mm::activate<mm::GELU>(x, rows, size, args.num_threads);
            case mm::GELU_TANH: return mm::activate<mm::GELU_TANH>(x, rows, size, args.num_threads);
            case mm::QUICK_GELU:
                return mm::activate<mm::QUICK_GELU>(x, rows, size, args.num_threads);
            default: return mm::activate<mm::SILU>(x, rows, size, args.num_threads);
        }
    });
}

void run(const mm::GateHeads& args) {
    by_dtype(args.dtype, [&](auto of) {
        mm::gate_heads(of.out(args.x), of.in(args.gate), args.gate_stride, args.gate_head_stride,
                       args.rows, args.heads, args.size, args.num_threads);
    });
}

void run(const mm::Rotate& args) {
    by_dtype(args.dtype, [&](auto of) {
        mm::rotate(of.out(args.x), args.row_stride, args.heads, args.head_stride, args.cosines,
                   args.sines, args.rows, args.pairs, args.is_interleaved != 0, args.num_threads);
    });
}

void run(const mm::Attend& args) {
    by_dtype(args.dtype, [&](auto of) {
        using T = typename decltype(of)::Type;
        by_cache_dtype<T>(args.cache_dtype, [&](auto cache) {
            mm::attend<T, typename decltype(cache)::Type>(args);
        });
    });
}

void run(const mm::WriteCache& args) {
    by_dtype(args.dtype, [&](auto of) {
        by_cache_dtype<typename decltype(of)::Type>(args.cache_dtype, [&](auto cache) {
            mm::write_cache(of.in(args.rows), args.row_stride, cache.out(args.cache), args.scales,
                            args.slots, args.tokens, args.num_kv_heads, args.head_dim,
                            args.num_threads);
        });
    });
}

void run(const mm::ShortConv& args) {
    const mm::StateRows rows{args.num_sequences, args.starts, args.read, args.write};
    by_dtype(args.dtype, [&](auto of) {
        mm::short_conv(of.in(args.x), args.x_stride, of.in(args.weights), of.in(args.bias),
                       of.out(args.states), of.out(args.out), rows, args.channels, args.taps,
                       args.has_silu != 0, args.num_threads);
    });
}

void run(const mm::DeltaRule& args) {
    by_dtype(args.dtype, [&](auto of) { mm::delta_rule<typename decltype(of)::Type>(args); });
}

void run(const mm::PackUnits& args) {
    const uint32_t* from = Of<uint32_t>::in(args.weights);
    uint32_t* to = Of<uint32_t>::out(args.packed);
    if (args.in_words != 0) {
        mm::pack_units(from, args.n, args.units, mm::unit_of_word, to, args.num_threads);
    } else {
        const auto as_it_is = [](uint32_t unit) { return unit; };
        mm::pack_units(from, args.n, args.units, as_it_is, to, args.num_threads);
    }
}

void run(const mm::PackS8& args) {
    mm::pack_s8(args.weights, args.n, args.k, args.packed, args.num_threads);
}

void run(const mm::WidenPanels& args) {
    const auto widen = args.unit_values == 2 ? mm::widen_panels<2> : mm::widen_panels<4>;
    widen(Of<uint32_t>::in(args.packed), args.panels, args.units, args.out, args.num_threads);
}

void run(const mm::Linear& args) {
    by_dtype(args.dtype, [&](auto of) {
        constexpr bool IS_FLOAT = std::is_same_v<typename decltype(of)::Type, float>;
        using Format = std::conditional_t<IS_FLOAT, mm::FloatFormat, mm::Bf16Format>;
        mm::linear<Format>(of.in(args.x), args.x_stride, args.packed, of.in(args.bias),
                           of.out(args.out), args.rows, args.n, args.k, args.num_threads,
                           next_of(args));
    });
}

void run(const mm::LinearS8& args) {
    by_dtype(args.dtype, [&](auto of) {
        mm::linear_s8(of.in(args.x), args.x_stride, Of<uint8_t>::in(args.packed), args.scales,
                      of.in(args.bias), of.out(args.out), args.rows, args.n, args.k,
                      args.num_threads, next_of(args));
    });
}

void run(const mm::LinearCodes& args) {
    const mm::Groups groups(args.k, args.group, args.has_offsets != 0);
    by_dtype(args.dtype, [&](auto of) {
        const auto multiply = [&](auto format) {
            mm::linear_codes<decltype(format)>(
                of.in(args.x), args.x_stride, args.packed, Of<uint32_t>::in(args.scales), groups,
                of.in(args.bias), of.out(args.out), args.rows, args.n, args.k, args.num_threads,
                next_of(args));
        };
        mm::with_codes<typename decltype(of)::Type>(args.bits, args.is_float8 != 0,
                                                    args.rounds != 0, multiply);
    });
}

void run(const mm::RoundGroups& args) {
    by_dtype(args.dtype, [&](auto of) {
        mm::round_groups(of.in(args.x), args.x_stride, args.rows, args.k, args.out,
                         args.num_threads);
    });
}

void run(const mm::QuantizeRows& args) {
    by_dtype(args.dtype, [&](auto of) {
        mm::quantize_rows(of.in(args.weights), args.n, args.k, args.out, args.scales,
                          args.num_threads);
    });
}

void run(const mm::RoundCodes& args) {
    by_dtype(args.dtype, [&](auto of) {
        mm::round_codes(of.in(args.weights), args.n, args.k, args.bits, args.group, args.units,
                        args.scales, args.zeros, args.num_threads);
    });
}

void run(const mm::Largest& args) {
    by_dtype(args.dtype, [&](auto of) {
        mm::largest(of.in(args.logits), args.stride, args.rows, args.size, args.num, args.values,
                    args.ids, args.num_threads);
    });
}

void run(const mm::FirstLargest& args) {
    by_dtype(args.dtype, [&](auto of) {
        mm::first_largest(of.in(args.logits), args.stride, args.rows, args.size, args.ids,
                          of.out(args.peaks), args.num_threads);
    });
}

void run(const mm::Temper& args) {
    by_dtype(args.dtype, [&](auto of) {
        mm::temper(of.in(args.logits), args.stride, args.rows, args.size, args.temperatures,
                   args.out, args.num_threads);
    });
}

void run(const mm::Cut& args) {
    mm::cut(args.z, args.probs, args.rows, args.size, args.least, args.top_k, args.top_p,
            args.cuts, args.num_threads);
}

void run(const mm::Invert& args) {
    mm::invert(args.probs, args.rows, args.size, args.uniforms, args.tokens, args.num_threads);
}

void run(const mm::Patchify& args) {
    mm::patchify(args.pixels, args.height, args.width, args.patch, args.merge, args.table,
                 args.frames, args.first, args.count, args.out);
}

void run(const mm::PlaceThreads& args) {
    *args.error = mm::place_threads(args.cpus, args.num_cpus, args.pinned, args.num_pinned,
                                    args.node, args.num_workers);
}

// A recorded call: a function of these and its arguments.
struct Call {
    void (*function)(const void*);
    const void* args;
};

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

#define MM_DEFINE(name, Args) \
    void mm_##name(const void* args) { run(*static_cast<const mm::Args*>(args)); }
MM_EACH_CALL(MM_DEFINE)
#undef MM_DEFINE

// Repeats calls [num] one after the other.
void mm_run(const Call* calls, int64_t num) {
    for (int64_t i = 0; i < num; ++i) calls[i].function(calls[i].args);
}

// Returns the bytes of a vector register of this level.
int32_t mm_vector_bytes() { return MM_VECTOR_BYTES; }

}  // extern "C"
#pragma GCC visibility pop
