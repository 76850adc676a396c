"""GGUF files: values to the last bit, names, the choice of a file, refusals."""

from __future__ import annotations

import os
import re
import sys

import gguf
import numpy as np
import pytest
import torch

from mmdeploy_llm.errors import CheckpointError, ModelNotSupportedError
from mmdeploy_llm.hooks import PluginManager
from mmdeploy_llm.weights import tensor_file
from mmdeploy_llm.weights.gguf import find_gguf, rows
from mmdeploy_llm.weights.gguf.codes import LAYOUTS, coded_rows
from mmdeploy_llm.weights.gguf.config import gguf_config
from mmdeploy_llm.weights.gguf.header import read_headers
from mmdeploy_llm.weights.gguf.library import known_keys, readable_types
from mmdeploy_llm.weights.gguf.tables import GGUFTable

from .gguf_writing import random_blocks, write_gguf
from .opening import opened, tables_of, usual_key

BLOCKS = [
    kind.name
    for kind in gguf.GGMLQuantizationType
    if kind in readable_types() and kind.name not in ("F64", "F32", "F16", "BF16")
]
NEEDED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


def write_tensors(path, tensors, arch="qwen2"):
    """tensors: name -> (array of bytes or floats, name of the type)."""
    writer = gguf.GGUFWriter(path, arch)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read(path, key, shape, dtype=torch.float32, **options):
    with opened([path], usual_key) as file:
        out = torch.full(shape, 7.0, dtype=dtype)
        file.read_into(key, out, **{"first_value": 0, "transpose": False, **options})
        return file.entries[key], out


def test_the_types_that_must_be_read():
    assert set(NEEDED) <= set(BLOCKS)


@pytest.mark.one_is_quick
@pytest.mark.parametrize("kind", BLOCKS)
def test_values_are_those_of_the_library(tmp_path, monkeypatch, kind):
    """Also a few rows at a time, from the middle on, and transposed."""
    number = gguf.GGMLQuantizationType[kind]
    data = random_blocks(kind, 24, 2)
    path = write_tensors(tmp_path / "a.gguf", {"blk.3.attn_v.weight": (data, kind)})
    with np.errstate(all="ignore"):
        wanted = torch.from_numpy(gguf.dequantize(data, number).copy())
    n, k = wanted.shape
    monkeypatch.setattr(tensor_file, "ROWS_BYTES", 5 * 4 * k)
    monkeypatch.setattr(rows, "SLICE_VALUES", 2 * k)
    key = "model.layers.3.self_attn.v_proj.weight"
    entry, found = read(path, key, (n, k))
    assert (entry.shape, entry.dtype) == ((n, k), torch.float32)
    assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))
    _, found = read(path, key, (9, k), first_value=7 * k)
    assert torch.equal(found.view(torch.int32), wanted[7:16].view(torch.int32))
    _, found = read(path, key, (k, n), transpose=True)
    assert torch.equal(found.view(torch.int32), wanted.T.contiguous().view(torch.int32))


@pytest.mark.one_is_quick
@pytest.mark.parametrize("kind", LAYOUTS)
def test_weights_that_stay_in_few_bits(tmp_path, kind):
    """Dequantised they are the library's values; with offsets, up to one more rounding."""
    data = random_blocks(kind, 24, 2)
    path = write_tensors(tmp_path / "a.gguf", {"blk.3.attn_v.weight": (data, kind)})
    with np.errstate(all="ignore"):
        wanted = gguf.dequantize(data, gguf.GGMLQuantizationType[kind])
    key = "model.layers.3.self_attn.v_proj.weight"
    with opened([path], {key}.__contains__) as file:
        layout, weight = file.layout(key), file.read_coded(key)
    assert (weight.bits, weight.group_size) == (layout.bits, layout.group_size)
    found, wanted = weight.dequantize(), torch.from_numpy(wanted.copy())
    finite = wanted.isfinite() & found.isfinite()
    assert finite.float().mean() > 0.5
    torch.testing.assert_close(found[finite], wanted[finite], atol=0, rtol=0)


# Where blocks have their halves.
HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}


@pytest.mark.parametrize("kind", LAYOUTS)
def test_matrices_take_as_much_memory_as_in_the_file(kernels, kind):
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = random_blocks(kind, 64, 2048 // block_size).reshape(-1, block_bytes)
    for place in HALVES[kind]:
        halves = np.random.default_rng(place).normal(0, 0.01, len(blocks)).astype(np.float16)
        blocks[:, place : place + 2] = halves[:, None].view(np.uint8)
    data = torch.from_numpy(blocks.reshape(64, -1))
    packed = kernels.pack_coded(coded_rows(kind, data, 2048), rounds=False)
    assert packed.num_bytes <= 1.03 * data.nbytes
    wanted = gguf.dequantize(data.numpy(), gguf.GGMLQuantizationType[kind])
    rows = packed.rows(torch.arange(64), torch.float32)
    torch.testing.assert_close(rows, torch.from_numpy(wanted.copy()), rtol=1e-6, atol=1e-6)


def test_reordered_rows_stay_in_few_bits(tmp_path):
    path = write_tensors(
        tmp_path / "a.gguf", {"blk.0.attn_q.weight": (random_blocks("Q4_0", 24, 2), "Q4_0")}
    )
    key = "model.layers.0.self_attn.q_proj.weight"
    with opened([path], {key}.__contains__) as file:
        assert file.layout(key) is not None
        weight = file.read_coded(key).dequantize()
        out = torch.empty(weight.shape)
        file.read_into(key, out, first_value=0, transpose=False)
    assert torch.equal(weight.nan_to_num(), out.nan_to_num())


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)],
)
def test_plain_values_keep_their_dtype(tmp_path, kind, dtype):
    values = torch.randn(6, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    data = values.view(torch.uint8).numpy() if kind == "BF16" else values.numpy()
    path = write_tensors(tmp_path / "a.gguf", {"token_embd.weight": (data, kind)})
    entry, found = read(path, "model.embed_tokens.weight", (6, 32), dtype)
    assert entry.dtype is dtype
    assert torch.equal(found, values)


def test_a_share_of_reordered_rows(tiny_copy, tmp_path):
    """Rows of llama's queries from the middle of one head to that of another."""
    tiny_copy("llama", tmp_path, head_dim=16)
    path = write_gguf(tmp_path, tmp_path / "a.gguf", "llama")
    key = "model.layers.1.self_attn.q_proj.weight"
    _, whole = read(path, key, (64, 64))
    _, part = read(path, key, (20, 64), first_value=5 * 64)
    assert torch.equal(part, whole[5:25])


def own_names():
    """Yields (architecture, name, key) of what the tables of the built-in plugins add."""
    plugins = PluginManager.load()
    for spec in {spec.gguf: spec for spec in plugins.models if spec.gguf}.values():
        table = plugins.gguf_table(spec, GGUFTable)
        for arch, model in table.models.items():
            yield from ((arch, name, key) for name, key in model.names.items())
        for tower in table.towers.values():
            yield from (("clip", name, key) for name, key in tower.names.items())


def test_tables_have_no_name_that_the_library_has():
    """Or the library has another one first."""
    names = list(own_names())
    assert len(names) > 20
    for arch, name, key in names:
        stem, whole = name.removesuffix(".weight"), key.removesuffix(".weight")
        first = next(iter(known_keys(arch).get(stem, ())), None)
        assert whole not in (first, f"model.{first}"), name


class TestChoiceOfAFile:
    @pytest.fixture
    def touch(self, tmp_path):
        def run(*names):
            for name in names:
                (tmp_path / name).touch()
            return tmp_path

        return run

    def test_the_only_one_in_a_folder(self, touch):
        folder = touch("a.gguf", "mmproj-a.gguf", "readme.md")
        assert find_gguf(folder) == (folder / "a.gguf",)
        assert find_gguf(folder / "mmproj-a.gguf") == (folder / "mmproj-a.gguf",)

    def test_safetensors_files_win(self, touch):
        folder = touch("a.gguf", "model.safetensors")
        assert find_gguf(folder) == ()

    def test_several(self, touch):
        parts = [f"b-0000{number}-of-00002.gguf" for number in (1, 2)]
        folder = touch("a.gguf", *parts)
        with pytest.raises(CheckpointError, match=r"holds 2 models: a.gguf, b-00001-of-00002.gguf"):
            find_gguf(folder)
        with pytest.raises(CheckpointError, match=r"name one of them: model='/.*/a.gguf'"):
            find_gguf(folder)
        assert find_gguf(folder / parts[1]) == tuple(folder / name for name in parts)

    def test_a_part_that_is_missing(self, touch):
        folder = touch("b-00001-of-00003.gguf", "b-00003-of-00003.gguf")
        with pytest.raises(CheckpointError, match=r"1 of the 3 files .*: b-00002-of-00003.gguf"):
            find_gguf(folder)

    def test_a_part_of_no_files(self, touch):
        folder = touch("b-00001-of-00000.gguf")
        with pytest.raises(CheckpointError, match="one of 0 files"):
            find_gguf(folder)

    def test_a_part_that_is_no_file(self, tiny_copy, tmp_path):
        """A FIFO would be read for ever, and a loop of links is none at all."""
        tiny_copy("qwen3", tmp_path)
        write_gguf(tmp_path, tmp_path / "b.gguf", "qwen3", num_files=2)
        paths = sorted(tmp_path.glob("*.gguf"))
        data = paths[1].read_bytes()
        paths[1].unlink()
        os.mkfifo(paths[1])
        with pytest.raises(CheckpointError, match=paths[1].name):
            read_headers(paths)
        paths[1].unlink()
        paths[1].symlink_to(paths[1])
        with pytest.raises(CheckpointError, match=paths[1].name):
            read_headers(paths)
        paths[1].unlink()
        paths[1].symlink_to(paths[0])
        with pytest.raises(CheckpointError, match="part 0 of"):
            read_headers(paths)
        (tmp_path / "elsewhere").write_bytes(data)
        paths[1].unlink()
        paths[1].symlink_to(tmp_path / "elsewhere")  # as the hub's cache keeps files
        assert len(read_headers(paths).tensors) > 10

    def test_parts_in_another_order(self, tiny_copy, tmp_path):
        tiny_copy("qwen3", tmp_path)
        write_gguf(tmp_path, tmp_path / "b.gguf", "qwen3", num_files=2)
        paths = sorted(tmp_path.glob("*.gguf"))
        with pytest.raises(CheckpointError, match="part 1 of 5, but was read as part 0"):
            read_headers([paths[1], paths[0], *paths[2:]])
        with pytest.raises(CheckpointError, match="was read as part 0 of 1"):
            read_headers(paths[:1])


def config_of(path):
    header = read_headers([path])
    return gguf_config(header, tables_of(header).model(header))


class TestRefusals:
    def test_a_type_that_nobody_dequantises(self, tmp_path):
        data = np.zeros((2, 32), dtype=np.int8)
        path = write_tensors(tmp_path / "a.gguf", {"token_embd.weight": (data, "I8")})
        with pytest.raises(CheckpointError, match=r"'token_embd.weight' .* type I8, .*: F32, F16"):
            read_headers([path])

    def test_an_unknown_architecture(self, tmp_path):
        path = write_tensors(tmp_path / "a.gguf", {}, arch="mamba")
        with pytest.raises(
            ModelNotSupportedError, match=r"'mamba' cannot be read; known: command-r, .* llama, "
        ):
            tables_of(read_headers([path])).model(read_headers([path]))

    def test_an_unknown_tensor(self, tmp_path):
        data = np.zeros((2, 2), dtype=np.float32)
        path = write_tensors(tmp_path / "a.gguf", {"blk.0.attn_sinks.weight": (data, "F32")})
        with pytest.raises(CheckpointError, match=r"1 tensors .*\(qwen2\) .*attn_sinks.weight"):
            opened([path])

    @pytest.mark.one_is_quick
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda w: w.add_uint32("llama.expert_count", 8), "expert_count' .* allowed: 0"),
            (lambda w: w.add_string("llama.rope.scaling.type", "own"), "is 'own'; allowed: none"),
            (lambda w: w.add_value_length(8), r"value_length' .* is 8; allowed: the same as"),
            (lambda w: w.add_block_count(20_000), "is 20000; allowed: an integer from 1 to 10000"),
            (lambda w: w.add_rope_freq_base(-1.0), "rope.freq_base' .* is -1.0; allowed: a number"),
            (lambda w: w.kv_data[0].pop("llama.embedding_length"), "embedding_length' .* missing"),
        ],
    )
    def test_metadata(self, tiny_copy, tmp_path, change, message):
        tiny_copy("llama", tmp_path)

        def extra(writer):
            for key in ("value_length", "block_count", "rope.freq_base"):
                if key.split(".")[-1] in change.__code__.co_names[0]:
                    name = "attention.value_length" if key == "value_length" else key
                    writer.kv_data[0].pop(f"llama.{name}")
            change(writer)

        path = write_gguf(tmp_path, tmp_path / "a.gguf", "llama", extra=extra)
        with pytest.raises(CheckpointError, match=message):
            config_of(path)

    def test_factors_of_frequencies_that_are_not_llamas(self, tiny_copy, tmp_path):
        factors = np.full(10, 3.0, dtype=np.float32)
        factors[2] = 1.5
        tiny_copy("llama", tmp_path)
        path = write_gguf(
            tmp_path,
            tmp_path / "a.gguf",
            "llama",
            extra=lambda writer: writer.add_tensor("rope_freqs.weight", factors),
        )
        with pytest.raises(
            CheckpointError, match=r"not that of rope_type .llama3.; put the model's config.json"
        ):
            config_of(path)

    def test_without_the_library(self, tmp_path, monkeypatch):
        path = write_tensors(tmp_path / "a.gguf", {})
        monkeypatch.setitem(sys.modules, "gguf", None)
        message = 'needs the package gguf, which is not installed: pip install "mmdeploy-llm[gguf]"'
        with pytest.raises(CheckpointError, match=re.escape(message)):
            read_headers([path])
