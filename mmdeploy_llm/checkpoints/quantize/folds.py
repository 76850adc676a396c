"""Folds: where the columns of a weight can be scaled and its inputs divided, without a change of
the products and without new tensors (AWQ, Lin et al. 2023).

    norm -> q, k, v      the norm's weight is divided
    norm -> gate, up     the same, where no router reads the norm
    up -> down           the rows of up are divided
    v -> o               the rows of v are divided; heads that share them share their scales

They are found in the modules that the engine has built, those of the standard decoder and of
experts. A class of a family's own, or one that overrides what joins these modules, has no folds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmdeploy_llm.layers.basic.experts import Experts
from mmdeploy_llm.layers.basic.mlp import GatedMLP
from mmdeploy_llm.layers.basic.norm import LateRMSNorm, RMSNorm, ZeroCenteredRMSNorm
from mmdeploy_llm.layers.decoder import Attention, DecoderLayer

from .sites import Site

SMALLEST = 1e-3  # a norm's factor below this is left alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """The place of the divisions that belong to the scales of a site.

    norm: the parameter of a norm, or None. is_centred: whether the norm multiplies by 1 + weight.
    rows: the parameter and expert of a site, or None; first_row: its first row to divide.
    head, repeat: the columns are heads of `head` columns, and `repeat` neighbours share scales.
    """

    norm: str | None = None
    is_centred: bool = False
    rows: tuple[str, int | None] | None = None
    first_row: int = 0
    head: int = 1
    repeat: int = 1

    def shared(self, power: Tensor) -> Tensor:
        """Returns the means of `power` [k] over the columns that share a scale, [k]."""
        heads = power.view(-1, self.repeat, self.head).mean(1, keepdim=True)
        return heads.expand(-1, self.repeat, -1).flatten()

    def row_scales(self, scales: Tensor) -> Tensor:
        """Returns the scales of the divided rows from those of the columns, [k]."""
        return scales.view(-1, self.repeat, self.head)[:, 0].flatten()


def folds_of(model: nn.Module, sites: Sequence[Site]) -> Mapping[tuple[str, int | None], Fold]:
    """Returns the folds of the sites that have one, by the parameter and expert of a site. Only
    whole fused matrices are scaled or divided."""
    whole = {(site.name, site.index) for site in sites if site.is_whole}
    found = {}
    for path, module in model.named_modules():
        for name, index, fold in _folds(module):
            place = f"{path}.{name}", index
            own = _within(path, fold)
            if place in whole and (own.rows is None or own.rows in whole):
                found[place] = own
    return found


def _within(path: str, fold: Fold) -> Fold:
    """Returns a fold of the module at `path` with names from the root of the model."""
    return Fold(
        norm=fold.norm and f"{path}.{fold.norm}",
        is_centred=fold.is_centred,
        rows=None if fold.rows is None else (f"{path}.{fold.rows[0]}", fold.rows[1]),
        first_row=fold.first_row,
        head=fold.head,
        repeat=fold.repeat,
    )


def _folds(module: nn.Module) -> Iterator[tuple[str, int | None, Fold]]:
    """Yields the matrices in a module that can be scaled, by their names from it."""
    if isinstance(module, DecoderLayer):
        yield from _after_norms(module)
    elif type(module) is Attention and module.qkv_proj.bias is None:
        yield "o_proj.weight", None, _values(module)
    elif type(module) is GatedMLP and module.gate_up_proj.bias is None:
        first_row = module.intermediate_size
        yield (
            "down_proj.weight",
            None,
            Fold(rows=("gate_up_proj.weight", None), first_row=first_row),
        )
    elif type(module) is Experts:
        _, up = module.expert_parts["up_proj"]
        assert up is not None
        for index in range(module.down_proj.shape[0]):
            yield "down_proj", index, Fold(rows=("gate_up_proj", index), first_row=up.start)


def _after_norms(layer: DecoderLayer) -> Iterator[tuple[str, int | None, Fold]]:
    own = type(layer)
    after = layer.post_attention_layernorm
    if own.forward is not DecoderLayer.forward or after is None:  # attention and MLP share a norm
        return
    mixer = getattr(layer, "self_attn", None)
    if own.mix is DecoderLayer.mix and type(mixer) is Attention:
        norm = _norm("input_layernorm", layer.input_layernorm)
        if norm is not None:
            yield "self_attn.qkv_proj.weight", None, norm
    if type(layer.mlp) is GatedMLP:
        norm = _norm("post_attention_layernorm", after)
        if norm is not None:
            yield "mlp.gate_up_proj.weight", None, norm


def _norm(name: str, norm: nn.Module) -> Fold | None:
    if type(norm) not in (RMSNorm, LateRMSNorm, ZeroCenteredRMSNorm):
        return None
    return Fold(norm=f"{name}.weight", is_centred=type(norm) is ZeroCenteredRMSNorm)


def _values(attention: Attention) -> Fold:
    return Fold(
        rows=("qkv_proj.weight", None),
        first_row=attention.qkv_proj.parts["v_proj"].start,
        head=attention.head_dim,
        repeat=attention.num_heads // attention.num_kv_heads,
    )


def divided_norm(weight: Tensor, scales: Tensor, *, is_centred: bool) -> tuple[Tensor, Tensor]:
    """Returns a norm's weight [k] divided by `scales`, in its dtype with values of bfloat16, and
    the scales by which the columns must be multiplied so that the products do not change, float32:
    what rounding did to the norm is in them. Columns whose factor is almost 0 keep it."""
    offset = 1.0 if is_centred else 0.0
    factor = weight.float() + offset
    divided = (factor / scales - offset).bfloat16().to(weight.dtype)
    rest = divided.float() + offset
    is_kept = (factor.abs() < SMALLEST) | (rest.abs() < SMALLEST) | ~divided.isfinite()
    divided = torch.where(is_kept, weight, divided)
    return divided, torch.where(is_kept, 1.0, factor / rest)


def set_norm(model: Any, name: str, weight: Tensor) -> None:
    """Lets a norm of a loaded model compute with another weight from now on."""
    model.get_parameter(name).data.copy_(weight)
