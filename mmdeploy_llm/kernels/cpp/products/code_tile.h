// A tile of a product with codes, and the scales that it multiplies by, see codes.h.
#pragma once

#include <cstdint>
#include <type_traits>

#include "code_formats.h"
#include "code_rows.h"
#include "lanes.h"
#include "numbers.h"
#include "tiles.h"

namespace mm {

// The steps of a chunk that a tile adds: those of some rows and some columns of a panel. A tile moves
// on in it. Pointers are to what belongs to the first step, row and column.
template <typename X>
struct CodeSteps {
    const X* x;
    int64_t x_stride;  // between rows
    int64_t place;     // of the first row and step in what follows: between steps num_rows
    const float* x_scales;
    const float* less;
    const int32_t* starts;
    int64_t num_rows;
    const char* codes;
    int64_t units, step_units;
    const float* scales;  // PANEL further the offsets, or zeros as integers; between groups 2 PANEL
    int64_t group_left, group_steps;  // steps of the first group, and of others
    Prefetch prefetch;
    float* out;
};

// What a strip multiplies: `units` units from `unit` on of a panel.
struct ChunkOfCodes {
    const char* codes;
    int64_t unit, units;
    const uint32_t* words;  // scales of the panel
    const float* scales;    // those of the chunk's groups, if they have been read
};

// Stores a value that a tile soon reads. Without this GCC would collect two of them in a vector
// register, in which they would wait for the products that are being computed.
template <typename T>
MM_INLINE void put(T& field, T value) {
    field = value;
    asm volatile("" : "+m"(field));
}

constexpr int64_t HALVED_COLUMNS = 32;  // after which halved sums are added
constexpr int64_t BLOCK_UNITS = 4;  // between which lines are prefetched, at least

// What a tile does with the products of an operand.
template <typename Sums>
struct SumsOfParts {
    static constexpr bool ARE_HALVED = false;
    template <typename Format>
    static MM_INLINE void add(Sums& sums, int, Ints x, Ints w) {
        sums = Format::add(sums, x, w);
    }
    static MM_INLINE void keep(Sums& sums) { MM_KEEP(sums); }
};

#ifdef MM_HAS_AMX
template <>
struct SumsOfParts<HalvedSums> {
    static constexpr bool ARE_HALVED = true;
    template <typename Format>
    static MM_INLINE void add(HalvedSums& sums, int part, Ints x, Ints w) {
        Floats& own = part < Format::PARTS / 2 ? sums.low : sums.high;
        own = Format::add(own, x, w);
    }
    static MM_INLINE void keep(HalvedSums& sums) {
        MM_KEEP(sums.low);
        MM_KEEP(sums.high);
    }
};
MM_INLINE Floats whole(const HalvedSums& sums) { return sums.low + sums.high; }
#endif
template <typename Sums>
MM_INLINE Ints whole(const Sums& sums) {
    return as_ints(sums);
}

// The sums of a tile. Those of 16 bits hold few products, and are added to others of 32 bits in memory
// meanwhile; halved ones are added to others after as many products.
template <typename Format, int ROWS, int NUM, bool HAS_OFFSETS>
struct CodeTile {
    using Sums = typename Format::Sums;
    using Steps = CodeSteps<typename Format::X>;
    using Parts = SumsOfParts<Sums>;
    static constexpr bool ARE_SHORT = std::is_same_v<Sums, SignedHalves>;
    static constexpr bool ARE_SPILLED = ARE_SHORT || Parts::ARE_HALVED;
    // Whether the sums over all steps are kept in registers, beside those over one step.
    static constexpr bool KEEPS_SUMS =
        MM_VECTOR_BYTES == 64 && ROWS * NUM <= (Parts::ARE_HALVED ? 8 : 12);
    static constexpr int64_t LIMIT =
        ARE_SHORT ? small_quadruples(Format::CODE_BITS) / Format::PARTS
                  : (Parts::ARE_HALVED ? HALVED_COLUMNS / Format::PARTS : INT64_MAX / 2);
    using Wide = std::conditional_t<Parts::ARE_HALVED, Floats, Ints>;
    Sums sums[ROWS][NUM];
    Wide wide[ARE_SPILLED ? ROWS : 1][NUM];
    Floats all[KEEPS_SUMS ? ROWS : 1][NUM];

    template <typename Body>
    static MM_INLINE void each(const Body& body) {
        unrolled<ROWS * NUM>([&](auto i) MM_ALWAYS {
            body(std::integral_constant<int, i / NUM>(), std::integral_constant<int, i % NUM>());
        });
    }
    static MM_INLINE float* at(float* out, int r, int b) { return out + r * PANEL + b * LANES; }
    MM_INLINE void load(float* out) {
        if constexpr (KEEPS_SUMS) {
            each([&](auto r, auto b) MM_ALWAYS { all[r][b] = load_lanes<Floats>(at(out, r, b)); });
        }
    }
    MM_INLINE void store(float* out) {
        if constexpr (KEEPS_SUMS) {
            each([&](auto r, auto b) MM_ALWAYS { store_lanes(at(out, r, b), all[r][b]); });
        }
    }
    MM_INLINE void start(const Steps& steps) {
        each([&](auto r, auto b) MM_ALWAYS {
            if constexpr (Format::FLOAT_BITS) {
                sums[r][b] = splat(steps.x_scales + steps.place + r);
            } else if constexpr (Format::SECOND_EXCESS != 0) {
                sums[r][b] = splat(steps.starts + steps.place + r);
            } else {
                sums[r][b] = Sums{};
            }
            if constexpr (Format::ZEROS_FIRST && !HAS_OFFSETS) {
                const Ints zeros = load_lanes<Ints>(steps.scales + PANEL + b * LANES);
                const Ints own = splat(steps.starts + steps.place + r);
                sums[r][b] = add_pairs_at_once<Format::FLOAT_BITS>(sums[r][b], zeros, own);
            }
        });
    }
    MM_INLINE void add_unit(const char* x, int64_t x_stride, const char* codes) {
        unrolled<Format::PARTS>([&](auto part) MM_ALWAYS {
            if constexpr (ROWS == 1 && MM_VECTOR_BYTES == 32) {  // 8 sums leave no room for 8 operands
                const Ints four = splat(x + part * 4);
                unrolled<NUM>([&](auto b) MM_ALWAYS {
                    const Ints own = load_lanes<Ints>(codes + b * MM_VECTOR_BYTES);
                    Parts::template add<Format>(sums[0][b], part, four, Format::widen(own, part));
                    Parts::keep(sums[0][b]);
                    MM_IN_ORDER();
                });
                if (Format::RELOADS) asm("" : "+r"(codes));
                return;
            }
            Ints w[NUM];
            unrolled<NUM>([&](auto b) MM_ALWAYS {
                const Ints own = load_lanes<Ints>(codes + b * MM_VECTOR_BYTES);
                w[b] = OfRows<Format>::widen(own, part);
            });
            unrolled<ROWS>([&](auto r) MM_ALWAYS {
                const Ints four = splat(x + r * x_stride + part * 4);
                unrolled<NUM>([&](auto b) MM_ALWAYS {
                    Parts::template add<Format>(sums[r][b], part, four, w[b]);
                });
                MM_IN_ORDER();
            });
            each([&](auto r, auto b) MM_ALWAYS { Parts::keep(sums[r][b]); });
            // Makes the next part load the weights again, which is cheaper than to keep them.
            if (Format::RELOADS) asm("" : "+r"(codes));
        });
    }
    template <bool ADDS>
    MM_INLINE void widen() {
        each([&](auto r, auto b) MM_ALWAYS {
            wide[r][b] = ADDS ? wide[r][b] + whole(sums[r][b]) : whole(sums[r][b]);
            sums[r][b] = Sums{};
        });
    }
    // out += scale * x_scale * sum - offset * x_sum
    template <bool SPILLED>
    MM_INLINE void scale(const Steps& steps, float* out) {
        // Read once: for the compiler a store to `out` could change them.
        const float *x_scales = steps.x_scales + steps.place, *own_less = steps.less + steps.place;
        const float* own_scales = steps.scales;
        unrolled<ROWS>([&](auto r) MM_ALWAYS {
            const Floats x_scale = all_lanes(Format::ROUNDS ? x_scales[r] : 1.0f);
            const Floats less = all_lanes(own_less[r]);
            unrolled<NUM>([&](auto b) MM_ALWAYS {
                const float* scales = own_scales + b * LANES;
                Floats sum = value<SPILLED>(r, b), base;
                if constexpr (Format::FLOAT_BITS) {
                    sum = sum - x_scale;
                } else if constexpr (Format::ROUNDS) {
                    sum = sum * x_scale;
                }
                if constexpr (KEEPS_SUMS) {
                    base = all[r][b];
                } else {
                    base = load_lanes<Floats>(at(out, r, b));
                }
                if (HAS_OFFSETS) base = multiply_add_at(less, scales + PANEL, base);
                base = multiply_add_at(sum, scales, base);
                if constexpr (KEEPS_SUMS) {
                    all[r][b] = base;
                    MM_KEEP(all[r][b]);
                } else {
                    store_lanes(at(out, r, b), base);
                }
            });
        });
    }

  private:
    template <bool SPILLED>
    MM_INLINE Floats value(int r, int b) const {
        if constexpr (Parts::ARE_HALVED) {
            return SPILLED ? wide[r][b] + whole(sums[r][b]) : whole(sums[r][b]);
        } else if constexpr (std::is_same_v<Sums, Floats> || Format::FLOAT_BITS) {
            return (Floats)sums[r][b];
        } else {
            const Ints own = as_ints(sums[r][b]);
            return to_floats(SPILLED ? wide[r][b] + own : own);
        }
    }
};

// Adds to out [ROWS][NUM registers] for each step: the products with its codes, times the scales of x
// and of the weights, less the offsets. Never inlined, so that the sums stay in registers.
template <typename Format, int ROWS, int NUM, bool HAS_OFFSETS>
__attribute__((noinline)) void code_tile(CodeSteps<typename Format::X>& steps) {
    using Tile = CodeTile<Format, ROWS, NUM, HAS_OFFSETS>;
    using X = typename Format::X;
    constexpr bool IS_MATRIX = ROWS > 1 && IN_MATRICES<X>;
    const char* x = reinterpret_cast<const char*>(steps.x);
    const char* codes = steps.codes;
    const int64_t x_stride = steps.x_stride * sizeof(X);
    Tile tile;
    tile.load(steps.out);
    while (true) {
        tile.start(steps);
        bool is_spilled = false;
        const int64_t units = std::min(steps.units, steps.step_units);
        if constexpr (IS_MATRIX) {
            add_units<Format, ROWS, NUM>(reinterpret_cast<const X*>(x), steps.x_stride, codes, PANEL,
                                         units, steps.prefetch, tile.sums);
            x += units * (Format::PARTS * 4);
            codes += units * PANEL * 4;
        }
        for (int64_t unit = IS_MATRIX ? units : 0; unit < units;) {
            if constexpr (Tile::ARE_SPILLED) {
                if (unit > 0) is_spilled ? tile.template widen<true>() : tile.template widen<false>();
                is_spilled = unit > 0;
            }
            const int64_t every = steps.prefetch.every;
            const int64_t block = Tile::Parts::ARE_HALVED ? Tile::LIMIT : std::max(every, BLOCK_UNITS);
            const int64_t own = std::min(std::min(units - unit, block), Tile::LIMIT);
            if ((unit & (every - 1)) == 0) {
                steps.prefetch.next(std::max<int64_t>(own >> __builtin_ctzll(every), 1));
            }
            const char* end = x + own * (Format::PARTS * 4);
            unit += own;
            // What the inner loop does not need waits in memory: GCC would give it vector registers.
            asm volatile("" : "+m"(steps), "+m"(unit));
            do {
                tile.add_unit(x, x_stride, codes);
                x += Format::PARTS * 4;
                codes += PANEL * 4;
            } while (x != end);
            asm volatile("" : "+m"(steps), "+m"(unit));
        }
        is_spilled ? tile.template scale<Tile::ARE_SPILLED>(steps, steps.out)
                   : tile.template scale<false>(steps, steps.out);
        put(steps.units, steps.units - steps.step_units);
        if (steps.units <= 0) break;
        put(steps.place, steps.place + steps.num_rows);
        if (--steps.group_left == 0) {
            steps.scales += 2 * PANEL;
            steps.group_left = steps.group_steps;
        }
    }
    tile.store(steps.out);
}

// What the operands of a format are smaller by than the codes.
template <typename Format>
constexpr int32_t LESS = 0;
#ifdef MM_HAS_S8_DOT
template <>
constexpr int32_t LESS<S8Codes<8>> = HAS_SIGNED_WEIGHTS ? 128 : 0;
#endif

}  // namespace mm
