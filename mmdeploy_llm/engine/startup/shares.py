"""Divides the machine among processes that compute at the same time: the ranks of one model, or
several engines."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.values.options.runtime_config import RuntimeConfig

from .cards import check_device, missing_cuda
from .machine import Machine
from .sizes import available_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineShare:
    """One process's share of the machine; its fields are options of EngineConfig."""

    device: str
    num_threads: int | None
    cpu_affinity: Any
    numa_node: int | None


def rank_runtimes(runtime: RuntimeConfig, machine: Machine) -> list[RuntimeConfig]:
    """Returns the options of each of tensor_parallel_size ranks. Raises ConfigError when there are
    not as many cards or CPUs."""
    options = runtime.options
    shares = _machine_shares(
        options, machine, options.tensor_parallel_size, num_cards=1, is_even=True
    )
    return [
        replace(
            runtime,
            options=options.model_copy(update=asdict(share)),
            device=share.device,
            num_threads=share.num_threads or runtime.num_threads,
        )
        for share in shares
    ]


def engine_configs(config: EngineConfig, machine: Machine) -> list[EngineConfig]:
    """Returns the options of each of data_parallel_size engines. Raises ConfigError when there are
    not as many cards or CPUs."""
    count = config.data_parallel_size
    num_cards = config.tensor_parallel_size
    shares = _machine_shares(config, machine, count, num_cards=num_cards, is_even=False)
    threads = config.num_intake_threads or max(1, min(8, machine.num_cpus // count))
    fields: dict[str, Any] = {"data_parallel_size": 1, "num_intake_threads": threads}
    if shares[0].device == "cpu" and not (config.kv_cache_memory or config.num_gpu_blocks_override):
        memory = available_memory(torch.device("cpu"), config.gpu_memory_utilization)
        fields["kv_cache_memory"] = memory // count
    return [config.model_copy(update={**asdict(share), **fields}) for share in shares]


def _machine_shares(
    config: EngineConfig, machine: Machine, count: int, *, num_cards: int, is_even: bool
) -> list[MachineShare]:
    """Divides the machine into `count` shares. num_cards: cards of each share on CUDA. is_even: see
    _cpu_shares."""
    kind, _, number = config.device.partition(":")
    if kind == "auto":
        kind = "cuda" if missing_cuda(machine.cuda) is None else "cpu"
    if kind != "cuda":
        return _cpu_shares(kind, config, machine, count, is_even=is_even)
    first = int(number) if number.isdecimal() else 0
    device = "cuda" if config.device == "auto" else config.device
    check_device(device, config.dtype, machine.cuda, count * num_cards)
    return [
        MachineShare(
            device=f"cuda:{first + index * num_cards}",
            num_threads=config.num_threads or machine.host_threads,
            cpu_affinity=config.cpu_affinity,
            numa_node=config.numa_node,
        )
        for index in range(count)
    ]


def _cpu_shares(
    device: str, config: EngineConfig, machine: Machine, count: int, *, is_even: bool
) -> list[MachineShare]:
    """Divides threads and CPUs. On a machine of several NUMA nodes each process has one, if they
    come out even, so that it computes with what lies in its own memory. is_even: whether all get
    equally many threads, because they wait for the slowest."""
    total = config.num_threads or machine.num_threads
    num_threads = max(1, total // count)
    pinned = () if machine.placement is None else machine.placement.pinned
    one = MachineShare(
        device=device,
        num_threads=num_threads,
        cpu_affinity=config.cpu_affinity,
        numa_node=config.numa_node,
    )
    if nodes := _nodes(machine, count, num_threads):
        return [replace(one, numa_node=node) for node in nodes]
    if not pinned:
        num_larger = 0 if is_even or total < count else total % count
        larger = replace(one, num_threads=num_threads + 1)
        return [larger] * num_larger + [one] * (count - num_larger)
    each = len(pinned) // count
    if not each:
        raise ConfigError(
            f"cpu_affinity has {len(pinned)} CPUs for {count} processes (tensor_parallel_size, "
            "data_parallel_size); each needs one of its own: lower these, or leave cpu_affinity out"
        )
    return [
        replace(one, cpu_affinity=pinned[index * each : (index + 1) * each])
        for index in range(count)
    ]


def _nodes(machine: Machine, count: int, num_threads: int) -> list[int]:
    """Returns the NUMA node of each process; none where the nodes have not as many processes each,
    or not the cores for their threads."""
    nodes = machine.nodes
    if len(nodes) < 2 or count % len(nodes):
        return []
    each = count // len(nodes)
    if any(node.num_cores < each * num_threads for node in nodes):
        return []
    return [node.number for node in nodes for _ in range(each)]
