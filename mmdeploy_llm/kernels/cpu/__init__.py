"""C++ kernels for the CPU: operations that torch would compute in several passes.

    kernels.cpp --compiler, once--> a library in the user's cache --ctypes--> CpuKernels

Without a compiler there are no kernels, and plain torch computes the same.
"""

from .build import Level, NoCompilerError, build, cpu_levels
from .coded import PANEL
from .cores import (
    ComputeThreads,
    NumaNode,
    Placement,
    choose_placement,
    num_suitable_threads,
    own_choice,
    usable_cpus,
    usable_nodes,
)
from .cpu_kernels import MAX_HEAD_DIM, CpuKernels, load
from .crowd import watch_crowd
from .memory import LargePages
from .openmp import THREAD_COUNT, make_forks_safe
from .packed import PACKED
from .prebuilt import find_prebuilt
from .recording import Recording
from .sealed import BuildError

__all__ = [
    "MAX_HEAD_DIM",
    "PACKED",
    "PANEL",
    "THREAD_COUNT",
    "BuildError",
    "ComputeThreads",
    "CpuKernels",
    "LargePages",
    "Level",
    "NoCompilerError",
    "NumaNode",
    "Placement",
    "Recording",
    "build",
    "choose_placement",
    "cpu_levels",
    "find_prebuilt",
    "load",
    "make_forks_safe",
    "num_suitable_threads",
    "own_choice",
    "usable_cpus",
    "usable_nodes",
    "watch_crowd",
]
