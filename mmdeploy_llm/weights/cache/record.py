"""Describes what a model holds once its weights are packed, as a list of tensors and values that
JSON can hold; and fills a model on the meta device from these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from mmdeploy_llm.kernels import PackedWeight
from mmdeploy_llm.kernels.cpu import PACKED

PACKERS = ("mmdeploy_llm.layers.basic.linear", "mmdeploy_llm.layers.basic.experts")  # of `pack`


class NotKeptError(Exception):
    """Raised for a model that the cache cannot keep, and for a record that does not fit a model;
    the text says why."""


@runtime_checkable
class Packer(Protocol):
    """A layer whose weights are packed."""

    def pack(self, kernels: Any, quantization: Any) -> None: ...

    def packed_parts(self) -> Mapping[str, PackedWeight]: ...

    def take_packed(self, parts: Mapping[str, PackedWeight]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """tensors: each once. values: the names of parameters and buffers, and the attributes of packed
    weights, with numbers of tensors."""

    tensors: Sequence[Tensor]
    values: Mapping[str, Any]


@dataclass(slots=True)
class _Tensors:
    """Numbers tensors; one that is used twice has one number."""

    tensors: list[Tensor] = field(default_factory=list)
    numbers: dict[tuple[Any, ...], int] = field(default_factory=dict)

    def number(self, tensor: Tensor) -> int:
        tensor = tensor.detach()
        if not tensor.is_cpu or type(tensor) not in (Tensor, nn.Parameter):
            raise NotKeptError(f"a weight is a {type(tensor).__name__} on {tensor.device}")
        own = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if not tensor.numel() or own not in self.numbers:
            self.numbers[own] = len(self.tensors)
            self.tensors.append(tensor)
        return self.numbers[own]


def record(model: nn.Module) -> Record:
    """Describes a model whose weights are packed. Raises NotKeptError for one that holds more than
    parameters, buffers and packed weights of known kinds."""
    if not getattr(model, "is_cacheable", True):
        raise NotKeptError(f"{type(model).__name__} computes with its weights while it is loaded")
    found = _Tensors()
    params = {name: found.number(param) for name, param in model.named_parameters()}
    buffers = {name: found.number(buffer) for name, buffer in model.named_buffers()}
    packed = {
        path: {part: _described(weight, found) for part, weight in module.packed_parts().items()}
        for path, module in model.named_modules()
        if isinstance(module, Packer) and _check_packer(path, module)
    }
    values = {
        "params": params,
        "buffers": buffers,
        "packed": {k: v for k, v in packed.items() if v},
    }
    return Record(tensors=found.tensors, values=values)


def _check_packer(path: str, module: Packer) -> bool:
    """Raises NotKeptError for a layer of a plugin that packs in its own way."""
    if type(module).pack.__module__ not in PACKERS:
        raise NotKeptError(f"{path} ({type(module).__name__}) packs its weights itself")
    return True


def _described(weight: PackedWeight, found: _Tensors) -> list[Any]:
    kind = type(weight).__name__
    if PACKED.get(kind) is not type(weight):
        raise NotKeptError(f"weights of kind {kind} are packed by a plugin")
    values: dict[str, Any] = {}
    for name, value in vars(weight).items():
        if name == "_kernels":
            continue
        if isinstance(value, Tensor):
            values[name] = {"tensor": found.number(value)}
        elif value is None or type(value) in (bool, int):
            values[name] = value
        else:
            raise NotKeptError(f"{kind}.{name} is a {type(value).__name__}")
    return [kind, values]


def fill(model: nn.Module, kept: Record, kernels: object) -> None:
    """Gives a model on the meta device the parameters and packed weights of a record. Raises
    NotKeptError before anything is changed where these are not the model's."""
    values, tensors = kept.values, kept.tensors
    names = {name for name, _ in model.named_parameters()}
    modules = dict(model.named_modules())
    packers = {path: modules.get(path) for path in values["packed"]}
    if names != values["params"].keys() or not all(
        isinstance(module, Packer) for module in packers.values()
    ):
        raise NotKeptError("its parameters are those of another model")
    for name, number in values["params"].items():
        path, _, own = name.rpartition(".")
        setattr(modules[path], own, nn.Parameter(tensors[number], requires_grad=False))
    for path, parts in values["packed"].items():
        module = packers[path]
        assert isinstance(module, Packer)
        module.take_packed(
            {part: _made(kind, own, tensors, kernels) for part, (kind, own) in parts.items()}
        )


def _made(
    kind: str, values: Mapping[str, Any], tensors: Sequence[Tensor], kernels: object
) -> PackedWeight:
    made: Any = object.__new__(PACKED[kind])
    made._kernels = kernels
    for name, value in values.items():
        setattr(made, name, tensors[value["tensor"]] if isinstance(value, dict) else value)
    packed: PackedWeight = made
    return packed


def has_buffers(model: nn.Module, kept: Record) -> bool:
    """Whether the buffers that a model has computed are those of the record: a buffer may depend on
    weights that are packed now."""
    own, numbers = dict(model.named_buffers()), kept.values["buffers"]
    return own.keys() == numbers.keys() and all(
        _are_equal(own[name], kept.tensors[number]) for name, number in numbers.items()
    )


def _are_equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype is other.dtype and torch.equal(one, other)
