// Turns pixels of images and frames into the patch rows that vision towers read.
#pragma once

#include <cstdint>
#include <cstring>

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

}  // namespace mm
