"""Builds the runner that computes steps: in this process, or in one process for each rank."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from mmdeploy_llm.engine.runner.distributed import DistributedRunner
from mmdeploy_llm.engine.runner.executor import Executor, ExecutorInfo
from mmdeploy_llm.hooks import Model
from mmdeploy_llm.hooks.objects.model import media_size
from mmdeploy_llm.layers.pooling.abilities import abilities_of
from mmdeploy_llm.system.sharding import Ranks
from mmdeploy_llm.system.sharding.peers import Peers
from mmdeploy_llm.values.options.runtime_config import RuntimeConfig

from .host import Host
from .loaded import RankGroup, check_divisible, load_model
from .machine import Machine, read_machine
from .memory import plan_cache
from .model_files import ModelFiles, read_model_files
from .runners import ready_runner
from .shares import rank_runtimes


@dataclass(frozen=True, slots=True, kw_only=True)
class Computer:
    """A runner that is ready to compute. info: what the engine must know of it. model, host: None
    when other processes hold the model."""

    runner: Executor
    info: ExecutorInfo
    model: Model | None
    host: Host | None = None

    def close(self) -> None:
        """Closes the runner, with its processes, and lets go of this process."""
        self.runner.close()
        if self.host is not None:
            self.host.close()


def build_computer(
    runtime: RuntimeConfig,
    files: ModelFiles,
    machine: Machine,
    host: Host,
    group: RankGroup | None = None,
) -> Computer:
    """Loads the model and builds its runner in this process."""
    with host.computing():
        loaded = load_model(runtime, files, machine, host.threads, group or RankGroup())
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
            abilities=abilities_of(loaded.model, files.rules),
        )
        runner = ready_runner(loaded, cache)
    return Computer(runner=runner, info=info, model=loaded.model, host=host)


def build_ranks(runtime: RuntimeConfig, files: ModelFiles, machine: Machine) -> Computer:
    """Starts one process for each rank; each builds its computer from options of its own."""
    check_divisible(files, runtime.options.tensor_parallel_size)
    ranks = DistributedRunner(rank_runtimes(runtime, machine), build_rank)
    return Computer(runner=ranks, info=ranks.info, model=None)


def build_rank(runtime: RuntimeConfig, ranks: Ranks, peers: Peers) -> Computer:
    """Builds a rank's computer in the rank's own process, after reading the model folder and the
    machine there."""
    files, machine = read_model_files(runtime.options), read_machine(runtime.options)
    torch.set_num_threads(runtime.num_threads)  # in this process nobody else computes
    host = Host(runtime, machine)
    return build_computer(runtime, files, machine, host, RankGroup(ranks=ranks, peers=peers))
