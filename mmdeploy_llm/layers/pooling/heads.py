"""Fits a generating model to a checkpoint of vectors or scores: without an output head, with one of
labels, with the dense layers of a sentence-transformers folder."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.hooks.objects.relatives import HeadKind
from mmdeploy_llm.weights.files import LOADABLE, SafetensorsFile
from mmdeploy_llm.weights.map import Target

from .rules import Activation, DenseRule, EmbeddingRules

BASE = "model."  # before the keys of a decoder in a checkpoint with a head
WORDS_HEAD = re.compile(r"(^|\.)lm_head\.")
SCORE = "score.weight"
ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "gelu": functional.gelu,
    "relu": torch.relu,
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
}


class LabelHead(nn.Module):
    """Maps states to the logits of labels, [N, hidden] -> [N, labels], in float32: it is small, and
    scores that differ little would be equal in bfloat16. It stays whole on every rank."""

    def __init__(self, hidden_size: int, num_labels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_labels, hidden_size))

    def forward(self, pooled: Tensor) -> Tensor:
        """Returns logits. Each row is computed alone, so that none depends on the others."""
        weight = self.weight.float()
        return torch.cat([functional.linear(row, weight) for row in torch.split(pooled.float(), 1)])


class DenseLayers:
    """The dense layers of a sentence-transformers folder, in float32, after what the model itself
    makes of pooled states: [N, hidden] -> [N, size]."""

    def __init__(
        self,
        rules: Sequence[DenseRule],
        device: torch.device,
        before: Callable[[Tensor], Tensor] | None,
    ) -> None:
        """before: the model's own `embedding`. Raises CheckpointError for weights of another
        form."""
        self._before = before
        self._layers = [(rule, _dense_weights(rule, device)) for rule in rules]

    def __call__(self, pooled: Tensor) -> Tensor:
        """Returns vectors, not yet normalised."""
        x = (pooled if self._before is None else self._before(pooled)).float()
        for rule, weights in self._layers:
            out = functional.linear(x, weights["linear.weight"], weights.get("linear.bias"))
            out = ACTIVATIONS[rule.activation](out)
            if rule.is_residual:
                shortcut = weights.get("residual.weight")
                out = out + (x if shortcut is None else functional.linear(x, shortcut))
            x = out
        return x


def fit_head(model: Any, head: HeadKind, rules: EmbeddingRules, num_labels: int) -> Any:
    """Changes a model, new on the meta device, into what its checkpoint holds, and returns it.

    A checkpoint without an output head, or whose folder says how its vectors are pooled, gives a
    model that cannot generate. Its keys may begin with "model." or not.
    """
    has_vectors = rules.pooling is not None and rules.score_tokens is None
    if head == "words" and not has_vectors:
        return model
    if hasattr(model, "lm_head"):
        model.lm_head = None
    model.is_embedder = True
    if head == "labels":
        model.score = LabelHead(model.hidden_size, num_labels)
    else:
        model.default_pooling = getattr(model, "default_pooling", None) or "last"
    names = frozenset(name for name, _ in model.named_parameters())
    model.weight_targets = _Targets(model.weight_targets, names)
    return model


def add_dense(model: Any, rules: EmbeddingRules, device: torch.device) -> None:
    """Gives a model the dense layers of its folder. Raises CheckpointError where the folder does
    not fit the model, or has weights of another form."""
    if rules.size is not None and rules.size != model.hidden_size:
        raise CheckpointError(
            f"the pooling in the model's folder is for states of {rules.size} values, but the "
            f"model has {model.hidden_size}"
        )
    if rules.dense:
        before = getattr(model, "embedding", None)
        model.embedding = DenseLayers(rules.dense, device, before)


class _Targets:
    """Finds the parameters, which have these names, of keys in a checkpoint without an output
    head."""

    def __init__(
        self, own: Callable[[str], Sequence[Target] | None], names: Collection[str]
    ) -> None:
        self._own, self._names = own, names

    def __call__(self, key: str) -> Sequence[Target] | None:
        """See Model.weight_targets."""
        if key == SCORE and SCORE in self._names:
            return (Target(name=SCORE),)
        if WORDS_HEAD.search(key):
            return ()
        found = self._own(key)
        is_found = found is not None and all(target.name in self._names for target in found)
        return found if is_found else self._own(BASE + key)


def _dense_weights(rule: DenseRule, device: torch.device) -> Mapping[str, Tensor]:
    shape = (rule.out_features, rule.in_features)
    shapes: dict[str, tuple[int, ...]] = {"linear.weight": shape}
    if rule.has_bias:
        shapes["linear.bias"] = shape[:1]
    if rule.is_residual and rule.out_features != rule.in_features:
        shapes["residual.weight"] = shape
    label = f"{rule.weights.parent.name}/{rule.weights.name}"
    with SafetensorsFile(rule.weights) as file:
        found = {key: entry.shape for key, entry in file.entries.items()}
        if found != shapes:
            raise CheckpointError(
                f"{label} of the model holds {_shapes(found)}; by its config.json it holds "
                f"{_shapes(shapes)}"
            )
        if any(entry.dtype not in LOADABLE for entry in file.entries.values()):
            raise CheckpointError(f"{label} of the model holds no floats; allowed: floats")
        return {key: _read(file, key, shape, device) for key, shape in shapes.items()}


def _read(file: SafetensorsFile, key: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
    values = torch.empty(shape, dtype=torch.float32)
    file.read_into(key, values, first_value=0, transpose=False)
    return values.to(device)


def _shapes(found: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{key} {list(shape)}" for key, shape in sorted(found.items())) or "nothing"
