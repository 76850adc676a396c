"""Maps the tensors of a checkpoint to parameters by transformers' tables of names and conversions.

    key --renamings, at most one converter--> name in transformers' modules --> Target

A converter is a list of operations on whole tensors. Those that only move rows become Targets; one
that changes the order of a parameter's rows is applied after loading; one that computes values is
an error that names it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.weights.map import Target

# Buffers that older checkpoints hold and today's modules compute.
COMPUTED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")


class WeightTable:
    """Finds the Targets of a checkpoint's tensors.

    prefix: comes before every name in a Target. ties: name -> the name of the same parameter.
    """

    def __init__(self, model: Any, prefix: str, ties: Mapping[str, str]) -> None:
        self._shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
        self._prefix = prefix
        self._computed = {name for name, _ in model.named_buffers()}
        self._known = dict.fromkeys([*self._shapes, *ties, *self._computed], True)
        self._ties = ties
        table = get_model_conversion_mapping(model)
        self._renamings = [item for item in table if isinstance(item, WeightRenaming)]
        self._converters = [item for item in table if isinstance(item, WeightConverter)]
        self._base = model.base_model_prefix
        self._vocab_size = int(getattr(model.config.get_text_config(), "vocab_size", 0))
        own = model._keys_to_ignore_on_load_unexpected or ()
        ignored = (*COMPUTED, *own, *_draft_layers(model.config.get_text_config()))
        self._ignored = re.compile("|".join(f"(?:{pattern})" for pattern in ignored))
        self._beside: dict[str, str] = {}  # see `add`
        self._modules = dict(model.named_modules())
        self._reordered: dict[str, tuple[Any, str]] = {}  # name -> (operation, its own pattern)
        # names -> (operations on all of them, joined; their patterns)
        self._interleaved: dict[tuple[str, ...], tuple[Sequence[Any], list[str]]] = {}

    def add(self, module: nn.Module, prefix: str, names: Mapping[str, str]) -> None:
        """Maps keys to parameters of a module beside the model too, whose names have `prefix` in a
        Target. names: what they would be called in the model -> their own."""
        for name, own in names.items():
            self._shapes[name], self._known[name] = tuple(module.get_parameter(own).shape), True
            self._beside[name] = prefix + own

    def complete(self, model: Any) -> None:
        """Brings the rows of loaded parameters into the order of transformers' modules."""
        for name, (operation, pattern) in self._reordered.items():
            param = model.get_parameter(name)
            given = {pattern: param.data}
            found = operation.convert(given, [pattern], [pattern], config=model.config)
            param.data = found[pattern]
        self._reordered.clear()
        for names, (operations, patterns) in self._interleaved.items():
            params = [model.get_parameter(name) for name in names]
            first, last = operations
            given = {patterns[0]: torch.cat([param.data for param in params], last.dim)}
            joined = first.convert(given, patterns[:1], patterns[:1], config=model.config)
            found = last.convert(joined, patterns[:1], patterns, config=model.config)
            for param, pattern in zip(params, patterns, strict=True):
                param.data = found[pattern]
        self._interleaved.clear()

    def targets(self, key: str) -> Sequence[Target] | None:
        """See weights.map. Raises CheckpointError for a conversion that is not a copy."""
        name, pattern = self._renamed(key)
        if pattern is not None:
            converter = next(c for c in self._converters if pattern in c.source_patterns)
            return self._converted(key, name, pattern, converter)
        if name in self._shapes:
            return (Target(name=self._name(name)),)
        if name in self._ties or name in self._computed or self._ignored.search(key):
            return ()
        return None

    def _reorder(self, name: str, operation: Any, pattern: str) -> None:
        """Has `complete` change a parameter, whose values must then be floats."""
        self._reordered[name] = operation, pattern
        owner: Any = self._modules[name.rpartition(".")[0]]
        owner.is_reordered = True

    def _name(self, name: str) -> str:
        return self._beside.get(name, self._prefix + name)

    def _renamed(self, key: str) -> tuple[str, str | None]:
        """Returns the name in the model and the source pattern of the converter, if one applies."""
        name, pattern = rename_source_key(
            key, self._renamings, self._converters, self._base, self._known
        )
        if name in self._known or key not in self._known:
            return name, pattern
        return key, None

    def _converted(
        self, key: str, name: str, pattern: str, converter: Any
    ) -> Sequence[Target] | None:
        if name not in self._shapes:
            return () if self._ignored.search(key) else None
        kinds = tuple((type(op).__name__, getattr(op, "dim", None)) for op in converter.operations)
        position = converter.source_patterns.index(pattern)
        rule = _RULES.get(kinds)
        if rule is None:
            raise CheckpointError(
                f"{key} needs transformers' {converter.operations} to become {name}, which "
                "transformers_any cannot do; save the checkpoint again with transformers' "
                "save_pretrained(save_original_format=False)"
            )
        renamed, _ = rename_source_key(key, self._renamings, [])
        return rule(self, renamed, name, pattern, position, converter)

    def _stacked(
        self, key: str, name: str, pattern: str, position: int, converter: Any
    ) -> Sequence[Target]:
        """Maps one tensor of one expert to its index, and to its rows when several are joined."""
        count = len(converter.source_patterns)
        size = self._shapes[name][1]
        rows = None if count == 1 else _chunk(size, position, count)
        return (Target(name=self._name(name), index=_index(key, pattern), rows=rows),)

    def _joined(
        self, key: str, name: str, pattern: str, position: int, converter: Any
    ) -> Sequence[Target]:
        sizes = self._sizes_of(name, converter.source_patterns)
        size, count = self._shapes[name][0], len(converter.source_patterns)
        if sizes is None:
            return (Target(name=self._name(name), rows=_chunk(size, position, count)),)
        rows = slice(sum(sizes[:position]), sum(sizes[: position + 1]))
        # save_pretrained cuts the joined parameter as torch.chunk does, whatever was joined in it.
        step = -(-size // count)
        cut = slice(position * step, min(size, (position + 1) * step))
        return (Target(name=self._name(name), rows=rows, other_rows=cut),)

    def _joined_experts(
        self, key: str, name: str, pattern: str, position: int, converter: Any
    ) -> Sequence[Target]:
        """Maps one tensor of all experts to its rows of each."""
        count, size, *_ = self._shapes[name]
        rows = _chunk(size, position, len(converter.source_patterns))
        target = Target(name=self._name(name), rows=rows, num_sources=count)
        return [replace(target, index=expert, source_index=expert) for expert in range(count)]

    def _sizes_of(self, name: str, patterns: Sequence[str]) -> list[int] | None:
        """Returns the rows of what is joined where they may differ, None for other parameters: of
        embeddings, those of the vocabulary and of tokens added to it (Molmo 2); of convolutions,
        those of the projections before them, since values may have more channels than queries."""
        if name.endswith("embed_tokens.weight"):
            return [self._vocab_size, self._shapes[name][0] - self._vocab_size]
        owner, found, last = name.rpartition(".conv1d.")
        if not found:
            return None
        names = [f"{owner}.{x.split('.')[-2]}.{last}".replace("_conv1d", "_proj") for x in patterns]
        if not all(x in self._shapes for x in names):
            return None
        return [self._shapes[x][0] for x in names]

    def _whole(
        self, key: str, name: str, pattern: str, position: int, converter: Any
    ) -> Sequence[Target]:
        """Maps one tensor to a parameter that `complete` changes."""
        self._reorder(name, converter.operations[-1], converter.target_patterns[0])
        return (Target(name=self._name(name)),)

    def _float_experts(
        self, key: str, name: str, pattern: str, position: int, converter: Any
    ) -> Sequence[Target] | None:
        """Maps experts that may be stored in few bits, where they are not."""
        if position:
            raise CheckpointError(
                f"{key} belongs to experts in few bits, which transformers_any cannot dequantise "
                "for this model; use a checkpoint in bfloat16"
            )
        if len(converter.operations) > 1:
            return self._whole(key, name, pattern, position, converter)
        return (Target(name=self._name(name)),)

    def _queries(
        self, key: str, name: str, pattern: str, position: int, converter: Any
    ) -> Sequence[Target]:
        """Maps pairs of queries, one after the other, to the four of each layer: (query, MLP) or
        (key, value) to (query, key, value, MLP)."""
        places = (slice(1, 2), slice(2, 3)) if position else (slice(0, 1), slice(3, 4))
        return [
            Target(
                name=self._name(name),
                index=layer,
                rows=rows,
                source=slice(2 * layer + i, 2 * layer + i + 1),
            )
            for layer in range(self._shapes[name][0])
            for i, rows in enumerate(places)
        ]

    def _first_rows(
        self, key: str, name: str, pattern: str, position: int, converter: Any
    ) -> Sequence[Target]:
        """Maps the first rows of a padded tensor."""
        return (Target(name=self._name(name), source=slice(0, self._shapes[name][0])),)

    def _halves(
        self, key: str, name: str, pattern: str, position: int, converter: Any
    ) -> Sequence[Target]:
        """Maps one tensor of alternating rows of several parameters, along the second axis for all
        experts at once, to these in turn; `complete` puts the rows in order."""
        patterns = converter.target_patterns
        names = tuple(name.replace(patterns[0], other) for other in patterns)
        self._interleaved[names] = converter.operations, patterns
        size = self._shapes[name][converter.operations[-1].dim]
        places = [slice(i * size, (i + 1) * size) for i in range(len(names))]
        if converter.operations[-1].dim == 0:
            pairs = zip(names, places, strict=True)
            return [Target(name=self._name(own), source=rows) for own, rows in pairs]
        count = self._shapes[name][0]
        targets = [
            Target(name=self._name(own), source=rows, num_sources=count)
            for own, rows in zip(names, places, strict=True)
        ]
        return [
            replace(own, index=expert, source_index=expert)
            for own in targets
            for expert in range(count)
        ]

    def _split(
        self, key: str, name: str, pattern: str, position: int, converter: Any
    ) -> Sequence[Target]:
        """Maps one tensor that holds several parameters, concatenated along the first axis."""
        first, *_ = patterns = converter.target_patterns
        names = [name.replace(first, other) for other in patterns]
        start, found = 0, []
        for own in names:
            end = start + self._shapes[own][0]
            found.append(Target(name=self._name(own), source=slice(start, end)))
            start = end
        if len(converter.operations) > 1:
            for own, other in zip(names, patterns, strict=True):
                self._reorder(own, converter.operations[-1], other)
        return found


Rule = Callable[[WeightTable, str, str, str, int, Any], Sequence[Target] | None]
_RULES: Mapping[tuple[tuple[str, int | None], ...], Rule] = {
    (("MergeModulelist", 0),): WeightTable._stacked,
    (("MergeModulelist", 0), ("Concatenate", 1)): WeightTable._stacked,
    (("Concatenate", 0),): WeightTable._joined,
    (("Concatenate", 1),): WeightTable._joined_experts,
    (("Chunk", 0),): WeightTable._split,
    (("Split", 0),): WeightTable._split,
    (("Chunk", 0), ("PermuteForRope", None)): WeightTable._split,
    (("PermuteForRope", None),): WeightTable._whole,
    (("Interleave", 1),): WeightTable._whole,
    (("Interleave", 0), ("Chunk", 0)): WeightTable._halves,
    (("Interleave", 1), ("Chunk", 1)): WeightTable._halves,
    (("Inkling2LoopDequantizeExperts", None),): WeightTable._float_experts,
    (("Inkling2LoopDequantizeExperts", None), ("Interleave", 1)): WeightTable._float_experts,
    (("Inkling2LoopMergeMessageQueries", None),): WeightTable._queries,
    (("Inkling2UnpadVocab", None),): WeightTable._first_rows,
}


def _draft_layers(config: Any) -> tuple[str, ...]:
    """Returns the patterns of the draft layers that a config counts. transformers names those of
    published checkpoints only, by number."""
    first, count = config.num_hidden_layers, getattr(config, "num_nextn_predict_layers", None) or 0
    numbers = range(first, first + count)
    return tuple(rf"^model\.(?:language_model\.)?layers\.{number}\." for number in numbers)


def _index(key: str, pattern: str) -> int:
    found = re.search(pattern.replace("*.", r"(\d+)\."), key)
    assert found is not None, "the pattern has just matched"
    return int(found[1])


def _chunk(size: int, position: int, count: int) -> slice:
    step = size // count
    return slice(position * step, (position + 1) * step)
