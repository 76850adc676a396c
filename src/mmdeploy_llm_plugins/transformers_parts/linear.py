"""Replaces transformers' linear layers and experts by the engine's, which run on the device's fast
kernels."""

from __future__ import annotations

import inspect
import re
from collections.abc import Set
from typing import cast

from torch import Tensor, nn

from mmdeploy_llm.layers import Linear

from .experts import engine_experts, has_experts

TEXTS = re.compile(r"""(["'])[\w.]*\1""")  # names, quoted
# Not after a weight of which only this is asked: a packed one keeps it (T5's MLPs ask).
KEPT = r"(?!\.(?:dtype|device)\b|, torch\.Tensor\))"


class AnyLinear(Linear):
    """Has the attributes and parameters of the torch.nn.Linear that it replaces."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__(plain.in_features, plain.out_features)
        self.in_features = plain.in_features
        self.out_features = plain.out_features
        self.weight = cast("nn.Parameter", plain.weight)
        self.bias = cast("nn.Parameter | None", plain.bias)

    def forward(self, x: Tensor) -> Tensor:
        """See Linear. The kernels need rows whose values follow one another in memory, but some of
        transformers' layers pass transposed tensors."""
        return super().forward(x if x.stride(-1) == 1 else x.contiguous())


def use_engine_layers(model: nn.Module) -> None:
    """Replaces the linear layers of `model` in place, and its experts where the engine's compute
    the same.

    Two kinds stay: layers that share their weight, since packing changes its layout, and layers
    whose values the parent module reads itself, or may read because its source is unavailable.
    """
    shared = _shared(model)
    sources: dict[type[nn.Module], str | None] = {}  # finding one takes milliseconds
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear and not has_experts(child):
                continue
            if type(parent) not in sources:
                sources[type(parent)] = _source(type(parent))
            code = sources[type(parent)]
            found = None if code is None else _engine_layer(child, code, name)
            if found is not None and not shared & {id(own) for own in child.parameters()}:
                setattr(parent, name, found)


def _engine_layer(plain: nn.Module, parent_code: str, name: str) -> nn.Module | None:
    """Returns what takes the place of a layer, which the parent has by this name; None: nothing."""
    if type(plain) is not nn.Linear:
        return engine_experts(plain, parent_code, name)
    own = rf"\b{re.escape(name)}\.weight\b"
    return None if re.search(own + KEPT, parent_code) else AnyLinear(plain)


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
