"""install_kernels: hands kernels to the layers of a model, and packs its weights for them. Without
kernels every layer computes the same in plain torch, which is the reference."""

from __future__ import annotations

from torch import nn

from mmdeploy_llm.kernels import Kernels, Quantization

from .decoder import CausalLM
from .kernel_layer import KernelLayer
from .linear import Linear
from .moe import Experts, Router, SoftmaxRouter


def install_kernels(
    model: nn.Module, kernels: Kernels, quantization: Quantization | None = None
) -> None:
    """Lets the layers of `model` compute with `kernels` from now on, on tensors that these accept.

    Packs the weights of linear layers, routers and experts where the kernels can;
    quantization="int8" rounds them, except exact ones, and the rows of x in each product.
    """
    for module in model.modules():
        if isinstance(module, KernelLayer):
            module.kernels = kernels
    for module in model.modules():
        if isinstance(module, Linear | Router | SoftmaxRouter | Experts):
            module.pack(kernels, quantization)
    # The largest weight comes last: in int8 it needs memory that the others have freed by then.
    for module in model.modules():
        if isinstance(module, CausalLM) and module.lm_head is None:
            module.model.embed_tokens.pack(kernels, quantization)
