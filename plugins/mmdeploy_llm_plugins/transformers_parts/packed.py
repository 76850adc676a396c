"""PackedEncoder: an encoder of transformers over all prompts of a step at once, one after another
in one row, with the engine's attention.

    rows of the step [ a a a a | b b | c c c ] --> transformers' layers
                                                     attention: inputs.attn, within each prompt

Shapes: T tokens of the step, H heads, K key/value heads, D head size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from mmdeploy_llm.forward import AttentionContext, ForwardInputs

from .tower import TransformersTower

NAME = "mmdeploy_llm_packed"
HOLDER = "mmdeploy_llm_held"  # attribute of an attention module


class Held:
    """Holds the attention of the current step. PackedEncoder is the only writer."""

    attn: AttentionContext | None = None


class PackedEncoder(TransformersTower):
    """Runs transformers' encoder of `config`, whose layers all attend in both directions.

    Its attention modules have a `layer_idx`, and give transformers' interface the `sliding_window`
    whose tokens they see: themselves and sliding_window - 1 to each side.
    """

    def __init__(self, config: Any, tower: Any = None) -> None:
        super().__init__(config, tower)
        AttentionInterface.register(NAME, attend)  # a second call changes nothing
        self.inner.config._attn_implementation = NAME
        self._held = Held()
        for module in self.inner.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                setattr(module, HOLDER, self._held)

    def forward(self, inputs: ForwardInputs, **given: Any) -> Tensor:
        """Returns the last hidden states [T, size]. given: further arguments of transformers'
        forward, of one row [1, T, ..], with a mask for no layer."""
        positions = inputs.positions
        self._held.attn = inputs.attn
        try:
            made = self.inner(
                position_ids=positions[None] if positions.ndim == 1 else positions[:, None], **given
            )
        finally:
            self._held.attn = None
        out: Tensor = made.last_hidden_state[0]
        return out


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Computes attention: `query` [1, H, T, D], `key` and `value` [1, K, T, D] -> [1, T, H, D]."""
    attn = getattr(module, HOLDER).attn
    assert attn is not None, "set by PackedEncoder.forward"
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    window = None if sliding_window is None else 2 * (sliding_window - 1)
    out = attn.attend(int(module.layer_idx), q, k, v, scale=scaling, window=window)  # type: ignore[arg-type]
    return out.contiguous()[None], None
