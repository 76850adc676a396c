// Calls every kernel on random shapes, in memory that is exactly as large as it must be, for a
// build with a sanitizer or for another processor, and compares products with plain sums. Prints
// "clean" at its end.
#include <atomic>
#include <memory>
#include <vector>
#ifdef __linux__
#include <sched.h>
#endif
#ifdef __AMX_TILE__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "driver_codes.h"
#include "driver_states.h"
#include "driver_values.h"

namespace {

void run_inputs(int32_t threads) {
    const int64_t tokens = between(1, 70), pairs = between(1, 40), n = between(1, 200);
    std::vector<int64_t> positions(tokens * 3), axes(pairs), ids(tokens);
    for (int64_t& position : positions) position = between(0, 100000);
    for (int64_t& axis : axes) axis = between(0, 2);
    for (int64_t& id : ids) id = between(-1, n);  // the matrix does not have the first and the last
    auto frequencies = random_values<float>(2 * pairs);
    std::vector<float> cosines(tokens * pairs), sines(tokens * pairs);
    const auto is_long = std::make_unique<bool[]>(tokens);
    for (int64_t token = 0; token < tokens; ++token) is_long[token] = between(0, 1);
    run(mm::Angles{positions.data(), tokens, axes.data(), frequencies.data(), nullptr, 1.3f,
                   cosines.data(), sines.data(), tokens, pairs, threads});
    run(mm::Angles{positions.data(), tokens, nullptr, frequencies.data(), is_long.get(), 1.3f,
                   cosines.data(), sines.data(), tokens, pairs, threads});
    auto rows = random_values<bf16>(n * pairs);
    auto packed = random_values<bf16>((n + 63) / 64 * 64 * pairs);
    std::vector<bf16> out(tokens * pairs);
    run(mm::LookUp{ids.data(), rows.data(), n, pairs * 2, 1, out.data(), tokens, threads});
    run(mm::LookUp{ids.data(), packed.data(), n, pairs / 2 * 4, 64, out.data(), tokens, threads});
}

template <typename T>
void run_rows(int32_t dtype, int32_t threads) {
    const int64_t rows = between(1, 70), size = between(1, 200), stride = size + between(0, 9);
    auto x = random_values<T>(rows * stride), residual = random_values<T>(rows * size);
    auto weight = random_values<T>(size);
    std::vector<T> out(rows * size);
    run(mm::RmsNorm{dtype, x.data(), stride, residual.data(), weight.data(), out.data(), rows, size,
                    1e-6f, 0, threads});
    run(mm::RmsNorm{dtype, x.data(), stride, nullptr, weight.data(), out.data(), rows, size, 1e-6f,
                    1, threads});
    for (const T* own : {static_cast<const T*>(weight.data()), static_cast<const T*>(nullptr)}) {
        run(mm::LayerNorm{dtype, x.data(), stride, residual.data(), own, own, out.data(), rows,
                          size, 1e-6f, 1, threads});
        run(mm::NormHeads{dtype, x.data(), stride, 1, size, own, out.data(), size, size, rows, size,
                          1e-6f, 1, threads});
    }
    run(mm::GateHeads{dtype, x.data(), residual.data(), size, size, rows, 1, size, threads});
    run(mm::Activate{dtype, int32_t(between(0, 5)), out.data(), rows, size, threads});
    std::vector<int64_t> columns(size);
    for (int64_t i = 0; i < size; ++i) columns[i] = size - 1 - i;
    run(mm::TakeColumns{dtype, columns.data(), x.data(), stride, out.data(), rows, size, threads});
    run(mm::GatedMul{dtype, int32_t(between(0, 6)), x.data(), stride, residual.data(), size,
                     out.data(), rows, size, threads});
    run(mm::Scale{dtype, out.data(), 0.22f, int32_t(between(0, 1)), rows * size, threads});
    const int64_t heads = between(1, 5), pairs = between(1, 40);
    auto turned = random_values<T>(rows * heads * pairs * 2);
    auto angles = random_values<float>(rows * pairs);
    for (int32_t is_interleaved : {0, 1}) {
        run(mm::Rotate{dtype, turned.data(), heads * pairs * 2, heads, pairs * 2, angles.data(),
                       angles.data(), rows, pairs, is_interleaved, threads});
    }
}

// Heads of keys and values [.][head_dim] as a cache of cache_dtype holds them, rounded as
// attention.h and int4.h describe.
template <typename T>
struct Stored {
    const T* heads;
    int64_t head_dim;
    int32_t cache_dtype;

    std::vector<double> head(int64_t index) const {
        std::vector<double> out(head_dim);
        const T* x = heads + index * head_dim;
        const int64_t size = cache_dtype == 3 && head_dim % 32 == 0 ? 32 : head_dim;
        for (int64_t first = 0; first < head_dim; first += size) {
            float least = INFINITY, most = -INFINITY;
            for (int64_t i = first; i < first + size; ++i) {
                least = std::min(least, mm::load(x[i]));
                most = std::max(most, mm::load(x[i]));
            }
            const float low = mm::rounded<bf16>(least), largest = std::max(most, -least);
            const float step = mm::rounded<bf16>((most - low) / 15.0f);
            const float inverse = 127.0f / largest;
            for (int64_t i = first; i < first + size; ++i) {
                const float value = mm::load(x[i]);
                out[i] = value;
                if (cache_dtype == 2) {
                    out[i] = std::nearbyint(value * inverse) * double(largest / 127.0f);
                }
                if (cache_dtype == 3 && step == 0.0f) out[i] = low;
                if (cache_dtype == 3 && step > 0.0f) {
                    const float code = std::floor((value - low) / step + 0.5f);
                    out[i] = low + double(step) * std::min(std::max(code, 0.0f), 15.0f);
                }
            }
        }
        return out;
    }
};

// Compares a head of the last token with plain sums. index(token): of the token's head in `stored`,
// which holds keys and values.
template <typename T, typename Index>
void compare_attention(const mm::Attend& args, const Stored<T>& stored, const T* q,
                       const T* out, const Index& index, float sink, float slope) {
    const int64_t dim = args.head_dim, at = args.query_starts[args.num_sequences] - 1;
    std::vector<double> sums(dim), sizes(dim);
    double total = args.sinks == nullptr ? 0.0 : std::exp(sink);
    for (int64_t token = args.first_visible[at]; token < args.end_visible[at]; ++token) {
        const auto head = stored.head(index(token));
        double score = 0.0;
        for (int64_t i = 0; i < dim; ++i) score += mm::load(q[i]) * head[i];
        score *= args.scale;
        if (args.softcap > 0.0f) score = args.softcap * std::tanh(score / args.softcap);
        if (args.slopes != nullptr) {
            const float bias = slope * float(token);
            score += args.bias_factor * (args.rounds_biases ? mm::rounded<mm::bf16>(bias) : bias);
        }
        total += std::exp(score);
        for (int64_t i = 0; i < dim; ++i) {
            sums[i] += std::exp(score) * head[i];
            sizes[i] += std::exp(score) * std::fabs(head[i]);
        }
    }
    const double error = sizeof(T) == 2 ? 1.0 / 64 : 1e-4;
    for (int64_t i = 0; i < dim; ++i) {
        const double found = mm::load(out[i]), sum = sums[i] / total;
        if (std::fabs(found - sum) <= error * sizes[i] / total) continue;
        std::printf("attention, cache %d: %g instead of %g\n", stored.cache_dtype, found, sum);
        std::exit(1);
    }
}

template <typename T, typename C>
void run_attention(int32_t dtype, int32_t cache_dtype, int32_t threads) {
    const int64_t kv_heads = between(1, 3), heads = kv_heads * between(1, 8);
    const int64_t head_dim = 2 * between(1, 64), block_size = between(1, 80);
    const int64_t sequences = between(1, 8), blocks_each = between(1, 24);
    const int64_t blocks = sequences * blocks_each, slots_each = blocks_each * block_size;
    const int64_t head_size = cache_dtype == 3 ? head_dim / 2 : head_dim;
    std::vector<C> keys(blocks * block_size * kv_heads * head_size), values(keys.size());
    // The range of a group of int4 is as large as one float.
    const int64_t num_scales = cache_dtype == 3 ? mm::num_ranges(head_dim) / 2 : 1;
    std::vector<float> scales(blocks * block_size * kv_heads * num_scales);
    std::vector<float> other_scales(scales.size());
    std::vector<int32_t> tables(blocks);
    for (int64_t i = 0; i < blocks; ++i) tables[i] = int32_t(blocks - 1 - i);
    std::vector<int64_t> starts{0}, first, end, slots;
    for (int64_t s = 0; s < sequences; ++s) {
        const int64_t context = between(1, slots_each);
        const int64_t count = between(1, std::min<int64_t>(context, between(0, 2) ? 4 : 150));
        for (int64_t i = context - count; i < context; ++i) {
            first.push_back(between(0, i));
            end.push_back(between(i + 1, context));
        }
        starts.push_back(starts.back() + count);
    }
    const int64_t tokens = starts.back();
    for (int64_t slot = 0; slot < blocks * block_size; ++slot) slots.push_back(slot);
    auto rows = random_values<T>(int64_t(slots.size()) * kv_heads * head_dim);
    for (auto* cache : {&keys, &values}) {
        run(mm::WriteCache{dtype, cache_dtype, rows.data(), kv_heads * head_dim, cache->data(),
                           (cache == &keys ? scales : other_scales).data(), slots.data(),
                           int64_t(slots.size()), kv_heads, head_dim, threads});
    }
    auto q = random_values<T>(tokens * heads * head_dim);
    std::vector<T> out(q.size());
    mm::Attend args{};
    args.dtype = dtype;
    args.cache_dtype = cache_dtype;
    args.q = q.data();
    args.q_stride = heads * head_dim;
    args.q_head_stride = head_dim;
    args.keys = keys.data();
    args.values = values.data();
    args.kv_stride = kv_heads * head_size;
    args.key_scales = scales.data();
    args.value_scales = other_scales.data();
    auto sinks = random_values<float>(heads);
    args.sinks = between(0, 1) ? sinks.data() : nullptr;
    auto slopes = random_values<float>(heads);
    for (float& slope : slopes) slope = 0.01f * std::fabs(slope) + 0.001f;
    args.slopes = between(0, 1) ? slopes.data() : nullptr;
    args.bias_factor = 0.7f;
    args.rounds_biases = between(0, 1);
    args.out = out.data();
    args.block_tables = tables.data();
    args.table_stride = blocks_each;
    args.block_size = block_size;
    args.query_starts = starts.data();
    args.first_visible = first.data();
    args.end_visible = end.data();
    args.num_sequences = sequences;
    args.num_heads = heads;
    args.num_kv_heads = kv_heads;
    args.head_dim = head_dim;
    args.scale = 0.1f;
    args.softcap = between(0, 1) ? 3.0f : 0.0f;
    args.num_threads = threads;
    run(args);
    const Stored<T> stored{rows.data(), head_dim, cache_dtype};
    for (int64_t head = 0; head < heads; ++head) {
        const auto slot = [&](int64_t token) {
            const int64_t block = (sequences - 1) * blocks_each + token / block_size;
            return tables[block] * block_size + token % block_size;
        };
        const int64_t kv_head = head / (heads / kv_heads), last = (tokens - 1) * heads + head;
        compare_attention(args, stored, q.data() + last * head_dim, out.data() + last * head_dim,
                          [&](int64_t token) { return slot(token) * kv_heads + kv_head; },
                          sinks[head], slopes[head]);
    }
}

template <typename T>
void run_linear(int32_t dtype, int32_t threads) {
    const int64_t rows = between(1, 120), n = between(1, 200), k = 4 * between(1, 23);
    std::vector<int8_t> weights(n * k);
    for (int8_t& weight : weights) weight = int8_t(between(-128, 127));
    std::vector<uint8_t> packed((n + 63) / 64 * (k / 4) * 256);
    run(mm::PackS8{weights.data(), n, k, packed.data(), threads});
    auto x = random_values<T>(rows * k), bias = random_values<T>(n);
    auto scales = random_values<float>(2 * n);
    std::vector<T> out(rows * n);
    const mm::LinearS8 product{dtype, dtype, x.data(), k, packed.data(), 0, scales.data(), bias.data(),
                               out.data(), rows, n, k, packed.data(), k, threads};
    run(product);
    compare_alone("int8", product);
    std::vector<float> wide_weights(packed.size()), rounded(rows * k);
    run(mm::WidenPanels{4, packed.data(), (n + 63) / 64, k / 4, wide_weights.data(), threads});
    run(mm::RoundGroups{dtype, x.data(), k, rows, k, rounded.data(), threads});
    std::vector<float> whole(rows * k), sums(rows * n), ones(2 * n);
    std::fill_n(ones.begin(), n, 1.0f);  // scales; every shift is 0
    for (int64_t i = 0; i < rows * k; ++i) {
        whole[i] = i % k % 64 == 0 ? 127.0f : float(between(-127, 127));  // every scale is 1
    }
    std::vector<float> turned(rows * k);  // is rotated to these
    run(mm::RotateGroups{0, whole.data(), rows, k, 1, turned.data(), threads});
    run(mm::LinearS8{0, 0, turned.data(), k, packed.data(), 0, ones.data(), nullptr, sums.data(), rows,
                     n, k, nullptr, 0, threads});
    compare<float, int8_t>("int8", whole.data(), weights.data(), nullptr, sums.data(), rows, n, k);
}

void run_linear_float(int32_t threads) {
    const int64_t rows = between(1, 250), n = between(1, 200), k = between(1, 700);
    auto weights = random_values<float>(n * k), x = random_values<float>(rows * k);
    auto bias = random_values<float>(n);
    std::vector<float> packed((n + 63) / 64 * 64 * k), out(rows * n);
    run(mm::PackUnits{weights.data(), n, k, 0, packed.data(), threads});
    const mm::Linear product{0, 0, x.data(), k, packed.data(), 0, bias.data(), out.data(), rows, n, k,
                             packed.data(), k * 4, threads};
    run(product);
    compare("float", x.data(), weights.data(), bias.data(), out.data(), rows, n, k);
    compare_alone("float", product);
}

void run_linear_bf16(int32_t threads) {
    const int64_t rows = between(1, 250), n = between(1, 200), k = 2 * between(1, 700);
    auto weights = random_values<bf16>(n * k), x = random_values<bf16>(rows * k);
    auto bias = random_values<bf16>(n);
    std::vector<bf16> packed((n + 63) / 64 * 64 * k), out(rows * n);
    run(mm::PackUnits{weights.data(), n, k / 2, 0, packed.data(), threads});
    const mm::Linear product{1, 1, x.data(), k, packed.data(), 0, bias.data(), out.data(), rows, n, k,
                             packed.data(), k * 2, threads};
    run(product);
    compare("bf16", x.data(), weights.data(), bias.data(), out.data(), rows, n, k);
    compare_alone("bf16", product);
    run(mm::Linear{1, 1, x.data(), k, packed.data(), 0, nullptr, out.data(), rows, n, k, nullptr, 0,
                   threads});
    std::vector<float> kept(rows * n);
    run(mm::Linear{1, 0, x.data(), k, packed.data(), 0, nullptr, kept.data(), rows, n, k, nullptr,
                   0, threads});
    for (int64_t i = 0; i < rows * n; ++i) {
        if (mm::load(mm::store<bf16>(kept[i])) == mm::load(out[i])) continue;
        std::printf("bf16: value %d is not the sum in float32, rounded\n", int(i));
        std::exit(1);
    }
    std::vector<float> wide(packed.size());
    run(mm::WidenPanels{2, packed.data(), (n + 63) / 64, k / 2, wide.data(), threads});
}

void run_pixels() {
    const int64_t patch = between(1, 16), merge = between(1, 3), frames = between(1, 3);
    const int64_t height = patch * merge * between(1, 3), width = patch * merge * between(1, 3);
    std::vector<uint8_t> pixels(height * width * 3, 200);
    auto table = random_values<float>(3 * 256);
    std::vector<float> out(height * width * 3 * frames);
    run(mm::Patchify{pixels.data(), height, width, patch, merge, table.data(), frames, 0, frames,
                     out.data()});
    run(mm::Patchify{pixels.data(), height, width, patch, merge, table.data(), frames, frames - 1,
                     1, out.data()});
}

template <typename T>
void run_sampling(int32_t dtype, int32_t threads) {
    const int64_t rows = between(1, 5), size = between(1, 40000);
    auto logits = random_values<T>(rows * size);
    std::vector<T> peaks(rows);
    std::vector<int64_t> tokens(rows);
    run(mm::FirstLargest{dtype, logits.data(), size, rows, size, tokens.data(), peaks.data(),
                         threads});
    const std::vector<float> temperatures(rows, 0.7f);
    const std::vector<float> least(rows, between(0, 1) ? -INFINITY : -float(between(0, 3)));
    const std::vector<int64_t> top_k(rows, between(0, 1) ? 0 : between(0, size));
    const std::vector<double> top_p(rows, between(0, 10) / 10.0), uniforms(rows, 0.9);
    run(mm::Draw{dtype, logits.data(), size, rows, size, temperatures.data(), least.data(),
                 top_k.data(), top_p.data(), uniforms.data(), tokens.data(), threads});
}

// Loops of a crew, of which some lie in another loop: each item is done once, and before the next loop.
void run_crew(int32_t threads) {
    std::vector<int64_t> counts(300);
    const auto loop = [&](int64_t num) {
        mm::parallel_for(num, threads, [&](int64_t i) { ++counts[i]; });
    };
    int64_t wanted = 0;
    mm::with_crew(threads, [&] {
        for (int64_t round = 0; round < 200; ++round) {
            const int64_t num = between(0, 300);
            wanted += num;
            loop(num);
        }
        mm::parallel_for(3, threads, [&](int64_t) {
            std::atomic<int64_t> own{0};
            mm::parallel_for(5, threads, [&](int64_t) { ++own; });
            if (own != 5) std::puts("a loop in a loop lost items");
        });
    });
    int64_t found = 0;
    for (const int64_t count : counts) found += count;
    if (found != wanted) std::puts("a crew lost items");
}

void run_all(int32_t threads) {
    run_inputs(threads);
    run_rows<float>(0, threads);
    run_rows<bf16>(1, threads);
    run_attention<float, float>(0, 0, threads);
    run_attention<bf16, bf16>(1, 1, threads);
    run_attention<float, int8_t>(0, 2, threads);
    run_attention<bf16, int8_t>(1, 2, threads);
    run_attention<float, mm::int4_pair>(0, 3, threads);
    run_attention<bf16, mm::int4_pair>(1, 3, threads);
    run_linear<float>(0, threads);
    run_linear<bf16>(1, threads);
    run_linear_bf16(threads);
    run_linear_float(threads);
    for (const bool rounds : {false, true}) {
        for (const int32_t bits : {4, 8}) {
            run_codes<float>(0, bits, rounds, threads);
            run_codes<bf16>(1, bits, rounds, threads);
        }
    }
    run_codes<float>(0, 0, false, threads);
    run_codes<bf16>(1, 0, false, threads);
    for (const bool is_step : {false, true}) {
        run_states<float>(0, is_step, threads);
        run_states<bf16>(1, is_step, threads);
    }
    run_pixels();
    run_sampling<float>(0, threads);
    run_sampling<bf16>(1, threads);
}

}  // namespace

int main() {
#ifdef __AMX_TILE__
    // A process asks Linux for the registers of tiles (arch_prctl, ARCH_REQ_XCOMP_PERM): torch does so
    // for the library.
    if (syscall(SYS_arch_prctl, 0x1023, 18) != 0) return 1;
#endif
    for (int round = 0; round < 40; ++round) {
        const int32_t threads = int32_t(between(1, 4));
        run_crew(threads);
        if (round % 2 == 0) {
            run_all(threads);
        } else {
            mm::with_crew(threads, [&] { run_all(threads); });
        }
    }
#ifdef __linux__
    const int32_t cpu = sched_getcpu();
    int32_t error = 0;
    run(mm::PlaceThreads{&cpu, 1, &cpu, 1, -1, 2, &error});
    if (error != 0) std::puts("not placed");
#endif
    std::puts("clean");
}
