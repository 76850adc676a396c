"""Qwen3-Next: Qwen3.5's decoder with experts, whose checkpoints fuse the projections of the linear
attention by key heads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from mmdeploy_llm.layers import CausalLM, GatedDeltaConfig, rotary_config
from mmdeploy_llm.weights.map import Target, WeightMap

from .hybrid import delta_config, hybrid_decoder, layer_cache, new_layer
from .qwen35 import NOT_NEEDED
from .text import RENAMES, with_experts

QKVZ, BA = ".in_proj_qkvz.weight", ".in_proj_ba.weight"


class Qwen3NextForCausalLM(CausalLM):
    """transformers' Qwen3NextForCausalLM."""

    def __init__(self, config: Any) -> None:
        tied = config.tie_word_embeddings
        decoder = with_experts(hybrid_decoder(config, rotary_config(config), is_tied=tied), config)
        super().__init__(decoder, new_layer(config))
        self.cache = layer_cache(decoder, config)
        ignored = (*NOT_NEEDED, "^lm_head") if tied else NOT_NEEDED
        self._delta = delta_config(config)
        self.weight_map = WeightMap(self, renames=RENAMES, ignored=ignored)

    def weight_targets(self, key: str) -> Sequence[Target] | None:
        """See weights.map."""
        for suffix in (QKVZ, BA):
            if key.endswith(suffix) and not key.startswith("mtp."):
                name = f"{key.removesuffix(suffix)}.in_proj.weight"
                return tuple(fused_targets(name, self._delta, is_ba=suffix == BA))
        return super().weight_targets(key)


def fused_targets(name: str, delta: GatedDeltaConfig, *, is_ba: bool) -> Iterator[Target]:
    """Yields where the rows of in_proj_qkvz, or of in_proj_ba, go in a GatedDeltaNet's in_proj.

    stored   q0 k0 v0 z0  q1 k1 v1 z1 ..  and  b0 a0  b1 a1 ..   index: key heads; v, z, b and a
    in_proj  q0 q1 .. k0 k1 .. v0 v1 .. z0 z1 .. b0 b1 .. a0 a1  of the value heads that one serves
    """
    num_heads, served = delta.num_key_heads, delta.num_value_heads // delta.num_key_heads
    key, value = delta.key_head_dim, served * delta.value_head_dim
    sizes = [key, key, value, value, served, served]
    starts = [0, *accumulate(size * num_heads for size in sizes)]
    kinds = range(4, 6) if is_ba else range(4)
    stored = 0
    for head in range(num_heads):
        for kind in kinds:
            size, first = sizes[kind], starts[kind] + head * sizes[kind]
            source = slice(stored, stored + size)
            yield Target(name=name, rows=slice(first, first + size), source=source)
            stored += size
