"""Decides everything that can be decided before the weights are loaded."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from mmdeploy_llm.attention import select as attention
from mmdeploy_llm.config import EngineConfig
from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.hooks.model_folder import shown
from mmdeploy_llm.intake.tokenizer import text_config
from mmdeploy_llm.runtime_config import ModelLimits, RuntimeConfig, resolve

from .cards import check_device
from .machine import Machine
from .model_files import ModelFiles, whole_number

STORED_DTYPES = ("float32", "float16", "bfloat16", "float64")


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """The plan of an engine, or of one rank of it. It can be pickled and sent to the rank's
    process, which reads its own ModelFiles and Machine by `config`.

    config: the options, with the device and CPUs of this share of the machine.
    runtime: the same options with every choice made.
    """

    config: EngineConfig
    runtime: RuntimeConfig

    @property
    def device(self) -> str:
        """The device that computes, such as "cpu" or "cuda:1"."""
        return self.runtime.device


def draw_blueprint(config: EngineConfig, files: ModelFiles, machine: Machine) -> Blueprint:
    """Resolves every option for this model on this machine. Raises ConfigError when an option does
    not fit, the device cannot compute in the dtype or the attention library is not installed, and
    ModelError for a config that cannot be used."""
    architecture = files.checkpoint.architecture
    text = text_config(files.checkpoint)
    limits = ModelLimits(
        dtype=_stored_dtype(files.checkpoint.config, text, config.dtype),
        max_position_embeddings=whole_number(text, "max_position_embeddings", architecture),
        hidden_size=whole_number(text, "hidden_size", architecture),
    )
    choose_attention = partial(
        attention.select,
        has_kernels=machine.kernels is not None and machine.kernels.attention is not None,
        capabilities=[card.capability for card in machine.cuda.cards],
        head_dim=_head_dim(text, limits.hidden_size),
    )
    runtime = resolve(config, limits, machine.host_facts, choose_attention)
    check_device(runtime.device, runtime.dtype, machine.cuda, config.tensor_parallel_size)
    attention.check_installed(runtime.attention_backend)
    return Blueprint(config=config, runtime=runtime)


def _stored_dtype(config: Any, text: Any, wanted: str) -> str:
    """Returns the dtype that the checkpoint names, float32 where it names none. Raises
    CheckpointError for one that weights cannot have, unless the options name another."""
    stored = getattr(config, "dtype", None) or getattr(text, "dtype", None) or "float32"
    name = str(stored).removeprefix("torch.")
    if wanted == "auto" and name not in STORED_DTYPES:
        raise CheckpointError(
            f"'dtype' in config.json of the model is {shown(name)}; allowed: "
            f"{', '.join(STORED_DTYPES)}. Set dtype to compute in another"
        )
    return name


def _head_dim(text: Any, hidden_size: int) -> int | None:
    """Returns the channels of a head where the config tells them: None where heads differ."""
    head_dim = getattr(text, "head_dim", None)
    num_heads = getattr(text, "num_attention_heads", None)
    if type(head_dim) is int and head_dim > 0:
        return head_dim
    return hidden_size // num_heads if type(num_heads) is int and num_heads > 0 else None
