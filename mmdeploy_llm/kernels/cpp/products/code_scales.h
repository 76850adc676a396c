// The scales of the groups of a weight in few bits: how they lie in words beside its codes, and how a
// product reads them. Every panel has rows of 64 words, one of each row of the weight:
//
//     form          words                                                  of a group    in memory
//     ZEROS         a float, whose lowest 8 bits are the zero              a word
//     OFFSETS       a float and, 64 words further, the offset's            two words
//     SHORT_ZEROS   5 bits of exponent, 7 of mantissa, 4 of the zero       half a word   2^-28 to 8
//     SHORT         a half: 1 sign, 5 bits of exponent, 10 of mantissa     half a word   2^-24 to 128
//     PAIRS         such a half, and one of the offset in the upper bits   a word
//     BLOCKS        int8 times the half, and int8 times the offset's, of   half a word   and a word
//                   a word that 8 groups have in common, before their own                for 8 groups
//     BLOCK_ZEROS   int8 times the half of such a word                     a byte        the same
//
// The first group is in the lowest bits of a word. A zero is the code that stands for 0: an offset is
// the scale times it. SHORT and BLOCK_ZEROS have one for all groups. Exponents of halves begin at 1, so
// that they hold the subnormal numbers of IEEE halves too; one whose exponent and mantissa are 0 is 0.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "gemm.h"
#include "numbers.h"

namespace mm {

enum ScaleForm : int32_t { ZEROS, OFFSETS, SHORT_ZEROS, SHORT, PAIRS, BLOCKS, BLOCK_ZEROS };

constexpr int64_t BLOCK_GROUPS = 8;

// Rows of words that a form takes for BLOCK_GROUPS groups, those before the first group's own, and
// groups of a word.
struct ScaleRows {
    int64_t block, head, groups;

    static ScaleRows of(ScaleForm form) {
        if (form == OFFSETS) return {16, 0, 1};
        if (form == SHORT_ZEROS || form == SHORT) return {4, 0, 2};
        if (form == BLOCKS) return {5, 1, 2};
        if (form == BLOCK_ZEROS) return {3, 1, 4};
        return {8, 0, 1};
    }
};

// The groups of a weight [n][k]. group: columns of a group, a multiple of 16, or k or more.
struct Groups {
    int64_t group;
    int64_t num;
    // Columns that one call of a tile adds, which have one scale of the weight and one of x: GROUP, or
    // the largest power of two that divides the columns of a group.
    int64_t step;
    ScaleForm form;
    int32_t zero;  // of all groups, in forms without their own
    bool has_offsets;
    ScaleRows in;

    // form: that of scales, and the zero of all groups times 256.
    Groups(int64_t k, int64_t size, int32_t own_form)
        : group(size),
          num((k + size - 1) / size),
          step(size >= k || size % GROUP == 0 ? GROUP : size % 32 == 0 ? 32 : 16),
          form(ScaleForm(own_form & 0xff)),
          zero(own_form >> 8),
          has_offsets(form == OFFSETS || form == PAIRS || form == BLOCKS),
          in(ScaleRows::of(form)) {}
    // The row of a group's word, or of its first one; that of what its block has in common; and the bit
    // at which a group begins in its word.
    int64_t row_of(int64_t number) const {
        const int64_t own = number % BLOCK_GROUPS * (form == OFFSETS ? 2 : 1);
        return head_of(number) + in.head + own / in.groups;
    }
    int64_t head_of(int64_t number) const { return number / BLOCK_GROUPS * in.block; }
    uint32_t bit(int64_t number) const { return uint32_t(number % in.groups * (32 / in.groups)); }
    int64_t rows() const { return row_of(num - 1) + (form == OFFSETS ? 2 : 1); }
};

// Of a group of one row: weight = scale * code - offset, or scale * (code - zero).
struct GroupScale {
    float scale, offset;
    int32_t zero;
};

MM_INLINE float float_of_short(uint32_t bits) {
    const uint32_t moved = (bits & 0x7fffu) << 13 | (bits & 0x8000u) << 16;
    return bits_to_float(moved) * bits_to_float((127u + 102u) << 23);
}

// Reads what a group's words say. own: the group's, from its first bit on. second: the next row's. head:
// that of its block. zero: of all groups.
template <ScaleForm FORM>
MM_INLINE GroupScale group_scale(uint32_t own, uint32_t second, uint32_t head, int32_t zero) {
    if constexpr (FORM == ZEROS) {
        return {bits_to_float(own & 0xffffff00u), 0.0f, int32_t(own & 0xffu)};
    } else if constexpr (FORM == OFFSETS) {
        return {bits_to_float(own), bits_to_float(second), 0};
    } else if constexpr (FORM == SHORT_ZEROS) {
        const float scale = bits_to_float((own & 0xfff0u) << 12) * bits_to_float((127u + 98u) << 23);
        return {scale, 0.0f, int32_t(own & 15u)};
    } else if constexpr (FORM == SHORT) {
        return {float_of_short(own), 0.0f, zero};
    } else if constexpr (FORM == PAIRS) {
        return {float_of_short(own), float_of_short(own >> 16), 0};
    } else {
        const float scale = float_of_short(head) * float(int32_t(own << 24) >> 24);
        if constexpr (FORM == BLOCK_ZEROS) return {scale, 0.0f, zero};
        return {scale, float_of_short(head >> 16) * float(int32_t(own << 16) >> 24), 0};
    }
}

// Calls run with the form as the type of its argument.
template <typename Run>
MM_INLINE void with_form(ScaleForm form, const Run& run) {
    switch (form) {
        case ZEROS: return run(std::integral_constant<ScaleForm, ZEROS>());
        case OFFSETS: return run(std::integral_constant<ScaleForm, OFFSETS>());
        case SHORT_ZEROS: return run(std::integral_constant<ScaleForm, SHORT_ZEROS>());
        case SHORT: return run(std::integral_constant<ScaleForm, SHORT>());
        case PAIRS: return run(std::integral_constant<ScaleForm, PAIRS>());
        case BLOCKS: return run(std::integral_constant<ScaleForm, BLOCKS>());
        case BLOCK_ZEROS: return run(std::integral_constant<ScaleForm, BLOCK_ZEROS>());
    }
}

// Returns that of a group in one row. words: of the row, PANEL apart.
MM_INLINE GroupScale scale_of(const Groups& groups, const uint32_t* words, int64_t group) {
    const uint32_t* own = words + groups.row_of(group) * PANEL;
    const uint32_t head = words[groups.head_of(group) * PANEL];
    GroupScale found{};
    with_form(groups.form, [&](auto form) {
        const uint32_t second = form == OFFSETS ? own[PANEL] : 0;
        found = group_scale<form>(*own >> groups.bit(group), second, head, groups.zero);
    });
    return found;
}

// Scales and offsets of a group of a panel.
struct alignas(64) PanelScales {
    float values[2 * PANEL];
};

// Reads those of `num` groups from `first` on, for codes from which LESS is subtracted; zeros as integers
// in place of offsets that come from them where ZEROS_FIRST. Never inlined: it would be in every tile.
template <int32_t LESS, bool ZEROS_FIRST>
__attribute__((noinline)) void read_scales(const uint32_t* panel, const Groups& groups,
                                           int64_t first, int64_t num, PanelScales* to) {
    with_form(groups.form, [&](auto form) {
        constexpr bool HAS_OFFSETS = form == OFFSETS || form == PAIRS || form == BLOCKS;
        constexpr int64_t SECOND = form == OFFSETS ? PANEL : 0;
        const int32_t zero = groups.zero;
        for (int64_t g = first; g < first + num; ++g, ++to) {
            const uint32_t* words = panel + groups.row_of(g) * PANEL;
            const uint32_t* heads = panel + groups.head_of(g) * PANEL;
            const uint32_t bit = groups.bit(g);
            float *scales = to->values, *offsets = scales + PANEL;
#pragma omp simd
            for (int64_t c = 0; c < PANEL; ++c) {
                const GroupScale own =
                    group_scale<form>(words[c] >> bit, words[c + SECOND], heads[c], zero);
                const float less = LESS == 0 ? 0.0f : own.scale * float(LESS);
                scales[c] = own.scale;
                if constexpr (HAS_OFFSETS) {
                    offsets[c] = own.offset - less;
                } else {
                    const int32_t own_zero = own.zero - LESS;
                    offsets[c] = ZEROS_FIRST ? bits_to_float(uint32_t(own_zero))
                                             : own.scale * float(own_zero);
                }
            }
        }
    });
}

}  // namespace mm
