"""A second start maps the weights that the first one kept, and answers the same."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.kernels.cpu import memory
from mmdeploy_llm.weights.cache import cache, file, folder_size

PARAMS = SamplingParams(temperature=0.0, max_tokens=6, logprobs=1)
OPTIONS = {"quiet": True, "num_threads": 1, "block_size": 16, "max_model_len": 64}


@pytest.fixture(autouse=True)
def waiting(monkeypatch):
    """Starts wait until the weights are kept."""
    keep = cache.WeightCache.keep

    def keep_now(own, model):
        keep(own, model)
        own.wait()

    monkeypatch.setattr(cache.WeightCache, "keep", keep_now)


@pytest.fixture
def answer(tmp_path, caplog):
    """answer(folder, **options) -> ids and logprobs, and whether the weights were mapped."""
    caplog.set_level(logging.INFO)

    def run(folder, **options):
        caplog.clear()
        with LLM(str(folder), weight_cache=tmp_path / "cache", **{**OPTIONS, **options}) as llm:
            output = llm.generate([3, 4, 5, 6, 7], PARAMS, use_tqdm=False)[0].outputs
        found = [list(output.token_ids), [str(each) for each in output.logprobs]]
        return found, "the weights are those of" in caplog.text

    return run


@pytest.mark.full
def test_the_second_start_maps_them(answer, tiny_folder, tmp_path):
    first, is_mapped = answer(tiny_folder("qwen2"), quantization="int8")
    assert not is_mapped
    second, is_mapped = answer(tiny_folder("qwen2"), quantization="int8")
    assert is_mapped
    assert first == second
    assert folder_size(tmp_path / "cache").num_files == 1


@pytest.mark.few_in_ci(8)
@pytest.mark.full
@pytest.mark.parametrize("quantization", [None, "int4", "int4wo", "int8wo"])
@pytest.mark.parametrize(
    "family", ["qwen2", "ernie4_5_moe", "gemma3_text", "qwen2_5_vl", "granite", "qwen3_5"]
)
def test_every_kind_of_layer_is_restored(answer, tiny_folder, family, quantization):
    first, _ = answer(tiny_folder(family), quantization=quantization)
    second, is_mapped = answer(tiny_folder(family), quantization=quantization)
    assert is_mapped
    assert first == second


@pytest.mark.full
@pytest.mark.parametrize("quantization", [None, "int4"])
@pytest.mark.parametrize("family", ["qwen2", "ernie4_5_moe"])
def test_a_first_start_of_weights_that_the_memory_does_not_hold(
    answer, tiny_folder, tmp_path, monkeypatch, caplog, family, quantization
):
    """They are written to files without names while they are loaded, and then mapped from the
    file of the cache, as at a second start."""
    expected, _ = answer(tiny_folder(family), quantization=quantization)
    kept, cached = folder_size(tmp_path / "cache"), tmp_path / "cache"
    for path in cached.glob("*.weights"):
        path.unlink()
    for module in (cache, file):
        monkeypatch.setattr(module, "free_ram", lambda: 0)
    found, is_mapped = answer(tiny_folder(family), quantization=quantization)
    assert is_mapped
    assert "they are written to" in caplog.text
    assert found == expected
    assert folder_size(cached) == kept
    found, is_mapped = answer(tiny_folder(family), quantization=quantization)
    assert is_mapped
    assert "they are written to" not in caplog.text
    assert found == expected


@pytest.mark.full
def test_a_disk_that_is_full_while_weights_move(answer, tiny_folder, tmp_path, monkeypatch, caplog):
    """The weights that were given back by then are read from the model's files again."""
    expected, _ = answer(tiny_folder("qwen2"))
    for path in (tmp_path / "cache").glob("*.weights"):
        path.unlink()

    def write(file, name, kept, is_stopped, release):
        for tensor in kept.tensors:
            release(tensor)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(memory, "MIN_SIZE", 1)  # these weights are small
    monkeypatch.setattr(cache, "write", write)
    monkeypatch.setattr(cache, "free_ram", lambda: 0)
    found, is_mapped = answer(tiny_folder("qwen2"))
    assert found == expected
    assert not is_mapped
    assert "No space left on device" in caplog.text


@pytest.mark.full
def test_other_options_and_files_are_read_anew(answer, tiny_copy, tmp_path):
    folder = tiny_copy("qwen2", tmp_path / "model")
    answer(folder)
    for options in (
        {"quantization": "int8"},
        {"quantization": "int4"},
        {"quantization": "int4wo"},
        {"quantization": "int4", "quantization_group_size": 32},
        {"dtype": "bfloat16"},
        {"deterministic": True},
        {"cpu_level": "portable"},
    ):
        assert not answer(folder, **options)[1]
        assert answer(folder, **options)[1]
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-64] + os.urandom(32) + bytes(32))
    assert not answer(folder)[1]
    assert answer(folder)[1]


@pytest.mark.full
@pytest.mark.parametrize("option", ["tensor_parallel_size", "data_parallel_size"])
def test_ranks_and_engines_restore_theirs(answer, tiny_folder, tmp_path, option):
    first, _ = answer(tiny_folder("qwen2"), **{option: 2})
    cached = tmp_path / "cache"
    files = sorted(Path(cached).glob("*.weights"))
    assert len(files) == (2 if option.startswith("tensor") else 1)
    second, _ = answer(tiny_folder("qwen2"), **{option: 2})
    assert first == second
    assert sorted(Path(cached).glob("*.weights")) == files


PROGRAM = """
import logging, sys
from mmdeploy_llm import LLM, SamplingParams
logging.basicConfig(level=logging.WARNING)
options = {"quiet": True, "num_threads": 1, "block_size": 16, "max_model_len": 64}
print("ready", flush=True)
sys.stdin.readline()
with LLM(sys.argv[1], weight_cache=sys.argv[2], **options) as llm:
    output = llm.generate([3, 4, 5], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
print(list(output[0].outputs.token_ids))
"""


@pytest.mark.full
def test_processes_that_start_one_model_at_once_are_both_right(tiny_folder, tmp_path):
    command = [sys.executable, "-c", PROGRAM, str(tiny_folder("qwen2")), str(tmp_path)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    both = [subprocess.Popen(command, text=True, **pipes) for _ in range(2)]
    for process in both:
        assert process.stdout.readline() == "ready\n"
    for process in both:
        process.stdin.write("go\n")
        process.stdin.flush()
    ends = [process.communicate(timeout=1800) for process in both]
    assert ends[0] == ends[1]
    assert ends[0][0].startswith("[")
    assert not ends[0][1]
    assert {path.suffix for path in tmp_path.iterdir()} == {".parsed", ".weights"}


@pytest.mark.full
@pytest.mark.parametrize("options", [{"weight_cache": False}, {"load_format": "dummy"}])
def test_it_can_be_off(tiny_folder, tmp_path, monkeypatch, options):
    monkeypatch.setattr(cache.WeightCache, "keep", lambda *_: pytest.fail("it is on"))
    with LLM(str(tiny_folder("qwen2")), **{"weight_cache": tmp_path, **OPTIONS, **options}) as llm:
        assert llm.generate([3, 4], PARAMS, use_tqdm=False)[0].is_ok
