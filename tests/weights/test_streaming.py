"""Modules are packed while others are read: the answers stay the same, and only so much is read
ahead."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.engine.startup import loaded
from mmdeploy_llm.layers import install
from mmdeploy_llm.layers.basic.rotary import Rotary
from mmdeploy_llm.weights import load, streaming
from mmdeploy_llm.weights.shard import Read

PARAMS = SamplingParams(temperature=0.0, max_tokens=6, logprobs=1)
FAMILIES = ["qwen2", pytest.param("ernie4_5_moe", marks=pytest.mark.full)]


def answer(folder, quantization):
    options = {"quiet": True, "num_threads": 1, "block_size": 16, "max_model_len": 64}
    with LLM(str(folder), quantization=quantization, weight_cache=False, **options) as llm:
        output = llm.generate([3, 4, 5, 6, 7], PARAMS, use_tqdm=False)[0].outputs
    return list(output.token_ids), [str(each) for each in output.logprobs]


@pytest.mark.one_is_quick
@pytest.mark.parametrize("quantization", [None, "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_is_packed_while_it_is_read_answers_the_same(
    tiny_folder, family, quantization, monkeypatch
):
    early, packed = [], install.packer

    def packer(*args, **kwargs):
        pack = packed(*args, **kwargs)

        def note(path, module):
            early.append(path)
            pack(path, module)

        return note

    monkeypatch.setattr(loaded, "packer", packer)
    monkeypatch.setattr(streaming, "PIECE_BYTES", 1000)
    found = answer(tiny_folder(family), quantization)
    assert sum(path.endswith("qkv_proj") for path in early) > 1
    with monkeypatch.context() as patch:
        patch.setattr(loaded, "_new_packer", lambda runtime, machine: None)
        assert answer(tiny_folder(family), quantization) == found


def reads(*names):
    """Reads of 4 bytes each."""
    entry = SimpleNamespace(dtype=torch.float32)
    return [
        SimpleNamespace(name=name, key=name, size=1, file=SimpleNamespace(entries={name: entry}))
        for name in names
    ]


@pytest.mark.parametrize(("ahead", "most"), [(None, 6), (12, 3), (4, 1), (1, 1)])
def test_no_more_is_read_ahead_than_is_allowed(ahead, most):
    begun, lock = [], threading.Lock()

    def fill(read):
        with lock:
            begun.append(read.name)

        return read.name

    given = reads(*"abcdef")
    with ThreadPoolExecutor(2) as pool:
        done = streaming.done_in_order(pool, fill, given, streaming._size, ahead)
        for number, (read, result) in enumerate(done):
            assert (read, result) == (given[number], given[number].name)
            assert len(begun) <= number + most
    assert sorted(begun) == list("abcdef")


def test_a_large_read_is_shared_by_rows(monkeypatch):
    monkeypatch.setattr(streaming, "PIECE_BYTES", 40)
    file = streaming.SafetensorsFile.__new__(streaming.SafetensorsFile)
    file.entries = {"a": SimpleNamespace(dtype=torch.float32)}
    whole = Read(
        file=file, key="a", name="a", start=100, shape=(7, 2, 2), first_value=8, transpose=False
    )
    found = list(streaming._pieces(whole, is_whole=False))
    assert [read.shape for read in found] == [(2, 2, 2), (2, 2, 2), (2, 2, 2), (1, 2, 2)]
    assert [read.start for read in found] == [100, 108, 116, 124]
    assert [read.first_value for read in found] == [8, 16, 24, 32]
    assert list(streaming._pieces(whole, is_whole=True)) == [whole]
    for other in (replace(whole, transpose=True), replace(whole, shape=(2, 2, 2))):
        assert list(streaming._pieces(other, is_whole=False)) == [other]


def test_what_fails_is_raised_and_ends_the_reads():
    done = []

    def fill(read):
        if read.name == "b":
            raise ValueError("torn")
        done.append(read.name)

    with pytest.raises(ValueError, match="torn"), ThreadPoolExecutor(1) as pool:
        list(streaming.done_in_order(pool, fill, reads(*"abcdef"), streaming._size, 8))
    assert "f" not in done


def test_weights_in_few_bits_are_packed_before_later_ones_are_read(monkeypatch):
    seen = []

    def hold(model, name, kept, units):
        seen.append(name)
        return SimpleNamespace(num_bytes=4)

    monkeypatch.setattr(load, "hold", hold)
    monkeypatch.setattr(load, "CODED_AHEAD_BYTES", 4)
    names = ("a.gate_proj", "a.up_proj", "b.weight", "c.weight")
    kept = {name: SimpleNamespace(units_shape=(1, 1), num_bytes=4) for name in names}
    model = nn.ModuleDict({path: nn.Module() for path in "abc"})
    load._hold(model, kept, None, lambda path, module: seen.append(path))
    assert seen == ["a.gate_proj", "a.up_proj", "a", "b.weight", "b", "c.weight", "c"]


class OfAPlugin(nn.Module):
    """Computes a buffer, maybe from its weights."""

    def init_buffers(self, device):
        pass


def test_models_of_other_packages_that_compute_buffers_are_packed_at_the_end():
    plain = nn.Sequential(nn.Linear(2, 2))
    assert streaming.can_pack_early(plain)
    with_rotary = nn.Sequential(Rotary.__new__(Rotary))
    nn.Module.__init__(with_rotary[0])
    assert streaming.can_pack_early(with_rotary)
    assert not streaming.can_pack_early(nn.Sequential(OfAPlugin()))
    plain.is_cacheable = False
    assert not streaming.can_pack_early(plain)
