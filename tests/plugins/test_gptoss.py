"""gpt-oss as it is published: experts in MXFP4, whose values are those that transformers computes
from the same blocks."""

import json
from types import SimpleNamespace

import pytest
import torch
import transformers
from mmdeploy_llm_plugins import gptoss
from mmdeploy_llm_plugins.gptoss.experts import ClampedExperts
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.testing.model_conformance import build
from mmdeploy_llm.testing.models.dense import DenseRunner
from mmdeploy_llm.weights.folder import read_checkpoint

STACKS = ("gate_up_proj", "down_proj")
PROMPTS = ("The quick brown fox", "a circle and a square " * 4)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(tiny_copy, tmp_path_factory):
    """Returns a folder in the layout of openai/gpt-oss-20b, and one with the same values as
    floats."""
    plain, packed = (tiny_copy("gpt_oss", tmp_path_factory.mktemp(name)) for name in ("f", "p"))
    tensors = load_file(plain / "model.safetensors")
    floats, blocks = dict(tensors), dict(tensors)
    generator = torch.Generator().manual_seed(0)
    for key in [key for key in tensors if key.endswith(STACKS)]:
        experts, k, n = tensors[key].shape
        shape = (experts, n, k // 32)
        codes = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 125, shape, generator=generator, dtype=torch.uint8)
        del blocks[key]
        blocks[f"{key}_blocks"], blocks[f"{key}_scales"] = codes, scales
        own = convert_moe_packed_tensors(codes.clone(), scales.clone(), dtype=torch.float32)
        floats[key] = own.contiguous()
    save_file(floats, plain / "model.safetensors", {"format": "pt"})
    save_file(blocks, packed / "model.safetensors", {"format": "pt"})
    config = json.loads((packed / "config.json").read_text("utf-8"))
    config["quantization_config"] = {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    }
    (packed / "config.json").write_text(json.dumps(config), "utf-8")
    return packed, plain


def test_the_published_layout_loads(folders, transformers_of):
    packed, plain = folders
    (spec,) = gptoss.provide_models()
    runner = DenseRunner(build(spec, packed, read_checkpoint(packed).config, torch.float32))
    ids = list(range(3, 40))
    wanted = transformers_of(plain).logits(ids)
    torch.testing.assert_close(runner.run(runner.add(ids)), wanted, atol=1e-4, rtol=1e-4)


def generated(folder, **options):
    with LLM(model=str(folder), dtype="float32", max_num_seqs=2, **options) as llm:
        outputs = llm.generate(list(PROMPTS), GREEDY, use_tqdm=False)
    assert [output.error_msg for output in outputs] == [None] * len(PROMPTS)
    return outputs


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_the_engine_serves_it(folders, transformers_of, num_ranks):
    packed, plain = folders
    for output in generated(packed, tensor_parallel_size=num_ranks):
        wanted = transformers_of(plain).generate(output.prompt_token_ids, GREEDY.max_tokens)
        assert output.outputs.token_ids == wanted


@pytest.mark.full
def test_rounding_to_other_formats(folders):
    """Gives what floats of the same values are rounded to."""
    found, wanted = (generated(folder, quantization="int4") for folder in folders)
    assert [o.outputs.token_ids for o in found] == [o.outputs.token_ids for o in wanted]


def test_a_config_without_the_numbers_of_the_activation():
    """The config of transformers 5.17 has neither; its model computes with those that 5.24 has as
    defaults."""
    sizes = {"num_local_experts": 2, "hidden_size": 8, "intermediate_size": 4}
    experts, wanted = ClampedExperts(SimpleNamespace(**sizes)), transformers.GptOssConfig()
    assert (experts.alpha, experts.limit) == (wanted.swiglu_alpha, wanted.swiglu_limit)
