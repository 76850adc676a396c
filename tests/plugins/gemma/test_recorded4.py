"""Decode steps of Gemma 4 are recorded, and have every bit of steps that are computed layer by
layer."""

import pytest

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.kernels.cpu import CpuKernels
from mmdeploy_llm.layers.basic import recordings
from tests.layers.adapters.lora import write_adapter

SMALL = {
    "plain": {},
    "no embeddings for layers": {"hidden_size_per_layer_input": 0},
    "keys as values": {"attention_k_eq_v": True, "num_global_key_value_heads": 2},
    "experts": {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
    },
}
LENGTHS = (5, 9, 14, 3, 20, 6, 8, 11)
FIXED = {"use_warmup": False, "max_num_seqs": 4, "enable_logprob": True, "max_model_len": 256}


def prompts(noise):
    """Two that begin alike, some that do not, and two with an image."""
    texts = [[30 + 7 * i, 40, 41 + i] * (2 * i + 1) for i in range(4)]
    alike = [[*range(50, 90), 20 + i] for i in range(2)]
    image = "You describe pictures.<|image|> Describe it."
    seen = [
        {"prompt": image, "multimodal_data": {"image": [noise(60, 80, seed=seed)]}}
        for seed in range(2)
    ]
    return [*texts, *alike, *seen]


def answers(folder, asked, **options):
    """Tokens with their log-probabilities, and whether each recorded step could be recorded."""
    params = [
        SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, logprobs=1)
        for length in LENGTHS
    ]
    with LLM(str(folder), **FIXED | options) as llm:
        outputs = llm.generate(asked, params[: len(asked)], use_tqdm=False)
        outputs += llm.generate(asked, params[: len(asked)], use_tqdm=False)  # prefix hits
        known = list(llm.model.model._recordings.values())
    assert [out.error_msg for out in outputs if not out.is_ok] == []
    found = [(out.outputs.token_ids, out.outputs.logprobs) for out in outputs]
    return found, {own is not None for own in known}


@pytest.fixture
def compare(monkeypatch, kernels):
    """Compares the answers of recorded steps with those of others. At the portable level torch
    multiplies float32, with bits that depend on the number of rows, and no call computes all
    experts: such steps are not recorded."""
    assert isinstance(kernels, CpuKernels)

    def run(folder, asked, has_experts=False, **options):
        is_torchs = options["dtype"] == "float32" or has_experts
        if is_torchs and not kernels.has_wide_registers:
            assert answers(folder, asked, **options)[1] == {False}
            return
        with monkeypatch.context() as context:
            found, are_recorded = answers(folder, asked, **options)
            assert are_recorded == {True}
            context.setattr(recordings, "MAX_RECORDED_ROWS", 0)
            expected, are_recorded = answers(folder, asked, **options)
            assert not are_recorded
        assert found == expected

    return run


@pytest.mark.few_in_ci(3)
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "name",
    [name if name == "plain" else pytest.param(name, marks=pytest.mark.full) for name in SMALL],
)
def test_decode_steps_are_recorded(tiny_folder, noise, compare, name, dtype):
    """Sequences come and go, with images and without."""
    folder = tiny_folder("gemma4", **SMALL[name])
    compare(folder, prompts(noise), has_experts=name == "experts", dtype=dtype)


ENGINES = {
    "chunks": {"max_num_batched_tokens": 16},
    "preemption": {"num_gpu_blocks_override": 14, "block_size": 4, "max_model_len": 48},
    "int8 cache": {"kv_cache_dtype": "int8"},
    "int4 cache": {"kv_cache_dtype": "int4"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
}


@pytest.mark.full
@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_engines_of_each_kind(tiny_folder, noise, compare, options):
    asked = prompts(noise)
    if {*options} & {"max_num_batched_tokens", "num_gpu_blocks_override"}:
        asked = asked[:4]  # an image is computed in one step
    compare(tiny_folder("gemma4"), asked, dtype="bfloat16", **options)


@pytest.mark.full
def test_adapters(tiny_folder, tmp_path, compare):
    """Rows of one step have one adapter, another or none."""
    folder = tiny_folder("gemma4_text")
    for seed, targets in enumerate((["q_proj", "o_proj"], ["gate_proj", "per_layer_projection"])):
        write_adapter(folder, tmp_path / f"own{seed}", seed=seed, target_modules=targets)
    asked = [
        {"prompt_token_ids": list(range(5 + at, 30)), "adapter": name}
        for at, name in enumerate(["own0", "", "own1", "own0", "own1"])
    ]
    adapters = {f"own{seed}": str(tmp_path / f"own{seed}") for seed in range(2)}
    compare(folder, asked, adapters=adapters, max_adapters=2, dtype="float32")
