"""What a model costs: the products with its weights, and the least time that a machine needs for
them. Attention itself, norms and the like are not counted, so a share of 1 cannot be reached.

For each step     rows of the decoder = tokens of the step, of the output head = sampled tokens;
                  of each the longer of arithmetic and reading the weights once
For each image    arithmetic of the media encoder, with as many rows as its layers really get
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from mmdeploy_llm.hooks import Model
from mmdeploy_llm.layers.decoder import CausalLM
from mmdeploy_llm.layers.linear import Embedding
from mmdeploy_llm.layers.moe import Experts, ModalityMLP, SparseMLP
from mmdeploy_llm.metrics import StepStats

from .machine import Machine

VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCost:
    """num_values: in all experts together. share: of them that a token uses."""

    num_values: int
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """Values in weights. dense: of the decoder, for every token. experts: of its sparse layers.
    head: of the output head. total: of the whole model, vectors and embedding included."""

    dense: int
    experts: tuple[ExpertCost, ...]
    head: int
    total: int
    is_tied: bool

    def weight_bytes(self, dtype: str, precision: str) -> int:
        """Of the weights in memory. A tied embedding is there twice where products are in int8 and
        lookups are not."""
        num_copied = self.head if self.is_tied and precision == "int8" else 0
        return self.total * VALUE_BYTES[precision] + num_copied * VALUE_BYTES[dtype]

    def step_seconds(self, num_rows: int, num_sampled: int, machine: Machine) -> float:
        """Least time of one step's products, the media encoder's excluded."""
        used = self.dense + sum(part.num_values * part.share for part in self.experts)
        read = self.dense + sum(
            part.num_values * min(1.0, num_rows * part.share) for part in self.experts
        )
        return _seconds(num_rows, used, read, machine) + _seconds(
            num_sampled, self.head, self.head, machine
        )

    def seconds(self, steps: Iterable[StepStats], media_flops: float, machine: Machine) -> float:
        """Least time of all steps and of the media encoder."""
        decoder = sum(
            self.step_seconds(step.num_scheduled_tokens, step.num_sampled_tokens, machine)
            for step in steps
        )
        return decoder + media_flops / machine.flops


def _seconds(num_rows: int, used: float, read: float, machine: Machine) -> float:
    if num_rows == 0:
        return 0.0
    num_bytes = read * VALUE_BYTES[machine.precision]
    return max(2 * num_rows * used / machine.flops, num_bytes / machine.bandwidth)


def model_cost(shapes: nn.Module) -> ModelCost | None:
    """The cost of a model; None for one that is not built of this package's decoder.

    shapes: the model on the meta device, since a loaded one may have its weights in other layouts.
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
    """Values of the dense matrices, and the sparse layers."""
    skipped = set(_unused_modules(decoder))
    dense, experts = 0, []
    for module in decoder.modules():
        if module in skipped or isinstance(module, Embedding):
            continue
        if isinstance(module, SparseMLP):
            share = module.gate.top_k / module.experts.down_proj.shape[0]
            experts.append(ExpertCost(num_values=_num_values(module.experts), share=share))
        elif not isinstance(module, Experts):
            dense += _num_values(module)
    return dense, experts


def _unused_modules(decoder: nn.Module) -> Iterator[nn.Module]:
    """Of experts for text and for media a token sees one kind; the smaller ones are counted."""
    for module in decoder.modules():
        if isinstance(module, ModalityMLP):
            kinds = (module.text_moe, module.vision_moe)
            yield from max(kinds, key=lambda kind: _num_values(kind.experts)).modules()


def _num_values(module: nn.Module) -> int:
    """In the matrices of its own."""
    own = module.parameters(recurse=False)
    return sum(parameter.numel() for parameter in own if parameter.dim() > 1)


class MediaFlops:
    """Counts the arithmetic of a model's media encoder while `counting`. flops: so far."""

    def __init__(self, model: Any, shapes: nn.Module) -> None:
        """model: built of this package's decoder. shapes: the same on the meta device."""
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
        """A layer with `num_values` weights got `inputs`; tables get no tensor."""
        if inputs and isinstance(inputs[0], Tensor):
            num_rows = math.prod(inputs[0].shape[:-1])
            self.flops += 2 * num_rows * num_values


def kv_block_bytes(model: Model, dtype: str, block_size: int) -> int:
    """Keys and values of a block in all layers, with a float32 scale for each head in 8 bits."""
    per_head = model.head_dim * VALUE_BYTES[dtype] + (4 if VALUE_BYTES[dtype] == 1 else 0)
    return 2 * model.num_layers * model.num_kv_heads * per_head * block_size
