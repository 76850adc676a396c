// The calls for what a sequence keeps between steps: attention over its cache, and states.
#include <cstdint>
#include <type_traits>

#include "../states/delta_rule.h"
#include "../states/state_space.h"
#include "../states/states.h"
#include "attention.h"
#include "dispatch.h"

namespace {

constexpr int32_t INT8 = 2, INT4 = 3;

// Calls function(Of<type>()) for the type of a cache, which has the dtype T of the call if it is not
// in few bits.
template <typename T, typename Function>
void by_cache_dtype(int32_t dtype, const Function& function) {
    if (dtype == INT8) return function(Of<int8_t>());
    if (dtype == INT4) return function(Of<mm::int4_pair>());
    function(Of<T>());
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

void run(const mm::Mamba2& args) {
    by_dtype(args.dtype, [&](auto of) { mm::mamba2<typename decltype(of)::Type>(args); });
}

}  // namespace

MM_EACH_SEQUENCE_CALL(MM_DEFINE)
