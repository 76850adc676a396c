"""Checks that tokens of a decoder interact only through the attention that we compute.

With attention that returns zeros, no token may depend on another. The check needs the weights, and
finds what probe.py cannot: a convolution or a state space next to the attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .interface import refused
from .probe import NUM_TOKENS
from .structure import decoder_layers, parts_of

# Largest relative change of a layer's output that rounding may cause; experts see other batches
# when another token changes.
ROUNDING = {torch.float32: 1e-4}
ROUNDING_OF_HALF = 2e-2


class Silence:
    """Attention that returns zeros."""

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, **_: Any) -> Tensor:
        """Returns zeros [T, H, D]."""
        return torch.zeros_like(q)

    def causal(self) -> Silence:
        """See forward.AttentionContext."""
        return self


def check_mixing(
    model: str, decoder: nn.Module, hidden_size: int, forward: Callable[[Tensor], object]
) -> None:
    """Raises ModelNotSupportedError that names the first layer in which tokens interact.

    forward: a pass over [NUM_TOKENS, hidden] with attention that returns zeros.
    """
    weight = next(decoder.parameters())
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(NUM_TOKENS, hidden_size, generator=generator).to(weight)
    first = _outputs(decoder, rows, forward)
    second = _outputs(decoder, torch.cat([-rows[:1], rows[1:]]), forward)
    allowed = ROUNDING.get(weight.dtype, ROUNDING_OF_HALF)
    for path, out in first.items():
        if (second[path] - out).norm() > allowed * out.norm():
            raise refused(
                model,
                f"{path} ({parts_of(decoder.get_submodule(path))})",
                "mixes tokens outside transformers' attention interface",
            )


def _outputs(
    decoder: nn.Module, rows: Tensor, forward: Callable[[Tensor], object]
) -> dict[str, Tensor]:
    """Returns path of each layer -> its output for all tokens but the first."""
    found: dict[str, Tensor] = {}
    layers = decoder_layers(decoder)
    hooks = [layer.register_forward_hook(_keeper(found, path)) for path, layer in layers.items()]
    try:
        forward(rows)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _keeper(found: dict[str, Tensor], path: str) -> Callable[..., None]:
    def keep(_module: nn.Module, _args: object, out: Any) -> None:
        hidden = out[0] if isinstance(out, tuple) else out
        found[path] = hidden.detach().reshape(NUM_TOKENS, -1)[1:].float()

    return keep
