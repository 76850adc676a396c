"""Counts what an engine takes of a machine, and how many engines a cluster can hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmdeploy_llm.engine.startup.needs import count_needs
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.system.portable.machine import free_ram, num_cpus
from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.values.options.runtime_config import max_num_seqs_of

PROCESS_BYTES = 2**30  # Python, torch, activations and the media of a few prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorSize:
    """The resources that Ray reserves for one actor, and the options with which its engines take
    just these.

    num_cpus, num_gpus: of all engines of the actor. memory: bytes of RAM; None: not reserved, since
    the model is on cards. num_seqs: prompts that they compute at the same time.
    """

    num_cpus: int
    num_gpus: int
    memory: int | None
    num_seqs: int
    options: Mapping[str, Any]

    @property
    def resources(self) -> dict[str, Any]:
        """The arguments of Ray's actors."""
        memory = {} if self.memory is None else {"memory": self.memory}
        return {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus, **memory}

    def num_on(self, node: Mapping[str, float]) -> int:
        """Returns how many actors a node with these resources holds."""
        needs = {"CPU": self.num_cpus, "GPU": self.num_gpus, "memory": self.memory or 0}
        return min(int(node.get(name, 0) // count) for name, count in needs.items() if count)

    def num_in(self, nodes: Iterable[Mapping[str, float]]) -> int:
        """Returns how many actors the nodes of a cluster hold. Raises ConfigError if none."""
        found = [dict(node) for node in nodes]
        count = sum(self.num_on(node) for node in found)
        if count:
            return count
        most = {name: max((node.get(name, 0) for node in found), default=0) for name in _NAMES}
        raise ConfigError(
            f"an engine needs {self.num_cpus} CPUs, {self.num_gpus} GPUs and "
            f"{(self.memory or 0) / 2**30:.1f} GiB on one machine, and no machine of the cluster "
            f"has them: the most are {most['CPU']:g} CPUs, {most['GPU']:g} GPUs and "
            f"{most['memory'] / 2**30:.1f} GiB; lower num_threads, kv_cache_memory or "
            "tensor_parallel_size, or add machines"
        )


_NAMES = ("CPU", "GPU", "memory")


def num_beside_reading(size: ActorSize, nodes: Sequence[Mapping[str, float]]) -> int:
    """Returns how many actors the nodes hold if one CPU is left for the tasks that read and write.
    Raises ConfigError when they hold none."""
    num_actors = size.num_in(nodes)
    num_cpus = int(sum(node.get("CPU", 0) for node in nodes))
    while num_actors * size.num_cpus >= num_cpus:
        num_actors -= 1
    if num_actors:
        return num_actors
    raise ConfigError(
        f"an engine with {size.num_cpus} threads takes all {num_cpus} CPUs of the cluster, and the "
        "tasks that read the dataset need one: lower num_threads, add machines, or give concurrency"
    )


def actor_size(model: str, options: Mapping[str, Any], *, has_gpus: bool) -> ActorSize:
    """Returns what an actor with an LLM of these options needs. Reads the model folder, but no
    weights. has_gpus: of the cluster, for device="auto". Raises ConfigError, ModelError,
    PluginError.

    num_threads, when it is not given, is that of this machine, and so is the KV cache on CPUs: the
    share that as many CPUs have of it.
    """
    config = EngineConfig.from_options(model, options)
    if config.plugin_files:  # absolute: an actor works in a folder of its own
        own = {"plugins": config.plugins, "plugin_files": config.plugin_files}
        options = {**options, **own}
    kind, _, number = config.device.partition(":")
    if number:
        raise ConfigError(
            f"device = {config.device!r} names a card; Ray chooses the cards: use device='cuda'"
        )
    count = config.data_parallel_size
    if kind == "cuda" or (kind == "auto" and has_gpus):
        num_gpus = config.tensor_parallel_size * count
        chosen = {**options, "device": "cuda"}
        return ActorSize(
            num_cpus=count,
            num_gpus=num_gpus,
            memory=None,
            num_seqs=count * max_num_seqs_of(config, is_cuda=True),
            options=chosen,
        )
    config = config.model_copy(update={"device": "cpu"})
    cpus = num_cpus()
    share = min(1.0, (config.num_threads or cpus) / cpus)
    needs = count_needs(config, int(free_ram() * share))
    chosen = {**options, "device": "cpu", "num_threads": needs.num_threads}
    if config.kv_cache_memory is None and config.num_gpu_blocks_override is None:
        chosen["kv_cache_memory"] = needs.kv_cache // count
    return ActorSize(
        num_cpus=needs.num_threads,
        num_gpus=0,
        memory=needs.total + PROCESS_BYTES * count,
        num_seqs=count * max_num_seqs_of(config, is_cuda=False),
        options=chosen,
    )
