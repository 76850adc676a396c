// Products with weights of 4 and 8 bits and with 8-bit floats, compared with plain sums.
#pragma once

#include "driver_values.h"

namespace {

// A weight in codes: its values are scale * value(row, column) - offset.
struct Codes {
    int32_t bits;
    bool is_float;
    int32_t form;  // of scales, see code_scales.h
    int64_t n, k, group;
    std::vector<uint8_t> codes;                // [n][whole units]
    std::vector<float> scales, offsets;        // [n][groups]

    int64_t per_unit() const { return 32 / bits; }
    int64_t units() const { return (k + per_unit() - 1) / per_unit(); }
    int64_t groups() const { return (k + group - 1) / group; }
    // As LinearCodes has it: the form, and the zero that all groups of form 3 have.
    int32_t scale_form() const { return form == 3 ? form | 8 << 8 : form; }
    double value(int64_t row, int64_t column) const {
        const uint8_t code = codes[row * units() * per_unit() + column];
        if (!is_float) return code;
        const int exponent = code >> 3 & 15, mantissa = code & 7;
        const double size = exponent == 0 ? std::ldexp(mantissa, -9)
                                          : std::ldexp(8 + mantissa, exponent - 10);
        return (code & 128) != 0 ? -size : size;
    }
};

Codes random_codes(int32_t bits, bool is_float, int64_t n, int64_t k, int64_t group) {
    const int32_t form = is_float ? 0 : int32_t(between(0, bits == 4 ? 3 : 1));
    Codes made{bits, is_float, form, n, k, group, {}, {}, {}};
    made.codes.resize(n * made.units() * made.per_unit());
    for (uint8_t& code : made.codes) {
        code = uint8_t(between(0, (1 << bits) - 1));
        if (is_float && (code & 127) == 127) code = 0;  // is NaN
    }
    for (int64_t i = 0; i < n * made.groups(); ++i) {
        const float scale = float(between(1, 255)) / 128.0f;  // as short as those of bf16
        const int64_t zero = is_float ? 0 : form == 3 ? 8 : between(0, (1 << bits) - 1);
        made.scales.push_back(form == 1 ? scale * 1.2345f : scale);
        made.offsets.push_back(form == 1 ? float(between(-999, 999)) / 77.0f : scale * float(zero));
    }
    return made;
}

std::vector<uint32_t> packed_codes(const Codes& from, int32_t in_words, int32_t threads) {
    std::vector<uint32_t> units(from.n * from.units());
    for (int64_t i = 0; i < int64_t(units.size()); ++i) {
        for (int64_t c = 0; c < from.per_unit(); ++c) {
            const int64_t at = in_words || from.bits == 8 ? from.bits * c : c % 4 * 8 + c / 4 * 4;
            units[i] |= uint32_t(from.codes[i * from.per_unit() + c]) << at;
        }
    }
    std::vector<uint32_t> packed((from.n + 63) / 64 * 64 * from.units());
    run(mm::PackUnits{units.data(), from.n, from.units(), in_words, packed.data(), threads});
    return packed;
}

std::vector<uint32_t> packed_scales(const Codes& from) {
    const int64_t words = mm::Groups(from.k, from.group, from.form).rows();
    std::vector<uint32_t> scales((from.n + 63) / 64 * 64 * words);
    for (int64_t row = 0; row < from.n; ++row) {
        uint32_t* to = scales.data() + row / 64 * 64 * words + row % 64;
        for (int64_t g = 0; g < from.groups(); ++g) {
            const float scale = from.scales[row * from.groups() + g];
            const float offset = from.offsets[row * from.groups() + g];
            if (from.form >= 2) {  // exponents are those of floats, 98 or 102 larger
                const uint32_t bits = mm::float_to_bits(std::ldexp(scale, from.form == 2 ? -98 : -102));
                const uint32_t half = from.form == 2 ? bits >> 12 | uint32_t(offset / scale) : bits >> 13;
                to[g / 2 * 64] |= half << (g % 2 * 16);
            } else if (from.form == 1) {
                to[2 * g * 64] = mm::float_to_bits(scale);
                to[(2 * g + 1) * 64] = mm::float_to_bits(offset);
            } else {
                to[g * 64] = mm::float_to_bits(scale) | uint32_t(offset / scale);
            }
        }
    }
    return scales;
}

// Makes x of which it is known what rounding to 8 bits gives: in each group of 64, whole numbers
// times a power of two, the largest of them 127. A quarter is added to small ones, or subtracted.
template <typename T>
std::vector<T> roundable(int64_t rows, int64_t k, std::vector<double>& rounded) {
    std::vector<T> x(rows * k);
    rounded.resize(rows * k);
    float power = 1.0f;
    for (int64_t i = 0; i < rows * k; ++i) {
        const bool is_first = i % k % 64 == 0;
        if (is_first) power = std::ldexp(1.0f, int(between(-3, 3)));
        const int64_t whole = is_first ? 127 : between(-127, 127);
        const float lost = std::abs(whole) < 32 ? float(between(-1, 1)) / 4.0f : 0.0f;
        rounded[i] = double(whole) * power;
        x[i] = mm::store<T>((float(whole) + lost) * power);
    }
    return x;
}

// bits: 4 or 8, or 0 for floats of 8 bits.
template <typename T>
void run_codes(int32_t dtype, int32_t bits, bool rounds, int32_t threads) {
    const int64_t sizes[] = {16, 32, 64, 128, 10000}, few[] = {1, 2, 3, 5, 6, 13};
    const int64_t rows = between(0, 1) ? few[between(0, 5)] : between(1, 70);
    const int64_t n = between(1, 200), k = between(1, 700), group = sizes[between(0, 4)];
    const Codes w = random_codes(bits == 0 ? 8 : bits, bits == 0, n, k, std::min(group, k));
    const auto packed = packed_codes(w, bits == 4 ? int32_t(between(0, 1)) : 0, threads);
    const auto scales = packed_scales(w);
    std::vector<double> multiplied;
    auto x = roundable<T>(rows, k, multiplied);
    if (!rounds) x = random_values<T>(rows * k);
    const auto bias = random_values<T>(n);
    std::vector<T> out(rows * n);
    const mm::LinearCodes product{dtype, dtype, w.bits, w.scale_form(), 0, w.is_float, rounds,
                                  x.data(), k, packed.data(), nullptr, 0, scales.data(), w.group,
                                  bias.data(), out.data(), rows, n, k, packed.data(), w.units() * 4,
                                  threads};
    run(product);
    compare_alone("codes", product);
    for (const int64_t row : {rows - 1, between(0, rows - 1)}) {
        for (int64_t column = 0; column < n; ++column) {
            double sum = mm::load(bias[column]), size = std::fabs(sum);
            for (int64_t i = 0; i < k; ++i) {
                const int64_t at = column * w.groups() + i / w.group;
                const double own = rounds ? multiplied[row * k + i] : mm::load(x[row * k + i]);
                const double part = own * w.scales[at] * w.value(column, i);
                sum += part - own * w.offsets[at];
                size += std::fabs(part) + std::fabs(own * w.offsets[at]);
            }
            const double found = mm::load(out[row * n + column]);
            const double unit = dtype == 1 ? 1.0 / 256 : 1e-6;
            if (std::fabs(found - sum) <= unit * std::fabs(sum) + 1e-6 * size) continue;
            std::printf("codes of %d bits, x %s, %d rows, groups of %d: %g instead of %g\n", bits,
                        rounds ? "rounded" : "as it is", int(rows), int(group), found, sum);
            std::exit(1);
        }
    }
}

}  // namespace
