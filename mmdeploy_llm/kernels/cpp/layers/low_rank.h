// Adds the low-rank changes of adapters to products, for each row those of its own adapter:
//     out = (out + (scale * x a^T) b^T) * factor + shift
//
//     rows, sorted by adapter --> strips of up to 6 rows of one adapter
//       many strips: in parallel; few: their panels of 64 columns are, four at a time
//
// A matrix of the model holds `parts` of the checkpoint, such as q_proj, k_proj and v_proj. Each has
// `rank` columns of a, and its own columns of out. No result depends on other rows: every sum is
// formed in the order of k, then of the rank.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "../products/dot.h"
#include "../products/pack.h"
#include "../products/parallel.h"
#include "calls.h"

namespace mm {

constexpr int64_t LOW_RANK_PANEL = 64;  // columns of a tile of one row, so that b is read in order
constexpr int64_t PANELS_AT_ONCE = 4;
constexpr int64_t SMALL_B = 32 * 1024;  // values that one thread adds sooner than several

// A row of the table, whose fields cpu/low_rank.py fills in; see LowRank in calls.h.
struct LowRankEntry {
    int64_t a, b, scales, factor, shift;  // addresses
    int64_t rank;                         // of a part, a multiple of a unit's values
    int64_t columns;                      // of a: parts * rank, rounded up to 16
};

// Columns `first` .. `first + num` of out, which are of one part; `before`: columns of b before them.
struct LowRankPanel {
    int64_t part, first, num, before;
};

// Rows of one adapter.
struct LowRankStrip {
    const LowRankEntry* entry;
    const int64_t* rows;
    int64_t num;
};

inline std::vector<LowRankPanel> low_rank_panels(const LowRank& args) {
    std::vector<LowRankPanel> panels;
    int64_t before = 0;
    for (int64_t part = 0; part < args.parts; ++part) {
        const int64_t end = args.starts[part + 1];
        for (int64_t at = args.starts[part]; at < end; at += LOW_RANK_PANEL) {
            const int64_t num = std::min(LOW_RANK_PANEL, end - at);
            panels.push_back({part, at, num, before});
            before += round_up(num, BLOCK);
        }
    }
    return panels;
}

// Returns the rows that have an adapter which changes this matrix, sorted by it, as strips.
inline std::vector<LowRankStrip> low_rank_strips(const LowRank& args, std::vector<int64_t>& rows) {
    const auto* table = reinterpret_cast<const LowRankEntry*>(args.table);
    const auto entry = [&](int64_t row) { return table + args.slots[row]; };
    for (int64_t row = 0; row < args.rows; ++row) {
        const int32_t slot = args.slots[row];
        if (slot >= 0 && slot < args.num_slots && entry(row)->a != 0) rows.push_back(row);
    }
    const auto sooner = [&](int64_t one, int64_t other) { return entry(one) < entry(other); };
    if (!std::is_sorted(rows.begin(), rows.end(), sooner)) {
        std::stable_sort(rows.begin(), rows.end(), sooner);
    }
    std::vector<LowRankStrip> strips;
    for (size_t i = 0; i < rows.size(); ++i) {
        const LowRankEntry* own = entry(rows[i]);
        if (strips.empty() || strips.back().entry != own || strips.back().num == STRIP) {
            strips.push_back({own, rows.data() + i, 0});
        }
        ++strips.back().num;
    }
    return strips;
}

// hidden [num][columns] = x a^T of the rows of a strip, times the scales of the parts.
template <typename T>
void low_rank_hidden(const LowRank& args, const LowRankStrip& strip, Left<T>* hidden) {
    const LowRankEntry& own = *strip.entry;
    static thread_local std::vector<Left<T>> gathered;
    static thread_local std::vector<float> sums;
    sums.resize(STRIP * own.columns);
    const T* x = static_cast<const T*>(args.x);
    const bool is_adjacent = strip.rows[strip.num - 1] - strip.rows[0] == strip.num - 1;
    const auto multiply = [&](const Left<T>* left, int64_t stride) {
        dot<T>(left, stride, reinterpret_cast<const T*>(own.a), own.columns,
               args.k / UNIT_VALUES<T>, sums.data(), own.columns, strip.num, false);
    };
    if constexpr (std::is_same_v<Left<T>, T>) {
        if (is_adjacent) multiply(x + strip.rows[0] * args.x_stride, args.x_stride);
    }
    if (!std::is_same_v<Left<T>, T> || !is_adjacent) {
        gathered.resize(STRIP * args.k);
        for (int64_t i = 0; i < strip.num; ++i) {
            const T* from = x + strip.rows[i] * args.x_stride;
            Left<T>* to = gathered.data() + i * args.k;
#pragma omp simd
            for (int64_t c = 0; c < args.k; ++c) to[c] = convert<Left<T>>(from[c]);
        }
        multiply(gathered.data(), args.k);
    }
    const auto* scales = reinterpret_cast<const float*>(own.scales);
    for (int64_t i = 0; i < strip.num; ++i) {
        for (int64_t part = 0; part < args.parts; ++part) {
            const int64_t first = i * own.columns + part * own.rank;
            for (int64_t c = 0; c < own.rank; ++c) {
                hidden[first + c] = store<Left<T>>(sums[first + c] * scales[part]);
            }
        }
    }
}

// out += hidden b^T, for the rows of a strip and the columns of a panel.
template <typename T>
void low_rank_add(const LowRank& args, const LowRankStrip& strip, const LowRankPanel& panel,
                  const Left<T>* hidden) {
    const LowRankEntry& own = *strip.entry;
    const int64_t columns = round_up(panel.num, BLOCK);
    alignas(64) float sums[STRIP * LOW_RANK_PANEL];
    const T* b = reinterpret_cast<const T*>(own.b) + panel.before * own.rank;
    dot<T>(hidden + panel.part * own.rank, own.columns, b, columns, own.rank / UNIT_VALUES<T>, sums,
           columns, strip.num, false);
    const auto* factor = reinterpret_cast<const float*>(own.factor);
    const auto* shift = reinterpret_cast<const float*>(own.shift);
    for (int64_t i = 0; i < strip.num; ++i) {
        T* out = static_cast<T*>(args.out) + strip.rows[i] * args.out_stride + panel.first;
        const float* added = sums + i * columns;
        if (factor == nullptr && shift == nullptr) {
#pragma omp simd
            for (int64_t c = 0; c < panel.num; ++c) out[c] = store<T>(load(out[c]) + added[c]);
            continue;
        }
        for (int64_t c = 0; c < panel.num; ++c) {
            const int64_t column = panel.first + c;
            const float times = factor == nullptr ? 1.0f : factor[column];
            const float plus = shift == nullptr ? 0.0f : shift[column];
            out[c] = store<T>((load(out[c]) + added[c]) * times + plus);
        }
    }
}

template <typename T>
void low_rank(const LowRank& args) {
    std::vector<int64_t> rows;
    const std::vector<LowRankStrip> strips = low_rank_strips(args, rows);
    if (strips.empty()) return;
    const std::vector<LowRankPanel> panels = low_rank_panels(args);
    const int64_t num_strips = strips.size(), num_panels = panels.size();
    int64_t columns = 0, rank = 0;
    for (const LowRankStrip& strip : strips) {
        columns = std::max(columns, strip.entry->columns);
        rank = std::max(rank, strip.entry->rank);
    }
    if (num_strips >= 2 * args.num_threads) {
        parallel_for(num_strips, args.num_threads, [&](int64_t at) {
            static thread_local std::vector<Left<T>> hidden;
            hidden.resize(STRIP * columns);
            low_rank_hidden<T>(args, strips[at], hidden.data());
            for (const LowRankPanel& panel : panels) {
                low_rank_add<T>(args, strips[at], panel, hidden.data());
            }
        });
        return;
    }
    std::vector<Left<T>> hidden(num_strips * STRIP * columns);
    const auto of_strip = [&](int64_t at) { return hidden.data() + at * STRIP * columns; };
    parallel_for(num_strips, args.num_threads,
                 [&](int64_t at) { low_rank_hidden<T>(args, strips[at], of_strip(at)); });
    const int64_t num_values = num_strips * args.n * rank;
    const int64_t num_parts = (num_panels + PANELS_AT_ONCE - 1) / PANELS_AT_ONCE;
    parallel_for(num_strips * num_parts, num_values < SMALL_B ? 1 : args.num_threads,
                 [&](int64_t at) {
                     const int64_t own = at / num_parts, first = at % num_parts * PANELS_AT_ONCE;
                     const int64_t end = std::min(first + PANELS_AT_ONCE, num_panels);
                     for (int64_t panel = first; panel < end; ++panel) {
                         low_rank_add<T>(args, strips[own], panels[panel], of_strip(own));
                     }
                 });
}

}  // namespace mm
