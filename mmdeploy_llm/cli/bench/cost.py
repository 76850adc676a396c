"""Computes a lower bound for the time of a model's matrix products on a given machine.

Attention, norms and elementwise operations are not counted, so the bound cannot be reached.

step    the decoder multiplies as many rows as the step has tokens, the output head as many as it
        samples; each takes the longer of the arithmetic and of reading its weights once
image   the arithmetic of the media encoder, with the rows that its layers actually receive
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmdeploy_llm.caches import layer_caches
from mmdeploy_llm.hooks import Model
from mmdeploy_llm.layers.attention.cache_memory import KVCacheShape
from mmdeploy_llm.layers.basic.experts import Experts
from mmdeploy_llm.layers.basic.linear import Embedding
from mmdeploy_llm.layers.decoder import CausalLM
from mmdeploy_llm.layers.moe import ModalityMLP, SparseMLP
from mmdeploy_llm.values.options.weight_formats import FORMATS
from mmdeploy_llm.values.outputs.metrics import StepStats

from .machine import Machine

VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}
# Weights, with the four bytes that a group's scale and zero take. The head, which has 8 bits in any
# case, is counted as the others.
WEIGHT_BYTES = VALUE_BYTES | {
    row.name: row.bits / 8 + (4 / row.group_size if row.group_size else 0)
    for row in FORMATS.values()
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCost:
    """Size of one sparse layer. num_values: values in all its experts. share: the fraction of the
    experts that a token uses."""

    num_values: int
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """Number of weight values of a model.

    dense: matrices of the decoder that every token uses.
    experts: the decoder's sparse layers.
    head: the output head.
    total: the whole model, including vectors and the embedding.
    is_tied: whether the output head shares the embedding's weights.
    """

    dense: int
    experts: tuple[ExpertCost, ...]
    head: int
    total: int
    is_tied: bool

    def weight_bytes(self, dtype: str, precision: str) -> int:
        """Returns the bytes of the weights in memory. With rounded weights a tied embedding is
        stored twice: rounded for the output head, in `dtype` for lookups."""
        num_copied = self.head if self.is_tied and precision.startswith("int") else 0
        return int(self.total * WEIGHT_BYTES[precision]) + num_copied * VALUE_BYTES[dtype]

    def step_seconds(self, num_rows: int, num_sampled: int, machine: Machine) -> float:
        """Returns the lower bound in seconds for one step, without the media encoder."""
        used = self.dense + sum(layer.num_values * layer.share for layer in self.experts)
        read = self.dense + sum(
            layer.num_values * min(1.0, num_rows * layer.share) for layer in self.experts
        )
        return _seconds(num_rows, used, read, machine) + _seconds(
            num_sampled, self.head, self.head, machine
        )

    def seconds(self, steps: Iterable[StepStats], media_flops: float, machine: Machine) -> float:
        """Returns the lower bound in seconds for all steps and the media encoder."""
        decoder = sum(
            self.step_seconds(step.num_scheduled_tokens, step.num_sampled_tokens, machine)
            for step in steps
        )
        return decoder + media_flops / machine.flops


def _seconds(num_rows: int, used: float, read: float, machine: Machine) -> float:
    if num_rows == 0:
        return 0.0
    num_bytes = read * WEIGHT_BYTES[machine.precision]
    # A multiplication and an addition for each weight and row, while the weights are read once.
    return max(2 * num_rows * used / machine.flops, num_bytes / machine.bandwidth)


def model_cost(shapes: nn.Module) -> ModelCost | None:
    """Returns the cost of a model, or None for a model that is not a CausalLM of this package.

    shapes: the model on the meta device, since a loaded model may have packed its weights.
    """
    if not isinstance(shapes, CausalLM):
        return None
    decoder = shapes.model
    embedding = decoder.embed_tokens.weight.numel()
    dense, experts = _decoder_cost(decoder)
    return ModelCost(
        dense=dense,
        experts=tuple(experts),
        head=embedding if shapes.lm_head is None else shapes.lm_head.weight.numel(),
        total=sum(parameter.numel() for parameter in shapes.parameters()),
        is_tied=shapes.lm_head is None,
    )


def _decoder_cost(decoder: nn.Module) -> tuple[int, list[ExpertCost]]:
    """Returns the number of values in dense matrices, and the costs of the sparse layers."""
    skipped = set(_unused_modules(decoder))
    dense, experts = 0, []
    for module in decoder.modules():
        if module in skipped or isinstance(module, Embedding):
            continue
        if isinstance(module, SparseMLP):
            share = module.gate.rule.top_k / module.experts.down_proj.shape[0]
            experts.append(ExpertCost(num_values=_num_values(module.experts), share=share))
        elif not isinstance(module, Experts):
            dense += _num_values(module)
    return dense, experts


def _unused_modules(decoder: nn.Module) -> Iterator[nn.Module]:
    """Yields the larger experts of each ModalityMLP: a token uses either the text or the media
    experts, and a lower bound counts the smaller ones."""
    for module in decoder.modules():
        if isinstance(module, ModalityMLP):
            kinds = (module.text_moe, module.vision_moe)
            yield from max(kinds, key=lambda kind: _num_values(kind.experts)).modules()


def _num_values(module: nn.Module) -> int:
    """Returns the number of values in the module's own matrices, without submodules."""
    own = module.parameters(recurse=False)
    return sum(parameter.numel() for parameter in own if parameter.dim() > 1)


class MediaFlops:
    """Counts the arithmetic of a model's media encoder inside `counting`. flops: the total."""

    def __init__(self, model: Any, shapes: nn.Module) -> None:
        """model: a loaded CausalLM of this package. shapes: the same model on the meta device."""
        self.flops = 0
        decoder = {*model.model.modules(), model.lm_head}
        own = dict(model.named_modules())
        self._matrices = [
            (own[name], _num_values(module))
            for name, module in shapes.named_modules()
            if _num_values(module) and name in own and own[name] not in decoder
        ]

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Counts what runs inside the block."""
        handles = [
            module.register_forward_pre_hook(partial(self._count, num_values))
            for module, num_values in self._matrices
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _count(self, num_values: int, module: nn.Module, inputs: Sequence[Any]) -> None:
        """Adds one call of a layer with `num_values` weights; ignores calls without a tensor."""
        if inputs and isinstance(inputs[0], Tensor):
            num_rows = math.prod(inputs[0].shape[:-1])
            self.flops += 2 * num_rows * num_values


def kv_block_bytes(model: Model, dtype: str, block_size: int) -> int:
    """Returns the bytes of one KV block in all layers."""
    layers, found = layer_caches(model), getattr(torch, dtype)
    shape = KVCacheShape(layers=layers, block_size=block_size, dtype=found)
    return shape.bytes_per_block + shape.bytes_per_window_block
