"""Whole models with the kernels against the same models in plain torch."""

import pytest
import torch
from mmdeploy_llm_plugins import ernie, qwen
from transformers import AutoConfig

from mmdeploy_llm.layers.install import install_kernels
from mmdeploy_llm.testing.dense import DenseRunner
from mmdeploy_llm.testing.model_conformance import build
from mmdeploy_llm.testing.prompts import make_prompt
from mmdeploy_llm.testing.tiny import write_tiny

SPECS = {spec.name: spec for plugin in (ernie, qwen) for spec in plugin.provide_models()}
FAMILIES = {  # with norms of heads, M-RoPE, experts of both routers, experts by modality
    "qwen3": (),
    "qwen2_5_vl": ((1, 4, 4), (2, 4, 4)),
    "qwen3_vl_moe": ((1, 4, 4),),
    "ernie4_5_vl_moe": ((1, 4, 4), (2, 4, 4)),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits(kernels, triton_device, family, tmp_path):
    """Of a prompt with media in one pass, and of tokens behind it one by one."""
    write_tiny(family, tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    found = []
    for own in (None, kernels):
        model = build(SPECS[family], tmp_path, config, torch.float32).to(triton_device)
        if own is not None:
            install_kernels(model, own)
        runner = DenseRunner(model, triton_device)
        sequence = runner.add(*make_prompt(config, FAMILIES[family]))
        logits = [runner.run(sequence)]
        for token_id in (7, 30, 21):
            sequence.token_ids.append(token_id)
            logits.append(runner.run(sequence))
        found.append(torch.cat(logits))
    torch.testing.assert_close(found[1], found[0], atol=2e-4, rtol=1e-3)
