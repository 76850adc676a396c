// Random values for the driver, and the comparison of products with plain sums.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <type_traits>
#include <vector>

#include "kernels.cpp"
#include "products.cpp"
#include "sequences.cpp"

namespace {

std::mt19937 generator(1);

int64_t between(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(generator);
}

template <typename T>
std::vector<T> random_values(int64_t size) {
    std::vector<T> values(size);
    std::normal_distribution<float> normal;
    for (T& value : values) value = mm::store<T>(normal(generator));
    return values;
}

// Compares the last row of a product [rows][n] with sums in double: integers are exact; floats lose
// half a unit in the last place for each product, and by rounding the result to bf16.
template <typename T, typename W>
void compare(const char* name, const T* x, const W* weights, const T* bias, const T* out,
             int64_t rows, int64_t n, int64_t k) {
    constexpr bool IS_EXACT = std::is_integral_v<W>;
    for (int64_t column = 0; column < n; ++column) {
        double sum = bias == nullptr ? 0.0 : mm::load(bias[column]), size = std::fabs(sum);
        for (int64_t i = 0; i < k; ++i) {
            const W weight = weights[column * k + i];
            double product = double(mm::load(x[(rows - 1) * k + i]));
            if constexpr (IS_EXACT) product *= weight;
            if constexpr (!IS_EXACT) product *= mm::load(weight);
            sum += product;
            size += std::fabs(product);
        }
        const double found = mm::load(out[(rows - 1) * n + column]);
        const double lost = IS_EXACT ? 0.0 : std::ldexp(double(k) / 2 + 2, -23) * size;
        const double rounding = sizeof(T) == 2 ? std::ldexp(std::fabs(sum) + lost, -8) : 0.0;
        if (std::fabs(found - sum) <= lost + rounding) continue;
        std::printf("%s: %g instead of %g\n", name, found, sum);
        std::exit(1);
    }
}

// Compares rows of a product with what each of them gives alone, bit by bit.
template <typename Product>
void compare_alone(const char* name, Product args) {
    const int64_t size = args.dtype == 1 ? 2 : 4, rows = args.rows;
    const char *x = static_cast<const char*>(args.x), *out = static_cast<const char*>(args.out);
    std::vector<char> own(args.n * size);
    args.out = own.data();
    args.rows = 1;
    for (const int64_t row : {int64_t(0), between(0, rows - 1), rows - 1}) {
        args.x = x + row * args.x_stride * size;
        run(args);
        if (std::equal(own.begin(), own.end(), out + row * args.n * size)) continue;
        std::printf("%s: row %d of %d has other bits alone\n", name, int(row), int(rows));
        std::exit(1);
    }
}

}  // namespace
