"""Builds the runner that computes steps: in this process, or in one process for each rank."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from mmdeploy_llm.hooks import Model
from mmdeploy_llm.hooks.model import media_size
from mmdeploy_llm.runner.distributed import DistributedRunner
from mmdeploy_llm.runner.executor import Executor, ExecutorInfo
from mmdeploy_llm.runner.peers import Peers
from mmdeploy_llm.sharding import Ranks

from .blueprint import Blueprint
from .host import Host
from .loaded import RankGroup, check_divisible, load_model
from .machine import Machine, read_machine
from .memory import plan_cache
from .model_files import ModelFiles, read_model_files
from .runners import ready_runner
from .shares import rank_blueprints


@dataclass(frozen=True, slots=True, kw_only=True)
class Computer:
    """A runner that is ready to compute. info: what the engine must know of it. model, host: None
    when other processes hold the model."""

    runner: Executor
    info: ExecutorInfo
    model: Model | None
    host: Host | None = None


def build_computer(
    blueprint: Blueprint,
    files: ModelFiles,
    machine: Machine,
    host: Host,
    group: RankGroup | None = None,
) -> Computer:
    """Loads the model and builds its runner in this process."""
    with host.computing():
        loaded = load_model(blueprint, files, machine, host.threads, group or RankGroup())
        cache = plan_cache(loaded)
        runtime = replace(loaded.runtime, max_model_len=cache.max_model_len)
        info = ExecutorInfo(
            runtime=runtime,
            shape=cache.shape,
            num_blocks=cache.num_blocks,
            media_size=media_size(loaded.model),
            num_state_rows=cache.num_state_rows,
            num_window_blocks=cache.num_window_blocks,
            long_after=getattr(loaded.model, "long_after", None),
        )
        runner = ready_runner(loaded, cache)
    return Computer(runner=runner, info=info, model=loaded.model, host=host)


def build_ranks(blueprint: Blueprint, files: ModelFiles, machine: Machine) -> Computer:
    """Starts one process for each rank; each builds its computer from its own blueprint."""
    check_divisible(files, blueprint.config.tensor_parallel_size)
    blueprints = rank_blueprints(blueprint, machine)
    ranks = DistributedRunner(blueprints, build_rank)
    return Computer(runner=ranks, info=ranks.info, model=None)


def build_rank(blueprint: Blueprint, ranks: Ranks, peers: Peers) -> Computer:
    """Builds a rank's computer in the rank's own process, after reading the model folder and the
    machine there."""
    files, machine = read_model_files(blueprint.config), read_machine(blueprint.config)
    torch.set_num_threads(blueprint.runtime.num_threads)  # in this process nobody else computes
    host = Host(blueprint.runtime, machine)
    return build_computer(blueprint, files, machine, host, RankGroup(ranks=ranks, peers=peers))
