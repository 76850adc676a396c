// Resizes images, and turns their pixels into the patch rows that vision towers read.
#pragma once

#include <cstdint>
#include <cstring>

#include "../products/lanes.h"

namespace mm {

// Looks pixels [height][width][3] up in table [3][256] and writes patch rows,
// out [patches][3][frames][patch][patch]. Patches are ordered in merge x merge blocks, row by row
// of blocks. Writes the same values to the frames `first` .. `first + count`.
inline void patchify(const uint8_t* pixels, int64_t height, int64_t width, int64_t patch,
                     int64_t merge, const float* table, int64_t frames, int64_t first,
                     int64_t count, float* out) {
    const int64_t side = patch * merge, area = patch * patch;
    for (int64_t top = 0; top < height; top += side) {
        for (int64_t left = 0; left < width; left += side) {
            for (int64_t part = 0; part < merge * merge; ++part) {
                const int64_t y = top + part / merge * patch, x = left + part % merge * patch;
                for (int64_t channel = 0; channel < 3; ++channel) {
                    const float* values = table + channel * 256;
                    float* plane = out + (channel * frames + first) * area;
                    for (int64_t row = 0; row < patch; ++row) {
                        const uint8_t* in = pixels + ((y + row) * width + x) * 3 + channel;
                        float* to = plane + row * patch;
                        for (int64_t column = 0; column < patch; ++column) {
                            to[column] = values[in[column * 3]];
                        }
                    }
                    for (int64_t copy = 1; copy < count; ++copy) {
                        std::memcpy(plane + copy * area, plane, area * sizeof *plane);
                    }
                }
                out += 3 * frames * area;
            }
        }
    }
}

// Which inputs an output is the weighted sum of: counts[i] of them, from number first[i] on.
struct Taps {
    const int32_t* first;
    const int32_t* counts;
    const int32_t* weights;  // [outputs][most], in 2^-WEIGHT_BITS
    int64_t most;
};

constexpr int WEIGHT_BITS = 22;     // as in Pillow
constexpr int64_t STRIP_ROWS = 16;  // that are resized across at a time
constexpr int64_t STRIP_BYTES = STRIP_ROWS * 3;
constexpr int64_t RUN_BYTES = 64;  // that are resized down at a time

// Returns LANES bytes as integers.
MM_INLINE Ints integers(const uint8_t* bytes) {
#if MM_VECTOR_BYTES == 64
    return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)bytes));
#elif MM_VECTOR_BYTES == 32
    return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)bytes));
#else
    return Ints{bytes[0], bytes[1], bytes[2], bytes[3]};
#endif
}

// Writes the rounded weighted sums of `count` runs of BYTES bytes, each `step` bytes after the one
// before. Not inlined, so that the sums stay in registers.
template <int64_t BYTES>
__attribute__((noinline)) void weighted(const uint8_t* in, int64_t step, const int32_t* weights,
                                        int64_t count, uint8_t* out) {
    constexpr int NUM = BYTES / LANES;
    Ints sums[NUM];
#pragma GCC unroll 16
    for (int part = 0; part < NUM; ++part) sums[part] = Ints{} + (1 << (WEIGHT_BITS - 1));
    for (int64_t tap = 0; tap < count; ++tap) {
        const Ints weight = splat(weights + tap);
#pragma GCC unroll 16
        for (int part = 0; part < NUM; ++part) {
            sums[part] += integers(in + tap * step + part * LANES) * weight;
        }
    }
    int32_t whole[BYTES];
#pragma GCC unroll 16
    for (int part = 0; part < NUM; ++part) {
        Ints sum = sums[part] >> WEIGHT_BITS;
        sum = sum < 0 ? Ints{} : sum;
        store_lanes(whole + part * LANES, sum > 255 ? Ints{} + 255 : sum);
    }
    for (int64_t byte = 0; byte < BYTES; ++byte) out[byte] = uint8_t(whole[byte]);
}

// Resizes `rows` rows of `width` pixels [3] across, to out [rows][columns][3]. A strip of rows is
// turned so that the pixels of a column follow each other, `turned` [width][STRIP_ROWS][3] with a
// byte more: so these are sums of runs of bytes too.
inline void across(const uint8_t* pixels, int64_t rows, int64_t width, const Taps& taps,
                   int64_t columns, uint8_t* turned, uint8_t* out) {
    for (int64_t top = 0; top < rows; top += STRIP_ROWS) {
        const int64_t left = rows - top < STRIP_ROWS ? rows - top : STRIP_ROWS;
        for (int64_t x = 0; x < width; ++x) {
            const uint8_t* in = pixels + (top * width + x) * 3;
            uint8_t* to = turned + x * STRIP_BYTES;
            // Four bytes are one move; the fourth is overwritten. The last pixel has none after it.
            if (x + 1 < width) {
                for (int64_t row = 0; row < left; ++row) {
                    std::memcpy(to + row * 3, in + row * width * 3, 4);
                }
            } else {
                for (int64_t row = 0; row < left; ++row) {
                    std::memcpy(to + row * 3, in + row * width * 3, 3);
                }
            }
        }
        for (int64_t x = 0; x < columns; ++x) {
            uint8_t sums[STRIP_BYTES];
            weighted<STRIP_BYTES>(turned + taps.first[x] * STRIP_BYTES, STRIP_BYTES,
                                  taps.weights + x * taps.most, taps.counts[x], sums);
            for (int64_t row = 0; row < left; ++row) {
                std::memcpy(out + ((top + row) * columns + x) * 3, sums + row * 3, 3);
            }
        }
    }
}

// Resizes rows of `row_bytes` bytes, RUN_BYTES or more, down to out [rows][row_bytes].
inline void down(const uint8_t* pixels, int64_t row_bytes, const Taps& taps, int64_t rows,
                 uint8_t* out) {
    for (int64_t y = 0; y < rows; ++y) {
        for (int64_t next = 0; next < row_bytes; next += RUN_BYTES) {
            // The last run begins earlier where it would be shorter.
            const int64_t begin = next + RUN_BYTES > row_bytes ? row_bytes - RUN_BYTES : next;
            weighted<RUN_BYTES>(pixels + taps.first[y] * row_bytes + begin, row_bytes,
                                taps.weights + y * taps.most, taps.counts[y],
                                out + y * row_bytes + begin);
        }
    }
}

}  // namespace mm
