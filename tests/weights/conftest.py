"""A small model that uses every kind of target, and its checkpoint."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mmdeploy_llm.hooks import Checkpoint
from mmdeploy_llm.layers import MergedLinear
from mmdeploy_llm.layers.basic.experts import Experts
from mmdeploy_llm.layers.moe import MoEConfig, Router
from mmdeploy_llm.weights.map import Target, WeightMap

MOE = MoEConfig(num_experts=3, top_k=1, intermediate_size=6)


class Small(nn.Module):
    """A model whose layers are all config.size wide."""

    def __init__(self, config) -> None:
        super().__init__()
        self.attn = nn.Module()
        self.attn.qkv_proj = MergedLinear(config.size, {"q": 4, "k": 2, "v": 2}, bias=True)
        self.gate = Router(config.size, MOE)
        self.experts = Experts(3, config.size, 6)
        self.register_buffer("frequencies", torch.empty(2), persistent=False)
        self.weight_map = WeightMap(self, renames=((r"^old\.", ""),), ignored=("unused",))

    def init_buffers(self, device):
        self.frequencies = torch.tensor([1.0, 2.0], device="cpu").to(device)

    def weight_targets(self, key):
        if key == "gate.transposed":
            return (Target(name="gate.weight", transpose=True),)
        if key == "stacked":
            return (Target(name="gate.correction_bias", source=slice(1, 2)),)
        return self.weight_map.targets(key)


@pytest.fixture
def factory():
    return Small


@pytest.fixture
def tensors():
    """The checkpoint of `Small` with size 8."""
    torch.manual_seed(0)
    shapes = {
        "attn.q.weight": (4, 8),
        "attn.k.weight": (2, 8),
        "old.attn.v.weight": (2, 8),
        "attn.q.bias": (4,),
        "attn.k.bias": (2,),
        "attn.v.bias": (2,),
        "gate.transposed": (8, 3),
        "stacked": (2, 3),
    }
    for expert in range(3):
        shapes[f"experts.{expert}.gate_proj.weight"] = (6, 8)
        shapes[f"experts.{expert}.up_proj.weight"] = (6, 8)
        shapes[f"experts.{expert}.down_proj.weight"] = (8, 6)
    return {key: torch.randn(shape) for key, shape in shapes.items()}


@pytest.fixture
def checkpoint(tmp_path):
    """A Checkpoint in tmp_path with a config."""
    return Checkpoint(folder=tmp_path, config=SimpleNamespace(size=8))


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Uses one thread: for tiny models, starting threads takes longer than the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
