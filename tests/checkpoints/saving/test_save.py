"""LLM.save writes what is loaded: tokens, codes and files are the same again."""

from __future__ import annotations

import filecmp
import json

import pytest
from PIL import Image
from safetensors.torch import load_file

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.kernels.cpu import load
from mmdeploy_llm.testing.tiny import write_tiny

SIZES = {"hidden_size": 64, "num_attention_heads": 4}
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)
PROMPTS = [[5, 9, 200, 31, 7], [3, 4]]


def answers(folder, save_to=None, **options):
    """Returns tokens and log-probabilities, and saves the model."""
    with LLM(str(folder), block_size=16, **options) as llm:
        found = [out.outputs for out in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
        if save_to is not None:
            llm.save(save_to)
    return [(out.token_ids, out.logprobs) for out in found]


def tensors(folder):
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


@pytest.mark.few_in_ci(6)
@pytest.mark.full
@pytest.mark.one_is_quick
@pytest.mark.skipif(load() is None, reason="needs the C++ kernels")
@pytest.mark.parametrize(
    "quantization",
    ["int4", *(pytest.param(n, marks=pytest.mark.full) for n in ("int8wo", "int4wo", "int8a8"))],
)
@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("qwen2", SIZES),
        ("qwen3_moe", {"hidden_size": 64, "head_dim": 16, "moe_intermediate_size": 48}),
        ("qwen2_5_vl", SIZES),
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.full)])
def test_codes_again(tmp_path, family, sizes, quantization, dtype):
    plain, first, second = write_tiny(family, tmp_path / "plain", **sizes), *folders(tmp_path)
    options = {"quantization": quantization, "dtype": dtype}
    expected = answers(plain, first, **options)
    found = answers(first, second, **options)
    assert found == expected
    assert any(key.endswith("weight_packed") for key in tensors(first))
    same_files(first, second)


def folders(tmp_path):
    return tmp_path / "first", tmp_path / "second"


def same_files(first, second):
    names = {path.name for path in first.iterdir()}
    assert names == {path.name for path in second.iterdir()}
    _, different, wrong = filecmp.cmpfiles(first, second, names, shallow=False)
    assert (different, wrong) == ([], [])


@pytest.mark.skipif(load() is None, reason="needs the C++ kernels")
def test_the_bundled_model(tmp_path):
    first, second = folders(tmp_path)
    expected = answers("shapes-vl", first, quantization="int4")
    assert answers(first, second, quantization="int4") == expected
    same_files(first, second)
    layouts = json.loads((first / "config.json").read_text())["quantization_config"]
    groups = [own["weights"] for own in layouts["config_groups"].values()]
    # One scheme but for experts, since transformers reads all other layers by the first.
    assert [(own["num_bits"], own["group_size"]) for own in groups] == [(4, 64), (4, 48)]
    assert all("experts" in name for name in layouts["config_groups"]["group_1"]["targets"])


@pytest.mark.full
def test_floats_again(tmp_path):
    plain, first, second = write_tiny("qwen2", tmp_path / "plain", **SIZES), *folders(tmp_path)
    expected = answers(plain, first)
    assert answers(first, second) == expected
    same_files(plain, first)
    same_files(first, second)


@pytest.mark.full
def test_refusals(tmp_path):
    plain = write_tiny("qwen2", tmp_path / "plain", **SIZES)
    dummy = LLM(str(plain), block_size=16, load_format="dummy")
    with dummy, pytest.raises(ConfigError, match="dummy"):
        dummy.save(tmp_path / "new")
    with LLM(str(plain), block_size=16) as llm:
        with pytest.raises(ConfigError, match="holds the model itself"):
            llm.save(plain, overwrite=True)
        llm.save(tmp_path / "new")
        with pytest.raises(ConfigError, match="exists; give another folder"):
            llm.save(tmp_path / "new")
        llm.save(tmp_path / "new", overwrite=True)
    assert not (tmp_path / "new.partial").exists()


@pytest.mark.full
@pytest.mark.skipif(load() is None, reason="needs the C++ kernels")
def test_int8_is_refused(tmp_path):
    plain = write_tiny("qwen2", tmp_path / "plain", **SIZES)
    llm = LLM(str(plain), block_size=16, quantization="int8")
    with llm, pytest.raises(ConfigError, match="load the model with int4, int8wo"):
        llm.save(tmp_path / "new")


@pytest.mark.skipif(load() is None, reason="needs the C++ kernels")
@pytest.mark.full
def test_a_model_with_an_encoder(tmp_path):
    plain, (first, second) = write_tiny("florence2", tmp_path / "plain"), folders(tmp_path)
    picture = Image.new("RGB", (40, 30), "red")
    found = []
    for folder, to in ((plain, first), (first, second)):
        with LLM(str(folder), quantization="int4", kv_cache_memory=2**22) as llm:
            ask = {"prompt": "<OD>", "multimodal_data": {"image": picture}}
            found.append(llm.generate(ask, PARAMS, use_tqdm=False)[0].outputs.token_ids)
            llm.save(to)
    assert found[0] == found[1]
    packed = [key for key in tensors(first) if key.endswith("weight_packed")]
    assert packed
    assert all("decoder.layers." in key for key in packed)
    same_files(first, second)
