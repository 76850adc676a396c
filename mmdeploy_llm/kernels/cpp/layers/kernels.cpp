// The other calls: of rows, of sampling and of pixels. And what repeats recorded calls.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "../experts/clamped.h"
#include "../products/lanes.h"
#include "../sampling/draw.h"
#include "../sampling/largest.h"
#include "dispatch.h"
#include "pixels.h"
#include "rows.h"
#include "runtime.h"
#include "threads.h"

namespace {

void run(const mm::LookUp& args) {
    mm::look_up(args.ids, Of<char>::in(args.weights), args.n, args.row_bytes, args.panel,
                Of<char>::out(args.out), args.tokens, args.num_threads);
}

void run(const mm::ReplaceId& args) {
    std::replace_copy(args.ids, args.ids + args.tokens, args.out, args.from, args.to);
}

void run(const mm::Widen& args) {
    mm::widen(Of<bf16>::in(args.x), args.out, args.values, args.num_threads);
}

void run(const mm::AddRows& args) {
    by_dtype(args.dtype, [&](auto of) {
        mm::add_rows(of.in(args.x), args.x_stride, of.in(args.gate), of.out(args.sum), args.rows,
                     args.size, args.num_threads);
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
        mm::add_and_norm(of.in(args.x), args.x_stride, of.out(args.residual), of.out(args.out),
                         args.rows, args.size, args.num_threads, [&](auto* in, auto* out) {
                             mm::norm_row(in, of.in(args.weight), out, args.size, args.eps,
                                          args.centre);
                         });
    });
}

void run(const mm::LayerNorm& args) {
    by_dtype(args.dtype, [&](auto of) {
        mm::add_and_norm(of.in(args.x), args.x_stride, of.out(args.residual), of.out(args.out),
                         args.rows, args.size, args.num_threads, [&](auto* in, auto* out) {
                             mm::layer_norm_row(in, of.in(args.weight), of.in(args.bias), out,
                                                args.size, args.eps, args.is_centred != 0);
                         });
    });
}

void run(const mm::NormHeads& args) {
    by_dtype(args.dtype, [&](auto of) {
        mm::norm_heads(of.in(args.x), args.row_stride, args.heads, args.head_stride,
                       of.in(args.weight), of.out(args.out), args.out_row_stride,
                       args.out_head_stride, args.rows, args.size, args.eps, args.centre,
                       args.num_threads);
    });
}

void run(const mm::MixHeads& args) {
    by_dtype(args.dtype, [&](auto of) { mm::mix_heads<typename decltype(of)::Type>(args); });
}

void run(const mm::AddNorm& args) {
    by_dtype(args.dtype, [&](auto of) {
        mm::add_norm(of.in(args.x), args.x_stride, of.in(args.weight), of.in(args.factor),
                     of.out(args.sum), args.rows, args.size, args.eps, args.centre,
                     args.num_threads);
    });
}

void run(const mm::GatedMul& args) {
    by_dtype(args.dtype, [&](auto of) {
        mm::by_kind(args.kind, [&](auto kind) {
            mm::gated_mul<decltype(kind)::value>(
                of.in(args.gate), args.gate_stride, of.in(args.up), args.up_stride,
                of.out(args.out), args.rows, args.size, args.num_threads);
        });
    });
}

void run(const mm::ClampedMul& args) {
    by_dtype(args.dtype, [&](auto of) {
        mm::clamped_mul(of.in(args.both), of.out(args.out), args.rows, args.size, args.alpha,
                        args.limit, args.num_threads);
    });
}

void run(const mm::Activate& args) {
    by_dtype(args.dtype, [&](auto of) {
        mm::by_kind(args.kind, [&](auto kind) {
            mm::activate<decltype(kind)::value>(of.out(args.x), args.rows, args.size,
                                                args.num_threads);
        });
    });
}

void run(const mm::MapValues& args) {
    mm::map_values(Of<uint16_t>::out(args.x), Of<uint16_t>::in(args.table), args.values,
                   args.num_threads);
}

void run(const mm::Scale& args) {
    by_dtype(args.dtype, [&](auto of) {
        using T = typename decltype(of)::Type;
        const float factor = args.rounds != 0 ? mm::rounded<T>(args.factor) : args.factor;
        mm::scale(of.out(args.x), factor, args.values, args.num_threads);
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

void run(const mm::FirstLargest& args) {
    by_dtype(args.dtype, [&](auto of) {
        mm::first_largest(of.in(args.logits), args.stride, args.rows, args.size, args.ids,
                          of.out(args.peaks), args.num_threads);
    });
}

void run(const mm::Draw& args) {
    by_dtype(args.dtype, [&](auto of) {
        mm::draw(of.in(args.logits), args.stride, args.rows, args.size, args.temperatures,
                 args.least, args.top_k, args.top_p, args.uniforms, args.tokens, args.num_threads);
    });
}

void run(const mm::Patchify& args) {
    mm::patchify(args.pixels, args.height, args.width, args.patch, args.merge, args.table,
                 args.frames, args.first, args.count, args.out);
}

void run(const mm::Resize& args) {
    const mm::Taps across = {args.across_first, args.across_counts, args.across_weights,
                             args.across_most};
    const mm::Taps down = {args.down_first, args.down_counts, args.down_weights, args.down_most};
    if (args.is_down_first) {
        mm::down(args.pixels, args.width * 3, down, args.rows, args.middle);
        mm::across(args.middle, args.rows, args.width, across, args.columns, args.turned, args.out);
    } else {
        mm::across(args.pixels, args.height, args.width, across, args.columns, args.turned,
                   args.middle);
        mm::down(args.middle, args.columns * 3, down, args.rows, args.out);
    }
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

MM_EACH_OTHER_CALL(MM_DEFINE)

#pragma GCC visibility push(default)
extern "C" {

// Repeats calls [num] one after the other, their loops on `num_threads` threads.
void mm_run(const Call* calls, int64_t num, int32_t num_threads) {
    mm::with_crew(num_threads, [&] {
        for (int64_t i = 0; i < num; ++i) calls[i].function(calls[i].args);
    });
}

// Returns the bytes of a vector register of this level.
int32_t mm_vector_bytes() { return MM_VECTOR_BYTES; }

}  // extern "C"
#pragma GCC visibility pop
