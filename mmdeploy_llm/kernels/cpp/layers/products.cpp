// The calls of products: matrix products, and how their weights are stored.
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../products/code_rounding.h"
#include "../products/codes.h"
#include "../products/gemm.h"
#include "../products/stored_codes.h"
#include "dispatch.h"

namespace {

// The weights that the product after this one reads.
template <typename Args>
mm::Next next_of(const Args& args) {
    return {static_cast<const char*>(args.next_packed), args.next_row_bytes * mm::PANEL};
}

template <typename Args>
mm::StoredCodes stored_codes(const void* codes, const Args& args) {
    return {static_cast<const char*>(codes), mm::CodeForm(args.code_form), args.list};
}

// Where a product is written.
template <typename T, typename Args>
mm::Result<T> result_of(Of<T>, const Args& args) {
    return {args.out, args.out_dtype == FLOAT};
}

void run(const mm::LookUpCodes& args) {
    const mm::Groups groups(args.k, args.group, args.scale_form);
    by_dtype(args.dtype, [&](auto of) {
        using T = typename decltype(of)::Type;
        const auto look_up = args.bits == 4 ? mm::look_up_codes<4, T> : mm::look_up_codes<8, T>;
        look_up(args.ids, stored_codes(args.codes, args), Of<uint32_t>::in(args.scales), groups,
                args.is_float8 != 0, args.is_s8 != 0, args.n, args.k, of.out(args.out),
                args.tokens, args.num_threads);
    });
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

void run(const mm::FindCodes& args) {
    mm::find_codes(Of<uint8_t>::in(args.units), args.num, args.found, args.num_threads);
}

void run(const mm::StoreCodes& args) {
    mm::store_codes(Of<uint32_t>::in(args.units), args.panels, args.num_units,
                    mm::CodeForm(args.code_form), args.places, Of<uint32_t>::out(args.packed),
                    args.num_threads);
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
                           result_of(of, args), args.rows, args.n, args.k, args.num_threads,
                           next_of(args));
    });
}

void run(const mm::LinearS8& args) {
    by_dtype(args.dtype, [&](auto of) {
        mm::linear_s8(of.in(args.x), args.x_stride, Of<uint8_t>::in(args.packed), args.scales,
                      of.in(args.bias), result_of(of, args), args.rows, args.n, args.k,
                      args.num_threads, next_of(args));
    });
}

void run(const mm::LinearCodes& args) {
    const mm::Groups groups(args.k, args.group, args.scale_form);
    by_dtype(args.dtype, [&](auto of) {
        const auto multiply = [&](auto format) {
            mm::linear_codes<decltype(format)>(
                of.in(args.x), args.x_stride, stored_codes(args.packed, args),
                Of<uint32_t>::in(args.scales), groups,
                of.in(args.bias), result_of(of, args), args.rows, args.n, args.k, args.num_threads,
                next_of(args));
        };
        mm::with_codes<typename decltype(of)::Type>(args.bits, mm::CodeForm(args.code_form),
                                                    args.is_float8 != 0, args.rounds != 0, args.rows,
                                                    multiply);
    });
}

void run(const mm::RoundGroups& args) {
    by_dtype(args.dtype, [&](auto of) {
        mm::round_groups(of.in(args.x), args.x_stride, args.rows, args.k, args.out,
                         args.num_threads);
    });
}

void run(const mm::RotateGroups& args) {
    by_dtype(args.dtype, [&](auto of) {
        mm::rotate_groups(of.in(args.x), args.rows, args.k, args.is_back != 0, args.out,
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

}  // namespace

MM_EACH_PRODUCT(MM_DEFINE)
