"""Finds the format of a quantised checkpoint among the plugins, and asks it for the weights."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmdeploy_llm.errors import (
    CheckpointError,
    ConfigError,
    MMDeployLLMError,
    PluginContractError,
    PluginError,
)
from mmdeploy_llm.hooks import PluginManager, WeightFormatSpec
from mmdeploy_llm.hooks.names import did_you_mean, error_text
from mmdeploy_llm.hooks.records import FAULTS
from mmdeploy_llm.weights.files import LOADABLE
from mmdeploy_llm.weights.tensor_file import WeightRows

from .layer import QuantizedLayer
from .method import Stored

logger = logging.getLogger(__name__)

UNNAMED = "compressed-tensors"  # wrote configs without quant_method
PLAIN = ".weight"  # what a weight in floats is called, too
PASS = (MMDeployLLMError, MemoryError, torch.OutOfMemoryError)  # are no faults of a plugin
MAX_NAMED = 4


def format_of(settings: Mapping[str, Any], plugins: PluginManager) -> WeightFormatSpec:
    """Returns the format that quantization_config names. Raises CheckpointError for one that no
    plugin reads, PluginConflictError for one that two read."""
    method = settings.get("quant_method", UNNAMED)
    name = str(getattr(method, "value", method))  # transformers has an enum for it
    try:
        return plugins.named(WeightFormatSpec, "weight format", name)
    except ConfigError:
        by_plugin: dict[str, list[str]] = defaultdict(list)
        for spec in plugins.provided(WeightFormatSpec):
            by_plugin[str(plugins.origin(spec))].append(spec.name)
        known = "; ".join(f"{', '.join(sorted(own))} by {who}" for who, own in by_plugin.items())
        hint = did_you_mean(name, [each for own in by_plugin.values() for each in own])
        raise CheckpointError(
            f"quantization_config in config.json says that {name[:80]!r} quantised the weights, "
            f"which is not supported{hint}; supported: {known or 'nothing, for no loaded plugin'}. "
            "Load a plugin that reads it, or the model that it was made from, with "
            f'quantization="int8wo" or "int4" if you like{plugins.failure_note()}'
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatReader:
    """A format that reads a checkpoint. owner: the spec and its plugin, for messages."""

    spec: WeightFormatSpec
    owner: str
    stored: Stored

    def layers(self, plugins: PluginManager, settings: Mapping[str, Any]) -> list[QuantizedLayer]:
        """Returns the weights that the format finds. Raises PluginError when it fails, and
        PluginContractError when what it yields cannot be."""
        factory = plugins.resolve(self.spec)
        layers: list[QuantizedLayer] = []
        keys: set[str] = set()
        try:
            for layer in factory(settings, self.stored):
                problem = self._problem(layer, keys)
                if problem:
                    raise PluginContractError(f"{self.owner}: {self.spec.factory} yields {problem}")
                keys.add(layer.key)
                layers.append(layer)
        except PASS:
            raise
        except FAULTS as error:
            raise PluginError(
                f"{self.owner}: {self.spec.factory} failed to read quantization_config and the "
                f"stored tensors: {error_text(error)}"
            ) from error
        return layers

    def _problem(self, layer: object, keys: set[str]) -> str | None:
        """Says what of a yielded layer cannot be; None when it can."""
        if not isinstance(layer, QuantizedLayer):
            return f"a {type(layer).__name__}; it must yield QuantizedLayer"
        shape = layer.shape
        is_shape = isinstance(shape, tuple) and len(shape) > 1
        if not is_shape or not all(type(size) is int and size > 0 for size in shape):
            return f"{layer.name} with shape {shape!r}; it must be a tuple of sizes, of two or more"
        if layer.dtype not in LOADABLE:
            return f"{layer.name} with dtype {layer.dtype}; it must be that of floats"
        unknown = [key for key in layer.parts.values() if key not in self.stored.entries]
        if unknown or not layer.parts:
            return f"{layer.name} with parts {unknown or 'none'}, which are not in the files"
        if layer.key in keys:
            return f"{layer.key} twice"
        if layer.layout is not None and len(shape) != 2:
            return f"{layer.name} with a layout and shape {list(shape)}; only matrices have one"
        return None

    def hidden(self, layers: Sequence[QuantizedLayer]) -> set[str]:
        """Returns the keys that a model does not see: those of the weights, and ignored ones.
        Raises CheckpointError for one that should be part of a weight, and is of none."""
        used = {key for layer in layers for key in layer.parts.values()}
        beside = sorted({layer.key for layer in layers} & self.stored.entries.keys() - used)
        if beside:  # as some libraries leave an output head
            shown = ", ".join(beside[:MAX_NAMED])
            logger.info(
                "%d weights in floats are not read, their codes are: %s", len(beside), shown
            )
        used.update(beside)
        ignored = self.spec.ignored
        used.update(key for key in self.stored.entries if ignored and key.endswith(ignored))
        left = (key for key in self.stored.entries if key not in used)
        for key, name in ((key, name) for key in left if (name := self._name(key)) is not None):
            wanted = [name + suffix for suffix in self.spec.suffixes]
            missing = [own for own in wanted if own not in self.stored.entries]
            raise CheckpointError(
                f"{key} in {self.stored.files[key].path} is of no weight that {self.owner} reads; "
                f"not there: {', '.join(missing) or 'none'}. The files are incomplete, or "
                "quantization_config in config.json belongs to others"
            )
        return used

    def _name(self, key: str) -> str | None:
        """Returns the name of the weight that a tensor must belong to, None for a plain tensor."""
        for suffix in self.spec.suffixes:
            is_plain = suffix == PLAIN and self.stored.entries[key].dtype in LOADABLE
            if key.endswith(suffix) and not is_plain:
                return key.removesuffix(suffix)
        return None

    def decoded(self, layer: QuantizedLayer, out: Tensor | None = None) -> DecodedWeight:
        """Reads and decodes a weight. out: memory for its codes, where they fit into it."""
        places = {"codes": out}
        parts = {role: self.stored.read(key, places.get(role)) for role, key in layer.parts.items()}
        return DecodedWeight(reader=self, layer=layer, made=self.call(layer, layer.decode, parts))

    def call(self, layer: QuantizedLayer, function: Any, *args: Any) -> Any:
        """Calls what a plugin has made. Raises PluginError, naming the weight and its tensors."""
        try:
            return function(*args)
        except PASS:
            raise
        except FAULTS as error:
            shown = ", ".join(self._shown(key) for key in [*layer.parts.values()][:MAX_NAMED])
            raise PluginError(
                f"{self.owner} failed to dequantise {layer.name} ({shown}): {error_text(error)}"
            ) from error

    def _shown(self, key: str) -> str:
        entry = self.stored.entries[key]
        return f"{key} {str(entry.dtype).removeprefix('torch.')} {list(entry.shape)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedWeight:
    """A decoded weight whose rows are checked: a row of the wrong shape could fill many."""

    reader: FormatReader
    layer: QuantizedLayer
    made: Tensor | WeightRows

    def rows(self, start: int, end: int) -> Tensor:
        """See WeightRows."""
        made = self.made
        if isinstance(made, Tensor):
            self._check("a tensor", made, self.layer.shape)
            return made[start:end]
        rows = self.reader.call(self.layer, lambda: made.rows(start, end))
        self._check(f"rows {start} to {end}", rows, (end - start, *self.layer.shape[1:]))
        return rows  # type: ignore[no-any-return]

    def _check(self, what: str, found: object, shape: tuple[int, ...]) -> None:
        shown = type(found).__name__
        if isinstance(found, Tensor):
            if tuple(found.shape) == shape and found.dtype in LOADABLE:
                return
            shown = f"{found.dtype} {list(found.shape)}"
        raise PluginContractError(
            f"{self.reader.owner} dequantises {self.layer.name} to {what} of {shown}; it must be "
            f"floats {list(shape)}"
        )
