// How codes of 8 bits lie in memory where a weight needs fewer: as the 4 lower bits of each and a plane
// of the others, or as places in a list of 16 codes. A product makes them whole a chunk at a time, in
// the cache, so that fewer bytes are read from memory.
//
//     form      a block of 32 codes of a row is words                            bits of a code
//     WHOLE     8: units, see codes.h                                            8
//     LISTED    4: word w holds unit 2 w, and unit 2 w + 1 in the upper 4 bits   4, of a list of 16
//     FIVE      4 such words, and one with bit 4 of unit j at bit j              5
//     SIX       4 such words, and two with bits 4 and 5 of units 4 h + i at      6
//               bits 2 i and 2 i + 1 of word 4 + h
//
// of each byte. Words of the 64 rows of a panel lie beside each other: [n / 64][k / 32][words][64].
#pragma once

#include <array>
#include <cstdint>
#include <type_traits>

#include "gemm.h"
#include "lanes.h"
#include "parallel.h"

namespace mm {

enum CodeForm : int32_t { WHOLE, LISTED, FIVE, SIX };

constexpr int64_t BLOCK_CODES = 32, UNITS_OF_BLOCK = BLOCK_CODES / 4;

// Calls run with the form, which is not WHOLE, as the type of its argument.
template <typename Run>
MM_INLINE auto with_code_form(CodeForm form, const Run& run) {
    if (form == LISTED) return run(std::integral_constant<CodeForm, LISTED>());
    if (form == FIVE) return run(std::integral_constant<CodeForm, FIVE>());
    return run(std::integral_constant<CodeForm, SIX>());
}

constexpr int64_t words_of_block(CodeForm form) {
    return form == LISTED ? 4 : form == FIVE ? 5 : form == SIX ? 6 : UNITS_OF_BLOCK;
}

// Returns the bits of each byte that are at FROM, moved to where `mask` has them, from bit 4 on.
template <int FROM, typename Word>
MM_INLINE Word high_bits(Word plane, uint32_t mask) {
    if constexpr (FROM < 4) {
        return (plane << uint32_t(4 - FROM)) & (Word{} + mask);
    } else {
        return (plane >> uint32_t(FROM - 4)) & (Word{} + mask);
    }
}

// Returns unit UNIT of a block in a form that is not WHOLE. word(i): its words, lanes or integers.
template <CodeForm FORM, int UNIT, typename Word, typename Load>
MM_INLINE Word stored_unit(const Load& word) {
    const Word low = (word(UNIT / 2) >> uint32_t(UNIT % 2 * 4)) & (Word{} + 0x0f0f0f0fu);
    if constexpr (FORM == FIVE) {
        return low | high_bits<UNIT>(word(4), 0x10101010u);
    } else if constexpr (FORM == SIX) {
        return low | high_bits<UNIT % 4 * 2>(word(4 + UNIT / 4), 0x30303030u);
    } else {
        return low;
    }
}

// Codes as they lie in memory. list: of LISTED, 16 codes.
struct StoredCodes {
    const char* data;
    CodeForm form;
    const uint8_t* list;

    int64_t unit_bytes() const { return words_of_block(form) * UNIT_BYTES / UNITS_OF_BLOCK; }

    // Returns a unit of the row whose first word is at `row`.
    uint32_t unit(const uint32_t* row, int64_t number) const {
        if (form == WHOLE) return row[number * PANEL];
        return with_code_form(form, [&](auto own) {
            const uint32_t* block = row + number / UNITS_OF_BLOCK * words_of_block(own) * PANEL;
            const auto word = [&](int i) { return block[i * PANEL]; };
            uint32_t found = 0;
            unrolled<UNITS_OF_BLOCK>([&](auto i) {
                if (number % UNITS_OF_BLOCK == i) found = stored_unit<own, i, uint32_t>(word);
            });
            return own == LISTED ? listed(found) : found;
        });
    }
    // Writes `units` units of a panel whose blocks begin at `from`, whole blocks.
    void expand(const char* from, int64_t units, uint32_t* to) const {
        with_code_form(form, [&](auto own) { expand_as<own>(from, units, to); });
    }

  private:
    uint32_t listed(uint32_t places) const {
        uint32_t found = 0;
        for (int i = 0; i < 32; i += 8) found |= uint32_t(list[places >> i & 15u]) << i;
        return found;
    }
    template <CodeForm FORM>
    __attribute__((noinline)) void expand_as(const char* from, int64_t units, uint32_t* to) const {
        const Ints codes = FORM == LISTED ? sixteen_bytes(list) : Ints{};
        for (int64_t block = 0; block < units / UNITS_OF_BLOCK; ++block) {
            for (int64_t c = 0; c < PANEL; c += LANES) {
                const auto word = [&](int i) MM_ALWAYS {
                    return load_lanes<Words>(from + (i * PANEL + c) * 4);
                };
                unrolled<UNITS_OF_BLOCK>([&](auto i) MM_ALWAYS {
                    Words unit = stored_unit<FORM, i, Words>(word);
                    if constexpr (FORM == LISTED) unit = (Words)bytes_at(codes, (Ints)unit);
                    store_lanes(to + i * PANEL + c, unit);
                });
            }
            from += words_of_block(FORM) * PANEL * 4;
            to += UNITS_OF_BLOCK * PANEL;
        }
    }
};

// Sets found[c] to 1 for each code c, of `num` bytes.
inline void find_codes(const uint8_t* codes, int64_t num, uint8_t* found, int num_threads) {
    parallel_parts(num, num_threads, [&](int64_t begin, int64_t end) {
        std::array<uint8_t, 256> own{};
        for (int64_t i = begin; i < end; ++i) own[codes[i]] = 1;
        for (int c = 0; c < 256; ++c) {
            if (own[c] != 0) __atomic_store_n(found + c, uint8_t(1), __ATOMIC_RELAXED);
        }
    });
}

// Stores panels of units, [panels][units][64], whole blocks, in a form with fewer bits: `places` of the
// codes, 256 of them, which are the codes themselves unless they are listed.
inline void store_codes(const uint32_t* from, int64_t panels, int64_t units, CodeForm form,
                        const uint8_t* places, uint32_t* to, int num_threads) {
    const int64_t num_words = words_of_block(form), blocks = units / UNITS_OF_BLOCK;
    parallel_for(panels * blocks, num_threads, [&](int64_t block) {
        const uint32_t* own = from + block * UNITS_OF_BLOCK * PANEL;
        uint32_t* words = to + block * num_words * PANEL;
        for (int64_t row = 0; row < PANEL; ++row, ++own, ++words) {
            uint32_t found[UNITS_OF_BLOCK] = {};
            for (int64_t j = 0; j < UNITS_OF_BLOCK; ++j) {
                const uint32_t unit = own[j * PANEL];
                uint32_t place = 0;
                for (int i = 0; i < 32; i += 8) place |= uint32_t(places[unit >> i & 255u]) << i;
                found[j / 2] |= (place & 0x0f0f0f0fu) << (j % 2 * 4);
                const uint32_t high = place >> 4;
                if (form == FIVE) found[4] |= (high & 0x01010101u) << j;
                if (form == SIX) found[4 + j / 4] |= (high & 0x03030303u) << (j % 4 * 2);
            }
            for (int64_t w = 0; w < num_words; ++w) words[w * PANEL] = found[w];
        }
    });
}

}  // namespace mm
