"""install_kernels: hands kernels to the layers of a model, and packs its weights for them. Without
kernels every layer computes the same in plain torch, which is the reference."""

from __future__ import annotations

import logging
from collections.abc import Callable, Set
from typing import Any

from torch import nn

from mmdeploy_llm.kernels import Kernels, Quantization
from mmdeploy_llm.layers.basic.experts import Experts
from mmdeploy_llm.layers.basic.kernel_layer import KernelLayer
from mmdeploy_llm.layers.basic.linear import Embedding, Linear, Matrix, check_finite
from mmdeploy_llm.values.options.weight_formats import FORMATS, LOOKED_UP

from .moe import Router, SoftmaxRouter

logger = logging.getLogger(__name__)


def decoder_modules(model: nn.Module) -> Set[nn.Module]:
    """Returns the modules of all layers that compute text, those of draft heads included: what
    `text_layers` of the model and its parts names, see hooks.Model."""
    owners: Any = (module for module in model.modules() if hasattr(type(module), "text_layers"))
    return {part for own in owners for layer in own.text_layers for part in layer.modules()}


def install_kernels(
    model: nn.Module, kernels: Kernels, quantization: Quantization | None = None
) -> None:
    """Lets the layers of `model` compute with `kernels` from now on, on tensors that these accept.

    Packs the weights of linear layers, routers and experts where the kernels can. `quantization`
    rounds them, except exact ones; in 4 bits only those of layers that compute text, which are most
    of a language model, and the others, an output head or an encoder, in 8 bits. Embeddings are
    rounded to 8 bits in groups, whether they are the output head too or not. What the kernels
    cannot round is logged. Raises CheckpointError for values that are not finite.
    """
    for module in model.modules():
        if isinstance(module, KernelLayer):
            module.kernels = kernels
    pack = packer(model, kernels, quantization)
    for name, module in model.named_modules():
        pack(name, module)
    if quantization is not None:
        _log_unrounded(model, quantization)


def packer(
    model: nn.Module, kernels: Kernels, quantization: Quantization | None
) -> Callable[[str, nn.Module], None]:
    """Returns the function that packs one module of `model`, with its path, as install_kernels does
    all that are not packed yet."""
    in_layers, heads = decoder_modules(model), _tied_heads(model)
    elsewhere = tied = quantization
    if quantization is not None:
        elsewhere = FORMATS[quantization].elsewhere if in_layers else quantization
        tied = FORMATS[quantization].tied_head

    def pack(name: str, module: nn.Module) -> None:
        is_rounded = isinstance(module, Matrix) and not module.is_exact
        if quantization is not None and (is_rounded or isinstance(module, Experts)):
            check_finite(name, module)
        if isinstance(module, Linear | Router | SoftmaxRouter | Experts):
            module.pack(kernels, quantization if module in in_layers else elsewhere)
        elif isinstance(module, Embedding) and module in heads:
            module.pack(kernels, tied)
        elif isinstance(module, Embedding) and (module.is_coded or quantization is not None):
            module.pack(kernels, LOOKED_UP)

    return pack


def _log_unrounded(model: nn.Module, quantization: Quantization) -> None:
    left = [
        name
        for name, module in model.named_modules()
        if (isinstance(module, Linear) and module.packed is None and not module.is_exact)
        or (isinstance(module, Experts) and not module.is_packed)
    ]
    if left:
        logger.warning(
            "quantization = %r leaves %d layers in the model's dtype, such as %s: this device has "
            "no products in few bits for them",
            quantization,
            len(left),
            left[0],
        )


def _tied_heads(model: nn.Module) -> Set[nn.Module]:
    """Returns the embeddings that are the output head too."""
    owners: Any = (module for module in model.modules() if hasattr(type(module), "tied_head"))
    return {own.tied_head for own in owners if own.tied_head is not None}
