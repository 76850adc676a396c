"""undetermined: finds the modules whose results may depend on the number of rows in a call."""

from __future__ import annotations

from torch import nn

from mmdeploy_llm.kernels.cpu import MAX_HEAD_DIM
from mmdeploy_llm.layers.basic.experts import Experts
from mmdeploy_llm.layers.basic.linear import Embedding, Matrix
from mmdeploy_llm.layers.basic.mlp import MLP, Activation

from .decoder import CausalLM
from .vision import VisionAttention

# torch's modules that compute each row alone, and containers.
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
HARMLESS = (*CONTAINERS, nn.Identity, nn.Dropout, nn.Embedding, nn.LayerNorm, nn.ReLU)
TORCHS_OWN = "torch.nn."


def undetermined(model: nn.Module) -> list[str]:
    """Returns the names of the modules that compute in torch what the kernels add in a fixed order:
    weights that were not packed, activations without a kernel, torch's own layers."""
    tied = [
        module.model.embed_tokens
        for module in model.modules()
        if isinstance(module, CausalLM) and module.lm_head is None and not module.is_embedder
    ]
    return [
        name or type(model).__name__
        for name, module in model.named_modules()
        if _is_undetermined(module, is_head=any(module is head for head in tied))
    ]


def _is_undetermined(module: nn.Module, *, is_head: bool) -> bool:
    match module:
        case Embedding():
            return is_head and module.packed is None  # else it only looks rows up
        case Matrix():
            return module.packed is None
        case Experts():
            return not (module.is_packed and module.is_plain)
        case MLP():
            return not isinstance(module.activation, Activation)
        case VisionAttention():
            head_dim = module.proj.weight.shape[-1] // module.num_heads
            return head_dim > MAX_HEAD_DIM or head_dim % 2 != 0
    return type(module).__module__.startswith(TORCHS_OWN) and not isinstance(module, HARMLESS)
