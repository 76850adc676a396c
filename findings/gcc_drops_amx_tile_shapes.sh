#!/usr/bin/env bash
# AMX's tiles get their shapes from 64 bytes in memory: _tile_loadconfig(&shapes). Code that fills a
# local variable with them and makes this call, as llama.cpp's does, is compiled by GCC 12 at -O2 to
# stores of 17 bytes: the palette, which is not 0, and 16 bytes after it. The lengths
# of rows behind these and all numbers of rows, at bytes 48 to 63, are what lay on the stack, so
# that the tiles have no such shape and the first instruction on one is an invalid opcode. The reason
# is one word in amxtileintrin.h: its assembler statement says that it reads a pointer there, eight
# bytes, so that stores to the others are dead. Clang writes all 64. Nothing warns, and it depends
# on what the stack held, and on where the compiler inlines the function.
#
# Met as: llama.cpp (in llama-cpp-python 0.3.36) and whisper.cpp (in pywhispercpp 1.5.1), built with
# their defaults by Debian 12's compiler on a processor with AMX, end with an illegal instruction in
# their first product of quantised weights; built by Clang 16 both run. It is not the processor, the
# kernel's permission or the file of the model. In own code: shapes in a `static const`, or
# `asm volatile("" ::: "memory")` before the call.
#
# Compiles only; no AMX is needed. Seen with GCC 12.2.0-14+deb12u1 and Clang of ziglang 0.13.0,
# 2026-12-01. Needs Debian 12 on x86-64 (apt-get download), Python 3 and the package index.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
gcc=12.2.0-14+deb12u1
apt-get download -qq "gcc-12=$gcc" "cpp-12=$gcc" "libgcc-12-dev=$gcc" \
    libmpc3 libmpfr6 libisl23 libgmp10 libzstd1
for package in ./*.deb; do dpkg-deb -x "$package" root; done
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check ziglang==0.13.0
cat > shapes.c <<'C'
#include <immintrin.h>
#include <stdint.h>

struct shapes {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes_of_row[16];
    uint8_t rows[16];
};

void set_up(void) {
    struct shapes tiles = {0};
    tiles.palette = 1;
    for (int tile = 0; tile < 8; ++tile) {
        tiles.bytes_of_row[tile] = 64;
        tiles.rows[tile] = 16;
    }
    _tile_loadconfig(&tiles);
}
C
# Without headers of a C library.
LD_LIBRARY_PATH=root/usr/lib/x86_64-linux-gnu root/usr/bin/x86_64-linux-gnu-gcc-12 \
    -ffreestanding -D_MM_MALLOC_H_INCLUDED -O2 -mamx-tile -S -o gcc.s shapes.c
venv/bin/python -m ziglang cc -target x86_64-linux-gnu -mcpu=x86_64+amx_tile -O2 -S -o clang.s shapes.c
venv/bin/python - <<'PYTHON'
import re
from pathlib import Path

WIDTHS = {"movb": 1, "movw": 2, "movl": 4, "movq": 8, "movaps": 16, "movups": 16, "movdqa": 16}
written = {}
for compiler in ("gcc", "clang"):
    before, _, after = Path(f"{compiler}.s").read_text().partition("ldtilecfg")
    first = int(re.match(r"\s+(-?\d+)\(%rsp\)", after)[1])
    found = set()
    for name, place in re.findall(r"^\s+(mov\w+)\s+\S+, (-?\d+)\(%rsp\)", before, re.MULTILINE):
        found |= {int(place) - first + byte for byte in range(WIDTHS[name])}
    written[compiler] = found
    print(f"{compiler}: writes {len(found)} of 64 bytes; of the numbers of rows, at 48 to 55:",
          len(found & set(range(48, 56))))
assert written["clang"] == set(range(64)), "it has changed"
assert written["gcc"] == set(range(17)), "it has changed"
PYTHON
