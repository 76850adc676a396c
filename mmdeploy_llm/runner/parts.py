"""The machine in parts: what each of several processes that compute at the same time may use of
it."""

from __future__ import annotations

import ctypes
import logging
import os
from typing import Any

import torch

from mmdeploy_llm import cuda, native
from mmdeploy_llm.config import EngineConfig
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.kernels import Kernels

from .devices import check_device, read_cuda
from .kv_cache import available_memory

logger = logging.getLogger(__name__)


def rank_configs(config: EngineConfig) -> list[EngineConfig]:
    """The options of each rank of a model on tensor_parallel_size devices. Raises ConfigError where
    there are not as many cards."""
    parts = _parted(config, config.tensor_parallel_size, num_cards=1)
    # The first one speaks for all: it looks whether the others' devices are there.
    return [parts[0], *(_changed(part, tensor_parallel_size=1) for part in parts[1:])]


def engine_configs(config: EngineConfig) -> list[EngineConfig]:
    """The options of each of data_parallel_size engines. Raises ConfigError where there are not as
    many cards."""
    count = config.data_parallel_size
    parts = _parted(config, count, num_cards=config.tensor_parallel_size)
    threads = config.num_intake_threads or max(1, min(8, len(native.usable_cpus())) // count)
    fields: dict[str, Any] = {"data_parallel_size": 1, "num_intake_threads": threads}
    if parts[0].device == "cpu" and not (config.kv_cache_memory or config.num_gpu_blocks_override):
        memory = available_memory(torch.device("cpu"), config.gpu_memory_utilization)
        fields["kv_cache_memory"] = memory // count
    return [_changed(part, **fields) for part in parts]


def _parted(config: EngineConfig, count: int, num_cards: int) -> list[EngineConfig]:
    """num_cards: that each part has, if it computes on CUDA."""
    kind, _, number = config.device.partition(":")
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        first = int(number) if number.isdecimal() else 0
        asked = "cuda" if config.device == "auto" else config.device
        check_device(asked, config.dtype, read_cuda(), count * num_cards)
        devices = [f"cuda:{first + index * num_cards}" for index in range(count)]
        return [_changed(config, device=device) for device in devices]
    return [_changed(config, device=kind, **fields) for fields in _cpu_parts(config, count)]


def _cpu_parts(config: EngineConfig, count: int) -> list[dict[str, Any]]:
    """Threads for each part, and CPUs where these are chosen."""
    placement = native.choose_placement(config.cpu_affinity, config.numa_node)
    if placement is not None and placement.pinned:
        each = len(placement.pinned) // count
        if not each:
            raise ConfigError(
                f"cpu_affinity gives {len(placement.pinned)} CPUs to {count} processes "
                "(tensor_parallel_size, data_parallel_size); each needs one of its own: lower "
                "these, or leave cpu_affinity out"
            )
        cpus = [placement.pinned[index * each : (index + 1) * each] for index in range(count)]
        threads = max(1, (config.num_threads or placement.num_threads) // count)
        return [{"cpu_affinity": own, "num_threads": threads} for own in cpus]
    usable = native.usable_cpus()
    suitable = placement.num_threads if placement else native.num_suitable_threads(usable)
    return [{"num_threads": max(1, (config.num_threads or suitable) // count)}] * count


def _changed(config: EngineConfig, **fields: Any) -> EngineConfig:
    return config.model_copy(update=fields)


def load_kernels(config: EngineConfig) -> Kernels | None:
    """The CPU kernels, where they are wanted and can be had; without them plain torch computes the
    same, which is told once. Raises ConfigError for an option that needs them."""
    is_cpu = config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available())
    if config.native_kernels is False:
        problem = "native_kernels is False"
    elif not is_cpu:
        problem = "the device is no CPU: leave it out, or use device='cpu'"
    else:
        try:
            return native.load()
        except native.BuildError as error:
            problem = str(error)
            logger.warning("no C++ kernels, plain torch computes the same more slowly: %s", error)
    needs = {
        "native_kernels = True": config.native_kernels,
        "quantization = 'int8'": config.quantization,
        "cpu_affinity": config.cpu_affinity is not None,
        "numa_node": config.numa_node is not None,
    }
    option = next((name for name, is_asked in needs.items() if is_asked), None)
    if option is not None:
        raise ConfigError(f"{option} needs the C++ kernels for CPUs, but {problem}")
    return None


def load_device_kernels(config: EngineConfig, device: torch.device) -> Kernels | None:
    """The Triton kernels on CUDA, unless plain torch is asked for."""
    if device.type != "cuda" or config.native_kernels is False:
        return None
    return cuda.load(device)


def bound_kernel_cache() -> None:
    """torch keeps the last 1,024 linear kernels of each thread, one for each number of rows, a
    megabyte or so each: hundreds of megabytes after a thousand steps of different sizes. The
    variable is read when the first linear layer runs; what the user has set stays."""
    if os.name == "posix":
        ctypes.CDLL(None).setenv(b"LRU_CACHE_CAPACITY", b"64", 0)
