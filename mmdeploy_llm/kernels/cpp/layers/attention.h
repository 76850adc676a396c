// Attention of many sequences over keys and values in pages or in contiguous memory.
//
// A task is one tile of queries: some tokens of one sequence, with all query heads that share a key
// head as its rows; where these are few, with several key heads. It iterates over the keys that are
// visible to its tokens:
//
//     for tiles of keys
//       for key heads                              packed once for all rows
//         for strips of 6 rows                       16 with AMX
//           scores [rows][keys] = q k^T            products of T, sums of float
//           weights = exp(scores - running maximum)
//           out [rows][head_dim] = out * correction + weights v
//
// A token attends to the keys `first` .. `end` (exclusive); causal attention, sliding windows
// and images whose tokens attend to each other are all such ranges.
//
// Where a sequence has few rows and many keys, as in decode over a long context, each chunk of the
// keys is a task of its own, and the last task to finish merges them all. A task with more rows
// merges the same chunks one after the other: chunks, tiles and lanes begin and end at fixed
// positions of the sequence, so that a row's result depends neither on the other rows of its call
// nor on the number of threads.
//
// Keys and values in int8 are multiplied unscaled: their scales are applied to scores and weights.
// Those in four bits are decoded to the type of the queries first, see int4.h.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include "../products/amx.h"
#include "../products/dot.h"
#include "../products/numbers.h"
#include "../products/pack.h"
#include "../products/parallel.h"
#include "calls.h"
#include "int4.h"
#include "softmax.h"

namespace mm {

constexpr int64_t TILE_ROWS = 256;  // upper bound
constexpr int64_t TILE_KEYS = 128;
constexpr int64_t PART_KEYS = 1024;  // keys of a chunk: sums over them are formed apart
constexpr int64_t LANE_KEYS = 2 * BLOCK;  // a tile begins at a multiple, so that lanes stay the same
static_assert(PART_KEYS % TILE_KEYS == 0 && TILE_KEYS % LANE_KEYS == 0, "chunks have whole tiles");
constexpr int64_t FEW_ROWS = 64;

// How queries of type T are multiplied: strips of ROWS rows, UNITS units of depth at a time.
template <typename T>
struct StripOf {
    static constexpr int64_t ROWS = STRIP, UNITS = 1;
    struct Setup {};
};
#ifdef MM_HAS_AMX
template <>
struct StripOf<bf16> {
    static constexpr int64_t ROWS = TILE_ROWS_OF_X, UNITS = TILE_UNITS;
    using Setup = TileSetup;
};
#endif

template <typename T>
struct Scratch {
    // A strip may read and write rows after the last one.
    static constexpr int64_t ROWS = TILE_ROWS + StripOf<T>::ROWS - 1;
    alignas(64) Left<T> q[ROWS * MAX_HEAD_DIM];
    alignas(64) T keys[TILE_KEYS * MAX_HEAD_DIM];
    alignas(64) T values[TILE_KEYS * MAX_HEAD_DIM];
    alignas(64) T wide[2 * TILE_KEYS * MAX_HEAD_DIM];  // keys and values of fewer bits
    alignas(64) Left<T> weights[StripOf<T>::ROWS * TILE_KEYS];
    alignas(64) float scores[StripOf<T>::ROWS * TILE_KEYS];
    alignas(64) float key_scales[TILE_KEYS];
    alignas(64) float value_scales[TILE_KEYS];
    alignas(64) float out[ROWS * MAX_HEAD_DIM];
    alignas(64) float strip[StripOf<T>::ROWS * MAX_HEAD_DIM];
    alignas(64) float kept[TILE_ROWS * (MAX_HEAD_DIM + 2)];  // of the chunks so far, see fold
    RunningSoftmax softmax[TILE_ROWS];
};

template <typename T>
inline Scratch<T>& scratch() {
    static thread_local std::unique_ptr<Scratch<T>> own(new Scratch<T>);
    return *own;
}

// Adds the result of a chunk of keys to that of the chunks before it, both [columns + 2]: the sums of
// weighted values, the sum of weights and the maximum. Never inlined: one code for all callers.
__attribute__((noinline)) inline void fold(float* kept, const float* sums, float total,
                                           float maximum, int64_t columns) {
    if (total == 0.0f) return;  // no visible key in this chunk
    float& kept_total = kept[columns];
    float& kept_maximum = kept[columns + 1];
    const bool is_first = kept_total == 0.0f;
    const float largest = is_first ? maximum : std::max(kept_maximum, maximum);
    const float own = is_first ? 0.0f : fast_exp(kept_maximum - largest);
    const float other = fast_exp(maximum - largest);
    for (int64_t c = 0; c < columns; c += LANES) {
        const Floats before = load_lanes<Floats>(kept + c) * all_lanes(own);
        const Floats added = load_lanes<Floats>(sums + c);
        store_lanes(kept + c, multiply_add(added, all_lanes(other), before));
    }
    kept_total = kept_total * own + total * other;
    kept_maximum = largest;
}

// Adds the weight of a sink, a score without a value, to a row's sum of weights. It is added last, to
// the sum over all keys, so that chunks do not know of it. Never inlined, see fold.
__attribute__((noinline)) inline float with_sink(float total, float maximum, float sink) {
    return total + fast_exp(sink - maximum);
}

// The results of the chunks of one tile's keys, each [rows][columns + 2]; see fold.
struct Parts {
    int64_t num;
    int64_t stride;  // from part to part
    std::unique_ptr<float[]> found;
    std::atomic<int64_t> missing;

    Parts(int64_t parts, int64_t part_size)
        : num(parts), stride(part_size), found(new float[parts * part_size]), missing(parts) {}
};

// Some tokens of one sequence with some key heads, and the keys first .. end (exclusive).
struct Task {
    int64_t sequence;
    int64_t kv_head;
    int64_t num_kv_heads;
    int64_t first_token;
    int64_t num_tokens;
    int64_t first;
    int64_t end;
    Parts* parts = nullptr;  // null: these are all keys that are visible to the tokens
    int64_t part = 0;
};

template <typename T, typename C>
class AttentionTask {
    static constexpr bool IS_INT8 = std::is_same_v<C, int8_t>;
    static constexpr bool IS_INT4 = std::is_same_v<C, int4_pair>;

   public:
    AttentionTask(const Attend& args, const Task& task)
        : args_(args),
          task_(task),
          group_(args.num_heads / args.num_kv_heads),
          head_rows_(task.num_tokens * group_),
          rows_(task.num_kv_heads * head_rows_),
          columns_(round_up(args.head_dim, BLOCK)),
          depth_(round_up(args.head_dim, StripOf<T>::UNITS * UNIT_VALUES<T>)),
          own_(scratch<T>()),
          scaling_{args.scale, args.softcap, IS_INT8 ? own_.key_scales : nullptr,
                   IS_INT8 ? own_.value_scales : nullptr} {}

    void run() {
        [[maybe_unused]] const typename StripOf<T>::Setup setup;
        begin();
        for (int64_t first = task_.first; first < task_.end;) {
            const int64_t end = std::min(task_.end, (first / TILE_KEYS + 1) * TILE_KEYS);
            for (int64_t head = 0; head < task_.num_kv_heads; ++head) {
                load_tile(task_.kv_head + head, first, end - first);
                if (head + 1 < task_.num_kv_heads) {
                    prefetch(task_.kv_head + head + 1, first, end);
                } else {
                    prefetch(task_.kv_head, end, std::min(task_.end, end + TILE_KEYS));
                }
                add_tile(head * head_rows_, first, end);
            }
            first = end;
            if (first % PART_KEYS == 0 && first < task_.end) fold_rows();
        }
        if (task_.parts == nullptr) {
            finish();
        } else {
            keep();
            // The last task to arrive sees the results that all others have stored.
            if (task_.parts->missing.fetch_sub(1, std::memory_order_acq_rel) == 1) merge();
        }
    }

   private:
    int64_t token_of(int64_t row) const {
        return task_.first_token + row % head_rows_ / group_;
    }

    int64_t head_of(int64_t row) const {
        return (task_.kv_head + row / head_rows_) * group_ + row % group_;
    }

    void begin() {
        const T* q = static_cast<const T*>(args_.q);
        for (int64_t row = 0; row < rows_; ++row) {
            const T* from = q + token_of(row) * args_.q_stride + head_of(row) * args_.q_head_stride;
            Left<T>* to = own_.q + row * depth_;
#pragma omp simd
            for (int64_t c = 0; c < args_.head_dim; ++c) to[c] = convert<Left<T>>(from[c]);
            std::fill(to + args_.head_dim, to + depth_, Left<T>{});
        }
        clear();
        is_folded_ = false;
    }

    void clear() {
        for (int64_t row = 0; row < rows_; ++row) own_.softmax[row].begin();
        std::memset(own_.out, 0, rows_ * columns_ * sizeof(float));
    }

    float* kept_row(int64_t row) const { return own_.kept + row * (columns_ + 2); }

    // Adds the sums of a chunk of keys to those of earlier chunks and begins the next one.
    void fold_rows() {
        if (!is_folded_) std::memset(own_.kept, 0, rows_ * (columns_ + 2) * sizeof(float));
        is_folded_ = true;
        for (int64_t row = 0; row < rows_; ++row) {
            const RunningSoftmax& softmax = own_.softmax[row];
            fold(kept_row(row), own_.out + row * columns_, softmax.total(), softmax.maximum, columns_);
        }
        clear();
    }

    // Returns what to add to the index of key `key` to get its slot in the cache.
    int64_t shift_of(int64_t key) const {
        if (args_.block_tables == nullptr) return args_.query_starts[task_.sequence];
        const int64_t page = key / args_.block_size;
        const int64_t block = args_.block_tables[task_.sequence * args_.table_stride + page];
        return (block - page) * args_.block_size;
    }

    // Calls place(key, slot in the cache) for every key first .. end.
    template <typename Place>
    void for_places(int64_t first, int64_t end, const Place& place) const {
        while (first < end) {
            const int64_t shift = shift_of(first);
            int64_t page_end = end;
            if (args_.block_tables != nullptr) {
                page_end = std::min(end, (first / args_.block_size + 1) * args_.block_size);
            }
            for (; first < page_end; ++first) place(first, first + shift);
        }
    }

    void load_tile(int64_t kv_head, int64_t first, int64_t count) {
        const T* key_rows[TILE_KEYS];
        const T* value_rows[TILE_KEYS];
        for_places(first, first + count, [&](int64_t key, int64_t place) {
            const int64_t i = key - first;
            key_rows[i] = row_of(args_.keys, args_.key_scales, kv_head, place, i);
            value_rows[i] = row_of(args_.values, args_.value_scales, kv_head, place, TILE_KEYS + i);
            if constexpr (IS_INT8) {
                const int64_t at = place * args_.num_kv_heads + kv_head;
                own_.key_scales[i] = static_cast<const float*>(args_.key_scales)[at];
                own_.value_scales[i] = static_cast<const float*>(args_.value_scales)[at];
            }
        });
        const int64_t columns = round_up(count, 2 * BLOCK);
        pack_keys(key_rows, count, args_.head_dim / UNIT_VALUES<T>, own_.keys, columns);
        pack_values(value_rows, count, args_.head_dim, own_.values, columns_);
        // The units that complete the last step of a product.
        std::fill(own_.keys + args_.head_dim * columns, own_.keys + depth_ * columns, T{});
        const int64_t keys = round_up(count, UNIT_VALUES<T>);
        const int64_t whole = round_up(count, StripOf<T>::UNITS * UNIT_VALUES<T>);
        std::fill(own_.values + keys * columns_, own_.values + whole * columns_, T{});
    }

    // Returns how many values of type C a head has.
    int64_t head_size() const { return IS_INT4 ? args_.head_dim / 2 : args_.head_dim; }

    const C* cache_row(const void* cache, int64_t kv_head, int64_t place) const {
        return static_cast<const C*>(cache) + place * args_.kv_stride + kv_head * head_size();
    }

    const T* row_of(const void* cache, const void* scales, int64_t kv_head, int64_t place,
                    int64_t slot) {
        const C* row = cache_row(cache, kv_head, place);
        [[maybe_unused]] T* wide = own_.wide + slot * args_.head_dim;
        if constexpr (IS_INT8) {
#pragma omp simd
            for (int64_t c = 0; c < args_.head_dim; ++c) wide[c] = exact<T>(row[c]);
            return wide;
        } else if constexpr (IS_INT4) {
            const int64_t at = (place * args_.num_kv_heads + kv_head) * num_ranges(args_.head_dim);
            decode_head(row, static_cast<const bf16*>(scales) + at, args_.head_dim, wide);
            return wide;
        } else {
            return row;
        }
    }

    // Only a few bytes of each token belong to one head, which the processor's own prefetcher does
    // not recognise.
    void prefetch(int64_t kv_head, int64_t first, int64_t end) const {
        const int64_t size = head_size() * int64_t(sizeof(C));
        for_places(first, end, [&](int64_t, int64_t place) {
            const C* key = cache_row(args_.keys, kv_head, place);
            const C* value = cache_row(args_.values, kv_head, place);
            for (int64_t at = 0; at < size; at += 64) {
                __builtin_prefetch(reinterpret_cast<const char*>(key) + at);
                __builtin_prefetch(reinterpret_cast<const char*>(value) + at);
            }
        });
    }

    // Adds the tile's keys first .. end to the rows of one key head.
    void add_tile(int64_t row, int64_t first, int64_t end) {
        const int64_t strips = (head_rows_ + StripOf<T>::ROWS - 1) / StripOf<T>::ROWS;
        for (int64_t strip = 0; strip < strips; ++strip) {
            const int64_t count = even_part(head_rows_, strips, strip);
            add_strip(row, count, first, end);
            row += count;
        }
    }

    void add_strip(int64_t row, int64_t count, int64_t first, int64_t end) {
        int64_t least = end, most = first;
        for (int64_t token = token_of(row); token <= token_of(row + count - 1); ++token) {
            least = std::min(least, args_.first_visible[token]);
            most = std::max(most, args_.end_visible[token]);
        }
        if (least >= end || most <= first) return;
        const int64_t columns = round_up(end - first, 2 * BLOCK);
        const Left<T>* q = own_.q + row * depth_;
        multiply(q, depth_, own_.keys, columns, args_.head_dim / UNIT_VALUES<T>, own_.scores, count,
                 false);
        for (int64_t i = 0; i < count; ++i) weigh(row + i, i, first, end, columns);
        const int64_t units = (end - first + UNIT_VALUES<T> - 1) / UNIT_VALUES<T>;
        multiply(own_.weights, TILE_KEYS, own_.values, columns_, units, own_.out + row * columns_,
                 count, true);
    }

    // out [count][columns] = left * right, or out += left * right.
    void multiply(const Left<T>* left, int64_t left_stride, const T* right, int64_t columns,
                  int64_t units, float* out, int64_t count, bool adds) {
#ifdef MM_HAS_AMX
        if constexpr (std::is_same_v<T, bf16>) {
            // Tiles are whole; rows of others, which must stay as they are, may follow in `out`.
            float* to = count == TILE_ROWS_OF_X || !adds ? out : own_.strip;
            dot_in_tiles(left, left_stride, right, columns, units, out, to, columns, adds);
            if (to != out) std::memcpy(out, to, count * columns * sizeof(float));
            return;
        }
#endif
        dot<T>(left, left_stride, right, columns, units, out, columns, count, adds);
    }

    void weigh(int64_t row, int64_t place, int64_t first, int64_t end, int64_t columns) {
        const int64_t token = token_of(row);
        const int64_t from = std::max<int64_t>(args_.first_visible[token] - first, 0);
        const int64_t to = std::min(args_.end_visible[token], end) - first;
        Left<T>* weights = own_.weights + place * TILE_KEYS;
        if (from >= to) {
            std::memset(weights, 0, columns * sizeof(Left<T>));
            return;
        }
        const float slope = args_.slopes == nullptr ? 0.0f : args_.slopes[head_of(row)];
        const Bias bias{slope, args_.bias_factor, args_.rounds_biases != 0};
        const float correction =
            weigh_row<T>(own_.scores + place * columns, from, to, columns, scaling_, bias, first,
                         own_.softmax[row], weights);
        if (correction == 1.0f) return;
        float* out = own_.out + row * columns_;
#pragma omp simd
        for (int64_t c = 0; c < columns_; ++c) out[c] *= correction;
    }

    void write(int64_t row, const float* sums, float total, float maximum) {
        if (args_.sinks != nullptr && total != 0.0f) {
            total = with_sink(total, maximum, args_.sinks[head_of(row)]);
        }
        T* result = static_cast<T*>(args_.out) +
                    (token_of(row) * args_.num_heads + head_of(row)) * args_.head_dim;
        const float factor = total != 0.0f ? 1.0f / total : 0.0f;  // 0 for a row without keys
#pragma omp simd
        for (int64_t c = 0; c < args_.head_dim; ++c) result[c] = store<T>(sums[c] * factor);
    }

    void write_kept(int64_t row) {
        const float* kept = kept_row(row);
        write(row, kept, kept[columns_], kept[columns_ + 1]);
    }

    void finish() {
        if (is_folded_) fold_rows();
        for (int64_t row = 0; row < rows_; ++row) {
            if (is_folded_) {
                write_kept(row);
            } else {
                const RunningSoftmax& softmax = own_.softmax[row];
                write(row, own_.out + row * columns_, softmax.total(), softmax.maximum);
            }
        }
    }

    void keep() {
        float* found = task_.parts->found.get() + task_.part * task_.parts->stride;
        for (int64_t row = 0; row < rows_; ++row, found += columns_ + 2) {
            std::memcpy(found, own_.out + row * columns_, columns_ * sizeof(float));
            found[columns_] = own_.softmax[row].total();
            found[columns_ + 1] = own_.softmax[row].maximum;
        }
    }

    void merge() {
        const Parts& parts = *task_.parts;
        std::memset(own_.kept, 0, rows_ * (columns_ + 2) * sizeof(float));
        for (int64_t row = 0; row < rows_; ++row) {
            const float* found = parts.found.get() + row * (columns_ + 2);
            for (int64_t part = 0; part < parts.num; ++part, found += parts.stride) {
                fold(kept_row(row), found, found[columns_], found[columns_ + 1], columns_);
            }
            write_kept(row);
        }
    }

    const Attend& args_;
    const Task& task_;
    const int64_t group_;
    const int64_t head_rows_;  // rows of one key head
    const int64_t rows_;
    const int64_t columns_;
    const int64_t depth_;  // head_dim, completed by zeros to whole steps of a product
    Scratch<T>& own_;
    const Scaling scaling_;
    bool is_folded_ = false;  // whether own_.kept holds earlier chunks of the keys
};

// The tasks of a call, head by head, so that a head's keys stay in the cache for all its tiles. The
// last tiles come first, because in causal attention they have the most keys.
class Tasks {
   public:
    explicit Tasks(const Attend& args)
        : args_(args), group_(args.num_heads / args.num_kv_heads) {
        merges_heads_ = num_parts() >= 4 * args.num_threads;
        while (tile_rows_ > FEW_ROWS && num_tiles() < 4 * args.num_threads) tile_rows_ /= 2;
        for (int64_t sequence = 0; sequence < args.num_sequences; ++sequence) add(sequence);
    }

    const std::vector<Task>& all() const { return tasks_; }

   private:
    int64_t tile_tokens() const { return std::max<int64_t>(1, tile_rows_ / group_); }

    int64_t num_tiles() const {
        int64_t num = 0;
        for (int64_t sequence = 0; sequence < args_.num_sequences; ++sequence) {
            const int64_t count = args_.query_starts[sequence + 1] - args_.query_starts[sequence];
            num += (count + tile_tokens() - 1) / tile_tokens();
        }
        return num * args_.num_kv_heads;
    }

    // Counts the chunks of keys of all sequences with few rows.
    int64_t num_parts() const {
        int64_t num = 0;
        for (int64_t sequence = 0; sequence < args_.num_sequences; ++sequence) {
            const int64_t begin = args_.query_starts[sequence];
            const int64_t end = args_.query_starts[sequence + 1];
            if (end > begin && (end - begin) * group_ <= FEW_ROWS) {
                num += (args_.end_visible[end - 1] + PART_KEYS - 1) / PART_KEYS;
            }
        }
        return num;
    }

    void add(int64_t sequence) {
        const int64_t begin = args_.query_starts[sequence];
        const int64_t count = args_.query_starts[sequence + 1] - begin;
        if (count == 0) return;
        const int64_t tokens = tile_tokens();
        const bool is_split = count * group_ <= FEW_ROWS;
        // Keys of all heads are adjacent in memory, so a task of few rows reads several heads at
        // once if that leaves enough tasks for the threads.
        int64_t heads = 1;
        if (is_split && merges_heads_) {
            heads = std::max<int64_t>(1, TILE_ROWS / (count * group_));
        }
        std::vector<Task> tiles;
        for (int64_t token = (count - 1) / tokens * tokens; token >= 0; token -= tokens) {
            Task tile{sequence, 0, 0, begin + token, std::min(tokens, count - token), INT64_MAX, 0};
            for (int64_t i = tile.first_token; i < tile.first_token + tile.num_tokens; ++i) {
                tile.first = std::min(tile.first, args_.first_visible[i]);
                tile.end = std::max(tile.end, args_.end_visible[i]);
            }
            tile.first = tile.first / LANE_KEYS * LANE_KEYS;
            tiles.push_back(tile);
        }
        for (int64_t head = 0; head < args_.num_kv_heads; head += heads) {
            for (Task tile : tiles) {
                tile.kv_head = head;
                tile.num_kv_heads = std::min(heads, args_.num_kv_heads - head);
                if (is_split) {
                    add_parts(tile);
                } else {
                    tasks_.push_back(tile);
                }
            }
        }
    }

    void add_parts(Task tile) {
        const int64_t first = tile.first / PART_KEYS;
        const int64_t num = (tile.end + PART_KEYS - 1) / PART_KEYS - first;
        if (num > 1) {
            const int64_t columns = round_up(args_.head_dim, BLOCK);
            const int64_t rows = tile.num_kv_heads * tile.num_tokens * group_;
            parts_.emplace_back(new Parts(num, rows * (columns + 2)));
            tile.parts = parts_.back().get();
        }
        const Task whole = tile;
        for (int64_t part = 0; part < std::max<int64_t>(num, 1); ++part) {
            tile.part = part;
            tile.first = std::max(whole.first, (first + part) * PART_KEYS);
            tile.end = std::min(whole.end, (first + part + 1) * PART_KEYS);
            tasks_.push_back(tile);
        }
    }

    const Attend& args_;
    const int64_t group_;
    int64_t tile_rows_ = TILE_ROWS;
    bool merges_heads_;
    std::vector<Task> tasks_;
    std::vector<std::unique_ptr<Parts>> parts_;
};

template <typename T, typename C>
void attend(const Attend& args) {
    const Tasks tasks(args);
    parallel_for(int64_t(tasks.all().size()), args.num_threads,
                 [&](int64_t task) { AttentionTask<T, C>(args, tasks.all()[task]).run(); });
}

// Writes keys or values [tokens][num_kv_heads][head_dim] of a step to their slots in the cache.
// scales: see Attend.
template <typename T, typename C>
void write_cache(const T* rows, int64_t row_stride, C* cache, void* scales, const int64_t* slots,
                 int64_t tokens, int64_t num_kv_heads, int64_t head_dim, int num_threads) {
    const int64_t head_size = std::is_same_v<C, int4_pair> ? head_dim / 2 : head_dim;
    parallel_parts(tokens, num_threads, [&](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; ++token) {
            for (int64_t head = 0; head < num_kv_heads; ++head) {
                const T* row = rows + token * row_stride + head * head_dim;
                const int64_t place = slots[token] * num_kv_heads + head;
                C* out = cache + place * head_size;
                if constexpr (std::is_same_v<C, int4_pair>) {
                    bf16* ranges = static_cast<bf16*>(scales) + place * num_ranges(head_dim);
                    encode_head(row, head_dim, out, ranges);
                } else if constexpr (std::is_same_v<C, int8_t>) {
                    static_cast<float*>(scales)[place] = quantize(row, head_dim, out);
                } else {
#pragma omp simd
                    for (int64_t c = 0; c < head_dim; ++c) out[c] = store<C>(load(row[c]));
                }
            }
        }
    });
}

}  // namespace mm
