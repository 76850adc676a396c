// The calls that Python makes: for each a struct of its arguments and a line in a list at the end,
// from which a .cpp file defines `void mm_NAME(const void* args)`. calls.py reads this file too, so
// that both sides have one list. It knows fields of the form `type name;` or `type* name;`, one a
// line.
//
// Pointers are to host memory; strides and sizes count values, where nothing else is said. Rows are
// a stride apart and contiguous in themselves; what has no stride is contiguous. Nothing is
// checked.
//
// dtype: of what pointers to void point to; 0 is float, 1 bf16; of a cache also 2 int8, 3 int4.
// num_threads: how many threads compute. A null pointer leaves out what its comment calls optional.
#pragma once

#include <cstdint>

namespace mm {

// out = rows `ids` of a matrix; NaN for one that it does not have.
struct LookUp {
    const int64_t* ids;   // [tokens]
    const void* weights;  // [n][row_bytes], or panels of it, see gemm.h
    int64_t n;
    int64_t row_bytes;
    int64_t panel;  // rows of a panel: 64, or 1 where rows are contiguous
    void* out;      // [tokens][row_bytes]
    int64_t tokens;
    int32_t num_threads;
};

// The same of a matrix in few bits, see codes.h, dequantised.
struct LookUpCodes {
    int32_t dtype;        // of out
    int32_t bits;         // of a code: 4 or 8
    int32_t scale_form;   // of groups, and the zero of all groups times 256, see code_scales.h
    int32_t code_form;    // see stored_codes.h
    int32_t is_float8;    // whether codes are floats of 8 bits
    int32_t is_s8;        // whether codes are those of PackS8, and scales those of QuantizeRows
    const int64_t* ids;   // [tokens]
    const void* codes;    // [n / 64][units][64], or as code_form says
    const uint8_t* list;  // [16], of the codes that code_form lists; optional
    const void* scales;   // [n / 64][see codes.h][64] words; of is_s8 [2][n] floats
    int64_t group;        // columns of a group
    int64_t n;
    int64_t k;
    void* out;  // [tokens][k]
    int64_t tokens;
    int32_t num_threads;
};

// out = ids, with `to` in the place of `from`.
struct ReplaceId {
    const int64_t* ids;  // [tokens]
    int64_t from;
    int64_t to;
    int64_t* out;  // [tokens]
    int64_t tokens;
};

// out = x in float.
struct Widen {
    const void* x;  // [values] bf16
    float* out;     // [values]
    int64_t values;
    int32_t num_threads;
};

// sum = sum + x, or + x * sigmoid(gate).
struct AddRows {
    int32_t dtype;
    const void* x;  // [rows][size]
    int64_t x_stride;
    const void* gate;  // [rows]; optional
    void* sum;         // [rows][size]
    int64_t rows;
    int64_t size;
    int32_t num_threads;
};

// out = the values of each row at `columns`.
struct TakeColumns {
    int32_t dtype;
    const int64_t* columns;  // [size]
    const void* x;           // [rows][size]
    int64_t x_stride;
    void* out;  // [rows][size]
    int64_t rows;
    int64_t size;
    int32_t num_threads;
};

// Angles of rotary embeddings: cos and sin of position * frequency, times `scale`.
struct Angles {
    const int64_t* positions;  // [tokens], or [axes][stride] with `axes`
    int64_t stride;            // from axis to axis
    const int64_t* axes;       // [pairs], the axis of each pair; optional
    const float* frequencies;  // [pairs], or [2][pairs] with `is_long`
    const bool* is_long;       // [tokens], which row of frequencies holds; optional
    float scale;
    float* cosines;  // [tokens][pairs]
    float* sines;    // [tokens][pairs]
    int64_t tokens;
    int64_t pairs;
    int32_t num_threads;
};

// out = x / rms(x) * weight, after residual += x, of which the norm is taken then.
struct RmsNorm {
    int32_t dtype;
    const void* x;  // [rows][size]
    int64_t x_stride;
    void* residual;      // [rows][size], optional
    const void* weight;  // [size]
    void* out;           // [rows][size]
    int64_t rows;
    int64_t size;
    float eps;
    float centre;  // added to the weight, and rounded only at the end; negative: rounded before
    int32_t num_threads;
};

// out = (x - mean) / deviation * weight + bias, after residual += x as RmsNorm has it.
struct LayerNorm {
    int32_t dtype;
    const void* x;  // [rows][size]
    int64_t x_stride;
    void* residual;      // [rows][size], optional
    const void* weight;  // [size], optional
    const void* bias;    // [size], optional
    void* out;           // [rows][size]
    int64_t rows;
    int64_t size;
    float eps;
    int32_t is_centred;  // whether 1 + weight multiplies, rounded to the dtype
    int32_t num_threads;
};

// The same for each head; out may be x.
struct NormHeads {
    int32_t dtype;
    const void* x;  // [rows][heads][size]
    int64_t row_stride;
    int64_t heads;
    int64_t head_stride;
    const void* weight;  // [size]; optional
    void* out;           // [rows][heads][size]
    int64_t out_row_stride;
    int64_t out_head_stride;
    int64_t rows;
    int64_t size;
    float eps;
    float centre;  // as RmsNorm has it
    int32_t num_threads;
};

// sum = (sum + x / rms(x) * weight) * factor.
struct AddNorm {
    int32_t dtype;
    const void* x;  // [rows][size]
    int64_t x_stride;
    const void* weight;  // [size]
    const void* factor;  // [1]; optional
    void* sum;           // [rows][size]
    int64_t rows;
    int64_t size;
    float eps;
    float centre;  // as RmsNorm has it
    int32_t num_threads;
};

// out = activation(gate) * up.
struct GatedMul {
    int32_t dtype;
    int32_t kind;  // mm::Activation
    const void* gate;  // [rows][size]
    int64_t gate_stride;
    const void* up;  // [rows][size]
    int64_t up_stride;
    void* out;  // [rows][size]
    int64_t rows;
    int64_t size;
    int32_t num_threads;
};

// out = (up + 1) * gate * sigmoid(alpha * gate), gate at most the limit and up within it.
struct ClampedMul {
    int32_t dtype;
    const void* both;  // [rows][2 * size], gate and up in turn
    void* out;         // [rows][size]
    int64_t rows;
    int64_t size;
    float alpha;
    float limit;
    int32_t num_threads;
};

// x = activation(x).
struct Activate {
    int32_t dtype;
    int32_t kind;  // mm::Activation
    void* x;       // [rows][size]
    int64_t rows;
    int64_t size;
    int32_t num_threads;
};

// x = the values of a table of all bf16, by their bits.
struct MapValues {
    void* x;            // [values] bf16
    const void* table;  // [65536] bf16
    int64_t values;
    int32_t num_threads;
};

// x *= factor.
struct Scale {
    int32_t dtype;
    void* x;  // [values]
    float factor;
    int32_t rounds;  // whether the factor is rounded to the dtype first
    int64_t values;
    int32_t num_threads;
};

// x *= sigmoid(gate).
struct GateHeads {
    int32_t dtype;
    void* x;           // [rows][heads][size]
    const void* gate;  // [rows][heads][size]
    int64_t gate_stride;
    int64_t gate_head_stride;
    int64_t rows;
    int64_t heads;
    int64_t size;
    int32_t num_threads;
};

// Rotates the first 2 * pairs channels of each head of x.
struct Rotate {
    int32_t dtype;
    void* x;  // [rows][heads][2 * pairs or more]
    int64_t row_stride;
    int64_t heads;
    int64_t head_stride;
    const float* cosines;  // [rows][pairs]
    const float* sines;    // [rows][pairs]
    int64_t rows;
    int64_t pairs;
    int32_t is_interleaved;  // whether channels 2 i and 2 i + 1 are a pair, else i and pairs + i
    int32_t num_threads;
};

// out = ((x - centres) * factors) H for each `block` channels of a head, with a matrix H.
struct MixHeads {
    int32_t dtype;
    const void* x;  // [rows][heads][size]
    int64_t row_stride;
    int64_t heads;
    int64_t head_stride;
    const float* centres;  // [groups][size], each of heads / groups heads; optional
    const float* factors;  // [groups][size]; optional
    int64_t groups;
    int64_t block;  // a power of two that divides size, at most 64
    void* out;      // [rows][heads][size]
    int64_t rows;
    int64_t size;
    int32_t num_threads;
};

// out = attention of q over the visible keys of each token, see attention.h.
struct Attend {
    int32_t dtype;        // of q and out
    int32_t cache_dtype;  // of keys and values
    const void* q;        // [tokens][num_heads][head_dim]
    int64_t q_stride;     // from token to token
    int64_t q_head_stride;
    const void* keys;    // pages: [blocks][block_size][num_kv_heads][head_dim]; else [tokens]
    const void* values;  // [num_kv_heads][head_dim]
    int64_t kv_stride;   // from token to token; of int4 in bytes
    const void* key_scales;       // of int8 [blocks][block_size][num_kv_heads] floats, else int4.h
    const void* value_scales;     // the same
    const float* sinks;           // [num_heads]; optional
    const float* slopes;          // [num_heads]; optional, see softmax.h
    void* out;                    // [tokens][num_heads][head_dim]
    const int32_t* block_tables;  // [sequences][table_stride]; null: keys are contiguous
    int64_t table_stride;
    int64_t block_size;
    const int64_t* query_starts;   // [sequences + 1], the first token of each sequence
    const int64_t* first_visible;  // [tokens], index of the sequence's first visible key
    const int64_t* end_visible;    // [tokens], one past the last visible key
    int64_t num_sequences;
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_dim;
    float scale;
    float softcap;  // 0 is none
    float bias_factor;
    int32_t rounds_biases;  // whether to bf16
    int32_t num_threads;
};

// Writes keys or values of a step to their slots of a cache.
struct WriteCache {
    int32_t dtype;        // of rows
    int32_t cache_dtype;  // of cache
    const void* rows;     // [tokens][num_kv_heads][head_dim]
    int64_t row_stride;
    void* cache;           // [slots][num_kv_heads][head_dim]
    void* scales;          // as Attend has them; null where the cache has the dtype of rows
    const int64_t* slots;  // [tokens]
    int64_t tokens;
    int64_t num_kv_heads;
    int64_t head_dim;
    int32_t num_threads;
};

// A causal convolution over the last `taps` tokens of each channel, see states.h.
struct ShortConv {
    int32_t dtype;
    const void* x;  // [tokens][channels]
    int64_t x_stride;
    const void* weights;    // [channels][taps]
    const void* bias;       // [channels]; optional
    void* states;           // [rows][channels][taps - 1], the last inputs
    void* out;              // [tokens][channels]
    const int64_t* starts;  // [sequences + 1], the first token of each
    const int64_t* read;    // [sequences], the row of `states` before the step
    const int64_t* write;   // [sequences], the row after it
    int64_t num_sequences;
    int64_t channels;
    int64_t taps;
    int32_t has_silu;
    int32_t num_threads;
};

// The gated delta rule with its norm, see states.h.
struct DeltaRule {
    int32_t dtype;
    const void* qkv;  // [tokens][2 * key_heads * key_dim + value_heads * value_dim]
    int64_t qkv_stride;
    const void* z;  // [tokens][value_heads][value_dim]: gates of the output
    int64_t z_stride;
    const void* a;  // [tokens][value_heads]: decays, before softplus
    const void* b;  // [tokens][value_heads]: weights of the changes, before the sigmoid
    int64_t ab_stride;
    const float* a_log;       // [value_heads]
    const float* dt_bias;     // [value_heads]
    const void* norm_weight;  // [value_dim]
    float* matrices;          // [rows][value_heads][key_dim][value_dim]
    float* last;              // [rows][value_heads][key_dim + value_dim + 3], see LastToken
    void* out;                // [tokens][value_heads][value_dim]
    const int64_t* starts;    // [sequences + 1], as ShortConv has them
    const int64_t* read;      // [sequences]
    const int64_t* write;     // [sequences]
    const int64_t* source;    // [sequences], the rows of the matrices before the step
    const int64_t* target;    // [sequences], those after it; the same where they change in place
    int64_t num_sequences;
    int64_t key_heads;
    int64_t value_heads;
    int64_t key_dim;
    int64_t value_dim;
    float eps;
    int32_t num_threads;
};

// The state space of Mamba-2 with its norm, see state_space.h.
struct Mamba2 {
    int32_t dtype;
    const void* rows;  // [tokens][heads * head_dim + 2 * groups * state_size]: x, B, C
    int64_t row_stride;
    const void* z;  // [tokens][heads][head_dim]: gates of the output
    int64_t z_stride;
    const void* dt;  // [tokens][heads]: steps, before softplus
    int64_t dt_stride;
    const float* a_log;       // [heads]
    const float* dt_bias;     // [heads]
    const float* skip;        // [heads]: factor of x in the output
    const void* norm_weight;  // [heads][head_dim]; null: no norm
    float* matrices;          // [rows][heads][state_size][head_dim]
    float* last;              // [rows][heads][state_size + head_dim + 3]; null: none change in place
    void* out;                // [tokens][heads][head_dim]
    const int64_t* starts;    // [sequences + 1], as ShortConv has them
    const int64_t* read;      // [sequences]
    const int64_t* write;     // [sequences]
    const int64_t* source;    // [sequences], as DeltaRule has them
    const int64_t* target;    // [sequences]
    int64_t num_sequences;
    int64_t heads;
    int64_t head_dim;
    int64_t state_size;
    int64_t groups;  // of heads, which share B and C, and of channels, which are normed together
    float dt_min;
    float dt_max;
    float eps;
    int32_t num_threads;
};

// Lays units of four bytes, 1 float, 2 bf16 or codes, out in panels.
struct PackUnits {
    const void* weights;  // [n][units]
    int64_t n;
    int64_t units;
    int32_t in_words;  // whether units are 8 codes of 4 bits with the first in the lowest bits
    void* packed;      // [n / 64][units][64]; may be `weights` where n is a multiple of 64
    int32_t num_threads;
};

// Finds which codes of 8 bits a weight has.
struct FindCodes {
    const void* units;  // [num] bytes
    int64_t num;
    uint8_t* found;  // [256], set to 1 where a code is found
    int32_t num_threads;
};

// Stores codes of 8 bits in fewer, see stored_codes.h.
struct StoreCodes {
    const void* units;  // [panels][units][64], units a multiple of 8
    int64_t panels;
    int64_t num_units;
    int32_t code_form;
    const uint8_t* places;  // [256], of each code in the list, or the codes themselves
    void* packed;
    int32_t num_threads;
};

// The same for int8.
struct PackS8 {
    const int8_t* weights;  // [n][k], k a multiple of 4
    int64_t n;
    int64_t k;
    uint8_t* packed;  // [n / 64][k / 4][64][4]
    int32_t num_threads;
};

// The floats of packed weights, transposed.
struct WidenPanels {
    int32_t unit_values;  // of a unit: 2 bf16 or 4 int8
    const void* packed;   // [panels][units][64]
    int64_t panels;
    int64_t units;
    float* out;  // [unit_values * units][panels * 64]
    int32_t num_threads;
};

// out = x w^T + bias with weights in float or bf16, see gemm.h. The product prefetches the weights
// of the one that comes after it, if these are known.
struct Linear {
    int32_t dtype;      // of x and bias
    int32_t out_dtype;  // that, or float32
    const void* x;  // [rows][k]
    int64_t x_stride;
    const void* packed;  // [n / 64][k / values of a unit][64][values of a unit]
    int64_t row_bytes;   // of `packed`, from which a recording fills in next_row_bytes
    const void* bias;    // [n]; optional
    void* out;           // [rows][n]
    int64_t rows;
    int64_t n;
    int64_t k;
    const void* next_packed;  // optional
    int64_t next_row_bytes;
    int32_t num_threads;
};

// The same with int8 weights, and rows of x that are rotated and rounded to int8: the weights are
// those of rows that were rotated alike.
struct LinearS8 {
    int32_t dtype;      // of x and bias
    int32_t out_dtype;  // that, or float32
    const void* x;  // [rows][k]
    int64_t x_stride;
    const void* packed;   // as PackS8 makes them
    int64_t row_bytes;    // see Linear
    const float* scales;  // [2][n], as QuantizeRows makes them
    const void* bias;     // [n]; optional
    void* out;            // [rows][n]
    int64_t rows;
    int64_t n;
    int64_t k;
    const void* next_packed;  // optional
    int64_t next_row_bytes;
    int32_t num_threads;
};

// The same with weights in few bits, see codes.h.
struct LinearCodes {
    int32_t dtype;        // of x and bias
    int32_t out_dtype;    // that, or float32
    int32_t bits;         // of a code: 4 or 8
    int32_t scale_form;   // of groups, and the zero of all groups times 256, see code_scales.h
    int32_t code_form;    // see stored_codes.h
    int32_t is_float8;    // whether codes are floats of 8 bits
    int32_t rounds;       // whether rows of x are rounded to int8; not with is_float8
    const void* x;        // [rows][k]
    int64_t x_stride;
    const void* packed;   // [n / 64][units][64], or as code_form says
    const uint8_t* list;  // [16], of the codes that code_form lists; optional
    int64_t row_bytes;   // see Linear
    const void* scales;  // [n / 64][see codes.h][64] words
    int64_t group;       // columns of a group
    const void* bias;    // [n]; optional
    void* out;           // [rows][n]
    int64_t rows;
    int64_t n;
    int64_t k;
    const void* next_packed;  // optional
    int64_t next_row_bytes;
    int32_t num_threads;
};

// out = x as LinearS8 rotates and rounds it.
struct RoundGroups {
    int32_t dtype;
    const void* x;  // [rows][k]
    int64_t x_stride;
    int64_t rows;
    int64_t k;
    float* out;  // [rows][k]
    int32_t num_threads;
};

// out = x as LinearS8 rotates it, or back.
struct RotateGroups {
    int32_t dtype;
    const void* x;  // [rows][k]
    int64_t rows;
    int64_t k;
    int32_t is_back;
    float* out;  // [rows][k]
    int32_t num_threads;
};

// Rounds weights to int8, with a scale and a shift for each row.
struct QuantizeRows {
    int32_t dtype;
    const void* weights;  // [n][k]
    int64_t n;
    int64_t k;
    int8_t* out;    // [n][k]
    float* scales;  // [2][n]: scales, shifts
    int32_t num_threads;
};

// Rounds weights to codes, with a scale and an integer zero for each group.
struct RoundCodes {
    int32_t dtype;
    const void* weights;  // [n][k]
    int64_t n;
    int64_t k;
    int32_t bits;    // 4 or 8
    int64_t group;   // columns of a group
    uint8_t* units;  // [n][whole units of four bytes]
    float* scales;   // [n][groups]
    uint8_t* zeros;  // [n][groups]
    int32_t num_threads;
};

// out = (out + (scale * x a^T) b^T) * factor + shift, for each row those of its adapter; see
// low_rank.h.
struct LowRank {
    int32_t dtype;   // of x, out, a and b
    const void* x;   // [rows][k]
    int64_t x_stride;
    void* out;  // [rows][n]
    int64_t out_stride;
    const int32_t* slots;   // [rows]; none where it is no row of the table
    const int64_t* table;   // [num_slots][7]: LowRankEntry; a is 0 where there is no change
    int64_t num_slots;
    const int64_t* starts;  // [parts + 1], the columns of out of each part, then n
    int64_t parts;
    int64_t rows;
    int64_t n;
    int64_t k;
    int32_t num_threads;
};

// Chooses experts by their scores, see router.h.
struct Route {
    int32_t dtype;       // of logits
    int32_t out_dtype;   // of weights
    const void* logits;  // [tokens][experts]
    const float* bias;   // [experts], added to the scores that choose; optional
    const void* factors; // [experts], which multiply weights; optional
    void* weights;       // [tokens][top_k]
    int64_t* ids;        // [tokens][top_k]
    int64_t tokens;
    int64_t experts;
    int64_t top_k;
    int32_t kind;         // 0: scores are softmax over all; 1: over the chosen; 2: sigmoids
    int64_t groups;       // of experts
    int64_t used_groups;  // those whose two best experts have the largest sum
    int32_t is_normed;    // whether weights are divided by their sum
    float norm_min;       // lower bound of the sum
    float norm_more;      // added to the sum
    float factor;         // of the weights
    int32_t rounds;       // whether each operation is rounded to the type of logits
    int32_t num_threads;
};

// The weighted sum of each token's experts, MLPs whose products are calls of a Linear.
struct RunExperts {
    int32_t dtype;          // of everything that is no number of another type
    int32_t weights_dtype;  // float32 or dtype: products with them are rounded to it
    int32_t activation;     // mm::Activation; -1: as ClampedMul; without gates -2 - Activation
    const void* x;          // [tokens][size]
    int64_t x_stride;
    const void* weights;     // [tokens][top_k]
    const int64_t* ids;      // [tokens][top_k]
    const int64_t* matrices; // [experts][2], arguments of gate and up together, and of down
    const int64_t* pages;    // [experts][2], address and bytes in a file; null: all are in memory
    const int32_t* slots;    // [tokens], as of LowRank; null where no adapter changes an expert
    const int64_t* changes;  // [experts][2], a LowRank of each matrix that has changes, else 0
    int32_t first_kind;      // of gate and up: 0 Linear, 1 LinearS8, 2 LinearCodes
    int32_t last_kind;       // of down
    void* rows;              // [tokens * top_k][size]: memory to compute in, as the next three
    void* both;              // [tokens * top_k][2 * inner], [inner] without gates
    void* hidden;            // [tokens * top_k][inner]
    void* outs;              // [tokens * top_k][size]
    void* out;               // [tokens][size]
    int64_t tokens;
    int64_t experts;
    int64_t top_k;
    int64_t size;
    int64_t inner;
    float alpha;
    float limit;
    int32_t num_threads;
};

// The first of the largest values of each row.
struct FirstLargest {
    int32_t dtype;
    const void* logits;  // [rows][size]
    int64_t stride;
    int64_t rows;
    int64_t size;
    int64_t* ids;  // [rows]
    void* peaks;   // [rows]
    int32_t num_threads;
};

// Draws a token of each row by rules, see draw.h.
struct Draw {
    int32_t dtype;
    const void* logits;  // [rows][size]
    int64_t stride;
    int64_t rows;
    int64_t size;
    const float* temperatures;  // [rows]
    const float* least;         // [rows]: of z; -inf is off
    const int64_t* top_k;       // [rows]; 0 is off
    const double* top_p;        // [rows]; 1 is off
    const double* uniforms;     // [rows]
    int64_t* tokens;            // [rows]
    int32_t num_threads;
};

// Writes some frames of the patch rows of an image, see pixels.h, on the calling thread alone: many
// images are prepared at once.
struct Patchify {
    const uint8_t* pixels;  // [height][width][3]
    int64_t height;
    int64_t width;
    int64_t patch;       // pixels of a side
    int64_t merge;       // patches of a side of a block
    const float* table;  // [3][256]
    int64_t frames;      // of a patch row
    int64_t first;       // frame that is written
    int64_t count;       // frames that are written
    float* out;          // [patches][3][frames][patch][patch]
};

// Resizes an image, see pixels.h, on the calling thread alone: across and down, each rounded to
// bytes, in Pillow's way.
struct Resize {
    const uint8_t* pixels;  // [height][width][3]
    int64_t height;
    int64_t width;
    const int32_t* across_first;    // [columns]
    const int32_t* across_counts;   // [columns]
    const int32_t* across_weights;  // [columns][across_most]
    int64_t across_most;
    const int32_t* down_first;    // [rows]
    const int32_t* down_counts;   // [rows]
    const int32_t* down_weights;  // [rows][down_most]
    int64_t down_most;
    int64_t rows;
    int64_t columns;
    int32_t is_down_first;
    uint8_t* turned;  // [width * STRIP_BYTES + 1]
    uint8_t* middle;  // [height][columns][3], or [rows][width][3]
    uint8_t* out;     // [rows][columns][3]
};

// Restricts threads to CPUs and their memory to a node, see threads.h.
struct PlaceThreads {
    const int32_t* cpus;  // [num_cpus], of all threads
    int32_t num_cpus;
    const int32_t* pinned;  // [num_pinned], of one thread each
    int32_t num_pinned;
    int32_t node;         // -1 is any
    int32_t num_workers;  // threads of the calling thread's pool
    int32_t* error;       // [1], errno of what the system refuses, or 0
};

// One list for each .cpp file.
#define MM_EACH_PRODUCT(CALL)         \
    CALL(look_up_codes, LookUpCodes)  \
    CALL(pack_units, PackUnits)       \
    CALL(find_codes, FindCodes)       \
    CALL(store_codes, StoreCodes)     \
    CALL(pack_s8, PackS8)             \
    CALL(widen_panels, WidenPanels)   \
    CALL(linear, Linear)              \
    CALL(linear_s8, LinearS8)         \
    CALL(linear_codes, LinearCodes)   \
    CALL(round_groups, RoundGroups)   \
    CALL(rotate_groups, RotateGroups) \
    CALL(quantize_rows, QuantizeRows) \
    CALL(round_codes, RoundCodes)

#define MM_EACH_SEQUENCE_CALL(CALL) \
    CALL(attend, Attend)            \
    CALL(write_cache, WriteCache)   \
    CALL(short_conv, ShortConv)     \
    CALL(delta_rule, DeltaRule)     \
    CALL(mamba2, Mamba2)

#define MM_EACH_LOW_RANK_CALL(CALL) \
    CALL(low_rank, LowRank)

#define MM_EACH_EXPERT_CALL(CALL) \
    CALL(route, Route)            \
    CALL(run_experts, RunExperts)

#define MM_EACH_OTHER_CALL(CALL)      \
    CALL(look_up, LookUp)             \
    CALL(replace_id, ReplaceId)       \
    CALL(widen, Widen)                \
    CALL(add_rows, AddRows)           \
    CALL(take_columns, TakeColumns)   \
    CALL(angles, Angles)              \
    CALL(rms_norm, RmsNorm)           \
    CALL(layer_norm, LayerNorm)       \
    CALL(norm_heads, NormHeads)       \
    CALL(add_norm, AddNorm)           \
    CALL(gated_mul, GatedMul)         \
    CALL(clamped_mul, ClampedMul)     \
    CALL(activate, Activate)          \
    CALL(map_values, MapValues)       \
    CALL(scale, Scale)                \
    CALL(gate_heads, GateHeads)       \
    CALL(rotate, Rotate)              \
    CALL(mix_heads, MixHeads)         \
    CALL(first_largest, FirstLargest) \
    CALL(draw, Draw)                  \
    CALL(patchify, Patchify)          \
    CALL(resize, Resize)              \
    CALL(place_threads, PlaceThreads)

}  // namespace mm
