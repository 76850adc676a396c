"""ModelPool: several models in one process, with one table of their memory and one rule for the
cores.

install --> installed --start--> running --stop--> stopped --release--> gone
                                    ^---------start----'
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Literal, Unpack

from mmdeploy_llm.client.belonging import Belonging
from mmdeploy_llm.errors import ConfigError, EngineError
from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.values.text.signatures import takes

from .async_llm import AsyncLLM

if TYPE_CHECKING:
    from mmdeploy_llm.engine.startup.needs import MemoryNeeds
    from mmdeploy_llm.values.params.option_dicts import EngineOptions


class FairLock:
    """A lock that threads get in the order in which they ask for it; threading.Lock may give it to
    the same thread again and again while others wait. A context manager.

    Writers: the threads that enter it, under `_lock`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_taken = False
        self._waiting: deque[threading.Lock] = deque()  # each is released to wake its thread

    def __enter__(self) -> None:
        with self._lock:
            if not self._is_taken:
                self._is_taken = True
                return
            wake = threading.Lock()
            wake.acquire()
            self._waiting.append(wake)
        wake.acquire()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()  # the lock stays taken, by that thread now
            else:
                self._is_taken = False


Cores = Literal["turns", "shares"]
State = Literal["installed", "running", "stopped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """A line of a pool's table.

    name, model: as given to `install`.
    state: "installed" before the first start, then "running" or "stopped".
    device: where a running model computes.
    num_threads: compute threads of a running model.
    weights, kv_cache: bytes that a running model may take; 0 for one that does not run.
    """

    name: str
    model: str
    state: State
    device: str | None = None
    num_threads: int = 0
    weights: int = 0
    kv_cache: int = 0


@dataclass(slots=True, eq=False)
class _Entry:
    """A model of the pool. Writer: the thread that has its lock; needs also under the pool's."""

    name: str
    config: EngineConfig
    max_queued: int | None
    lock: threading.RLock
    llm: AsyncLLM | None = None
    needs: MemoryNeeds | None = None
    was_started: bool = False

    @property
    def state(self) -> State:
        if self.llm is not None:
            return "running"
        return "stopped" if self.was_started else "installed"


class ModelPool(Belonging):
    """Holds several models in one process; `pool[name]` is the AsyncLLM of one that runs.

    Nothing of one model reaches another: each has its own plugins, caches and seeds.

    memory: bytes of RAM that the weights and KV caches of all running models may take; None: what
        was free when the pool was made. A model that does not fit is refused with the numbers
        before its weights are read. A model on a card is checked against that card instead.
    cores: how models that compute on the CPU share it. "turns": each has all its threads, and one
        model computes a step at a time, in the order in which they ask. "shares": all compute at
        the same time, each with its `num_threads`, which must be given and together be no more
        than the CPUs.

    Its methods may be called from any thread. Use it in a `with` block, or call `close`.
    """

    def __init__(self, *, memory: int | None = None, cores: Cores = "turns") -> None:
        super().__init__()
        if cores not in ("turns", "shares"):
            raise ConfigError(f"cores must be 'turns' or 'shares', got {cores!r}")
        self._cores: Cores = cores
        self._limit = _free_ram() if memory is None else memory
        self._step_lock = FairLock()
        self._lock = threading.Lock()  # held for the table only, never while a model loads
        self._entries: dict[str, _Entry] = {}

    @takes(EngineConfig)
    def install(
        self,
        name: str,
        model: str | PathLike[str],
        *,
        max_queued: int | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        """Adds a model under a new name, without loading it. model, max_queued, options: as for
        AsyncLLM. Raises ConfigError for wrong options, and for a name that is in use."""
        self._home.check()
        config = EngineConfig.from_options(model, options)
        with self._lock:
            if name in self._entries:
                raise ConfigError(
                    f"{name!r} is installed already; release it first, or take another name"
                )
            self._entries[name] = _Entry(name, config, max_queued, threading.RLock())

    def start(self, name: str) -> AsyncLLM:
        """Loads a model, warms it up and returns it; returns at once if it runs. Raises ConfigError
        when it does not fit, KeyError when it is released meanwhile, and what AsyncLLM raises."""
        self._home.check()
        entry = self._entry(name)
        with entry.lock:
            if self._entries.get(name) is not entry:
                raise KeyError(f"model {name!r} was released before it was started; install it")
            if entry.llm is None:
                config = self._reserve(entry)
                try:
                    lock = self._step_lock if self._cores == "turns" else None
                    entry.llm = AsyncLLM(config, max_queued=entry.max_queued, step_lock=lock)
                except BaseException:
                    self._give_back(entry)
                    raise
                entry.was_started = True
            return entry.llm

    def stop(self, name: str, *, abort: bool = False) -> None:
        """Ends a model and gives its memory back; it can be started again. New requests are refused
        at once, those it has are finished first. abort: ends them instead."""
        self._home.check()
        entry = self._entry(name)
        with entry.lock:
            self._stop(entry, abort)

    def release(self, name: str) -> None:
        """Stops a model, aborting what it computes, and forgets it."""
        self._home.check()
        self._release(self._entry(name))

    def close(self) -> None:
        """Releases all models. May be called twice."""
        self._home.check()
        for entry in list(self._entries.values()):
            self._release(entry)

    def __getitem__(self, name: str) -> AsyncLLM:
        """Returns a running model. Raises KeyError for an unknown name, EngineError for a model
        that does not run."""
        entry = self._entry(name)
        llm = entry.llm
        if llm is None:
            raise EngineError(f"model {name!r} is {entry.state}; call pool.start({name!r}) first")
        return llm

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._entries))

    def __len__(self) -> int:
        return len(self._entries)

    def status(self) -> tuple[ModelStatus, ...]:
        """Returns a line for each model, in the order in which they were installed."""
        with self._lock:
            return tuple(map(_status, self._entries.values()))

    def _stop(self, entry: _Entry, abort: bool) -> None:
        if entry.llm is not None:
            entry.llm.finish(abort=abort)
            entry.llm.close()
            entry.llm = None
            self._give_back(entry)

    def _release(self, entry: _Entry) -> None:
        """Stops and forgets a model. Who waits for its lock finds it gone, and not another one that
        was installed under its name meanwhile."""
        with entry.lock:
            self._stop(entry, abort=True)
            with self._lock:
                if self._entries.get(entry.name) is entry:
                    del self._entries[entry.name]

    def _entry(self, name: str) -> _Entry:
        try:
            return self._entries[name]
        except KeyError:
            known = ", ".join(map(repr, self._entries)) or "none"
            raise KeyError(f"no model is installed as {name!r}; installed: {known}") from None

    def _reserve(self, entry: _Entry) -> EngineConfig:
        """Writes the model into the table. Returns its options with the size of the KV cache that
        was written. Raises ConfigError when it does not fit."""
        from mmdeploy_llm.engine.startup.needs import count_needs  # which imports torch

        with self._lock:
            left = self._memory_left()
        needs = count_needs(entry.config, left)
        with self._lock:
            if needs.device == "cpu":
                self._check_threads(entry, needs)
                self._check_fit(entry, needs)
            entry.needs = needs
        count = entry.config.data_parallel_size
        is_open = needs.device == "cpu" and entry.config.num_gpu_blocks_override is None
        fields = {"kv_cache_memory": needs.kv_cache // count} if is_open else {}
        return entry.config.model_copy(update=fields)

    def _give_back(self, entry: _Entry) -> None:
        with self._lock:
            entry.needs = None

    def _memory_left(self) -> int:
        """Returns the RAM for one more model: free now, and not promised to others."""
        return max(0, min(self._limit - sum(needs.total for needs in self._on_cpu()), _free_ram()))

    def _on_cpu(self) -> list[MemoryNeeds]:
        each = (entry.needs for entry in self._entries.values())
        return [needs for needs in each if needs is not None and needs.device == "cpu"]

    def _check_fit(self, entry: _Entry, needs: MemoryNeeds) -> None:
        left = self._memory_left()
        if needs.total <= left:
            return
        others = ", ".join(
            f"{other.name!r} {_gib(other.needs.total)}"
            for other in self._entries.values()
            if other.needs is not None and other.needs.device == "cpu"
        )
        raise ConfigError(
            f"model {entry.name!r} takes {_gib(needs.total)} ({_gib(needs.weights)} of weights, "
            f"{_gib(needs.kv_cache)} of KV cache), but {_gib(left)} of {_gib(self._limit)} are "
            f"left; running: {others or 'none'}. Stop another model, or lower kv_cache_memory"
        )

    def _check_threads(self, entry: _Entry, needs: MemoryNeeds) -> None:
        from mmdeploy_llm.system.portable.machine import num_cpus

        config, name = entry.config, entry.name
        if self._cores == "turns":
            if config.data_parallel_size > 1:
                raise ConfigError(
                    f"model {name!r} has data_parallel_size = {config.data_parallel_size}, whose "
                    "engines compute at the same time; make the pool with cores='shares'"
                )
            return
        if config.num_threads is None:
            raise ConfigError(
                f"model {name!r} has no num_threads; with cores='shares' each model needs its "
                "own, or make the pool with cores='turns'"
            )
        used, cpus = sum(other.num_threads for other in self._on_cpu()), num_cpus()
        if used + needs.num_threads > cpus:
            raise ConfigError(
                f"model {name!r} computes with {needs.num_threads} threads and the running ones "
                f"with {used}, but there are {cpus} CPUs; lower num_threads, stop another "
                "model, or make the pool with cores='turns'"
            )


def _status(entry: _Entry) -> ModelStatus:
    needs = entry.needs
    if needs is None or entry.llm is None:
        return ModelStatus(name=entry.name, model=entry.config.model, state=entry.state)
    return ModelStatus(
        name=entry.name,
        model=entry.config.model,
        state=entry.state,
        device=needs.device,
        num_threads=needs.num_threads,
        weights=needs.weights,
        kv_cache=needs.kv_cache,
    )


def _free_ram() -> int:
    from mmdeploy_llm.system.portable.machine import free_ram

    return free_ram()


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
