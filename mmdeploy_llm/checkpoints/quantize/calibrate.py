"""Rounds the decoder's layers with calibration data, window by window of layers:

    answer every item once --> for each window: pass all samples through its layers (carried.py),
    sum up the inputs of its products --> round (scales.py, gptq.py) --> file --> the model goes on
    with rounded weights

so that a layer is rounded for the inputs that the rounded layers before it give. Memory: the model
in bfloat16, the moments and weights of one window, and the hidden states of all samples at one
layer. What is finished is kept for the next run.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from mmdeploy_llm.checkpoints.saving.rounders import GroupRounder, Place
from mmdeploy_llm.checkpoints.saving.rounding import Rounded, Scheme
from mmdeploy_llm.checkpoints.saving.writer import places_of, unstacked
from mmdeploy_llm.data.records.item import Item
from mmdeploy_llm.data.rows.rows import BadItem
from mmdeploy_llm.engine.desk.answerer import GeneratingModel
from mmdeploy_llm.engine.startup.machine import load_kernels
from mmdeploy_llm.engine.startup.media import ChatMedia
from mmdeploy_llm.kernels import TORCH, Kernels
from mmdeploy_llm.layers.decoder import CausalLM
from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.weights.files import SafetensorsFile
from mmdeploy_llm.weights.map import Target
from mmdeploy_llm.weights.tensor_file import TensorFile

from .carried import Carried
from .folds import Fold, folds_of, set_norm
from .loss import Loss, answers_of, compare, load_answers, pass_through, save_answers
from .samples import OpenModel, Samples, answered
from .scales import Window, round_window
from .sites import LayerWindow, Site, Watched, use_rounded, watched, windows

FOLDER = "calibration"  # in the folder that is being written
REFERENCE = "reference.safetensors"
PARTS = ("codes", "scales", "zeros")
NEEDED = MappingProxyType({"device": "cpu", "native_kernels": True})
TOWERS = Scheme(bits=8, group_size=128)
MEDIA_LIMIT = 64  # items of a kind in a calibration prompt


def engine_options(config: EngineConfig) -> dict[str, Any]:
    """Returns the options of the engines that calibrate and compare: plain products in bfloat16 on
    the CPU, whole prompts."""
    return {
        "plugins": config.plugins,
        "blocked_plugins": config.blocked_plugins,
        "use": config.use,
        "plugin_files": config.plugin_files,
        "device": "cpu",
        "dtype": "bfloat16",
        "native_kernels": True,
        "enable_prefix_caching": False,
        "limit_mm_per_prompt": dict.fromkeys(("image", "video"), MEDIA_LIMIT),
        "quiet": True,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """The result of `calibrate`. folder: holds the rounded weights and the reference. gain: the
    errors of all outputs, as a part of what rounding to the nearest codes has. num_experts: experts
    of all layers; num_unseen: those to which no token was routed, which are rounded to the nearest
    codes."""

    folder: Path
    samples: Samples
    gain: float
    num_experts: int
    num_unseen: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums over windows; see Window and Calibrated."""

    error: float = 0.0
    nearest: float = 0.0
    num_experts: int = 0
    num_unseen: int = 0

    def plus(self, other: Totals) -> Totals:
        """Returns the totals of both."""
        return Totals(
            error=self.error + other.error,
            nearest=self.nearest + other.nearest,
            num_experts=self.num_experts + other.num_experts,
            num_unseen=self.num_unseen + other.num_unseen,
        )


def calibrate(
    config: EngineConfig,
    paths: Sequence[Path],
    items: Sequence[Item | BadItem],
    scheme: Scheme,
    partial: Path,
    open_model: OpenModel,
) -> Calibrated:
    """Rounds the layers of the model that `config` names, and keeps the codes under `partial`, as
    whatever an earlier run has finished there. paths: the files of the weights."""
    folder = partial / FOLDER
    folder.mkdir(exist_ok=True)
    kernels: Any = load_kernels(EngineConfig.from_options(config.model, NEEDED), is_cpu=True)
    with open_model(config.model, **engine_options(config)) as llm, ExitStack() as stack:
        media = ChatMedia(EngineConfig.from_options(config.model, engine_options(config)))
        stack.callback(media.close)
        samples = answered(llm, items, folder, media)
        _stop_recording(llm.model)
        if not (folder / REFERENCE).exists():
            save_answers(answers_of(llm, samples.held_out), folder / REFERENCE)
        opened = [stack.enter_context(SafetensorsFile(path)) for path in paths]
        model: Any = llm.model
        places, rounder = places_of(model), GroupRounder(scheme)
        files = [unstacked(file, model, places, rounder) for file in opened]
        totals = _round_windows(llm, kernels, samples, files, scheme, folder)
    return Calibrated(
        folder=folder,
        samples=samples,
        gain=totals.error / totals.nearest if totals.nearest else 1.0,
        num_experts=totals.num_experts,
        num_unseen=totals.num_unseen,
    )


def _stop_recording(model: Any) -> None:
    """Lets decoders compute every step: one that replays a recording shows no inputs."""
    for module in model.modules():
        if isinstance(module, CausalLM):
            module.model.kernels = TORCH


def _round_windows(
    llm: GeneratingModel,
    kernels: Kernels,
    samples: Samples,
    files: Sequence[TensorFile],
    scheme: Scheme,
    folder: Path,
) -> Totals:
    """Rounds all windows that have no file yet; returns the totals of all."""
    owners = {key: file for file in files for key in file.entries}
    model: Any = llm.model
    todo = windows(model, files, GroupRounder(scheme))
    totals, carried = Totals(), Carried(model)
    with tqdm(total=len(todo) * len(samples.used), desc="calibration", unit="prompt") as bar:
        for number, window in enumerate(todo):
            path = folder / f"window-{number:05}.safetensors"
            if path.exists():
                bar.update(len(samples.used))
            else:
                _round_window(llm, samples, carried, window, owners, path, bar)
            with safe_open(path, framework="pt") as file:
                totals = totals.plus(Totals(**json.loads(file.metadata()["totals"])))
                for site in window.sites:
                    use_rounded(model, kernels, site, _joined(file, site))
                for key in json.loads(file.metadata()["norms"]):
                    set_norm(model, model.weight_targets(key)[0].name, file.get_tensor(key))
    return totals


def _round_window(
    llm: GeneratingModel,
    samples: Samples,
    carried: Carried,
    window: LayerWindow,
    owners: Mapping[str, TensorFile],
    path: Path,
    bar: Any,
) -> None:
    """Rounds a window and writes its file."""
    sites = window.sites
    with watched(llm.model, sites) as found, carried.window(window.first, window.stop):
        for sample in samples.used:
            pass_through(llm, sample)
            bar.update()
    parts = [[_read(owners[key], key) for key in site.keys] for site in sites]
    folds, norms = _foldable(llm.model, sites, owners)
    weights = [torch.cat(own) for own in parts]
    done = round_window(sites, weights, [own.moments for own in found], folds, norms)
    tensors: dict[str, Tensor] = {}
    errors: dict[str, float] = {}
    for site, own, rounded in zip(sites, parts, done.sites, strict=True):
        start = 0
        for key, part in zip(site.keys, own, strict=True):
            rows = slice(start, start + len(part))
            start += len(part)
            errors[key] = rounded.squared_error
            for name in PARTS:
                tensors[f"{key}.{name}"] = getattr(rounded, name)[rows].contiguous()
    keys = _keys(llm.model, owners)
    changed = {keys[name]: weight for name, weight in done.norms.items()}
    totals = asdict(_totals(done, sites, found))
    results = {"errors": errors, "totals": totals, "norms": list(changed)}
    new = path.with_name(f"{path.name}.new")
    metadata = {name: json.dumps(value) for name, value in results.items()}
    save_file(tensors | changed, new, metadata=metadata)
    new.replace(path)


def _totals(done: Window, sites: Sequence[Site], found: Sequence[Watched]) -> Totals:
    seen = [
        bool(own.moments.any()) for site, own in zip(sites, found, strict=True) if site.is_expert
    ]
    return Totals(
        error=done.error,
        nearest=done.nearest,
        num_experts=len(seen),
        num_unseen=seen.count(False),
    )


def _foldable(
    model: Any, sites: Sequence[Site], owners: Mapping[str, TensorFile]
) -> tuple[Mapping[tuple[str, int | None], Fold], Mapping[str, Tensor]]:
    """Returns the folds of a window, and the weights of their norms by parameter. A norm that is no
    tensor of its own in the checkpoint is left alone."""
    keys = _keys(model, owners)
    folds = {
        place: fold
        for place, fold in folds_of(model, sites).items()
        if fold.norm is None or fold.norm in keys
    }
    names = [fold.norm for fold in folds.values() if fold.norm is not None]
    return folds, {name: _read(owners[keys[name]], keys[name], exact=True) for name in names}


def _keys(model: Any, owners: Mapping[str, TensorFile]) -> Mapping[str, str]:
    """Returns the tensor of the checkpoint that is a parameter as it is, by parameter."""
    found = {}
    for key in owners:
        targets: Sequence[Target] = model.weight_targets(key) or []
        if len(targets) == 1 and targets[0] == Target(name=targets[0].name):
            found[targets[0].name] = key
    return found


def _read(file: TensorFile, key: str, *, exact: bool = False) -> Tensor:
    """Reads a tensor as float32. exact: in its own dtype."""
    entry = file.entries[key]
    out = torch.empty(entry.shape, dtype=entry.dtype if exact else torch.float32)
    file.read_into(key, out, first_value=0, transpose=False)
    return out


def _joined(file: Any, site: Site) -> Rounded:
    """Reads the rounded weight of a site."""
    codes, scales, zeros = (
        torch.cat([file.get_tensor(f"{key}.{name}") for key in site.keys]) for name in PARTS
    )
    return Rounded(codes=codes, scales=scales, zeros=zeros, squared_error=0.0)


class CalibratedRounder:
    """A Rounder with the weights that `calibrate` has rounded."""

    def __init__(self, folder: Path, nearest: GroupRounder, stack: ExitStack) -> None:
        """nearest: rounds the other weights. stack: closes the files. norms: the tensors that take
        the place of a checkpoint's."""
        self.norms: dict[str, Tensor] = {}
        self._nearest = nearest
        self._places: dict[str, Any] = {}
        self._errors: dict[str, float] = {}
        for path in sorted(folder.glob("window-*.safetensors")):
            file = stack.enter_context(safe_open(path, framework="pt"))
            errors = json.loads(file.metadata()["errors"])
            self._errors |= errors
            norms = json.loads(file.metadata()["norms"])
            self.norms |= {key: file.get_tensor(key) for key in norms}
            self._places |= dict.fromkeys(errors, file)

    def scheme(self, place: Place) -> Scheme | None:
        """See Rounder."""
        return self._nearest.scheme(place)

    def round(self, key: str, weight: Tensor, scheme: Scheme) -> Rounded:
        """See Rounder."""
        file = self._places.get(key)
        if file is None:
            return self._nearest.round(key, weight, scheme)
        codes, scales, zeros = (file.get_tensor(f"{key}.{name}") for name in PARTS)
        return Rounded(codes=codes, scales=scales, zeros=zeros, squared_error=self._errors[key])


def measured(config: EngineConfig, done: Calibrated, folder: Path, open_model: OpenModel) -> Loss:
    """Compares the written model with the reference; see Loss."""
    before = load_answers(done.folder / REFERENCE)
    with open_model(str(folder), **engine_options(config)) as llm:
        _stop_recording(llm.model)
        after = answers_of(llm, done.samples.held_out)
        return compare(llm, before, after, len(done.samples.used))


def clear(done: Calibrated) -> None:
    """Removes what only a run that is cut off needs."""
    shutil.rmtree(done.folder)
