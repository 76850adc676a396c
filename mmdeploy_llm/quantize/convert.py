"""Copies a checkpoint tensor by tensor, with the matrices of its decoder's layers in few bits."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from mmdeploy_llm.errors import CheckpointError, ConfigError
from mmdeploy_llm.hooks import PluginManager
from mmdeploy_llm.intake.checkpoint import MODEL_FILES, read_checkpoint, resolve_model
from mmdeploy_llm.kernels.coded import Bits
from mmdeploy_llm.layers.install import decoder_modules
from mmdeploy_llm.layers.linear import Linear
from mmdeploy_llm.layers.moe import Experts
from mmdeploy_llm.weights.bounds import bounded_building
from mmdeploy_llm.weights.files import LOADABLE, Entry, SafetensorsFile
from mmdeploy_llm.weights.find import INDEX_FILE, PICKLE_SUFFIXES, find_weights
from mmdeploy_llm.weights.map import Target

from .packing import packed_tensors, settings
from .rounding import round_groups

logger = logging.getLogger(__name__)

SHARD_BYTES = 2 * 2**30
WEIGHT = ".weight"
MARK = ".being-quantized"  # a file in a folder that is not whole yet


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The result of quantize_checkpoint.

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


def quantize_checkpoint(
    model: str,
    output: Path,
    *,
    bits: Bits,
    group_size: int,
    overwrite: bool = False,
    plugins: Sequence[str] | None = None,
    blocked_plugins: Sequence[str] = (),
) -> Summary:
    """Writes `model`, a folder or a hub's name, to `output` in compressed-tensors' format.

    The new folder grows as OUTPUT.partial and is renamed once it is whole. Holds one tensor and one
    file of the output in memory. Raises ConfigError for a size or folder that cannot be used,
    CheckpointError for weights that cannot be rounded, and errors of the model's files and plugins.
    """
    if group_size < 8 or group_size % 8:
        raise ConfigError(f"group size {group_size}: give a multiple of 8, such as 32, 64 or 128")
    manager = PluginManager.load(plugins, blocked_plugins)
    checkpoint = read_checkpoint(resolve_model(model, None, MODEL_FILES))
    source = checkpoint.folder
    if checkpoint.gguf_files:
        raise ConfigError(f"{model} is a GGUF file; give a folder with safetensors files")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if any("quantization_config" in part for part in (config, config.get("text_config") or {})):
        raise ConfigError(f"{model} is quantised already; give the folder that it was made from")
    _check_output(output, source, overwrite)
    spec = manager.model_for(checkpoint.config.architectures or ())
    with torch.device("meta"), bounded_building():
        built = manager.build(spec, checkpoint.config)
    partial = output.with_name(f"{output.name}.partial")
    _begin(partial)
    writer = _Writer(partial, built, bits, group_size)
    for path in find_weights(source):
        writer.copy(path)
    summary = writer.finish(output, config)
    _copy_others(source, partial)
    (partial / MARK).unlink()
    _put_in_place(partial, output)
    return summary


def _begin(partial: Path) -> None:
    """Makes the folder that is written to. Removes one that an earlier run left, which has MARK;
    raises ConfigError for anything else of that name."""
    if (partial / MARK).is_file():
        logger.warning("%s, which a run that was cut off left, is removed", partial)
        shutil.rmtree(partial)
    if partial.exists() or partial.is_symlink():
        raise ConfigError(
            f"{partial} is in the way, and no run that was cut off left it: move it, or give "
            "another OUTPUT"
        )
    partial.mkdir(parents=True)
    (partial / MARK).touch()


def _put_in_place(partial: Path, output: Path) -> None:
    """Renames `partial` to `output`. A folder that is there is moved aside first and removed last,
    so that one of the two is whole whenever the run is killed."""
    aside = output.with_name(f"{output.name}.replaced")
    if not output.exists():
        partial.rename(output)
        return
    if aside.exists():
        raise ConfigError(f"{aside} is in the way: move it. The new folder is {partial}")
    output.rename(aside)
    partial.rename(output)
    shutil.rmtree(aside)


def _check_output(output: Path, source: Path, overwrite: bool) -> None:
    if source.resolve().is_relative_to(output.resolve()):
        raise ConfigError(f"{output} holds the model itself; give another folder")
    if not output.exists():
        return
    if not output.is_dir():
        raise ConfigError(f"{output} is a file; give the name of a new folder")
    if not overwrite:
        raise ConfigError(f"{output} exists; give another folder, or --overwrite to replace it")
    if any(output.iterdir()) and not (output / "config.json").exists():
        raise ConfigError(f"{output} has no config.json: only the folder of a model is replaced")


def _copy_others(source: Path, target: Path) -> None:
    """Copies tokenizer, processors' configs and the like; subfolders are left out."""
    for path in source.iterdir():
        is_weight = path.suffix in (".safetensors", *PICKLE_SUFFIXES) or path.name == INDEX_FILE
        if path.is_file() and not is_weight and not (target / path.name).exists():
            shutil.copyfile(path, target / path.name)


class _Writer:
    """Writes the tensors of a folder, shard by shard."""

    def __init__(self, folder: Path, model: Any, bits: Bits, group_size: int) -> None:
        self._folder, self._model, self._bits, self._group_size = folder, model, bits, group_size
        self._in_layers = decoder_modules(model)
        self._shard: dict[str, Tensor] = {}
        self._places: dict[str, str] = {}
        self._ignored = ["lm_head"]
        self._errors: list[float] = []
        self._stacked: list[str] = []
        self._bytes = self._shard_bytes = self._bytes_before = self._num_shards = 0

    def copy(self, path: Path) -> None:
        """Copies the tensors of a file, rounded where they belong to a layer that is."""
        with SafetensorsFile(path) as file:
            for key, entry in tqdm(file.entries.items(), desc=path.name, unit="tensor", delay=1):
                tensor = torch.empty(entry.shape, dtype=entry.dtype)
                file.read_into(key, tensor, first_value=0, transpose=False)
                self._bytes_before += tensor.nbytes
                for name, stored in self._converted(key, entry, tensor).items():
                    self._add(name, stored)

    def _converted(self, key: str, entry: Entry, tensor: Tensor) -> dict[str, Tensor]:
        name = key.removesuffix(WEIGHT)
        if not self._is_rounded(key, entry):
            if key.endswith(WEIGHT) and len(entry.shape) == 2 and name not in self._ignored:
                self._ignored.append(name)
            return {key: tensor}
        if not bool(tensor.isfinite().all()):
            raise CheckpointError(f"{key} has values that are not finite; they cannot be rounded")
        rounded = round_groups(tensor, self._bits, self._group_size)
        self._errors.append(rounded.squared_error**0.5)
        return packed_tensors(name, rounded, self._bits)

    def _is_rounded(self, key: str, entry: Entry) -> bool:
        """Whether a tensor fills a linear layer or an expert inside of a decoder's layers."""
        targets: Sequence[Target] = self._model.weight_targets(key) or []
        if len(targets) != 1 or entry.dtype not in LOADABLE:
            return False
        target, num_axes = targets[0], len(entry.shape)
        module = self._model.get_submodule(target.name.rpartition(".")[0])
        if module not in self._in_layers or getattr(module, "is_exact", False):
            return False
        if isinstance(module, Experts) and num_axes == 3:
            self._stacked.append(key)
        is_plain = target.source is None and target.transpose is False
        is_matrix = isinstance(module, Linear | Experts) and num_axes == 2
        divides = is_matrix and entry.shape[-1] % self._group_size == 0
        return is_plain and divides and key.endswith(WEIGHT)

    def _add(self, key: str, tensor: Tensor) -> None:
        if self._shard and self._shard_bytes + tensor.nbytes > SHARD_BYTES:
            self._flush()
        self._shard[key] = tensor
        self._shard_bytes += tensor.nbytes

    def _flush(self) -> None:
        self._num_shards += 1
        name = f"model-{self._num_shards:05}.safetensors"
        save_file(self._shard, self._folder / name, metadata={"format": "pt"})
        self._places |= dict.fromkeys(self._shard, name)
        self._bytes += self._shard_bytes
        self._shard, self._shard_bytes = {}, 0

    def finish(self, output: Path, config: dict[str, Any]) -> Summary:
        """Writes the last shard, the index and config.json. Raises ConfigError when no layer was
        rounded."""
        if not self._errors:
            raise ConfigError(
                f"no layer of this model can be rounded in groups of {self._group_size} columns; "
                "give a --group-size that divides its sizes, or a model of another family"
            )
        self._flush()
        index = {"metadata": {"total_size": self._bytes}, "weight_map": self._places}
        config = {
            **config,
            "quantization_config": settings(self._bits, self._group_size, self._ignored),
        }
        for name, values in ((INDEX_FILE, index), ("config.json", config)):
            (self._folder / name).write_text(json.dumps(values, indent=2), encoding="utf-8")
        return Summary(
            folder=output,
            bytes_before=self._bytes_before,
            bytes_after=self._bytes,
            num_layers=len(self._errors),
            mean_error=sum(self._errors) / len(self._errors),
            stacked=self._stacked,
        )
