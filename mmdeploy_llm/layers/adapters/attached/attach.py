"""attach: finds the matrices of a model that an adapter changes, by the names that its checkpoint
has for them, and lays the changes out as these matrices are.

    "model.layers.0.self_attn.k_proj" --weight_targets--> rows of layers.0.self_attn.qkv_proj
    "...mlp.experts.3.down_proj"      --weight_targets--> expert 3 of layers.0.mlp.experts.down_proj
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.hooks.objects.model import cross_of
from mmdeploy_llm.layers import CausalLM
from mmdeploy_llm.layers.adapters import Adapter, LowRank, names_of
from mmdeploy_llm.layers.basic.adapted import Lookup, Rows
from mmdeploy_llm.layers.basic.experts import Experts
from mmdeploy_llm.layers.basic.linear import Embedding, Matrix
from mmdeploy_llm.system.sharding import Share
from mmdeploy_llm.weights.load import dtype_of
from mmdeploy_llm.weights.map import Target

from .places import Attached, Piece, Place, Placed, combined, held_of, shared, starts_of

logger = logging.getLogger(__name__)

LAYER = re.compile(r"\.\d+\.")
MAX_SHOWN = 3  # names in a warning


@dataclass(slots=True, kw_only=True)
class _Found:
    """Gathers what is found for one matrix, before it is laid out."""

    pieces: list[Piece] = field(default_factory=list)
    weights: list[Rows] = field(default_factory=list)
    biases: list[Rows] = field(default_factory=list)


class Blueprint:
    """The matrices of a model before they were sharded and packed, for adapters to be attached to.

    model: on the meta device, whole. shares: what one rank holds, of parameters that it does not
    hold whole.
    """

    def __init__(self, model: nn.Module, shares: Mapping[str, Share], dtype: torch.dtype) -> None:
        self._model: Any = model
        self._modules = dict(model.named_modules())
        self._shares, self._dtype = shares, dtype
        found = (item for item in self._modules.items() if isinstance(item[1], CausalLM))
        own = next(found, None)
        self._path = "" if own is None else own[0]
        self._causal: Any = None if own is None else own[1]

    def has_media(self, attached: Attached) -> bool:
        """Whether an adapter changes what is computed of media: modules outside of the decoder and
        its head, or those of a decoder whose layers make keys and values of an item."""
        if self._causal is None or cross_of(self._model) is not None:
            return True  # or unknown
        prefix = f"{self._path}." if self._path else ""
        inside = tuple(f"{prefix}{name}." for name in ("model", "lm_head"))
        return not all(f"{place.module}.".startswith(inside) for place in attached.matrices)

    def attach(self, adapter: Adapter) -> Attached:
        """Returns the adapter as this model holds it. Raises CheckpointError for what it has no
        matrix for, with the name that the adapter has for it."""
        found: dict[Place, _Found] = defaultdict(_Found)
        for path, change in adapter.modules.items():
            for target in self._targets(adapter, path, "weight"):
                for place, piece in self._pieces(adapter, path, change, target):
                    found[place].pieces.append(piece)
        for key, tensor in adapter.saved.items():
            if not self._is_table(key):
                self._add_saved(adapter, key, tensor, found)
        matrices = {place: self._placed(adapter, place, own) for place, own in found.items()}
        return Attached(matrices=matrices, lookups=self._lookups(adapter))

    def _targets(self, adapter: Adapter, path: str, name: str) -> Sequence[Target]:
        """Returns what the model has for the module, or stacked parameter, that is called so in a
        checkpoint."""
        is_unused = False
        for key in (f"{path}.{name}", path):
            for other in names_of(key):
                targets: Sequence[Target] | None = self._model.weight_targets(other)
                if targets:
                    return targets
                is_unused |= targets is not None
        if path.rpartition(".")[2] == "lm_head" and name == "weight" and self._is_tied:
            return (Target(name=f"{self._embedding}.{name}"),)
        if is_unused:  # in the checkpoint, but not computed
            logger.warning(
                "adapter %r changes %s, which the model does not use", adapter.name, path
            )
            return ()
        raise _refusal(adapter, path, "this model has no such module")

    def tell(self, name: str, adapter: Adapter) -> None:
        """Warns of an adapter that is not whole, or that changes nothing."""
        if adapter.is_without_effect:
            logger.warning("adapter %r changes nothing: all that it adds is zero", name)
        if lacking := self._lacking(adapter):
            logger.warning(
                "adapter %r has no tensors for %d modules that its config names, such as %s; was "
                "it saved whole?",
                name,
                len(lacking),
                ", ".join(lacking[:MAX_SHOWN]),
            )

    def _lacking(self, adapter: Adapter) -> list[str]:
        """Returns the modules beside those that an adapter changes, in other layers or with other
        names of its target_modules, that it leaves as they are."""
        targets = adapter.config.target_modules
        names = [own for own in targets if "." not in own] if isinstance(targets, list) else []
        forms = dict.fromkeys(tuple(LAYER.split(path, maxsplit=1)) for path in adapter.modules)
        beside = [
            (*first, ".".join((*last.split(".")[:-1], name)))
            for *first, last in forms
            for name in names
        ]
        others = (
            f".{number}.".join(form)
            for form in dict.fromkeys((*forms, *beside))
            for number in range(self._num_layers if len(form) > 1 else 1)
        )
        here = [each for each in others if each not in adapter.modules and self._has(each)]
        is_meant = adapter.config.targeted(here)
        return [path for path, own in zip(here, is_meant, strict=True) if own]

    def _has(self, path: str) -> bool:
        return any(self._model.weight_targets(own) for own in names_of(f"{path}.weight"))

    @property
    def _num_layers(self) -> int:
        """More than the largest number that the name of a module has."""
        numbers = (
            int(part) for name in self._modules for part in name.split(".") if part.isdigit()
        )
        return 1 + max(numbers, default=0)

    @property
    def _is_tied(self) -> bool:
        return self._causal is not None and self._causal.lm_head is None

    @property
    def _embedding(self) -> str:
        return f"{self._path}.model.embed_tokens".removeprefix(".")

    def _place(self, adapter: Adapter, path: str, target: Target) -> tuple[Place, torch.Size]:
        """Returns the matrix, or stack of them, that a target names, and its shape."""
        module, _, name = target.name.rpartition(".")
        owner = self._modules.get(module)
        is_head = path.rpartition(".")[2] == "lm_head"
        is_matrix = isinstance(owner, Matrix) and name in ("weight", "bias")
        if isinstance(owner, Embedding) and not (is_head and module == self._embedding):
            raise _refusal(adapter, path, "it looks rows up, and is changed as if it multiplied")
        if not (is_matrix or (isinstance(owner, Experts) and name in owner._parameters)):
            raise _refusal(adapter, path, f"it is a {type(owner).__name__} here, not a matrix")
        assert owner is not None
        return Place(module, name), owner.get_parameter(name).shape

    def _pieces(
        self, adapter: Adapter, path: str, change: LowRank, target: Target
    ) -> Iterator[tuple[Place, Piece]]:
        place, shape = self._place(adapter, path, target)
        is_stack = isinstance(self._modules[place.module], Experts)
        indices = [-1] if not is_stack else range(shape[0])
        if target.index is not None:
            indices = [target.index]
        shape = shape[1:] if is_stack else shape
        start, stop, _ = (target.rows or slice(None)).indices(shape[0])
        for number, index in enumerate(indices):
            at = number if target.source_index is None else target.source_index
            own = _of_expert(change, at)
            if target.source is not None:
                own = _rows_of(own, target.source)
            wanted = (own.rank, shape[1:].numel()), (stop - start, own.rank)
            _check_shapes(adapter, path, own, wanted)
            place = Place(place.module, place.name, index)
            yield place, Piece(path=path, start=start, change=own)

    def _add_saved(
        self, adapter: Adapter, key: str, tensor: Tensor, found: dict[Place, _Found]
    ) -> None:
        """Adds a tensor that takes the place of the model's."""
        path, _, name = key.rpartition(".")
        for target in self._targets(adapter, path, name):
            place, shape = self._place(adapter, path, target)
            if target.index is not None or target.source_index is not None or len(shape) > 2:
                raise _refusal(adapter, path, "whole matrices of experts are not replaced")
            start, stop, _ = (target.rows or slice(None)).indices(shape[0])
            values = tensor if target.source is None else tensor[target.source]
            if values.shape != (stop - start, *shape[1:]):
                raise _refusal(
                    adapter,
                    key,
                    f"it has shape {list(values.shape)} and needs {[stop - start, *shape[1:]]}",
                )
            rows = Rows(start=start, values=values.to(self._dtype))
            own = found[Place(place.module)]
            (own.weights if place.name == "weight" else own.biases).append(rows)

    def _placed(self, adapter: Adapter, place: Place, found: _Found) -> Placed:
        """Lays out what is found for a matrix, for the rows and columns that this rank holds."""
        module = self._modules[place.module]
        n, k = _matrix_shape(module.get_parameter(place.name), is_stack=place.index >= 0)
        magnitudes = tuple(
            Rows(start=piece.start, values=piece.change.magnitude.float())
            for piece in found.pieces
            if piece.change.magnitude is not None
        )
        dtype, starts = self._dtype_of(module, place.name), starts_of(module, place.name, n)
        placed = Placed(
            starts=starts,
            num_columns=k,
            change=combined(found.pieces, starts, k, dtype) if found.pieces else None,
            magnitudes=magnitudes,
            weights=tuple(found.weights),
            biases=tuple(found.biases),
        )
        share = self._shares.get(f"{place.module}.{place.name}")
        if share is None:
            return placed
        axis = share.axis - (place.index >= 0)
        if axis == 1 and magnitudes:
            path = found.pieces[0].path
            raise _refusal(adapter, path, "DoRA needs whole rows, which ranks share; merge it")
        return shared(placed, share.ranges, axis)

    def _dtype_of(self, module: nn.Module, name: str) -> torch.dtype:
        """Returns the dtype of a change: that of the product that it is added to."""
        return getattr(module, "out_dtype", None) or dtype_of(module, name, self._dtype)

    def _lookups(self, adapter: Adapter) -> Mapping[str, Lookup]:
        found: dict[str, Lookup] = {}
        saved = {key.removesuffix(".weight") for key in adapter.saved if self._is_table(key)}
        for path in {*adapter.embeddings, *adapter.tokens, *saved}:
            targets = self._targets(adapter, path, "weight")
            if len(targets) != 1:
                raise _refusal(adapter, path, "it is not one embedding here")
            module = targets[0].name.rpartition(".")[0]
            owner = self._modules.get(module)
            if not isinstance(owner, Embedding):
                raise _refusal(adapter, path, f"it is a {type(owner).__name__} here")
            if path in adapter.tokens and self._is_tied:
                raise _refusal(adapter, path, "its rows are those of the output head too")
            found[module] = self._lookup(adapter, path, module, owner)
        return found

    def _is_table(self, key: str) -> bool:
        """Whether a tensor takes the place of an embedding, not of an output head."""
        found = (self._model.weight_targets(name) for name in names_of(key))
        targets: Sequence[Target] = next(filter(None, found), ())
        modules = [self._modules.get(target.name.rpartition(".")[0]) for target in targets]
        is_head = key.rpartition(".")[0].endswith("lm_head")
        return not is_head and any(isinstance(module, Embedding) for module in modules)

    def _lookup(self, adapter: Adapter, path: str, module: str, owner: Embedding) -> Lookup:
        vocab, hidden = owner.weight.shape
        lookup, held = Lookup(), torch.arange(vocab)
        share = self._shares.get(f"{module}.weight")
        if share is not None:
            held = held_of(share.ranges)
        if (table := adapter.saved.get(f"{path}.weight")) is not None:
            if table.shape != (vocab, hidden):
                shape = f"{list(table.shape)} and needs {[vocab, hidden]}"
                raise _refusal(adapter, path, f"it has shape {shape}")
            lookup = Lookup(rows=table[held].to(self._dtype))
        if (change := adapter.embeddings.get(path)) is not None:
            _check_shapes(adapter, path, change, ((change.rank, vocab), (hidden, change.rank)))
            a, b = change.a[:, held].T.contiguous(), change.b.contiguous()
            a, b = a.to(self._dtype), b.to(self._dtype)
            lookup = replace(lookup, a=a, b=b, scale=change.scale)
        if (tokens := adapter.tokens.get(path)) is not None:
            ids, order = tokens.ids.sort()
            if lookup.rows is not None:
                raise _refusal(adapter, path, "it is given whole and by rows; keep one of both")
            if int(ids[-1]) >= vocab or tokens.rows.shape[1] != hidden:
                found = f"{list(tokens.rows.shape)}, the last of token {int(ids[-1])}"
                words = f"its rows are {found}; this model has {vocab} of {hidden} values"
                raise _refusal(adapter, path, words)
            here = torch.isin(ids, held)
            rows = tokens.rows[order][here].to(self._dtype)
            lookup = replace(lookup, ids=torch.searchsorted(held, ids[here]), rows=rows)
        return lookup


def _refusal(adapter: Adapter, path: str, reason: str) -> CheckpointError:
    return CheckpointError(f"the adapter {adapter.name!r} changes {path!r}: {reason}")


def _check_shapes(
    adapter: Adapter, path: str, change: LowRank, wanted: tuple[tuple[int, ...], ...]
) -> None:
    for name, tensor, shape in zip("AB", (change.a, change.b), wanted, strict=True):
        if tuple(tensor.shape) != shape:
            raise _refusal(
                adapter,
                path,
                f"lora_{name} has shape {list(tensor.shape)}, but this model needs "
                f"{list(shape)}: the adapter was trained on another model",
            )


def _of_expert(change: LowRank, index: int) -> LowRank:
    """Returns the change of one expert where the tensors are of all of them."""
    if change.a.dim() == 2 or index >= len(change.a):
        return change  # of another shape, which is told
    return replace(change, a=change.a[index], b=change.b[index])


def _rows_of(change: LowRank, rows: slice) -> LowRank:
    bias = None if change.bias is None else change.bias[rows]
    magnitude = None if change.magnitude is None else change.magnitude[rows]
    return replace(change, b=change.b[rows], bias=bias, magnitude=magnitude)


def _matrix_shape(weight: Tensor, *, is_stack: bool) -> tuple[int, int]:
    shape = weight.shape[1:] if is_stack else weight.shape
    return shape[0], shape[1:].numel()
