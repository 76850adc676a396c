"""Reads what this machine offers to an engine: CPUs, CUDA cards, kernels. The rest of the start-up
receives it as a value and never queries the machine again."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.kernels import TORCH, Kernels, cuda
from mmdeploy_llm.kernels import cpu as native
from mmdeploy_llm.kernels.cpu import NumaNode, Placement
from mmdeploy_llm.kernels.plain import has_product
from mmdeploy_llm.system.portable import cgroups
from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.values.options.runtime_config import MachineLimits
from mmdeploy_llm.values.options.weight_formats import with_group_size

from .cards import CudaSetup, missing_cuda, read_cuda

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The share of this machine that one engine may use.

    cpus: the CPUs this process may run on.
    placement: CPUs chosen by cpu_affinity and numa_node, None when neither is given.
    cuda: what torch finds; without cards when device is "cpu".
    kernels: the compiled kernels for the engine's device; TORCH without them.
    cpu_level: instruction sets of the kernels for the CPU, None without them.
    host_threads: the number of threads that the program has set for torch or OpenMP; None where it
        left that to torch.
    nodes: NUMA nodes that engines may be placed on; none where the options place them.
    """

    cpus: tuple[int, ...]
    placement: Placement | None
    cuda: CudaSetup
    kernels: Kernels
    cpu_level: str | None = None
    host_threads: int | None = None
    nodes: tuple[NumaNode, ...] = ()

    @property
    def num_cpus(self) -> int:
        """CPUs that may be busy at the same time, within the container's quota."""
        return cgroups.within_quota(len(self.cpus))

    @property
    def num_threads(self) -> int:
        """Compute threads: those that the program has set, if there are CPUs for them, else one for
        each core, within the container's quota."""
        if self.host_threads is not None:
            return min(self.host_threads, self.num_cpus)
        if self.placement is not None:
            return self.placement.num_threads
        return native.num_suitable_threads(self.cpus)

    @property
    def limits(self) -> MachineLimits:
        """Returns what `runtime_config.resolve` asks of the machine."""
        problem = missing_cuda(self.cuda)
        return MachineLimits(
            has_cuda=problem is None,
            cuda_problem=problem or "",
            num_cpus=self.num_cpus,
            num_threads=self.num_threads,
            cpu_level=self.cpu_level,
            has_bf16=has_product(torch.bfloat16),
        )


def read_machine(config: EngineConfig) -> Machine:
    """Reads the share of the machine that the options let an engine use. The first call on a
    machine compiles the CPU kernels, which takes seconds. Raises ConfigError for CPUs that do not
    exist, and for an option whose kernels are missing."""
    setup = CudaSetup(torch=torch.__version__) if config.device == "cpu" else read_cuda()
    problem = missing_cuda(setup)
    if config.device == "auto" and problem and setup.driver:
        logger.warning("device = 'auto' is the CPU: %s", problem)
    is_cpu = config.device == "cpu" or (config.device == "auto" and problem is not None)
    kernels = load_kernels(config, is_cpu=is_cpu)
    if not is_cpu and problem is None and config.native_kernels is not False:
        kernels = _cuda_kernels(config)
    cpus = native.usable_cpus()
    placement = native.choose_placement(config.cpu_affinity, config.numa_node)
    num_processes = config.data_parallel_size * config.tensor_parallel_size
    can_place = placement is None and num_processes > 1 and kernels.can_place_threads
    host_threads = native.own_choice(native.THREAD_COUNT.of_host, cpus)
    return Machine(
        cpus=cpus,
        # A list of CPUs is a choice for this engine, which has a thread on each.
        host_threads=None if isinstance(config.cpu_affinity, tuple) else host_threads,
        placement=placement,
        cuda=setup,
        kernels=kernels,
        cpu_level=kernels.cpu_level,
        nodes=native.usable_nodes(cpus) if can_place else (),
    )


def _cuda_kernels(config: EngineConfig) -> Kernels:
    """Loads the Triton kernels. Raises ConfigError where the options ask for rounded weights, which
    need Triton for their products and the C++ kernels to round them."""
    device = torch.device("cuda")
    if config.quantization is None:
        return cuda.load(device) or TORCH
    option = f"quantization = {config.quantization!r}"
    try:
        formats = with_group_size(config.quantization, config.quantization_group_size)
        kernels = cuda.load(device, native.load(formats=formats))
    except native.BuildError as error:
        raise ConfigError(
            f"{option} needs the C++ kernels, which round the weights for CUDA too, but {error}"
        ) from error
    if kernels is None:
        raise ConfigError(f"{option} needs Triton on CUDA, which cannot be imported: install it")
    return kernels


def load_kernels(config: EngineConfig, *, is_cpu: bool) -> Kernels:
    """Loads the C++ kernels when the options want them and they can be built. Without them plain
    torch computes the same, which is logged once. Raises ConfigError for an option that needs
    them."""
    if config.native_kernels is False:
        problem = "native_kernels is False"
    elif not is_cpu:
        problem = "the device is not a CPU: leave it out, or use device='cpu'"
    else:
        try:
            return native.load(
                level=config.cpu_level,
                fixed_order=config.deterministic,
                formats=with_group_size(config.quantization, config.quantization_group_size),
            )
        except native.BuildError as error:
            problem = str(error)
            logger.warning("no C++ kernels, plain torch computes the same more slowly: %s", error)
    needs = {
        "native_kernels = True": config.native_kernels,
        f"quantization = {config.quantization!r}": config.quantization
        and (is_cpu or config.native_kernels is False),
        "cpu_level": config.cpu_level,
        "deterministic = True": config.deterministic,
        "cpu_affinity": config.cpu_affinity is not None,
        "numa_node": config.numa_node is not None,
    }
    option = next((name for name, is_set in needs.items() if is_set), None)
    if option is not None:
        raise ConfigError(f"{option} needs the C++ kernels for CPUs, but {problem}")
    return TORCH
