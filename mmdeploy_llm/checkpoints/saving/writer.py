"""Copies a checkpoint tensor by tensor into shards, with some of its matrices in few bits. A run
that was cut off continues after its last whole shard."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from mmdeploy_llm.errors import CheckpointError, ConfigError
from mmdeploy_llm.layers.basic.experts import Experts
from mmdeploy_llm.layers.basic.linear import Linear
from mmdeploy_llm.layers.install import decoder_modules
from mmdeploy_llm.values.options.weight_formats import MAX_GROUP
from mmdeploy_llm.weights.files import LOADABLE, SafetensorsFile
from mmdeploy_llm.weights.find import INDEX_FILE
from mmdeploy_llm.weights.map import Target
from mmdeploy_llm.weights.tensor_file import Entry

from .folders import Partial
from .packing import packed_tensors, settings
from .rounders import Place, Rounder
from .rounding import Scheme
from .stacks import Unstacked

SHARD_BYTES = 2 * 2**30
WEIGHT = ".weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The result of a Writer.

    bytes_before, bytes_after: sizes of the weights. num_layers: matrices in few bits.
    mean_error: mean over these of |w' - w| / |w|, Euclidean norms.
    stacked: keys of stacked experts, which were copied as they are.
    """

    folder: Path
    bytes_before: int
    bytes_after: int
    num_layers: int
    mean_error: float
    stacked: Sequence[str]


@dataclass(slots=True, kw_only=True)
class Progress:
    """The contents of the shards so far; the Writer is its only writer. rounded: the schemes of
    layers, by name."""

    num_tensors: int = 0
    num_shards: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    places: dict[str, str] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    stacked: list[str] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    rounded: dict[str, str] = field(default_factory=dict)


class Writer:
    """Writes the tensors of a folder, shard by shard."""

    def __init__(
        self,
        partial: Partial,
        model: Any,
        rounder: Rounder,
        replaced: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        """model: built on the meta device; says where tensors belong. replaced: tensors to write in
        the place of those that would be copied, by key."""
        self._replaced = replaced
        self._partial, self._model, self._rounder = partial, model, rounder
        self._places = places_of(model)
        self._shard: dict[str, Tensor] = {}
        self._shard_bytes = 0
        self._done = Progress(**partial.state.get("progress", {}))

    def copy(self, paths: Sequence[Path]) -> None:
        """Copies the tensors of all files, rounded where they belong to a layer that is."""
        number = 0
        for path in paths:
            with SafetensorsFile(path) as whole:
                file = unstacked(whole, self._model, self._places, self._rounder)
                bar = tqdm(file.entries.items(), desc=path.name, unit="tensor", delay=1)
                for key, entry in bar:
                    number += 1
                    if number <= self._done.num_tensors:
                        continue
                    tensor = torch.empty(entry.shape, dtype=entry.dtype)
                    file.read_into(key, tensor, first_value=0, transpose=False)
                    self._add(key, entry, tensor)

    def _add(self, key: str, entry: Entry, tensor: Tensor) -> None:
        stored = self._converted(key, entry, tensor)
        size = sum(part.nbytes for part in stored.values())
        self._shard |= stored
        self._shard_bytes += size
        self._done.num_tensors += 1
        self._done.bytes_before += tensor.nbytes
        if self._shard_bytes >= SHARD_BYTES:
            self._flush()

    def _converted(self, key: str, entry: Entry, tensor: Tensor) -> dict[str, Tensor]:
        name = key.removesuffix(WEIGHT)
        scheme = self._scheme(key, entry)
        if scheme is None:
            if key.endswith(WEIGHT) and len(entry.shape) == 2:
                self._done.ignored.append(name)
            return {key: self._replaced.get(key, tensor)}
        if not bool(tensor.isfinite().all()):
            raise CheckpointError(f"{key} has values that are not finite; they cannot be rounded")
        rounded = self._rounder.round(key, tensor, scheme)
        self._done.errors.append(rounded.squared_error**0.5)
        self._done.rounded[name] = f"{scheme.bits} {scheme.group_size} {scheme.is_symmetric:d}"
        return packed_tensors(name, rounded, scheme)

    def _scheme(self, key: str, entry: Entry) -> Scheme | None:
        """Returns how a tensor is rounded; None: it is copied."""
        module, _ = target_of(self._model, key)
        if isinstance(module, Experts) and len(entry.shape) == 3:
            self._done.stacked.append(key)
        return scheme_of(self._model, self._places, self._rounder, key, entry)

    def _flush(self) -> None:
        """Writes a shard and says that it is there."""
        done, folder = self._done, self._partial.folder
        done.num_shards += 1
        name = f"model-{done.num_shards:05}.safetensors"
        save_file(self._shard, folder / f"{name}.new", metadata={"format": "pt"})
        (folder / f"{name}.new").replace(folder / name)
        done.places |= dict.fromkeys(self._shard, name)
        done.bytes_after += self._shard_bytes
        self._shard, self._shard_bytes = {}, 0
        self._partial.record({"progress": asdict(done)})

    def finish(self, config: Mapping[str, Any]) -> Summary:
        """Writes the last shard, the index and config.json. Raises ConfigError when no layer was
        rounded."""
        done = self._done
        if not done.errors:
            raise ConfigError(
                "no layer of this model can be rounded in groups of this size; give a "
                "--group-size that divides its sizes, or a model of another family"
            )
        quantized = settings(self._by_scheme(), done.ignored)
        self._write_index({**config, "quantization_config": quantized})
        return Summary(
            folder=self._partial.output,
            bytes_before=done.bytes_before,
            bytes_after=done.bytes_after,
            num_layers=len(done.errors),
            mean_error=sum(done.errors) / len(done.errors),
            stacked=done.stacked,
        )

    def _write_index(self, config: Mapping[str, Any]) -> None:
        """Writes the last shard, the index and config.json."""
        if self._shard:
            self._flush()
        done, folder = self._done, self._partial.folder
        index = {"metadata": {"total_size": done.bytes_after}, "weight_map": done.places}
        for name, value in ((INDEX_FILE, index), ("config.json", config)):
            (folder / name).write_text(json.dumps(value, indent=2), encoding="utf-8")

    def _by_scheme(self) -> Mapping[Scheme, Sequence[str]]:
        """Returns the rounded layers by scheme, those of a decoder's layers first."""
        found: dict[Scheme, list[str]] = {}
        first = self._rounder.scheme("layers")
        if first is not None:
            found[first] = []
        for name, numbers in self._done.rounded.items():
            bits, group_size, is_symmetric = map(int, numbers.split())
            scheme = Scheme(
                bits=4 if bits == 4 else 8, group_size=group_size, is_symmetric=bool(is_symmetric)
            )
            found.setdefault(scheme, []).append(name)
        return {scheme: names for scheme, names in found.items() if names}


def target_of(model: Any, key: str) -> tuple[nn.Module | None, Target | None]:
    """Returns the module and parameter that a tensor of the checkpoint fills; None, None where they
    are not one."""
    targets: Sequence[Target] = model.weight_targets(key) or []
    if len(targets) != 1:
        return None, None
    return model.get_submodule(targets[0].name.rpartition(".")[0]), targets[0]


def places_of(model: nn.Module) -> Mapping[nn.Module, Place]:
    """Returns the places of the modules of a model, where these are not towers: none for one
    whose modules compute while it is loaded, when weights in few bits are not laid out yet."""
    if not getattr(model, "is_cacheable", True):
        return {}
    places: dict[nn.Module, Place] = dict.fromkeys(decoder_modules(model), "layers")
    places |= {own: "experts" for own in places if isinstance(own, Experts)}
    for module in model.modules():
        head = getattr(module, "lm_head", None)
        if hasattr(type(module), "text_layers") and head is not None:
            places[head] = "head"
    return places


def scheme_of(
    model: Any, places: Mapping[nn.Module, Place], rounder: Rounder, key: str, entry: Entry
) -> Scheme | None:
    """Returns how `rounder` rounds the tensor `key`; None where it is copied."""
    module, target = target_of(model, key)
    if module is None or target is None or getattr(module, "is_exact", False):
        return None
    found = rounder.scheme(places.get(module, "towers"))
    is_matrix = isinstance(module, Linear | Experts) and len(entry.shape) == 2
    is_plain = target.source is None and target.transpose is False and entry.dtype in LOADABLE
    if found is None or not (is_matrix and is_plain and key.endswith(WEIGHT)):
        return None
    return fitting(found, module, entry.shape[-1])


def unstacked(
    file: SafetensorsFile, model: Any, places: Mapping[nn.Module, Place], rounder: Rounder
) -> Unstacked:
    """Returns a file with the matrices that `rounder` rounds, those of stacks one by one."""

    def is_rounded(key: str, entry: Entry) -> bool:
        return scheme_of(model, places, rounder, key, entry) is not None

    return Unstacked(file, model, is_rounded)


def fitting(scheme: Scheme, module: nn.Module, k: int) -> Scheme | None:
    """Returns the scheme of a matrix of k columns: a row that is shorter than a group is one; whole
    rows have one scheme whatever their length. None
    where groups do not divide it, or do not divide the other matrices of the same experts: these
    stay in few bits together or not at all."""
    widths = [k]
    if isinstance(module, Experts):
        widths += [stack.shape[-1] for stack in (module.gate_up_proj, module.down_proj)]
    if any(width % 8 or width % min(scheme.group_size, width) for width in widths):
        return None
    whole = scheme.group_size == MAX_GROUP
    return scheme if whole else replace(scheme, group_size=min(scheme.group_size, k))
