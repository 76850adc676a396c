#!/usr/bin/env bash
# torch 2.13.0 on a CPU with AVX2: the second convolution of Whisper base (512 channels in and out, three
# taps, stride 2, half a minute of sound) in three dtypes, on one thread.
#
#     dtype      the layer itself    to float32, the layer, and back
#     float32    1                   1
#     bfloat16   about 27            about 1
#     float16    about 25            about 1
#
# A linear layer (1,500 rows, 512 to 2,048) takes about 8 times as long in bfloat16: slow, not so. Where
# oneDNN has no products of a dtype, torch leaves the convolution to loops of its own. Nothing warns, and
# the results are right. A checkpoint of Whisper in half precision, as most are, spends half of its
# time in two of its layers, which have less than a twentieth of its sums; copying the values to float32
# and back costs nothing beside it. torch.ops.mkldnn._is_mkldnn_bf16_supported() says where this is so.
#
# Seen with Python 3.11, Linux x86-64 (Zen 3, no AVX-512), 2026-11-29. On a CPU with AVX-512 the variables
# below hold torch to AVX2. Needs Python 3.11 or newer, the package index, 1 GB of disk (more
# where pip takes the CUDA build) and a minute.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet --disable-pip-version-check install torch==2.13.0 numpy==2.3.4
cd "$folder"
ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 OMP_NUM_THREADS=1 venv/bin/python - <<'PYTHON'
import time

import torch
import torch.nn.functional as F

torch.manual_seed(0)
print("torch", torch.__version__, torch.backends.cpu.get_cpu_capability())
assert not torch.ops.mkldnn._is_mkldnn_bf16_supported()
sound, taps = torch.randn(1, 512, 3000), torch.randn(512, 512, 3)


def seconds(compute):
    times = []
    compute()
    for _ in range(3):
        begin = time.perf_counter()
        compute()
        times.append(time.perf_counter() - begin)
    return min(times)


def layer(x, weight):
    return F.conv1d(x, weight, stride=2, padding=1)


with torch.inference_mode():
    exact = seconds(lambda: layer(sound, taps))
    for dtype in (torch.bfloat16, torch.float16):
        x, weight = sound.to(dtype), taps.to(dtype)
        own = seconds(lambda: layer(x, weight)) / exact
        wide = seconds(lambda: layer(x.float(), weight.float()).to(dtype)) / exact
        print(f"{dtype}: {own:.1f} times float32's time, with both conversions {wide:.1f}")
        assert own > 5 * wide, "the layer itself is not five times slower than by way of float32"
PYTHON
