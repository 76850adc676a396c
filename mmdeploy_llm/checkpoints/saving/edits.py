"""Changes the tensors of a checkpoint as an adapter does, by their keys.

A tensor that has the adapter's name is changed as it is. Otherwise the model says which of its
parameters both belong to: a checkpoint may store fused what the adapter has divided, and the other
way round.

    adapter: layers.0.mlp.gate_proj --weight_targets--> rows of layers.0.mlp.gate_up_proj
    checkpoint: layers.0.mlp.gate_up_proj ------------> the same parameter, all rows
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.layers.adapters import Adapter, LowRank, TokenRows, names_of
from mmdeploy_llm.weights.map import Target
from mmdeploy_llm.weights.tensor_file import Entry

WEIGHT = ".weight"
Matrix = tuple[str, int]  # of a model: a parameter, and the index in a stack, -1 for none


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """A low-rank change of a tensor. index: of the matrix in a stack; rows: of the matrix. None is
    all. is_transposed: whether the tensor stores [in, out]; None decides by the shapes."""

    change: LowRank
    index: int | None = None
    rows: slice | None = None
    is_transposed: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Edits:
    """Says what becomes of a checkpoint's tensors, by key: another tensor, then low-rank changes,
    then what is added, then other rows."""

    saved: Mapping[str, Tensor]
    changes: Mapping[str, Sequence[Edit]]
    added: Mapping[str, Tensor]
    tokens: Mapping[str, TokenRows]

    @property
    def keys(self) -> set[str]:
        """The tensors that change."""
        return {*self.saved, *self.changes, *self.added, *self.tokens}

    def applied(self, key: str, tensor: Tensor) -> Tensor:
        """Returns what becomes of a tensor, perhaps in its memory. Raises CheckpointError where it
        has other shapes than the adapter needs."""
        tensor = self.saved[key].to(tensor.dtype).clone() if key in self.saved else tensor
        for edit in self.changes.get(key, ()):
            _edit(key, tensor, edit)
        if key in self.added:
            tensor = (tensor.float() + self.added[key].float()).to(tensor.dtype)
        if (tokens := self.tokens.get(key)) is not None:
            if tensor.shape[1:] != tokens.rows.shape[1:] or int(tokens.ids.max()) >= len(tensor):
                raise _shape_error(key, tensor.shape, f"rows {list(tokens.rows.shape)}")
            tensor[tokens.ids] = tokens.rows.to(tensor.dtype)
        return tensor


def edits_of(adapter: Adapter, entries: Mapping[str, Entry], model: Any, head: str) -> Edits:
    """Returns what `adapter` changes of a checkpoint with these tensors.

    model: built on the meta device. head: the key of the output head, which a checkpoint may lack.
    Raises CheckpointError for what is not found.
    """
    keys = {*entries, head}
    changes: dict[str, list[Edit]] = defaultdict(list)
    added: dict[str, Tensor] = {}
    left: dict[str, LowRank] = {}
    for path, change in adapter.modules.items():
        key = _key_of(path + WEIGHT, keys) or _key_of(path, keys)
        if key is None:
            left[path] = change
            continue
        changes[key].append(Edit(change=change, is_transposed=_is_transposed(model, key)))
        if change.bias is not None:
            added[_required(f"{path}.bias", keys)] = change.bias
    for path, change in adapter.embeddings.items():
        key = _required(path + WEIGHT, keys)
        changes[key].append(Edit(change=change, is_transposed=True))
    if left:
        _add_through_model(left, entries, model, changes)
    return Edits(
        saved={_required(key, keys): tensor for key, tensor in adapter.saved.items()},
        changes=changes,
        added=added,
        tokens={_required(path + WEIGHT, keys): rows for path, rows in adapter.tokens.items()},
    )


def _key_of(name: str, keys: set[str]) -> str | None:
    return next((key for key in names_of(name) if key in keys), None)


def _required(name: str, keys: set[str]) -> str:
    key = _key_of(name, keys)
    if key is None:
        raise CheckpointError(f"the adapter changes {name}, which the model has no tensor for")
    return key


def _is_transposed(model: Any, key: str) -> bool | None:
    targets: Sequence[Target] = model.weight_targets(key) or ()
    return targets[0].transpose if len(targets) == 1 else None


def _add_through_model(
    left: Mapping[str, LowRank], entries: Mapping[str, Entry], model: Any, to: dict[str, list[Edit]]
) -> None:
    """Adds the changes of modules that the checkpoint stores under another name, fused or divided:
    those of the model's matrices, cut as the checkpoint's tensors are."""
    matrices: dict[Matrix, list[Edit]] = defaultdict(list)  # rows: of the model's matrix
    for path, change in left.items():
        named = (key for name in (path + WEIGHT, path) for key in names_of(name))
        targets = next(filter(None, map(model.weight_targets, named)), None)
        if targets is None:
            raise CheckpointError(f"the adapter changes {path}, which the model does not have")
        if change.bias is not None:
            raise CheckpointError(f"{path} has a bias of its LoRA and is fused: merge it with PEFT")
        for target in targets:
            for matrix, at in _matrices(target, change.a.shape):
                own = change if at is None else replace(change, a=change.a[at], b=change.b[at])
                low, high, _ = (target.source or slice(None)).indices(len(own.b))
                start = 0 if target.rows is None else target.rows.start
                rows = slice(start, start + high - low)
                matrices[matrix].append(Edit(change=_rows_of(own, low, high), rows=rows))
    found = set()
    for key, entry in entries.items():
        for target in model.weight_targets(key) or ():
            for matrix, at in _matrices(target, entry.shape):
                if matrix in matrices:
                    found.add(matrix)
                    to[key] += [x for own in matrices[matrix] for x in _cut(own, target, at)]
    if missing := matrices.keys() - found:
        raise CheckpointError(f"the model has no tensor for {min(missing)[0]}, which is changed")


def _matrices(target: Target, shape: Sequence[int]) -> Iterator[tuple[Matrix, int | None]]:
    """Yields the model's matrices that a tensor fills, with their index in the tensor."""
    if target.index is not None or len(shape) != 3:
        yield (target.name, -1 if target.index is None else target.index), target.source_index
    else:
        for index in range(shape[0]):
            yield (target.name, index), index


def _cut(own: Edit, target: Target, at: int | None) -> Iterator[Edit]:
    """Yields the change of the rows of a matrix that a tensor holds."""
    assert own.rows is not None
    start, end = own.rows.start, own.rows.stop
    first, last = (target.rows.start, target.rows.stop) if target.rows else (0, end)
    low, high = max(start, first), min(end, last)
    if low < high:
        change = _rows_of(own.change, low - start, high - start)
        shift = first - (target.source.start if target.source else 0)
        yield Edit(
            change=change,
            index=at,
            rows=slice(low - shift, high - shift),
            is_transposed=target.transpose,
        )


def _rows_of(change: LowRank, low: int, high: int) -> LowRank:
    magnitude = None if change.magnitude is None else change.magnitude[low:high]
    return replace(change, b=change.b[low:high], magnitude=magnitude)


def _edit(key: str, tensor: Tensor, edit: Edit) -> None:
    """Applies a change in place, one matrix at a time."""
    a, b = edit.change.a, edit.change.b
    if a.dim() == 3:
        if tensor.dim() != 3 or len(tensor) != len(a):
            raise _shape_error(key, tensor.shape, f"{len(a)} experts")
        for index in range(len(a)):
            own = replace(edit.change, a=a[index], b=b[index])
            _edit(key, tensor, replace(edit, change=own, index=index))
        return
    matrix = tensor if edit.index is None else tensor[edit.index]
    shape, sizes = (len(b), a.shape[1]), (matrix.shape[0], matrix.shape[1:].numel())
    is_swapped = edit.is_transposed
    if is_swapped is None:
        is_swapped = sizes != shape and sizes[0] == shape[1]
    view = matrix.mT if is_swapped else matrix.view(sizes)
    rows = view if edit.rows is None else view[edit.rows]
    if rows.shape != shape:
        raise _shape_error(key, tensor.shape, f"a matrix {list(shape)}")
    new = rows.float().addmm_(b.float(), a.float(), alpha=edit.change.scale)
    if edit.change.magnitude is not None:
        new *= (edit.change.magnitude.float() / new.norm(dim=1))[:, None]
    rows.copy_(new)


def _shape_error(key: str, found: Sequence[int], expected: str) -> CheckpointError:
    return CheckpointError(
        f"{key} of the model has the shape {list(found)}, the adapter expects {expected}: it was "
        "trained on another model"
    )
