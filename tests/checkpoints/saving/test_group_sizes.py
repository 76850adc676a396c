"""quantization_group_size: how many columns of a row share a scale while a model is loaded."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.checkpoints.saving.folders import Partial
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.kernels.cpu import load
from mmdeploy_llm.testing.tiny import write_tiny
from mmdeploy_llm.values.options.config import EngineConfig

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "tie_word_embeddings": False}
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = [5, 9, 200, 31, 7]


def saved(tmp_path, **options):
    """Returns the tokens of a rounded model, and the folder that it was saved to."""
    plain, folder = write_tiny("qwen2", tmp_path / "plain", **SIZES), tmp_path / "saved"
    with LLM(str(plain), dtype="float32", **options) as llm:
        (out,) = llm.generate([PROMPT], PARAMS, use_tqdm=False)
        llm.save(folder)
    return out.outputs.token_ids, folder


@pytest.mark.full
@pytest.mark.one_is_quick
@pytest.mark.skipif(load() is None, reason="needs the C++ kernels")
@pytest.mark.parametrize(
    ("quantization", "size", "columns"),
    [("int4wo", 16, 16), ("int4wo", -1, 64), ("int8wo", 32, 32)],
)
def test_transformers_gives_the_tokens(tmp_path, quantization, size, columns):
    options = {"quantization": quantization, "quantization_group_size": size}
    found, folder = saved(tmp_path, **options)
    (path,) = folder.glob("*.safetensors")
    scales = load_file(path)["model.layers.0.self_attn.q_proj.weight_scale"]
    assert scales.shape == (64, 64 // columns)
    own = CompressedTensorsConfig(dequantize=True)
    with pytest.warns(UserWarning, match="quantization_config"):
        reference = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, quantization_config=own
        ).eval()
    ids = list(PROMPT)
    for _ in range(PARAMS.max_tokens):
        ids.append(int(reference(torch.tensor([ids])).logits[0, -1].argmax()))
    # The engine's head is in 8 bits; the folder's is not, so that transformers loads it.
    assert found == ids[len(PROMPT) :]


@pytest.mark.skipif(load() is None, reason="needs the C++ kernels")
def test_only_what_the_quantization_names_has_the_groups(tmp_path):
    """The output head of int4 is rounded as int8wo at load, and copied to the folder."""
    _, folder = saved(tmp_path, quantization="int4", quantization_group_size=32)
    groups = json.loads((folder / "config.json").read_text())["quantization_config"]
    (own,) = groups["config_groups"].values()
    assert (own["weights"]["num_bits"], own["weights"]["group_size"]) == (4, 32)
    assert any("lm_head" in pattern for pattern in groups["ignore"])


@pytest.mark.full
@pytest.mark.skipif(load() is None, reason="needs the C++ kernels")
def test_a_save_that_was_cut_off_in_other_groups_begins_again(tmp_path, monkeypatch):
    plain, folder = write_tiny("qwen2", tmp_path / "plain", **SIZES), tmp_path / "saved"

    def die(partial):
        raise KeyboardInterrupt

    def save(size):
        with LLM(str(plain), quantization="int4", quantization_group_size=size) as llm:
            llm.save(folder)

    with monkeypatch.context() as patch:
        patch.setattr(Partial, "finish", die)
        with pytest.raises(KeyboardInterrupt):
            save(16)
    save(32)
    (path,) = folder.glob("*.safetensors")
    scales = load_file(path)["model.layers.0.self_attn.q_proj.weight_scale"]
    assert scales.shape == (64, 2)


@pytest.mark.parametrize(
    ("quantization", "size", "words"),
    [
        ("int4", 24, "a group of 24 columns: give a multiple of 16"),
        ("int4", 0, "a group of 0 columns"),
        ("int8", 64, "needs a quantization that has groups"),
        (None, 64, "needs a quantization that has groups"),
    ],
)
def test_refusals(quantization, size, words):
    with pytest.raises(ConfigError, match=words):
        EngineConfig(model="any", quantization=quantization, quantization_group_size=size)
