"""A rank reads its share of a checkpoint, and takes memory for no more."""

import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from mmdeploy_llm.system.sharding import Share
from mmdeploy_llm.testing.tiny import write_tiny
from mmdeploy_llm.weights import files
from mmdeploy_llm.weights.files import SafetensorsFile
from mmdeploy_llm.weights.shard import Read, fill, fill_share

MEGABYTE = 2**20
WHOLE = (4, 6, 8)  # experts, rows, columns


@pytest.fixture
def stored(tmp_path):
    """A parameter as it is, each matrix transposed, each expert by itself, and rows of it."""
    generator = torch.Generator().manual_seed(0)
    param = torch.randn(WHOLE, generator=generator)
    tensors = {"whole": param, "swapped": param.mT.contiguous()}
    for expert in range(4):
        tensors[f"expert.{expert}"] = param[expert].contiguous()
        tensors[f"expert.{expert}.swapped"] = param[expert].T.contiguous()
        tensors[f"expert.{expert}.low"] = param[expert, :2].contiguous()
        tensors[f"expert.{expert}.high"] = param[expert, 2:].to(torch.bfloat16)
    tensors["row"] = param[0, 0].contiguous()
    tensors = {key: tensor.clone() for key, tensor in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    with SafetensorsFile(tmp_path / "model.safetensors") as file:
        yield param, file


def reads_of(file, layout):
    size = WHOLE[1] * WHOLE[2]
    if layout in ("whole", "swapped"):
        return [read(file, layout, 0, WHOLE, layout == "swapped")]
    if layout == "parts":
        low = [read(file, f"expert.{e}.low", e * size, (2, 8)) for e in range(4)]
        return low + [read(file, f"expert.{e}.high", e * size + 16, (4, 8)) for e in range(4)]
    end = ".swapped" if layout == "experts swapped" else ""
    return [read(file, f"expert.{e}{end}", e * size, (6, 8), bool(end)) for e in range(4)]


def read(file, key, start, shape, transpose=False):
    return Read(
        file=file,
        key=key,
        name="p",
        start=start,
        shape=shape,
        first_value=0,
        transpose=transpose,
    )


@pytest.mark.one_is_quick
@pytest.mark.parametrize("layout", ["whole", "swapped", "parts", "experts", "experts swapped"])
@pytest.mark.parametrize(
    "share",
    [
        Share(axis=0, ranges=((1, 3),)),
        Share(axis=1, ranges=((0, 1), (3, 5))),
        Share(axis=1, ranges=((2, 6),)),
        Share(axis=2, ranges=((4, 8),)),
        Share(axis=2, ranges=((0, 2), (5, 6))),
        Share(axis=0, ranges=()),
    ],
)
@pytest.mark.parametrize("staging", [1, files.STAGING_BYTES])
def test_a_share_is_filled_from_any_layout(stored, layout, share, staging, monkeypatch):
    monkeypatch.setattr("mmdeploy_llm.weights.shard.STAGING_BYTES", staging)
    param, file = stored
    whole = torch.full(WHOLE, torch.nan)
    for one in reads_of(file, layout):
        fill(one, whole)
    shape = list(WHOLE)
    shape[share.axis] = sum(stop - first for first, stop in share.ranges)
    found = torch.full(shape, torch.nan)
    for one in reads_of(file, layout):
        fill_share(one, found, share, WHOLE)
    if share.ranges:
        assert torch.equal(found, share.take(whole))
    assert (whole - param).abs().max() < 0.02  # rounded to bf16 in places


def test_rows_are_read_without_what_is_beside_them(stored, monkeypatch):
    """Not a byte more: other rows may lie on pages that no rank of this host has read."""
    _, file = stored
    counted = []
    preadv = os.preadv

    def count(fd, buffers, offset):
        counted.append(sum(len(buffer) for buffer in buffers))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", count)
    out = torch.empty(4, 3, 8)
    for one in reads_of(file, "experts"):
        fill_share(one, out, Share(axis=1, ranges=((3, 6),)), WHOLE)
    assert sum(counted) == out.nbytes


MEASURE = """
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from mmdeploy_llm_plugins.llama.text import LlamaForCausalLM

from mmdeploy_llm.weights.folder import read_checkpoint
from mmdeploy_llm.layers.tp_plan import tp_plan
from mmdeploy_llm.system.sharding import shares_of
from mmdeploy_llm.weights.load import build_model

checkpoint, size = read_checkpoint(Path(sys.argv[1])), int(sys.argv[2])

def memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024

before = memory("VmRSS")
split = shares_of(tp_plan, SimpleNamespace(rank=size - 1, size=size, num_calls=0), "llama")
model = build_model(
    LlamaForCausalLM, checkpoint, torch.float32, torch.device("cpu"),
    split=split if size > 1 else None,
)
print(sum(param.nbytes for param in model.parameters()), memory("VmHWM") - before)
"""


@pytest.mark.full
def test_the_memory_of_a_rank_is_its_share(tmp_path):
    """Its peak is measured, buffers for columns included."""
    sizes = {"hidden_size": 768, "intermediate_size": 4096, "num_hidden_layers": 4}
    write_tiny("llama", tmp_path, num_attention_heads=12, num_key_value_heads=4, **sizes)
    (whole, whole_peak), (half, half_peak) = (measure(tmp_path, size) for size in (1, 2))
    assert whole > 150 * MEGABYTE
    assert half < 0.51 * whole
    assert whole_peak > 0.9 * whole  # the measure sees the weights
    assert half_peak < half + files.STAGING_BYTES + 24 * MEGABYTE


def measure(folder, size):
    """Bytes of the parameters, and how far loading them raised the peak of the process."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, folder, str(size)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return tuple(int(number) for number in done.stdout.split())
