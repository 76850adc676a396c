// Layers with states, compared with their recurrences in double.
#pragma once

#include <cstring>

#include "driver_values.h"

namespace {

// Sequences of a step: sequence i reads row i of the states and writes row num + i.
struct Steps {
    int64_t num;
    std::vector<int64_t> starts{0}, read, write;

    explicit Steps(bool is_step) : num(between(1, 6)) {
        for (int64_t i = 0; i < num; ++i) {
            starts.push_back(starts.back() + (is_step ? 1 : between(1, 11)));
            read.push_back(i);
            write.push_back(num + i);
        }
    }
    int64_t tokens() const { return starts.back(); }
};

// Compares values with those expected, of which the largest tells the error that is allowed.
template <typename T>
void compare_all(const char* name, const std::vector<double>& expected, const T* found) {
    double largest = 0.0;
    for (const double value : expected) largest = std::max(largest, std::fabs(value));
    const double error = (sizeof(T) == 2 ? 1.0 / 32 : 1e-4) * largest;
    for (const double value : expected) {
        const double own = mm::load(*found++);
        if (std::fabs(own - value) <= error) continue;
        std::printf("%s: %g instead of %g\n", name, own, value);
        std::exit(1);
    }
}

double silu(double x) { return x / (1.0 + std::exp(-x)); }
double positive(double x) { return std::log1p(std::exp(x)); }

// Makes x [size] one in root mean square.
void norm(double* x, int64_t size, double eps) {
    double squares = 0.0;
    for (int64_t i = 0; i < size; ++i) squares += x[i] * x[i];
    for (int64_t i = 0; i < size; ++i) x[i] /= std::sqrt(squares / double(size) + eps);
}

template <typename T>
void run_conv(int32_t dtype, const Steps& steps, int32_t threads) {
    const int64_t channels = between(1, 300), taps = between(2, 8), kept = taps - 1;
    const auto x = random_values<T>(steps.tokens() * channels), bias = random_values<T>(channels);
    const auto weights = random_values<T>(channels * taps);
    auto states = random_values<T>(2 * steps.num * channels * kept);
    const auto before = states;
    std::vector<T> out(x.size());
    run(mm::ShortConv{dtype, x.data(), channels, weights.data(), bias.data(), states.data(),
                      out.data(), steps.starts.data(), steps.read.data(), steps.write.data(),
                      steps.num, channels, taps, 1, threads});
    std::vector<double> expected;
    for (int64_t s = 0; s < steps.num; ++s) {
        for (int64_t token = steps.starts[s]; token < steps.starts[s + 1]; ++token) {
            for (int64_t c = 0; c < channels; ++c) {
                double sum = mm::load(bias[c]);
                for (int64_t i = 0; i < taps; ++i) {
                    const int64_t at = token - kept + i, old = at - steps.starts[s] + kept;
                    const T input = at < steps.starts[s] ? before[(s * channels + c) * kept + old]
                                                         : x[at * channels + c];
                    sum += double(mm::load(weights[c * taps + i])) * mm::load(input);
                }
                expected.push_back(silu(sum));
            }
        }
    }
    compare_all("short convolution", expected, out.data());
}

// Compares three more steps of one token whose matrices change in place with steps that write them anew:
// the same bits.
template <typename T, typename Args>
void compare_in_place(const char* name, Args args, const Steps& steps, std::vector<float> anew,
                      int64_t last_size, int64_t out_size) {
    std::vector<float> own = anew, last(last_size), own_last(last_size);
    std::vector<T> expected(out_size), found(out_size);
    const int64_t* rows[] = {steps.write.data(), steps.read.data()};
    for (int step = 0; step < 3; ++step) {
        args.read = args.source = rows[step % 2];
        args.write = args.target = rows[1 - step % 2];
        args.matrices = anew.data(), args.last = last.data(), args.out = expected.data();
        run(args);
        args.source = args.target = rows[0];
        args.matrices = own.data(), args.last = own_last.data(), args.out = found.data();
        run(args);
        if (std::memcmp(expected.data(), found.data(), out_size * sizeof(T)) == 0) continue;
        std::printf("%s: step %d in place has other bits\n", name, step);
        std::exit(1);
    }
}

template <typename T>
void run_delta(int32_t dtype, const Steps& steps, int32_t threads) {
    const int64_t sizes[] = {16, 48, 64, 128}, key_heads = between(1, 2);
    const int64_t heads = key_heads * between(1, 2), keys = 4 * between(1, 20);
    const int64_t values = sizes[between(0, 3)], stride = 2 * key_heads * keys + heads * values;
    const int64_t tokens = steps.tokens(), size = keys * values;
    const auto qkv = random_values<T>(tokens * stride), z = random_values<T>(tokens * heads * values);
    const auto a = random_values<T>(tokens * heads), b = random_values<T>(tokens * heads);
    const auto a_log = random_values<float>(heads), dt_bias = random_values<float>(heads);
    const auto weight = random_values<T>(values);
    auto matrices = random_values<float>(2 * steps.num * heads * size);
    std::vector<double> wide(matrices.begin(), matrices.begin() + steps.num * heads * size);
    std::vector<T> out(z.size());
    std::vector<float> last(2 * steps.num * heads * (keys + values + 3));
    const mm::DeltaRule args{dtype, qkv.data(), stride, z.data(), heads * values, a.data(), b.data(),
                             heads, a_log.data(), dt_bias.data(), weight.data(), matrices.data(),
                             last.data(), out.data(), steps.starts.data(), steps.read.data(),
                             steps.write.data(), steps.read.data(), steps.write.data(), steps.num,
                             key_heads, heads, keys, values, 1e-6f, threads};
    run(args);
    std::vector<double> expected(out.size());
    for (int64_t s = 0; s < steps.num; ++s) {
        for (int64_t head = 0; head < heads; ++head) {
            double* state = wide.data() + (s * heads + head) * size;
            for (int64_t token = steps.starts[s]; token < steps.starts[s + 1]; ++token) {
                const T* row = qkv.data() + token * stride + head / (heads / key_heads) * keys;
                std::vector<double> q(keys), k(keys);
                for (int64_t i = 0; i < keys; ++i) {
                    q[i] = mm::load(row[i]);
                    k[i] = mm::load(row[key_heads * keys + i]);
                }
                norm(q.data(), keys, 1e-6 / double(keys));
                norm(k.data(), keys, 1e-6 / double(keys));
                const int64_t at = token * heads + head;
                const double step = positive(mm::load(a[at]) + dt_bias[head]);
                const double decay = std::exp(-std::exp(a_log[head]) * step);
                const double beta = 1.0 / (1.0 + std::exp(-mm::load(b[at])));
                const T* value = qkv.data() + token * stride + 2 * key_heads * keys + head * values;
                double* to = expected.data() + at * values;
                for (int64_t c = 0; c < values; ++c) {
                    double known = 0.0;
                    for (int64_t i = 0; i < keys; ++i) {
                        state[i * values + c] *= decay;
                        known += k[i] / std::sqrt(double(keys)) * state[i * values + c];
                    }
                    const double change = (mm::load(value[c]) - known) * beta;
                    for (int64_t i = 0; i < keys; ++i) {
                        state[i * values + c] += k[i] / std::sqrt(double(keys)) * change;
                        to[c] += q[i] / double(keys) * state[i * values + c];
                    }
                }
                norm(to, values, 1e-6);
                for (int64_t c = 0; c < values; ++c) {
                    to[c] *= mm::load(weight[c]) * silu(mm::load(z[at * values + c]));
                }
            }
        }
    }
    compare_all("delta rule", expected, out.data());
    compare_all("states of the delta rule", wide, matrices.data() + wide.size());
    if (tokens == steps.num) {
        compare_in_place<T>("delta rule", args, steps, matrices, last.size(), out.size());
    }
}

template <typename T>
void run_mamba(int32_t dtype, const Steps& steps, int32_t threads) {
    const int64_t groups = between(1, 2), heads = groups * between(1, 3), dim = 16 * between(1, 6);
    const int64_t states = between(1, 70), inner = heads * dim, size = states * dim;
    const int64_t stride = inner + 2 * groups * states, tokens = steps.tokens();
    const auto rows = random_values<T>(tokens * stride), z = random_values<T>(tokens * inner);
    const auto dt = random_values<T>(tokens * heads), weight = random_values<T>(inner);
    const auto a_log = random_values<float>(heads), dt_bias = random_values<float>(heads);
    const auto skip = random_values<float>(heads);
    auto matrices = random_values<float>(2 * steps.num * heads * size);
    std::vector<double> wide(matrices.begin(), matrices.begin() + steps.num * heads * size);
    std::vector<T> out(z.size());
    std::vector<float> last(2 * steps.num * heads * (states + dim + 3));
    const mm::Mamba2 args{dtype, rows.data(), stride, z.data(), inner, dt.data(), heads, a_log.data(),
                          dt_bias.data(), skip.data(), weight.data(), matrices.data(), last.data(),
                          out.data(), steps.starts.data(), steps.read.data(), steps.write.data(),
                          steps.read.data(), steps.write.data(), steps.num, heads, dim, states,
                          groups, 0.1f, 2.0f, 1e-6f, threads};
    run(args);
    std::vector<double> expected(out.size());
    for (int64_t s = 0; s < steps.num; ++s) {
        for (int64_t token = steps.starts[s]; token < steps.starts[s + 1]; ++token) {
            const T* row = rows.data() + token * stride;
            double* to = expected.data() + token * inner;
            for (int64_t head = 0; head < heads; ++head) {
                const T* b = row + inner + head / (heads / groups) * states;
                const T* c = b + groups * states;
                const double raw = positive(mm::load(dt[token * heads + head]) + dt_bias[head]);
                const double step = std::min(std::max(raw, double(0.1f)), 2.0);
                const double decay = std::exp(-std::exp(a_log[head]) * step);
                double* state = wide.data() + (s * heads + head) * size;
                for (int64_t i = 0; i < dim; ++i) {
                    const int64_t at = head * dim + i;
                    const double x = mm::load(row[at]), open = silu(mm::load(z[token * inner + at]));
                    to[at] = x * skip[head];
                    for (int64_t j = 0; j < states; ++j) {
                        double& own = state[j * dim + i];
                        own = own * decay + mm::load(b[j]) * x * step;
                        to[at] += mm::load(c[j]) * own;
                    }
                    to[at] *= open;
                }
            }
            for (int64_t g = 0; g < groups; ++g) norm(to + g * inner / groups, inner / groups, 1e-6);
            for (int64_t i = 0; i < inner; ++i) to[i] *= mm::load(weight[i]);
        }
    }
    compare_all("mamba2", expected, out.data());
    compare_all("states of mamba2", wide, matrices.data() + wide.size());
    if (tokens == steps.num) {
        compare_in_place<T>("mamba2", args, steps, matrices, last.size(), out.size());
    }
}

// is_step: whether each sequence has one token, as in a step after the prompt.
template <typename T>
void run_states(int32_t dtype, bool is_step, int32_t threads) {
    const Steps steps(is_step);
    run_conv<T>(dtype, steps, threads);
    run_delta<T>(dtype, steps, threads);
    run_mamba<T>(dtype, steps, threads);
}

}  // namespace
