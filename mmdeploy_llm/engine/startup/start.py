"""start: turns the options into a running engine. Called once for each engine; no option is decided
later."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from mmdeploy_llm.engine.runner.executor import ExecutorInfo
from mmdeploy_llm.errors import ConfigError, MMDeployLLMError
from mmdeploy_llm.layers.attention.out_of_memory import is_out_of_memory
from mmdeploy_llm.values.closing import closed_on_error
from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.values.options.runtime_config import RuntimeConfig
from mmdeploy_llm.weights.folder import naming

from .computer import Computer, build_computer, build_ranks
from .host import Host
from .loaded import new_table
from .machine import Machine, read_machine
from .media import build_media
from .model_files import ModelFiles, read_model_files
from .options import final_options, warn_of_loss
from .rooms import Assembly, build_rooms

logger = logging.getLogger(__name__)


def cache_line(num_blocks: int, block_size: int) -> str:
    """Returns the size of the KV cache as text, which begins as FastDeploy's line does."""
    num_tokens = num_blocks * block_size
    return f"total_block_num:{num_blocks}, block size {block_size}, {num_tokens} cacheable tokens"


def start(config: EngineConfig) -> Assembly:
    """Returns a running engine. Raises ConfigError, ModelError and PluginError, before the weights
    are read if the check is cheap."""
    with naming(config.model), explaining_memory(config.model):
        return _start(config)


@contextmanager
def explaining_memory(model: str) -> Iterator[None]:
    """Replaces whatever is raised when memory runs out, in a library or here, by a ConfigError."""
    try:
        yield
    except Exception as error:
        if isinstance(error, MMDeployLLMError) or not is_out_of_memory(error):
            raise
        raise ConfigError(
            f"memory ran out while {model!r} was loaded ({type(error).__name__}); end other "
            'programs, or give quantization="int4" or "int8", a smaller kv_cache_memory or a '
            "smaller max_model_len"
        ) from error


def _start(config: EngineConfig) -> Assembly:
    files = read_model_files(config)
    machine = read_machine(config)
    runtime = final_options(config, files, machine)
    with closed_on_error() as opened:
        # Before the weights are read, so that wrong options are told at once.
        media = build_media(files, runtime.options)
        opened.callback(media.close)
        adapters = new_table(files, runtime)
        computer = _computer(config, runtime, files, machine)
        opened.callback(computer.close)
        _log(computer.info, files)
        return build_rooms(files, machine, computer, media, adapters)


def _log(info: ExecutorInfo, files: ModelFiles) -> None:
    """Logs what the model is computed with."""
    if info.runtime.dtype_choice is not None:
        logger.info(info.runtime.dtype_choice)
    warn_of_loss(info.runtime, files)
    if files.spec.sampling:
        logger.info(
            "usual for %s, where a request does not say otherwise: %s (None or False: off)",
            files.spec.name,
            dict(files.spec.sampling),
        )
    logger.info(
        "%s, %.1f MiB",
        cache_line(info.num_blocks, info.runtime.block_size),
        info.num_blocks * info.shape.bytes_per_block / 2**20,
    )
    if info.num_window_blocks:
        logger.info(
            "layers with a window: %d blocks of their own, %.1f MiB",
            info.num_window_blocks,
            info.num_window_blocks * info.shape.bytes_per_window_block / 2**20,
        )


def _computer(
    config: EngineConfig, runtime: RuntimeConfig, files: ModelFiles, machine: Machine
) -> Computer:
    """Builds what computes the steps: in this process, or with ranks."""
    if config.tensor_parallel_size > 1:
        # The ranks choose the same plugins, and say so no second time.
        use = {**files.plugins.choices, **config.use}
        own = replace(runtime, options=config.model_copy(update={"use": use}))
        return build_ranks(own, files, machine)
    with closed_on_error() as opened:
        host = Host(runtime, machine)
        opened.callback(host.close)
        computer = build_computer(runtime, files, machine, host)
        host.settle()
        return computer


def report_load(runtime: RuntimeConfig, num_blocks: int, *, quiet: bool) -> None:
    """Writes the dtype that was chosen and the size of the KV cache on stderr, a line each, unless
    they are unwanted or logged there."""
    if sys.stderr is not None and not quiet and not logger.isEnabledFor(logging.INFO):
        with suppress(OSError, ValueError):  # a closed stderr
            if runtime.dtype_choice is not None:
                print(runtime.dtype_choice, file=sys.stderr)
            print(cache_line(num_blocks, runtime.block_size), file=sys.stderr)
