"""Replaces transformers' linear layers and experts by the engine's, which run on the device's fast
kernels, and has convolutions compute in a dtype that the CPU has products of."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Collection, Set
from typing import Any, cast

from torch import Tensor, nn

from mmdeploy_llm.layers import Linear

from .experts import engine_experts, has_experts
from .wide_conv import widen_convolutions

TEXTS = re.compile(r"""(["'])[\w.]*\1""")  # names, quoted
# Not after a weight of which only this is asked: a packed one keeps it (T5's MLPs ask).
KEPT = r"(?!\.(?:dtype|device)\b|, torch\.Tensor\))"


class AnyLinear(Linear):
    """Has the attributes and parameters of the torch.nn.Linear that it replaces. is_reordered:
    whether its rows get another order once they are loaded, see WeightTable."""

    is_reordered = False

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__(plain.in_features, plain.out_features)
        self.in_features = plain.in_features
        self.out_features = plain.out_features
        self.weight = cast("nn.Parameter", plain.weight)
        self.bias = cast("nn.Parameter | None", plain.bias)

    def can_hold_coded(self, name: str) -> bool:
        """See Matrix."""
        return super().can_hold_coded(name) and not self.is_reordered

    def forward(self, x: Tensor) -> Tensor:
        """See Linear. The kernels need rows whose values follow one another in memory, but some of
        transformers' layers pass transposed tensors."""
        return super().forward(x if x.stride(-1) == 1 else x.contiguous())


class AnyEmbedding(nn.Embedding):
    """Has the attributes and the parameter of the torch.nn.Embedding that it replaces. packed: the
    weight as its TiedLinear has packed it."""

    packed: Any = None  # kernels.PackedWeight

    def __init__(self, plain: nn.Embedding) -> None:
        sizes = plain.num_embeddings, plain.embedding_dim, plain.padding_idx
        super().__init__(*sizes, _weight=plain.weight)
        self.weight = plain.weight

    def forward(self, input: Tensor) -> Tensor:
        """Looks up embeddings, [..] -> [.., hidden]."""
        if self.packed is None:
            return super().forward(input)
        rows: Tensor = self.packed.rows(input.flatten().long(), self.weight.dtype)
        return rows.view(*input.shape, -1)


class TiedLinear(AnyLinear):
    """A head whose weight is that of an embedding; it packs both, and rounds neither."""

    def __init__(self, plain: nn.Linear, embedding: AnyEmbedding) -> None:
        super().__init__(plain)
        self.__dict__["_embedding"] = embedding  # its parent has it as a submodule

    def pack(self, kernels: Any, quantization: Any) -> None:
        """See Matrix."""
        super().pack(kernels, None)
        if self.packed is not None:
            embedding: AnyEmbedding = self.__dict__["_embedding"]
            embedding.packed, embedding.weight = self.packed, self.weight


def use_engine_layers(model: nn.Module) -> None:
    """Replaces the linear layers of `model` in place, a head that is the embedding too, and its
    experts where the engine's compute the same.

    Two kinds stay: other layers that share their weight, since packing changes its layout, and
    layers whose values the parent module reads itself, in a branch that its own switches do not
    rule out, or may read because its source is unavailable.
    """
    widen_convolutions(model)
    sources = {kind: _source(kind) for kind in {type(module) for module in model.modules()}}
    _replace_tied(model, sources.values())
    shared = _shared(model)
    for parent in list(model.modules()):
        code = sources.get(type(parent))
        for name, child in list(parent.named_children()):
            if code is None or (type(child) is not nn.Linear and not has_experts(child)):
                continue
            if _is_read((code,), name):
                code = _living_code(parent)
            found = _engine_layer(child, code, name)
            if found is not None and not shared & {id(own) for own in child.parameters()}:
                setattr(parent, name, found)


def _replace_tied(model: nn.Module, codes: Collection[str | None]) -> None:
    """Replaces heads and embeddings that are each other's only sharers, where no class of the model
    reads their values."""
    owners: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for param in module.parameters(recurse=False):
            owners.setdefault(id(param), []).append(module)
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is not None:
                places.setdefault(child, []).append((parent, name))
    for pair in owners.values():
        kinds: dict[type, Any] = {type(module): module for module in pair}
        if len(pair) != 2 or kinds.keys() != {nn.Linear, nn.Embedding}:
            continue
        head, embedding = kinds[nn.Linear], kinds[nn.Embedding]
        names = {name for own in (head, embedding) for _, name in places[own]}
        if embedding.max_norm is not None or any(_is_read(codes, name) for name in names):
            continue
        made = AnyEmbedding(embedding)
        for old, new in ((embedding, made), (head, TiedLinear(head, made))):
            for parent, name in places[old]:
                setattr(parent, name, new)


def _engine_layer(plain: nn.Module, parent_code: str, name: str) -> nn.Module | None:
    """Returns what takes the place of a layer, which the parent has by this name; None: nothing."""
    if type(plain) is not nn.Linear:
        return engine_experts(plain, parent_code, name)
    return None if _is_read((parent_code,), name) else AnyLinear(plain)


def _is_read(codes: Collection[str | None], name: str) -> bool:
    """Whether source code, or one that is unavailable, may read values of a layer's weight."""
    pattern = re.compile(rf"\b{re.escape(name)}\.weight\b{KEPT}")
    return any(code is None or pattern.search(code) for code in codes)


def _shared(model: nn.Module) -> Set[int]:
    """Returns the ids of parameters that have more than one name."""
    seen: set[int] = set()
    shared: set[int] = set()
    for _, param in model.named_parameters(remove_duplicate=False):
        (shared if id(param) in seen else seen).add(id(param))
    return shared


def _source(module_class: type[nn.Module]) -> str | None:
    """Returns the source code of a class without its texts, which only name weights (the lists of
    tied ones do); None where it cannot be read."""
    try:
        return TEXTS.sub("", inspect.getsource(module_class))
    except (OSError, TypeError):
        return None


def _living_code(module: nn.Module) -> str:
    """Returns the source code of a module's class as `_source` does, without the branches that it
    takes only while it learns, or with another switch that it has off."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(type(module))))
    off = {name for name, value in vars(module).items() if value is False}
    return TEXTS.sub("", ast.unparse(_Living(off).visit(tree)))


class _Living(ast.NodeTransformer):
    """Removes branches whose condition asks for an attribute of `self` that is False."""

    def __init__(self, off: Collection[str]) -> None:
        self._off = {f"self.{name}" for name in off}

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        """See NodeTransformer."""
        self.generic_visit(node)
        is_all = isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.And)
        parts = node.test.values if is_all else [node.test]  # type: ignore[attr-defined]
        return node.orelse if any(ast.unparse(part) in self._off for part in parts) else node
