"""Decides everything that can be decided before the weights are loaded."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from mmdeploy_llm.attention import select as attention
from mmdeploy_llm.config import EngineConfig
from mmdeploy_llm.runtime_config import ModelLimits, RuntimeConfig, resolve

from .cards import check_device
from .machine import Machine
from .model_files import ModelFiles


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
    not fit, the device cannot compute in the dtype or the attention library is not installed."""
    text = files.checkpoint.config.get_text_config()
    stored = getattr(files.checkpoint.config, "dtype", None) or getattr(text, "dtype", None)
    limits = ModelLimits(
        dtype=str(stored or "float32").removeprefix("torch."),
        max_position_embeddings=text.max_position_embeddings,
        hidden_size=text.hidden_size,
    )
    num_heads = getattr(text, "num_attention_heads", None)
    choose_attention = partial(
        attention.select,
        has_kernels=machine.kernels is not None and machine.kernels.attention is not None,
        capabilities=[card.capability for card in machine.cuda.cards],
        head_dim=getattr(text, "head_dim", None) or (num_heads and text.hidden_size // num_heads),
    )
    runtime = resolve(config, limits, machine.host_facts, choose_attention)
    check_device(runtime.device, runtime.dtype, machine.cuda, config.tensor_parallel_size)
    attention.check_installed(runtime.attention_backend)
    return Blueprint(config=config, runtime=runtime)
