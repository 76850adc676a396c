"""GGUF files from strangers: each ends with an error that says what is wrong, soon and without
allocating what the file claims."""

from __future__ import annotations

import os
import random
import struct
import time
import tracemalloc

import gguf
import numpy as np
import pytest
import torch

from mmdeploy_llm import LLM
from mmdeploy_llm.errors import CheckpointError, ModelError
from mmdeploy_llm.hooks import PluginManager
from mmdeploy_llm.weights.folder.gguf import check_tokenizer, described
from mmdeploy_llm.weights.gguf.header import read_headers

from .gguf_writing import write_gguf
from .opening import opened, usual_key

HUGE = 2**60
STRING, ARRAY, UINT32, FLOAT32 = 8, 9, 4, 6
MAX_SECONDS = 60.0  # after which a case hangs
MAX_BYTES = 200 * 2**20


def text(value):
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def item(key, kind, value):
    return text(key) + struct.pack("<I", kind) + value


ARCHITECTURE = item("general.architecture", STRING, text("llama"))


def header(*items, num_tensors=0, num_items=None, version=3, infos=b""):
    count = len(items) if num_items is None else num_items
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, count) + b"".join(items) + infos


def info(name="token_embd.weight", axes=(32, 4), kind=0, offset=0):
    packed = struct.pack(f"<I{len(axes)}Q", len(axes), *axes)
    return text(name) + packed + struct.pack("<IQ", kind, offset)


def one(*tensors):
    return header(ARCHITECTURE, num_tensors=len(tensors), infos=b"".join(tensors)) + bytes(4096)


def array(key, kind, count, data=b""):
    return item(key, ARRAY, struct.pack("<IQ", kind, count) + data)


FILES = {
    "nothing": (b"", "ends within its first bytes"),
    "no GGUF": (b"version https://git-lfs.github.com/spec/v1", "does not begin with GGUF"),
    "version 1": (header(version=1), "has version 1; allowed"),
    "big-endian": (header(version=3 << 24), r"has version 50331648 \(big-endian\)"),
    "cut in the counts": (header()[:15], "ends within tensors"),
    "tensors": (header(num_tensors=HUGE), f"has {HUGE} tensors; allowed: 0"),
    "keys": (header(num_items=HUGE), f"has {HUGE} metadata keys; allowed: 0"),
    "length of a key": (
        header(struct.pack("<Q", HUGE) + bytes(64)),
        f"has {HUGE} bytes in a metadata key; allowed: 64",
    ),
    "length of a text": (
        header(item("a", STRING, struct.pack("<Q", 2**64 - 1))),
        f"has {2**64 - 1} bytes in 'a'; allowed: 0",
    ),
    "no UTF-8": (header(item("a", STRING, text(b"\xff\xfe"))), "not UTF-8 in 'a'"),
    "a type": (header(item("a", 77, bytes(8))), "a value of type 77 in 'a'"),
    "items": (header(array("a", UINT32, HUGE, bytes(64))), f"{HUGE} items in 'a'; allowed: 16"),
    "texts": (header(array("a", STRING, 9, bytes(64))), "has 9 items in 'a'; allowed: 8"),
    "nested arrays": (header(array("a", ARRAY, 1, bytes(64))), "an array of values of type 9"),
    "a key twice": (header(ARCHITECTURE, ARCHITECTURE), "'general.architecture' a second time"),
    "not a number": (
        header(item("a", FLOAT32, struct.pack("<f", float("nan")))),
        "has nan in 'a'; allowed: finite",
    ),
    "alignment 0": (
        header(item("general.alignment", UINT32, struct.pack("<I", 0))),
        "general.alignment 0",
    ),
    "alignment 48": (
        header(item("general.alignment", UINT32, struct.pack("<I", 48))),
        "48, which is no power of two",
    ),
    "an alignment in words": (
        header(item("general.alignment", STRING, text("32"))),
        "general.alignment '32'",
    ),
    "no architecture": (header(), "names no general.architecture"),
    "axes": (one(info(axes=(2,) * 5)), "has 5 axes in 'token_embd.weight'; allowed: 1 to 4"),
    "no axes": (one(info(axes=())), "has 0 axes"),
    "an empty axis": (one(info(axes=(32, 0))), r"has the shape \[32, 0\]"),
    "a huge axis": (one(info(axes=(HUGE, 4))), rf"has the shape \[{HUGE}, 4\]"),
    "a product of 2**64": (one(info(axes=(2**32, 2**32))), "ends within the tensor"),
    "half a block": (one(info(axes=(33, 4), kind=8)), "rows of 33 values .* blocks of 32"),
    "an unknown type": (one(info(kind=12345)), "has type 12345, which cannot be read"),
    "an offset": (one(info(offset=2**63)), "ends within the tensor 'token_embd.weight'"),
    "tensors on each other": (
        one(info("a.weight"), info("b.weight", offset=64)),
        "has 'b.weight' within 'a.weight'",
    ),
    "a tensor twice": (one(info(), info(offset=512)), "'token_embd.weight' a second time"),
    "parts": (
        header(ARCHITECTURE, item("split.count", UINT32, struct.pack("<I", 3))),
        "part 0 of 3, but was read as part 0 of 1",
    ),
}


def everything(path):
    """Reads all that is read of a GGUF file before its weights."""
    found = read_headers([path])
    described([path], None, PluginManager.load())
    check_tokenizer(found)
    with opened([path]):
        pass


@pytest.mark.one_is_quick
@pytest.mark.parametrize(("data", "message"), FILES.values(), ids=FILES)
def test_a_hostile_header_is_refused(tmp_path, data, message):
    path = tmp_path / "a.gguf"
    path.write_bytes(data)
    begin = time.monotonic()
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=message):
            everything(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert time.monotonic() - begin < MAX_SECONDS
    assert peak < MAX_BYTES
    with pytest.raises(ModelError, match=message):
        LLM(model=str(path))


@pytest.mark.parametrize("kind", [0, STRING])
def test_a_sparse_file_that_backs_a_huge_count(tmp_path, kind):
    path = tmp_path / "a.gguf"
    path.write_bytes(header(array("tokenizer.ggml.tokens", kind, 2**34)))
    os.truncate(path, 2**38)
    with pytest.raises(
        CheckpointError, match=r"items in 'tokenizer.ggml.tokens'; allowed: 4194304"
    ):
        read_headers([path])


@pytest.mark.full
def test_a_header_of_many_long_texts(tmp_path):
    path = tmp_path / "a.gguf"
    long = struct.pack("<Q", 8 * 2**20)
    with path.open("wb") as file:
        file.write(header(num_items=100))
        for number in range(100):
            file.write(item(f"k{number}", STRING, long))
            file.seek(8 * 2**20, os.SEEK_CUR)
        file.truncate()
    with pytest.raises(CheckpointError, match="needs more than 268435456 bytes"):
        read_headers([path])


def test_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "a.gguf")
    with pytest.raises(CheckpointError, match="is a FIFO"):
        LLM(model=str(tmp_path))


@pytest.fixture
def tiny(tiny_copy, tmp_path):
    """Returns a whole GGUF file with a tokenizer, in a folder of its own."""
    source, place = tmp_path / "source", tmp_path / "place"
    tiny_copy("llama", source, head_dim=16, num_hidden_layers=1)
    place.mkdir()
    return write_gguf(source, place / "a.gguf", "llama", kind="Q8_0")


def test_what_lies_beside_a_file_is_not_opened(tiny):
    """A file alone may lie anywhere, such as among downloads."""
    os.mkfifo(tiny.parent / "tokenizer_config.json")
    os.mkfifo(tiny.parent / "added_tokens.json")
    (tiny.parent / "special_tokens_map.json").write_text("[")
    with LLM(model=str(tiny), quiet=True, max_model_len=64) as llm:
        assert llm.generate("The quick")[0].error_code == 200


@pytest.mark.few_in_ci(3)
@pytest.mark.full
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "family",
    [
        "llama",
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in ("gemma3_text", "qwen3_5_moe_text", "lfm2")
        ),
    ],
)
def test_damaged_files(tiny_copy, tmp_path, family, seed):
    """Bytes of the header are changed, removed or doubled: whatever comes, it is an error that the
    package raises, or a file that is good."""
    tiny_copy(family, tmp_path)
    tiny = write_gguf(tmp_path, tmp_path / "a.gguf", family)
    data = tiny.read_bytes()
    length = read_headers([tiny]).tensors["token_embd.weight"].offset
    chance = random.Random(seed)
    num_refused = 0
    for _ in range(60):
        changed = bytearray(data)
        for _ in range(chance.choice((1, 1, 4, 30))):
            place = chance.randrange(length)
            match chance.randrange(4):
                case 0:
                    changed[place] = chance.randrange(256)
                case 1:
                    changed[place : place + 8] = struct.pack("<Q", chance.choice((0, 2**63, 2**32)))
                case 2:
                    del changed[place : place + chance.randrange(1, 9)]
                case 3:
                    changed[place:place] = changed[place : place + 16]
        tiny.write_bytes(changed)
        try:
            everything(tiny)
        except ModelError:
            num_refused += 1
    assert num_refused > 20


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model", "t5", r"is 't5'; allowed: gpt2 and llama; or give tokenizer="),
        ("tokens", None, "is no list; allowed: 1 to"),
        ("tokens", ["a", "b" * 1025], "holds 'bbb.*; allowed: up to 1024 characters"),
        ("tokens", [3, 4], "holds 3; allowed: up to 1024"),
        ("merges", ["a " * 3000], "allowed: up to 2049 characters"),
        ("merges", ["a"], "cannot be loaded"),
        ("bos_token_id", 99999, "is 99999; allowed: 0 to 383"),
        ("eos_token_id", 2**31, "2147483648.*; allowed"),
    ],
)
def test_a_hostile_tokenizer(tiny_copy, tmp_path, key, value, message):
    tiny_copy("llama", tmp_path / "source", num_hidden_layers=1)

    def extra(writer):
        writer.kv_data[0].pop(f"tokenizer.ggml.{key}")
        if isinstance(value, list):
            writer.add_array(f"tokenizer.ggml.{key}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"tokenizer.ggml.{key}", value)
        elif value is not None:
            writer.add_string(f"tokenizer.ggml.{key}", value)

    path = write_gguf(tmp_path / "source", tmp_path / "a.gguf", "llama", extra=extra)
    with pytest.raises(CheckpointError, match=message):
        LLM(model=str(path))


def test_infinite_scales_are_values_and_no_warnings(tmp_path):
    """Blocks of random bytes hold infinities, which are the model's own trouble."""
    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    data = np.full((4, 144), 0xFF, dtype=np.uint8)
    data[:, :2] = (0, 0x7C)
    writer.add_tensor("token_embd.weight", data, raw_dtype=gguf.GGMLQuantizationType.Q4_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with opened([path], {"model.embed_tokens.weight"}.__contains__) as file:
        out = torch.empty(4, 256)
        file.read_into("model.embed_tokens.weight", out, first_value=0, transpose=False)
    assert not out.isfinite().all()


def test_a_file_that_shrinks_while_it_is_read(tiny):
    with opened([tiny], usual_key) as file:
        os.truncate(tiny, 5000)
        out = torch.empty(384, 64)
        with pytest.raises(CheckpointError, match="it changed while it was being read"):
            file.read_into("lm_head.weight", out, first_value=0, transpose=False)
