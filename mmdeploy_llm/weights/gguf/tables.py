"""The types of GGUF tables, and what helps to write one: a plugin that reads GGUF files of its
family names a GGUFTable in `ModelSpec.gguf`.

The names of tensors come from the package `gguf`, which knows what a tensor is called in the
checkpoints of many families: the model tells which of these names it has. A table holds the rest:
what the converter changed, the config that the metadata describe, and names that the package lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from .header import Header, Scalar, StoredTensor
from .metadata import (
    MAX_HEAD_DIM,
    MAX_LAYERS,
    MAX_WHOLE,
    Metadata,
    has_biases,
    head_dim,
    num_layers,
)
from .order import Order, OrderOf, halves_to_pairs
from .rope import FREQUENCY_FACTORS, factors_of, rope_parameters, rope_sections
from .tower_sizes import check_activation, grid_image, merge_size, mlp_size, side, tower_sizes

__all__ = [
    "ADDED_ONE",
    "FREQUENCY_FACTORS",
    "MAX_HEAD_DIM",
    "MAX_LAYERS",
    "MAX_WHOLE",
    "PERMUTED",
    "Change",
    "GGUFTable",
    "Header",
    "MediaModel",
    "Metadata",
    "Order",
    "OrderOf",
    "Scalar",
    "StoredTensor",
    "TextModel",
    "Tower",
    "Values",
    "check_activation",
    "factors_of",
    "grid_image",
    "halves_to_pairs",
    "has_biases",
    "head_dim",
    "merge_size",
    "mlp_size",
    "num_layers",
    "rope_parameters",
    "rope_sections",
    "side",
    "tower_sizes",
]

Values: TypeAlias = dict[str, Any]  # fields of transformers' config


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change that llama.cpp's converter made of a tensor, undone when the tensor is read.

    rows, columns: the order that it gave them; None: it kept theirs.
    added: what it added to every value.
    is_log: whether it stored -exp(value).
    new_axis: the axis of size 1 that it removed.
    is_flat: whether it spread values of one axis over several.
    """

    rows: OrderOf | None = None
    columns: OrderOf | None = None
    added: float = 0.0
    is_log: bool = False
    new_axis: int | None = None
    is_flat: bool = False


ADDED_ONE: Mapping[str, Change] = {"*norm.weight": Change(added=1.0)}
PERMUTED: Mapping[str, Change] = {
    "attn_q.*": Change(rows=halves_to_pairs("attention.head_count")),
    "attn_k.*": Change(rows=halves_to_pairs("attention.head_count_kv")),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextModel:
    """A text model: one value of general.architecture.

    model_type, model: names of config and class in transformers.
    config: returns the fields of transformers' config that are the architecture's own; they win
        over those that all architectures share.
    changes: patterns of names (those within a layer without "blk.N.") -> the change of the tensors;
        the first pattern that fits decides.
    names: names in GGUF -> keys of transformers' checkpoints, where the package `gguf` has none or
        several that fit; "{bid}" stands for the number of the layer. Without ".weight" and ".bias"
        they hold for both.
    has_equal_layers: whether one number of heads, and of channels of a head, holds for all layers,
        and rotary positions for all; else `config` returns them.
    has_mlp_size: whether one size of MLPs does.
    has_rms_norm: whether norms are RMS norms; else `config` returns what they add to variances.
    has_extra_layers: whether layers that predict further tokens may follow, which are not used.
    needs_tower: whether transformers has the model with a vision tower only.
    """

    model_type: str
    model: str
    config: Callable[[Metadata], Values]
    changes: Mapping[str, Change] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    has_equal_layers: bool = True
    has_mlp_size: bool = True
    has_rms_norm: bool = True
    has_extra_layers: bool = False
    needs_tower: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaModel:
    """An image-text model of transformers: names of its config and class. text_type: model_type of
    its text config; "": as the text model has it alone."""

    model_type: str
    model: str
    text_type: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tower:
    """One kind of vision tower: a value of clip.projector_type.

    models: general.architecture of the text model -> what both are together.
    config: called with the metadata of the tower and the text config; returns the fields of the
        vision config, and options of the image processor.
    outer: those fields of the vision config that transformers has beside it.
    last: the tensor whose rows are channels of the decoder.
    tokens: fields of the config -> texts of the tokens.
    names: as in TextModel. Tensors with the same key are parts of one entry, one below the other.
    patches: what the converter did with the weight of the patches: "frames": it split a convolution
        over two frames; "pixels": it made a convolution of a matrix of pixels; "": neither.
    num_axes: keys -> number of axes, of which it removed those of size 1 at the front.
    ignored: how names of tensors that are not used begin, such as those of an encoder of sounds.
    """

    models: Mapping[str, MediaModel]
    config: Callable[[Metadata, Values], tuple[Values, Values]]
    last: str
    tokens: Mapping[str, str]
    outer: frozenset[str] = frozenset()
    names: Mapping[str, str] = field(default_factory=dict)
    patches: Literal["", "frames", "pixels"] = ""
    num_axes: Mapping[str, int] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFTable:
    """The GGUF files that a plugin can read. models: general.architecture -> text model. towers:
    clip.projector_type -> vision tower."""

    models: Mapping[str, TextModel] = field(default_factory=dict)
    towers: Mapping[str, Tower] = field(default_factory=dict)
