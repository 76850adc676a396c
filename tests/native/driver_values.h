// Random values for the driver, and the comparison of products with plain sums.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
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

// Compares the last row of a product [rows][n] with sums in double.
template <typename T, typename W>
void compare(const char* name, const T* x, const W* weights, const T* bias, const T* out,
             int64_t rows, int64_t n, int64_t k, double error) {
    for (int64_t column = 0; column < n; ++column) {
        double sum = bias == nullptr ? 0.0 : mm::load(bias[column]), size = std::fabs(sum);
        for (int64_t i = 0; i < k; ++i) {
            const double product = double(mm::load(x[(rows - 1) * k + i])) *
                                   mm::load(mm::convert<float>(weights[column * k + i]));
            sum += product;
            size += std::fabs(product);
        }
        const double found = mm::load(out[(rows - 1) * n + column]);
        if (std::fabs(found - sum) <= error * size) continue;
        std::printf("%s: %g instead of %g\n", name, found, sum);
        std::exit(1);
    }
}

}  // namespace
