"""Refuses what `deterministic = True` cannot promise, with the reason."""

from __future__ import annotations

from torch import nn

from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.layers.fixed_order import undetermined
from mmdeploy_llm.values.options.runtime_config import RuntimeConfig

from .model_files import ModelFiles

MAX_RANKS = 2  # a sum of two numbers has one order
MAX_NAMED = 5  # modules in a message


def check_promise(files: ModelFiles, runtime: RuntimeConfig) -> None:
    """Raises ConfigError when the answers could depend on the batch."""
    reason = _reason(files, runtime)
    if reason is not None:
        raise ConfigError(f"deterministic = True cannot be kept: {reason}")


def _reason(files: ModelFiles, runtime: RuntimeConfig) -> str | None:
    if runtime.device != "cpu":
        return (
            f"on device {runtime.device!r} cuBLAS chooses by the number of rows how it adds; use "
            "device='cpu', or leave deterministic out"
        )
    if not files.spec.deterministic:
        return (
            f"the model family {files.spec.name!r} of plugin {files.plugins.owner(files.spec)!r} "
            "does not promise that a row of its results is independent of the others "
            "(ModelSpec.deterministic); leave deterministic out"
        )
    num_ranks = runtime.options.tensor_parallel_size
    if num_ranks > MAX_RANKS:
        return (
            f"{num_ranks} processes add their sums in an order that depends on "
            f"the number of rows; use tensor_parallel_size of at most {MAX_RANKS}"
        )
    return None


def check_model(model: nn.Module) -> None:
    """Raises ConfigError when the kernels do not compute all products of the model, whose weights
    are packed."""
    names = undetermined(model)
    if names:
        more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        raise ConfigError(
            "deterministic = True cannot be kept: torch computes "
            f"{', '.join(names[:MAX_NAMED])}{more} of the model, in an order that depends on the "
            "number of rows; leave deterministic out, or report the model"
        )
