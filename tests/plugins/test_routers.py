"""Routers weight experts in the precision of transformers' own."""

import pytest
import torch
import transformers
from mmdeploy_llm_plugins.gemma.decoder4 import Gemma4Router

from mmdeploy_llm.hooks import PluginManager
from mmdeploy_llm.layers import GroupRouter, SoftmaxRouter
from mmdeploy_llm.layers.moe import Router
from mmdeploy_llm.testing.model_conformance import build
from mmdeploy_llm.weights.folder import read_checkpoint

ROUTERS = Gemma4Router, GroupRouter, Router, SoftmaxRouter
GEMMA = {
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
}
FAMILIES = {
    "mixtral": {},
    "glm4_moe": {},
    "qwen3_moe": {},
    "qwen2_moe": {},
    "olmoe": {},
    "nemotron_h": {},
    "ernie4_5_moe": {},
    "gemma4_text": {"seed": 3, **GEMMA},
}
QUICK = ("mixtral", "glm4_moe", "qwen3_moe")


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[pytest.mark.full] * (name not in QUICK)) for name in FAMILIES],
)
def test_weights_of_experts_are_rounded_where_those_of_transformers_are(
    tiny_folder, kernels, family
):
    folder = tiny_folder(family, **FAMILIES[family])
    config = read_checkpoint(folder).config
    spec = PluginManager.load().model_for(config.architectures)
    ours = build(spec, folder, config, torch.bfloat16)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    own = next(each for each in ours.modules() if isinstance(each, ROUTERS))
    other = next(each for each in theirs.modules() if type(each).__name__.endswith("uter"))
    torch.manual_seed(0)
    x = torch.randn(9, config.hidden_size).to(torch.bfloat16)
    with torch.no_grad():
        expected = other(x)[1]
        found = own(x)[0]
        assert found.dtype is expected.dtype
        torch.testing.assert_close(found.sort().values, expected.sort().values)
        for module in own.modules():
            module.kernels = kernels
        found = own(x)[0]
    assert found.dtype is expected.dtype
    torch.testing.assert_close(found.sort().values, expected.sort().values, atol=0.01, rtol=0.01)
