"""Decides everything that can be decided before the weights are loaded."""

from __future__ import annotations

from functools import partial

from mmdeploy_llm.attention import select as attention
from mmdeploy_llm.config import EngineConfig
from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.guarding.folder_files import shown
from mmdeploy_llm.runtime_config import ModelLimits, RuntimeConfig, resolve

from .cards import check_device
from .deterministic import check_promise
from .machine import Machine
from .model_files import ModelFiles

STORED_DTYPES = ("float32", "float16", "bfloat16", "float64")


def final_options(config: EngineConfig, files: ModelFiles, machine: Machine) -> RuntimeConfig:
    """Resolves every option for this model on this machine. Raises ConfigError when an option does
    not fit, the device cannot compute in the dtype or the attention library is not installed, and
    ModelError for a config that cannot be used."""
    text = files.text
    if config.dtype == "auto" and text.dtype not in STORED_DTYPES:
        raise CheckpointError(
            f"'dtype' in config.json of the model is {shown(text.dtype)}; allowed: "
            f"{', '.join(STORED_DTYPES)}. Set dtype to compute in another"
        )
    limits = ModelLimits(
        dtype=text.dtype,
        max_position_embeddings=text.max_position_embeddings,
        hidden_size=text.hidden_size,
    )
    choose_attention = partial(
        attention.select,
        has_kernels=machine.kernels is not None and machine.kernels.attention is not None,
        capabilities=[card.capability for card in machine.cuda.cards],
        head_dim=text.head_dim,
    )
    runtime = resolve(config, limits, machine.limits, choose_attention)
    if config.deterministic:
        check_promise(files, runtime)
    check_device(runtime.device, runtime.dtype, machine.cuda, config.tensor_parallel_size)
    attention.check_installed(runtime.attention_backend)
    return runtime
