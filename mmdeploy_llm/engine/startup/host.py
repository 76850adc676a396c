"""Host: the process that an engine computes in, whose settings it changes and puts back."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch

from mmdeploy_llm.kernels import cpu as native
from mmdeploy_llm.kernels.cpu import ComputeThreads
from mmdeploy_llm.system.portable.libraries import c_library, keep_freed_memory
from mmdeploy_llm.system.processes import finalize_here
from mmdeploy_llm.values.options.runtime_config import RuntimeConfig

from .machine import Machine

Undo = Callable[[], None]
KERNEL_CACHE_VARIABLE, KERNEL_CACHE_SIZE = b"LRU_CACHE_CAPACITY", b"64"


class SharedChange:
    """A change of the process that the first engine makes and the last one takes back. change:
    makes it and returns the function that takes it back."""

    def __init__(self, change: Callable[[], Undo]) -> None:
        self._change = change
        self._lock = threading.RLock()  # a collected engine may let go while another one starts
        self._num_holders = 0
        self._undo: Undo | None = None

    @property
    def is_held(self) -> bool:
        """Whether the change is made."""
        return self._num_holders > 0

    def hold(self, owner: object) -> Callable[[], object]:
        """Makes the change for `owner`, until the returned function is called or `owner` is
        collected."""
        with self._lock:
            if self._undo is None:
                self._undo = self._change()
            self._num_holders += 1
        return finalize_here(owner, self._let_go)

    def _let_go(self) -> None:
        with self._lock:
            self._num_holders -= 1
            if not self._num_holders and self._undo is not None:
                undo, self._undo = self._undo, None
                undo()


class Host:
    """One engine's hold on its process.

    Until `close` it bounds torch's cache of linear kernels and, on a CPU, makes the C library keep
    freed memory, and has threads that wait for each other sleep where others want the CPUs. The
    number of torch's threads and the current CUDA device are changed only while the engine
    computes; see `computing`. threads: places threads on the CPUs of cpu_affinity and numa_node;
    None leaves that to the system.
    """

    def __init__(self, runtime: RuntimeConfig, machine: Machine) -> None:
        self._num_threads = runtime.num_threads
        self._device = torch.device(runtime.device)
        self._held = [KERNEL_CACHE.hold(self)]
        self.threads: ComputeThreads | None = None
        native.make_forks_safe()
        if self._device.type == "cpu":
            self._held.append(FREED_MEMORY.hold(self))
            if runtime.num_threads > 1:
                self._held.append(CROWD.hold(self))
        if machine.placement is not None and machine.kernels.can_place_threads:
            self.threads = ComputeThreads(machine.kernels, machine.placement, runtime.num_threads)

    def settle(self) -> None:
        """Called after the load: Python's garbage collector no longer examines the objects that
        exist now, hundreds of thousands of modules, classes and entries of tables, which would make
        each of its full runs in a step last tenths of a second. With the last engine to close it
        examines them again. A program that has called gc.freeze itself keeps what it chose."""
        if EXAMINED_OBJECTS.is_held or not gc.get_freeze_count():
            self._held.append(EXAMINED_OBJECTS.hold(self))
            gc.freeze()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Computes in the block with the engine's number of threads and on its card; afterwards the
        calling thread has the settings that it had before."""
        is_card = self._device.type == "cuda" and self._device.index is not None
        card = torch.cuda.device(self._device) if is_card else nullcontext()
        with native.THREAD_COUNT.computing(self._num_threads), card:
            yield

    def close(self) -> None:
        """Puts back what was changed: with the last engine the settings of the process, and the
        CPUs of the calling thread. What torch's allocator keeps of a card goes back to the driver,
        since the next model counts what is free there."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        if self.threads is not None:
            self.threads.put_back()
        for let_go in self._held:
            let_go()


def _bound_kernel_cache() -> Undo:
    """Bounds torch's cache of linear kernels. It keeps 1,024 for each thread, one for each number
    of rows, about a megabyte each: hundreds of megabytes after a thousand steps of different sizes.
    torch reads the variable when a thread computes its first linear layer; a value set by the user
    stays."""
    library = c_library()
    if library is None:
        return lambda: None
    library.getenv.restype = ctypes.c_char_p

    def unset() -> None:
        if library.getenv(KERNEL_CACHE_VARIABLE) == KERNEL_CACHE_SIZE:
            library.unsetenv(KERNEL_CACHE_VARIABLE)

    if library.getenv(KERNEL_CACHE_VARIABLE) is not None:
        return lambda: None
    library.setenv(KERNEL_CACHE_VARIABLE, KERNEL_CACHE_SIZE, 0)
    return unset


KERNEL_CACHE = SharedChange(_bound_kernel_cache)
EXAMINED_OBJECTS = SharedChange(lambda: gc.unfreeze)
FREED_MEMORY = SharedChange(keep_freed_memory)
CROWD = SharedChange(native.watch_crowd)
