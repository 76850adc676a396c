"""Formats of few bits through LLM: the options have an effect, and outputs stay close to bf16."""

import pytest
import torch

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.engine.startup.start import start
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.kernels.cpu import BuildError, load
from mmdeploy_llm.kernels.cpu.coded import CodedPanels
from mmdeploy_llm.kernels.cpu.products import FloatWeight, S8Weight
from mmdeploy_llm.layers import Linear
from mmdeploy_llm.layers.basic.experts import Experts
from mmdeploy_llm.values.options.config import EngineConfig

PROMPTS = ["The quick brown fox", "A red circle and a blue square", "How many are there?"]


@pytest.fixture(scope="module", autouse=True)
def has_kernels():
    try:
        load()
    except BuildError as error:
        pytest.skip(f"no kernels on this machine: {error}")


@pytest.fixture(scope="module", params=["qwen2", "ernie4_5_moe"])
def folder(request, tiny_folder):
    return tiny_folder(request.param)


def run(folder, **options):
    """Returns the log-probabilities of the tokens of the prompts."""
    params = SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=0)
    with LLM(model=str(folder), dtype="bfloat16", **options) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert {output.error_code for output in outputs} == {200}
    entries = [entry for output in outputs for entry in output.prompt_logprobs if entry]
    return torch.tensor([next(iter(entry.values())).logprob for entry in entries])


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    "options",
    [
        {"quantization": "int8"},
        {"kv_cache_dtype": "int8"},
        {"kv_cache_dtype": "int4"},
        {"kv_cache_dtype": "int4", "native_kernels": False},
        {"quantization": "int8", "kv_cache_dtype": "int8"},
    ],
)
def test_it_has_an_effect_and_stays_close(folder, options):
    expected, found = run(folder), run(folder, **options)
    assert not torch.equal(found, expected)
    limit = 0.5 if options.get("kv_cache_dtype") == "int4" else 0.1  # random experts flip
    assert (found - expected).abs().mean() < limit


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("quantization", "kind"), [(None, FloatWeight), ("int8", S8Weight), ("int8wo", CodedPanels)]
)
def test_every_linear_layer_and_expert_is_packed(folder, quantization, kind):
    assembly = start(EngineConfig(model=str(folder), dtype="bfloat16", quantization=quantization))
    layers = [m for m in assembly.model.modules() if isinstance(m, Linear)]
    assert layers
    assert all(isinstance(layer.packed, kind) for layer in layers)
    for experts in (m for m in assembly.model.modules() if isinstance(m, Experts)):
        assert experts.gate_up_proj.numel() == 0


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    "options",
    [
        {"quantization": "int8"},
        {"native_kernels": True},
        pytest.param({"cpu_level": "portable"}, marks=pytest.mark.full),  # compiles once more
    ],
)
def test_options_that_need_kernels_raise_without_them(folder, options, monkeypatch):
    def fail(**options):
        raise BuildError("no C++ compiler is installed")

    monkeypatch.setattr("mmdeploy_llm.kernels.cpu.load", fail)
    with pytest.raises(ConfigError, match=r"needs the C\+\+ kernels .* no C\+\+ compiler"):
        LLM(model=str(folder), **options)
    if "native_kernels" not in options:
        with pytest.raises(ConfigError, match="native_kernels is False"):
            LLM(model=str(folder), native_kernels=False, **options)


@pytest.mark.full
def test_without_a_compiler_the_same_tokens_and_one_warning(folder, monkeypatch, caplog):
    def tokens(**options):
        with LLM(model=str(folder), dtype="float32", **options) as llm:
            outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12))
        return [output.outputs.token_ids for output in outputs]

    expected = tokens()

    def fail(**options):
        raise BuildError("no C++ compiler is installed")

    monkeypatch.setattr("mmdeploy_llm.kernels.cpu.load", fail)
    with caplog.at_level("WARNING"):
        assert tokens() == expected
    assert sum("no C++ kernels" in record.message for record in caplog.records) == 1
