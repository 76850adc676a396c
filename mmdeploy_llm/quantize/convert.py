"""Writes a copy of a checkpoint with the matrices of its decoder's layers in few bits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from mmdeploy_llm.config import EngineConfig
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.intake.checkpoint import MODEL_FILES, read_checkpoint, resolve_model
from mmdeploy_llm.kernels.coded import Bits, CodeLayout
from mmdeploy_llm.saving import GroupRounder, Summary, Writer, built, is_quantized
from mmdeploy_llm.saving.folders import Partial, check_output, copy_others, digest_of
from mmdeploy_llm.weights.find import find_weights


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

    The new folder grows as OUTPUT.partial and is renamed once it is whole; a run that was cut off
    is continued by the next one with the same arguments. Holds one tensor and one file of the
    output in memory. Raises ConfigError for a size or folder that cannot be used, CheckpointError
    for weights that cannot be rounded, and errors of the model's files and plugins.
    """
    if group_size < 8 or group_size % 8:
        raise ConfigError(f"group size {group_size}: give a multiple of 8, such as 32, 64 or 128")
    options = {"plugins": plugins, "blocked_plugins": tuple(blocked_plugins)}
    config = EngineConfig.from_options(model, options)
    checkpoint = read_checkpoint(resolve_model(model, None, MODEL_FILES))
    source = checkpoint.folder
    if checkpoint.gguf_files:
        raise ConfigError(f"{model} is a GGUF file; give a folder with safetensors files")
    values = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if is_quantized(values):
        raise ConfigError(f"{model} is quantised already; give the folder that it was made from")
    check_output(output, source, overwrite=overwrite)
    empty, paths = built(config, checkpoint), find_weights(source)
    partial = Partial(output, digest_of({"bits": bits, "group_size": group_size}, paths))
    layout = CodeLayout(bits=bits, group_size=group_size)
    writer = Writer(partial, empty, GroupRounder(layout))
    writer.copy(paths)
    summary = writer.finish(values)
    copy_others(source, partial.folder)
    partial.finish()
    return summary
