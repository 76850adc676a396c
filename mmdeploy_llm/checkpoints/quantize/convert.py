"""Writes a copy of a checkpoint with the matrices of its decoder's layers in few bits."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmdeploy_llm.checkpoints.saving import GroupRounder, Summary, Writer, built, is_quantized
from mmdeploy_llm.checkpoints.saving.folders import (
    Partial,
    check_output,
    copy_others,
    digest_of,
    written,
)
from mmdeploy_llm.checkpoints.saving.rounding import Scheme
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.hooks import Checkpoint
from mmdeploy_llm.kernels.coded import Bits
from mmdeploy_llm.system.guarding.group_size import stored_group
from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.values.options.plugin_choice import PluginChoice
from mmdeploy_llm.weights.find import find_weights
from mmdeploy_llm.weights.folder import MODEL_FILES, read_checkpoint, resolve_model
from mmdeploy_llm.weights.stored_head import follow_stored_head, untie

from .calibrate import TOWERS, Calibrated, CalibratedRounder, calibrate, clear, measured
from .loss import Loss
from .samples import OpenModel, digests_of, read_items

LOSS_FILE = "quantization_loss.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """The result of quantize_checkpoint. loss and all that follows: with calibration; see Loss,
    Samples and Calibrated."""

    summary: Summary
    loss: Loss | None = None
    skipped: Sequence[str] = ()
    gain: float = 1.0
    num_experts: int = 0
    num_unseen: int = 0


def quantize_checkpoint(
    model: str,
    output: Path,
    *,
    bits: Bits,
    group_size: int,
    calibrate_with: str | None = None,
    open_model: OpenModel | None = None,
    rounds_towers: bool = False,
    overwrite: bool = False,
    **choice: Any,
) -> Quantized:
    """Writes `model`, a folder or a hub's name, to `output` in compressed-tensors' format.

    group_size: columns that share a scale, or -1 for whole rows. choice: plugins, plugin_files,
    blocked_plugins, use, as of an engine. calibrate_with: a folder of images and videos, a corpus,
    or "builtin", to calibrate with; what was lost is written to quantization_loss.json.
    open_model: opens the model for it, as LLM does. rounds_towers: to 8 bits in groups of 128.
    The new folder grows as OUTPUT.partial and is renamed once it is whole; a run that was cut off
    is continued by the next one with the same arguments. Holds one tensor and one file of the
    output in memory, and while it calibrates the model and the moments of two layers' inputs.
    Raises ConfigError for a size, folder or item that cannot be used, CheckpointError for weights
    that cannot be rounded, and errors of the model's files and plugins.
    """
    _check_together(calibrate_with, open_model)
    scheme = Scheme(bits=bits, group_size=stored_group(group_size))
    nearest = GroupRounder(scheme, TOWERS if rounds_towers else None)
    config = EngineConfig.from_options(model, PluginChoice(**choice).model_dump())
    checkpoint, values = _read(model)
    check_output(output, checkpoint.folder, overwrite=overwrite)
    empty, paths = built(config, checkpoint), find_weights(checkpoint.folder)
    items = () if calibrate_with is None else read_items(calibrate_with)
    asked = {"bits": bits, "group_size": group_size, "items": digests_of(items), "version": 5}
    asked |= {"towers": rounds_towers}
    done: Calibrated | None = None
    begun = written(output, digest_of(asked, paths), overwrite=overwrite)
    with begun as partial, ExitStack() as stack:
        writer = Writer(partial, empty, nearest)
        if open_model is not None:
            done = calibrate(config, paths, items, scheme, partial.folder, open_model)
            rounder = CalibratedRounder(done.folder, nearest, stack)
            writer = Writer(partial, empty, rounder, rounder.norms)
        writer.copy(paths)
        summary = writer.finish(values)
        stack.close()  # the codes of the calibration, which are removed below
        copy_others(checkpoint.folder, partial.folder)
        found = Quantized(summary=summary)
        if done is not None and open_model is not None:
            found = _compared(config, summary, done, partial, open_model)
    return found


def _check_together(calibrate_with: str | None, open_model: OpenModel | None) -> None:
    if (calibrate_with is None) != (open_model is None):
        raise ConfigError("calibrate_with and open_model are given together; pass open_model=LLM")


def _read(model: str) -> tuple[Checkpoint, Mapping[str, Any]]:
    """Reads the JSON files of a model with safetensors files that is not quantised; returns its
    config.json too."""
    checkpoint = follow_stored_head(read_checkpoint(resolve_model(model, None, MODEL_FILES)))
    if checkpoint.other_files:
        raise ConfigError(
            f"{model} is {checkpoint.other_files[0].name}; give a folder with safetensors files"
        )
    values = json.loads((checkpoint.folder / "config.json").read_text(encoding="utf-8"))
    if is_quantized(values):
        raise ConfigError(f"{model} is quantised already; give the folder that it was made from")
    return checkpoint, untie(values, checkpoint)


def _compared(
    config: EngineConfig,
    summary: Summary,
    done: Calibrated,
    partial: Partial,
    open_model: OpenModel,
) -> Quantized:
    """Measures and writes down what was lost; removes what only calibration needs."""
    loss = measured(config, done, partial.folder, open_model)
    text = json.dumps(loss.values(), indent=2)
    (partial.folder / LOSS_FILE).write_text(text, encoding="utf-8")
    clear(done)
    return Quantized(
        summary=summary,
        loss=loss,
        skipped=done.samples.skipped,
        gain=done.gain,
        num_experts=done.num_experts,
        num_unseen=done.num_unseen,
    )
