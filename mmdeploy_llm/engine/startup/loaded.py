"""Builds the model, loads its weights and gives its layers the kernels."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from mmdeploy_llm.engine.runner.encoder_cache import encoder_tokens
from mmdeploy_llm.hooks import Model
from mmdeploy_llm.kernels.cpu import ComputeThreads
from mmdeploy_llm.layers.adapters.attached.attach import Blueprint
from mmdeploy_llm.layers.adapters.attached.table import AdapterTable
from mmdeploy_llm.layers.install import install_kernels, packer
from mmdeploy_llm.layers.pooling.abilities import has_whole_prompts
from mmdeploy_llm.layers.pooling.heads import add_dense, fit_head
from mmdeploy_llm.layers.tp_plan import tp_plan
from mmdeploy_llm.system.sharding import FirstRank, Ranks, shares_of
from mmdeploy_llm.system.sharding.peers import NoPeers, Peers
from mmdeploy_llm.values.options.runtime_config import RuntimeConfig
from mmdeploy_llm.values.options.weight_formats import FORMATS
from mmdeploy_llm.weights.bounds import bounded_building
from mmdeploy_llm.weights.cache import WeightCache, open_cache
from mmdeploy_llm.weights.find import find_weights
from mmdeploy_llm.weights.kept import CanKeep
from mmdeploy_llm.weights.load import Split, build_model
from mmdeploy_llm.weights.quantized.settings import quantization_settings
from mmdeploy_llm.weights.streaming import PackModule

from .deterministic import check_model
from .machine import Machine
from .model_files import ModelFiles
from .sizes import check_size, model_length, weight_bytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """The ranks that share one model, as one of them sees them. ranks: None when one process holds
    the whole model."""

    ranks: Ranks | None = None
    peers: Peers = field(default_factory=NoPeers)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return 1 if self.ranks is None else self.ranks.size

    def least(self, value: int) -> int:
        """Returns the smallest `value` of all ranks."""
        return value if self.ranks is None else self.ranks.least(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model with its weights in memory (under tensor parallelism only this rank's shard).

    runtime: the options, with the encoder cache counted in this model's media rows, and
        max_model_len lowered where the model needs it.
    threads: places the calling thread on its CPUs; None leaves that to the system.
    mapped_bytes: of the weights that are pages of a file, which the system counts as free memory.
    """

    files: ModelFiles
    runtime: RuntimeConfig
    machine: Machine
    model: Model
    threads: ComputeThreads | None
    group: RankGroup
    mapped_bytes: int = 0

    @property
    def device(self) -> torch.device:
        """The device that holds the weights."""
        return torch.device(self.runtime.device)


def load_model(
    runtime: RuntimeConfig,
    files: ModelFiles,
    machine: Machine,
    threads: ComputeThreads | None,
    group: RankGroup,
) -> LoadedModel:
    """Builds the model and loads its weights, whose memory should be on the threads' NUMA node.
    Raises ConfigError when they do not fit into memory, CheckpointError when the files do not fit
    the model, and PluginError from the model's plugin."""
    if threads is not None:
        threads.place()
    split = None if group.ranks is None else shard(files, group.ranks)
    can_keep = _can_keep(runtime, machine)
    stays_coded = can_keep is not None and _is_quantized(files)

    def build(config: Any) -> Any:
        built = new_model(files, config)
        check_size(built, runtime, group.size, stays_coded=stays_coded)
        model_length(built, runtime)  # raises before the weights are read
        return built

    cache = _cache(runtime, files, machine, group)
    restored = partial(_restored, build, runtime, files, machine, split, cache)

    def read() -> Any:
        coded = files if stays_coded else None
        with ExitStack() as room:
            added = partial(_add_room, build, runtime, machine, group, cache, coded, room)
            return _read(added, runtime, files, machine, split, can_keep)

    model = restored()
    if model is None:
        model = read()
        if cache is not None:
            cache.keep(model)
            model = cache.moved(model, restored, read)
    return LoadedModel(
        files=files,
        runtime=replace(
            runtime,
            encoder_cache_tokens=group.least(encoder_tokens(runtime, model)),
            **_limits(model, runtime),
        ),
        machine=machine,
        model=model,
        threads=threads,
        group=group,
        mapped_bytes=0 if cache is None else cache.mapped_bytes,
    )


def new_model(files: ModelFiles, config: Any) -> Any:
    """Builds the model on the device of the caller, with the head that its checkpoint has, and the
    draft head that the options ask for."""
    built = files.plugins.build(files.spec, config)
    if files.add_draft_head is not None:
        files.add_draft_head(built, config)
    return fit_head(built, files.head, files.rules, getattr(config, "num_labels", 1))


def _restored(
    build: Callable[[Any], Any],
    runtime: RuntimeConfig,
    files: ModelFiles,
    machine: Machine,
    split: Split | None,
    cache: WeightCache | None,
) -> Any:
    """Builds the model with the weights of the cache, None where it has none."""
    kernels = machine.kernels
    if cache is None or not kernels.is_compiled:
        return None
    complete = partial(add_dense, rules=files.rules, device=torch.device(runtime.device))
    model = cache.restored(build, files.checkpoint, split, kernels, complete)
    if model is not None:
        _install(model, machine, runtime)
    return model


def _read(
    build: Callable[[Any], Any],
    runtime: RuntimeConfig,
    files: ModelFiles,
    machine: Machine,
    split: Split | None,
    can_keep: CanKeep | None,
) -> Any:
    """Builds the model with the weights of its files."""
    device, kernels = torch.device(runtime.device), machine.kernels
    model = build_model(
        build,
        files.checkpoint,
        dtype=getattr(torch, runtime.dtype),
        device=device,
        load_format=runtime.options.load_format,
        split=split,
        memory=kernels.memory,
        can_keep=can_keep,
        plugins=files.plugins,
        new_packer=_new_packer(runtime, machine),
    )
    add_dense(model, rules=files.rules, device=device)
    _install(model, machine, runtime)
    return model


def _add_room(
    build: Callable[[Any], Any],
    runtime: RuntimeConfig,
    machine: Machine,
    group: RankGroup,
    cache: WeightCache | None,
    coded: ModelFiles | None,
    room: ExitStack,
    config: Any,
) -> Any:
    """Builds the model, and enters into `room` what has its weights allocated where there is room
    for them. coded: the files of weights that stay in few bits."""
    model = build(config)
    memory = machine.kernels.memory
    if cache is not None and memory is not None and isinstance(model, nn.Module):
        size = _packed_bytes(model, runtime) if coded is None else _stored_bytes(coded)
        room.enter_context(cache.room_for(size // group.size, memory))
    return model


def _packed_bytes(model: nn.Module, runtime: RuntimeConfig) -> int:
    """Returns about how many bytes the weights take once they are packed, and rounded if asked."""
    rounding = runtime.quantization
    bits = None if rounding is None else FORMATS[rounding].bits
    return weight_bytes(model, getattr(torch, runtime.dtype), bits=bits)


def _stored_bytes(files: ModelFiles) -> int:
    """Returns the bytes of the files with the weights."""
    checkpoint = files.checkpoint
    found = checkpoint.other_files or find_weights(checkpoint.folder)
    return sum(path.stat().st_size for path in found)


def _new_packer(
    runtime: RuntimeConfig, machine: Machine
) -> Callable[[nn.Module], PackModule] | None:
    """Returns what packs modules while the weights are loaded; None without compiled kernels."""
    if not machine.kernels.is_compiled:
        return None
    return partial(packer, kernels=machine.kernels, quantization=runtime.quantization)


def _cache(
    runtime: RuntimeConfig, files: ModelFiles, machine: Machine, group: RankGroup
) -> WeightCache | None:
    """Opens the cache of packed weights; None where there are no kernels that pack them."""
    if machine.cpu_level is None:
        return None
    rank = None if group.ranks is None else (group.ranks.rank, group.size)
    model = files.plugins.owner(files.spec), files.spec.name, files.spec.factory, files.head
    has_drafts = files.add_draft_head is not None
    facts = {"level": machine.cpu_level, "rank": rank, "model": model, "drafts": has_drafts}
    dense = [rule.weights for rule in files.rules.dense]
    return open_cache(runtime, files.checkpoint, files.plugins, facts, dense)


def _install(model: Model, machine: Machine, runtime: RuntimeConfig) -> None:
    """Gives the layers of a model the machine's kernels, which pack its weights."""
    if machine.kernels.is_compiled and isinstance(model, nn.Module):
        if (own := runtime.quantization) != runtime.options.quantization:
            logger.info("quantization = %r is %r on CUDA", runtime.options.quantization, own)
        install_kernels(model, machine.kernels, own)
        if runtime.options.deterministic:
            check_model(model)


def _limits(model: Model, runtime: RuntimeConfig) -> dict[str, Any]:
    """Returns the options that the model lowers, with a line in the log."""
    most = model_length(model, runtime)
    if most < runtime.max_model_len:
        logger.info("max_model_len is reduced to %d, which the model can compute", most)
    if not has_whole_prompts(model):
        return {"max_model_len": most}
    # Each prompt is computed in one step, and no part of it is like that of another prompt.
    return {"max_model_len": most, "enable_prefix_caching": False, "enable_chunked_prefill": False}


def _can_keep(runtime: RuntimeConfig, machine: Machine) -> CanKeep | None:
    """Returns which weights of few bits the kernels multiply by; None in a dtype that they have no
    products for. 8-bit floats are rounded again to what `quantization` asks for."""
    is_cpu = torch.device(runtime.device).type == "cpu"
    if not machine.kernels.is_compiled or (is_cpu and runtime.dtype == "float16"):
        return None
    can_pack = machine.kernels.can_pack_coded
    if runtime.options.quantization is None:
        return can_pack
    return lambda layout, shape: not layout.is_float8 and can_pack(layout, shape)


def _is_quantized(files: ModelFiles) -> bool:
    """Whether the checkpoint stores weights in few bits, some of them at least."""
    checkpoint = files.checkpoint
    return bool(checkpoint.other_files) or quantization_settings(checkpoint.config) is not None


def check_divisible(files: ModelFiles, num_ranks: int) -> None:
    """Raises ConfigError when the model's sizes are not divisible by num_ranks. Builds the model on
    the meta device, without memory, before any process is started."""
    with torch.device("meta"), bounded_building():
        whole = new_model(files, files.checkpoint.config)
    shard(files, FirstRank(num_ranks))(whole)


def shard(files: ModelFiles, ranks: Ranks) -> Split:
    """Returns a function that reduces a whole model on the meta device to one rank's shard."""
    plan = partial(tp_plan, own=files.spec.tp_plan)
    return shares_of(plan, ranks, files.checkpoint.architecture)


def new_table(files: ModelFiles, runtime: RuntimeConfig) -> AdapterTable:
    """Returns a table with the adapters of the options. Raises ConfigError and CheckpointError."""
    config = runtime.options
    size = config.tensor_parallel_size
    ranks = FirstRank(size) if size > 1 else None
    table = AdapterTable(
        partial(blueprint_of, files, runtime, ranks),
        max_rank=config.max_adapter_rank,
        max_bytes=config.adapter_memory,
        is_deterministic=config.deterministic,
    )
    for name, source in config.adapters.items():
        table.load(name, source)
    return table


def blueprint_of(files: ModelFiles, runtime: RuntimeConfig, ranks: Ranks | None) -> Blueprint:
    """Returns the blueprint of a model that one process holds, or one of several ranks."""

    def build() -> Any:
        with torch.device("meta"), bounded_building():
            return new_model(files, files.checkpoint.config)

    shares = {} if ranks is None else shard(files, ranks)(build())
    return Blueprint(build(), shares, getattr(torch, runtime.dtype))
