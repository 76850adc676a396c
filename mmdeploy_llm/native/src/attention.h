// Attention of many sequences over keys and values that lie in pages or in one piece.
//
// A task is one tile of queries: a few tokens of one sequence, and of each all query heads that
// share a key head, as rows side by side. It walks over the keys that its tokens see, a tile at a
// time, with the softmax computed on the way (Milakov and Gimelshein, 2018):
//
//     scores [rows][keys] = q k^T        products of T, sums of float
//     weights = exp(scores - running maximum)
//     out [rows][head_dim] = out * correction + weights v
//
// Each token sees keys `first` .. `behind`; causal attention, sliding windows and images whose
// tokens see each other are all such ranges.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include "dot.h"
#include "numbers.h"
#include "pack.h"
#include "parallel.h"

namespace mm {

constexpr int64_t TILE_ROWS = 64;
constexpr int64_t TILE_KEYS = 64;
constexpr int64_t MAX_HEAD_DIM = 512;

// Pointers to host memory; strides in values.
struct AttentionArgs {
    const void* q;           // [tokens][num_heads][head_dim]
    int64_t q_stride;        // from token to token
    const void* keys;        // pages: [blocks][block_size][num_kv_heads][head_dim]; else [tokens]
    const void* values;      // [num_kv_heads][head_dim]
    int64_t kv_stride;       // from token to token
    const float* key_scales;    // of keys and values in int8, [blocks][block_size][num_kv_heads]
    const float* value_scales;
    void* out;               // [tokens][num_heads][head_dim]
    const int32_t* block_tables;  // [sequences][table_stride]; null: keys lie in one piece
    int64_t table_stride;
    int64_t block_size;
    const int64_t* query_starts;  // [sequences + 1], the first token of each sequence
    const int64_t* first_seen;    // [tokens], of the sequence's keys
    const int64_t* behind_seen;   // [tokens]
    int64_t num_sequences;
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_dim;
    float scale;
    float softcap;  // 0: none
    int32_t num_threads;
};

template <typename T>
struct Scratch {
    alignas(64) T q[TILE_ROWS * MAX_HEAD_DIM];
    alignas(64) T keys[TILE_KEYS * MAX_HEAD_DIM];
    alignas(64) T values[TILE_KEYS * MAX_HEAD_DIM];
    alignas(64) T wide[2 * TILE_KEYS * MAX_HEAD_DIM];  // keys and values that were int8
    alignas(64) T weights[TILE_ROWS * TILE_KEYS];
    alignas(64) float scores[TILE_ROWS * TILE_KEYS];
    alignas(64) float out[TILE_ROWS * MAX_HEAD_DIM];
    float maxima[TILE_ROWS];
    float sums[TILE_ROWS];
};

template <typename T>
inline Scratch<T>& scratch() {
    static thread_local std::unique_ptr<Scratch<T>> own(new Scratch<T>);
    return *own;
}

struct QueryTile {
    int64_t sequence;
    int64_t first_token;
    int64_t num_tokens;
};

template <typename T, typename C>
class AttentionTask {
   public:
    AttentionTask(const AttentionArgs& args, const QueryTile& tile, int64_t kv_head)
        : args_(args),
          tile_(tile),
          kv_head_(kv_head),
          group_(args.num_heads / args.num_kv_heads),
          rows_(tile.num_tokens * group_),
          columns_(round_up(args.head_dim, LANES)),
          own_(scratch<T>()) {}

    void run() {
        begin();
        int64_t first = INT64_MAX, behind = 0;
        for (int64_t token = tile_.first_token; token < tile_.first_token + tile_.num_tokens;
             ++token) {
            first = std::min(first, args_.first_seen[token]);
            behind = std::max(behind, args_.behind_seen[token]);
        }
        while (first < behind) {
            const int64_t count = tile_keys(first, behind);
            load_tile(first, count);
            score(count);
            weigh(first, count);
            add_values(count);
            first += count;
        }
        finish();
    }

   private:
    void begin() {
        const T* q = static_cast<const T*>(args_.q);
        for (int64_t row = 0; row < rows_; ++row) {
            const int64_t token = tile_.first_token + row / group_;
            const int64_t head = kv_head_ * group_ + row % group_;
            std::memcpy(own_.q + row * args_.head_dim,
                        q + token * args_.q_stride + head * args_.head_dim,
                        args_.head_dim * sizeof(T));
            own_.maxima[row] = -INFINITY;
            own_.sums[row] = 0.0f;
        }
        std::memset(own_.out, 0, rows_ * columns_ * sizeof(float));
    }

    // Keys of the next tile: none beyond the page that key `first` lies in.
    int64_t tile_keys(int64_t first, int64_t behind) const {
        int64_t end = std::min(behind, first + TILE_KEYS);
        if (args_.block_tables != nullptr) {
            end = std::min(end, (first / args_.block_size + 1) * args_.block_size);
        }
        return end - first;
    }

    // The token's place in the cache.
    int64_t place(int64_t key) const {
        if (args_.block_tables == nullptr) return args_.query_starts[tile_.sequence] + key;
        const int32_t* table = args_.block_tables + tile_.sequence * args_.table_stride;
        return int64_t(table[key / args_.block_size]) * args_.block_size + key % args_.block_size;
    }

    void load_tile(int64_t first, int64_t count) {
        const T* key_rows[TILE_KEYS];
        const T* value_rows[TILE_KEYS];
        const int64_t begin = place(first);
        for (int64_t i = 0; i < count; ++i) {
            key_rows[i] = row_of(args_.keys, args_.key_scales, begin + i, own_.wide, i);
            value_rows[i] =
                row_of(args_.values, args_.value_scales, begin + i, own_.wide, TILE_KEYS + i);
        }
        pack_keys(key_rows, count, args_.head_dim, own_.keys, round_up(count, LANES));
        pack_values(value_rows, count, args_.head_dim, own_.values, columns_);
    }

    const T* row_of(const void* cache, const float* scales, int64_t place, T* wide, int64_t slot) {
        const C* row =
            static_cast<const C*>(cache) + place * args_.kv_stride + kv_head_ * args_.head_dim;
        if constexpr (sizeof(C) == 1) {
            const float scale = scales[place * args_.num_kv_heads + kv_head_];
            T* out = wide + slot * args_.head_dim;
#pragma omp simd
            for (int64_t c = 0; c < args_.head_dim; ++c) out[c] = store<T>(float(row[c]) * scale);
            return out;
        } else {
            return row;
        }
    }

    void score(int64_t count) {
        const int64_t columns = round_up(count, LANES);
        std::memset(own_.scores, 0, rows_ * columns * sizeof(float));
        dot(own_.q, args_.head_dim, own_.keys, columns, args_.head_dim, own_.scores, columns,
            rows_);
    }

    // Scores -> weights; what was summed before is corrected for the new maximum.
    void weigh(int64_t first, int64_t count) {
        const int64_t columns = round_up(count, LANES);
        for (int64_t row = 0; row < rows_; ++row) {
            const int64_t token = tile_.first_token + row / group_;
            const int64_t from = std::max<int64_t>(args_.first_seen[token] - first, 0);
            const int64_t to = std::min<int64_t>(args_.behind_seen[token] - first, count);
            float* scores = own_.scores + row * columns;
            T* weights = own_.weights + row * TILE_KEYS;
            float maximum = own_.maxima[row];
            if (from >= to) {
                for (int64_t c = 0; c < columns; ++c) weights[c] = store<T>(0.0f);
                continue;
            }
            scale_scores(scores + from, to - from);
#pragma omp simd reduction(max : maximum)
            for (int64_t c = from; c < to; ++c) maximum = std::max(maximum, scores[c]);
            for (int64_t c = 0; c < from; ++c) scores[c] = -INFINITY;
            for (int64_t c = to; c < columns; ++c) scores[c] = -INFINITY;
            float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
            for (int64_t c = 0; c < columns; ++c) {
                const float weight = fast_exp(scores[c] - maximum);
                sum += weight;
                weights[c] = store<T>(weight);
            }
            const float correction = fast_exp(own_.maxima[row] - maximum);
            if (correction != 1.0f) {
                float* out = own_.out + row * columns_;
#pragma omp simd
                for (int64_t c = 0; c < columns_; ++c) out[c] *= correction;
            }
            own_.sums[row] = own_.sums[row] * correction + sum;
            own_.maxima[row] = maximum;
        }
    }

    void scale_scores(float* scores, int64_t count) const {
        if (args_.softcap == 0.0f) {
#pragma omp simd
            for (int64_t c = 0; c < count; ++c) scores[c] *= args_.scale;
        } else {
            const float factor = args_.scale / args_.softcap;
#pragma omp simd
            for (int64_t c = 0; c < count; ++c) {
                scores[c] = args_.softcap * fast_tanh(scores[c] * factor);
            }
        }
    }

    void add_values(int64_t count) {
        dot(own_.weights, TILE_KEYS, own_.values, columns_, round_up(count, 2), own_.out, columns_,
            rows_);
    }

    void finish() {
        T* out = static_cast<T*>(args_.out);
        for (int64_t row = 0; row < rows_; ++row) {
            const int64_t token = tile_.first_token + row / group_;
            const int64_t head = kv_head_ * group_ + row % group_;
            T* result = out + (token * args_.num_heads + head) * args_.head_dim;
            const float* sums = own_.out + row * columns_;
            const float factor = own_.sums[row] > 0.0f ? 1.0f / own_.sums[row] : 0.0f;
#pragma omp simd
            for (int64_t c = 0; c < args_.head_dim; ++c) result[c] = store<T>(sums[c] * factor);
        }
    }

    const AttentionArgs& args_;
    const QueryTile& tile_;
    const int64_t kv_head_;
    const int64_t group_;
    const int64_t rows_;
    const int64_t columns_;
    Scratch<T>& own_;
};

inline std::vector<QueryTile> query_tiles(const AttentionArgs& args) {
    const int64_t group = args.num_heads / args.num_kv_heads;
    const int64_t tokens = std::max<int64_t>(1, TILE_ROWS / group);
    std::vector<QueryTile> tiles;
    for (int64_t sequence = 0; sequence < args.num_sequences; ++sequence) {
        const int64_t end = args.query_starts[sequence + 1];
        for (int64_t token = args.query_starts[sequence]; token < end; token += tokens) {
            tiles.push_back({sequence, token, std::min(tokens, end - token)});
        }
    }
    return tiles;
}

template <typename T, typename C>
void attend(const AttentionArgs& args) {
    const std::vector<QueryTile> tiles = query_tiles(args);
    const int64_t num = int64_t(tiles.size()) * args.num_kv_heads;
    parallel_for(num, args.num_threads, [&](int64_t task) {
        const QueryTile& tile = tiles[task / args.num_kv_heads];
        AttentionTask<T, C>(args, tile, task % args.num_kv_heads).run();
    });
}

// Keys or values [tokens][num_kv_heads][head_dim] of a step to their slots in the cache.
template <typename T, typename C>
void write_cache(const T* rows, int64_t row_stride, C* cache, float* scales, const int64_t* slots,
                 int64_t tokens, int64_t num_kv_heads, int64_t head_dim, int num_threads) {
    parallel_parts(tokens, num_threads, [&](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; ++token) {
            for (int64_t head = 0; head < num_kv_heads; ++head) {
                const T* row = rows + token * row_stride + head * head_dim;
                const int64_t place = slots[token] * num_kv_heads + head;
                C* out = cache + place * head_dim;
                if constexpr (sizeof(C) == 1) {
                    float largest = 0.0f;
#pragma omp simd reduction(max : largest)
                    for (int64_t c = 0; c < head_dim; ++c) {
                        largest = std::max(largest, std::fabs(load(row[c])));
                    }
                    const float scale = largest / 127.0f;
                    const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
                    for (int64_t c = 0; c < head_dim; ++c) {
                        out[c] = C(std::nearbyint(load(row[c]) * inverse));
                    }
                    scales[place] = scale;
                } else {
#pragma omp simd
                    for (int64_t c = 0; c < head_dim; ++c) out[c] = store<C>(load(row[c]));
                }
            }
        }
    });
}

}  // namespace mm
