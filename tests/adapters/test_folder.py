"""Folders of adapters, as PEFT writes them."""

import json

import torch
from safetensors.torch import save_file

from mmdeploy_llm.adapters import read_adapter

Q = "base_model.model.model.layers.0.self_attn.q_proj"


def write(folder, tensors, **config):
    """Writes a PEFT folder of rank 4."""
    folder.mkdir(exist_ok=True)
    values = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]} | config
    (folder / "adapter_config.json").write_text(json.dumps(values))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def halves(path=Q, rank=4, k=12, n=16, name=""):
    """Returns both halves of a random change."""
    return {
        f"{path}.lora_A{name}.weight": torch.randn(rank, k),
        f"{path}.lora_B{name}.weight": torch.randn(n, rank),
    }


def test_a_plain_adapter_is_read(tmp_path):
    tensors = halves()
    adapter = read_adapter(write(tmp_path / "one", tensors))
    ((path, change),) = adapter.modules.items()
    assert path == "model.layers.0.self_attn.q_proj"
    assert change.scale == 2
    assert torch.equal(change.a, tensors[f"{Q}.lora_A.weight"])
    assert torch.equal(change.b, tensors[f"{Q}.lora_B.weight"])
    assert (adapter.name, adapter.max_rank, adapter.num_bytes) == ("one", 4, 4 * 4 * 28)
