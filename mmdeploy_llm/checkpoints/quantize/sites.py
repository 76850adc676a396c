"""Sites: the packed matrices of a loaded model's decoder layers, whose inputs are summed up and
whose weights are replaced, a window of layers at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmdeploy_llm.checkpoints.saving.rounders import Rounder
from mmdeploy_llm.checkpoints.saving.rounding import Rounded, Scheme
from mmdeploy_llm.checkpoints.saving.writer import places_of, scheme_of, target_of
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.kernels import Kernels, PackedWeight
from mmdeploy_llm.kernels.coded import CodedWeight, CodeLayout, units_of
from mmdeploy_llm.layers.basic.experts import Experts
from mmdeploy_llm.layers.basic.linear import MergedLinear
from mmdeploy_llm.layers.decoder import CausalLM
from mmdeploy_llm.weights.tensor_file import TensorFile

from .gptq import values_of

WINDOW_LAYERS = 2  # whose moments are in memory together
BLOCK_COLUMNS = 256  # of moments that are summed up at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A packed matrix. name, index: its parameter, and the expert in that. keys: the tensors of the
    checkpoint that are its rows, in order. k: its columns. is_whole: whether these tensors are all
    of its rows."""

    name: str
    index: int | None
    keys: tuple[str, ...]
    k: int
    scheme: Scheme
    is_whole: bool

    @property
    def is_expert(self) -> bool:
        """Whether this is the first matrix of an expert, whose inputs are its tokens."""
        return self.index is not None and self.name.endswith(".gate_up_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWindow:
    """Layers that are rounded together, those from `first` up to `stop`, and their sites."""

    first: int
    stop: int
    sites: Sequence[Site]


def windows(model: Any, files: Sequence[TensorFile], rounder: Rounder) -> Sequence[LayerWindow]:
    """Returns the sites of the decoder's layers, those of WINDOW_LAYERS neighbours together."""
    layers = list(_by_layer(model, files, rounder))
    together = [layers[at : at + WINDOW_LAYERS] for at in range(0, len(layers), WINDOW_LAYERS)]
    return [
        LayerWindow(
            first=own[0][0],
            stop=own[-1][0] + 1,
            sites=[site for _, sites in own for site in sites],
        )
        for own in together
    ]


def _by_layer(
    model: Any, files: Sequence[TensorFile], rounder: Rounder
) -> Iterator[tuple[int, Sequence[Site]]]:
    """Yields each layer that has sites, by its number, with these."""
    decoders = [module.model for module in model.modules() if isinstance(module, CausalLM)]
    layers = [layer for decoder in decoders for layer in decoder.layers]
    owner = {module: index for index, layer in enumerate(layers) for module in layer.modules()}
    parts: dict[int, dict[tuple[str, int | None], list[Any]]] = defaultdict(dict)
    places = places_of(model)
    for file in files:
        for key, entry in file.entries.items():
            module, target = target_of(model, key)
            scheme = scheme_of(model, places, rounder, key, entry)
            if module in owner and target is not None and scheme is not None:
                first = 0 if target.rows is None else target.rows.start
                place = parts[owner[module]].setdefault((target.name, target.index), [])
                place.append((first, key, entry.shape[-1], scheme, target.rows is None))
    for layer in sorted(parts):
        yield layer, [_site(model, place, own) for place, own in _sorted(parts[layer])]


def _sorted(places: Mapping[tuple[str, int | None], list[Any]]) -> Iterator[Any]:
    """Yields places in an order that does not depend on the files."""
    yield from sorted(places.items(), key=lambda own: (own[0][0], own[0][1] or 0))


def _site(model: Any, place: tuple[str, int | None], parts: list[Any]) -> Site:
    rows = sorted(parts, key=lambda part: part[0])
    name, index = place
    return Site(
        name=name,
        index=index,
        keys=tuple(part[1] for part in rows),
        k=rows[0][2],
        scheme=rows[0][3],
        is_whole=rows[0][4] or len(rows) == _num_parts(model, name),
    )


def _num_parts(model: Any, name: str) -> int:
    """Returns how many tensors of a checkpoint are the rows of a matrix."""
    path, _, own = name.rpartition(".")
    module = model.get_submodule(path)
    if isinstance(module, Experts):
        return sum(parameter == own for parameter, _ in module.expert_parts.values())
    return len(module.parts) if isinstance(module, MergedLinear) else 1


class Watched:
    """A kernels.PackedWeight that sums up the second moments of its inputs. moments: [k, k]; while
    inputs are seen, only the blocks of columns on the diagonal and right of it."""

    def __init__(self, inner: PackedWeight, k: int) -> None:
        self.inner, self.moments = inner, torch.zeros(k, k)

    def fill(self) -> None:
        """Fills the other half of the moments, which are symmetric."""
        upper = self.moments.triu()
        self.moments = upper + upper.triu(1).T

    def rows(self, indices: Tensor, dtype: torch.dtype) -> Tensor:
        """See PackedWeight."""
        return self.inner.rows(indices, dtype)

    def product(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        """See PackedWeight."""
        wide = x.float()
        for start in range(0, wide.shape[1], BLOCK_COLUMNS):
            rows = slice(start, start + BLOCK_COLUMNS)
            self.moments[rows, start:].addmm_(wide[:, rows].T, wide[:, start:])
        return self.inner.product(x, bias, dtype)


@contextmanager
def watched(model: Any, sites: Sequence[Site]) -> Iterator[Sequence[Watched]]:
    """Watches the inputs of sites."""
    found = [Watched(_packed(model, site), site.k) for site in sites]
    for site, own in zip(sites, found, strict=True):
        _replace(model, site, own)
    try:
        yield found
    finally:
        for site, own in zip(sites, found, strict=True):
            _replace(model, site, own.inner)
            own.fill()


def use_rounded(model: Any, kernels: Kernels, site: Site, rounded: Rounded) -> None:
    """Lets a site compute with its rounded weight from now on."""
    bits, size = site.scheme.bits, site.scheme.group_size
    if kernels.can_pack_coded(CodeLayout(bits=bits, group_size=size), rounded.codes.shape):
        weight = CodedWeight(
            bits=bits,
            k=site.k,
            group_size=size,
            units=units_of(rounded.codes, bits),
            scales=rounded.scales.float(),
            zeros=rounded.zeros.contiguous(),
        )
        packed: PackedWeight | None = kernels.pack_coded(weight, rounds=False)
    else:
        values = values_of(rounded.codes, rounded.scales, rounded.zeros)
        packed = kernels.pack(values.bfloat16(), None)
    assert packed is not None
    _replace(model, site, packed)


def _packed(model: Any, site: Site) -> PackedWeight:
    path, _, own = site.name.rpartition(".")
    module = model.get_submodule(path)
    if site.index is None:
        found = module.packed
    else:
        found = module._packed and module._packed[site.index][own != "gate_up_proj"]
    if not found:
        raise ConfigError(
            f"the inputs of {site.name} are not seen: calibration needs a model whose products the "
            "C++ kernels compute; quantize it without --calibrate"
        )
    weight: PackedWeight = found
    return weight


def _replace(model: Any, site: Site, packed: PackedWeight) -> None:
    path, _, own = site.name.rpartition(".")
    module = model.get_submodule(path)
    if site.index is None:
        module.packed = packed
    else:
        module.replace(site.index, packed, is_down=own != "gate_up_proj")
