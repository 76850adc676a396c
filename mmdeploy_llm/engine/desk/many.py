"""ManyDesks: several desks of one model (data parallelism), each with an engine in its own process.

    submit --> queue --> the desk with the most free capacity     (with its own ranks, if any)

When a desk dies, its unfinished prompts are computed by another one, as deaths.py says. A prompt
that is to be computed alone, or that has produced output already, ends as an error; the other desks
continue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from mmdeploy_llm.engine.intake.rendered import TokenCount
from mmdeploy_llm.engine.startup.machine import read_machine
from mmdeploy_llm.engine.startup.shares import engine_configs
from mmdeploy_llm.engine.startup.start import start
from mmdeploy_llm.errors import EngineError, WorkerDiedError
from mmdeploy_llm.hooks import PluginManager
from mmdeploy_llm.media.boxes.reading import FoundBoxes
from mmdeploy_llm.media.loading.cache import CacheStats, add_stats
from mmdeploy_llm.values.adapter_ref import AdapterRef
from mmdeploy_llm.values.closing import closed_on_error
from mmdeploy_llm.values.options.config import EngineConfig

from .deaths import again
from .desk import CLOSED_MEANWHILE, Desk, DeskStats, Held
from .local import LocalDesk
from .remote import RemoteDesk
from .ticket import Ticket

Value = TypeVar("Value")


def open_desk(config: EngineConfig, step_lock: AbstractContextManager[None] | None = None) -> Desk:
    """Returns the desk that the options describe. step_lock: see LocalDesk; of no effect on engines
    in other processes. Raises ConfigError, ModelError and PluginError, and WorkerDiedError when a
    process ends as it starts."""
    if config.data_parallel_size == 1:
        return LocalDesk(partial(start, config), step_lock)
    plugins = PluginManager.of(config)
    machine = read_machine(config)  # compiles the kernels once, not in all engines at once
    make = [
        partial(RemoteDesk, own, f"engine {index}", is_quiet=index > 0)
        for index, own in enumerate(engine_configs(config, machine))
    ]
    desks: list[RemoteDesk] = []
    with closed_on_error() as opened:
        for start_one in make:
            desks.append(start_one())
            opened.callback(desks[-1].kill)
        for desk in desks:
            desk.open()
        return ManyDesks(desks, plugins, make)


class ManyDesks(Desk):
    """Gives prompts to several desks. Each ticket is written in the thread of the desk that has its
    prompt."""

    def __init__(
        self,
        desks: list[RemoteDesk],
        plugins: PluginManager,
        make: Sequence[Callable[[], RemoteDesk]] = (),
    ) -> None:
        """make: functions that start another desk in place of each."""
        super().__init__()
        self.desks = desks
        self._make = make
        self._changes: dict[str, str | None] = {}  # of adapters since the start
        self.plugins = plugins
        self.runtime, self.abilities = desks[0].runtime, desks[0].abilities
        self.num_kv_blocks = min(desk.num_kv_blocks for desk in desks)
        self.max_begun = sum(desk.max_begun for desk in desks)
        self.num_seqs = sum(desk.num_seqs for desk in desks)

    @property
    def death(self) -> EngineError | None:
        """Why no desk is left; None while one is."""
        if self._living():
            return None
        return WorkerDiedError(f"no engine is left; the last one: {self.desks[-1].death}")

    @property
    def num_dead(self) -> int:
        """How many engines have died while others compute."""
        living = len(self._living())
        return len(self.desks) - living if living else 0

    def revive(self) -> None:
        """Starts engines in place of those that have died; see Desk."""
        for index, make in enumerate(self._make):
            dead = self.desks[index]
            if dead.death is None or self._is_closed:
                continue
            with closed_on_error() as opened:
                fresh = make()
                opened.callback(fresh.kill)
                fresh.open()
                self._change_adapters(fresh)
            self.desks[index] = fresh
            dead.close()
            self._begin_some()

    def _change_adapters(self, desk: RemoteDesk) -> None:
        """Gives a new desk the adapters of the others."""
        known = desk.adapters()
        for name, source in self._changes.items():
            if source is not None:
                desk.load_adapter(name, source)
            elif name in known:
                desk.unload_adapter(name)

    def count_tokens(self, prompt: Any) -> TokenCount:
        """Counts prompt and media tokens; see Desk."""
        return self._ask_one(lambda desk: desk.count_tokens(prompt))

    def boxes(self, prompt: Any, text: str) -> FoundBoxes:
        """Returns the boxes in an answer; see Desk."""
        return self._ask_one(lambda desk: desk.boxes(prompt, text))

    def load_adapter(self, name: str, source: str) -> AdapterRef:
        """Makes an adapter known to all living desks, or to none; see Desk."""
        self.check()
        before, done, ref = self.adapters().get(name), [], None
        try:
            for desk in self._living():
                ref = desk.load_adapter(name, source)
                done.append(desk)
        except BaseException:
            for desk in done:
                if before is None:
                    desk.unload_adapter(name)
                else:
                    desk.load_adapter(name, before.folder)
            raise
        self._changes[name] = source
        assert ref is not None, "a desk lives"
        return ref

    def unload_adapter(self, name: str) -> None:
        """Has all living desks forget an adapter; see Desk."""
        self.check()
        self._check_unused(name)
        for desk in self._living():
            desk.unload_adapter(name)
        self._changes[name] = None

    def adapters(self) -> Mapping[str, AdapterRef]:
        """Returns the adapters by name; see Desk."""
        return self._ask_one(lambda desk: desk.adapters())

    def copy_tokenizer(self) -> Any:
        """Returns a copy of the tokenizer; see Desk."""
        return self._ask_one(lambda desk: desk.copy_tokenizer())

    def cache_stats(self) -> Mapping[str, CacheStats]:
        """Returns the sums of the statistics of all living desks; see Desk."""
        self.check_open()
        return add_stats(desk.cache_stats() for desk in self._living())

    def stats(self) -> DeskStats:
        """Returns the sums of the counters of all living desks, and of the prompts held back."""
        self.check()
        each = [desk.stats() for desk in self._living()]
        added = {name: sum(getattr(one, name) for one in each) for name in DeskStats.__slots__}
        added["num_waiting"] += len(self._held) - self._num_begun
        return DeskStats(**added)

    def stop(self) -> None:
        """Ends all processes; see Desk."""
        self._is_closed = True
        for desk in self.desks:
            desk.stop()

    def close(self) -> None:
        """Ends all processes and waits for their ends; see Desk."""
        self._home.check()
        self.stop()
        for desk in self.desks:
            desk.close()
        self._fail_all(EngineError(CLOSED_MEANWHILE))

    def _living(self) -> list[RemoteDesk]:
        return [desk for desk in self.desks if desk.death is None]

    def _watch(self, held: Held) -> None:
        """Does nothing: a prompt with a deadline is given to a desk at once, and watched there."""

    def _can_begin(self, held: Held) -> bool:
        """Holds a prompt back while all desks are full, so that the first to be free gets it."""
        desks = self._living()
        return held.deadline is not None or not desks or max(d.num_free for d in desks) > 0

    def _begin(self, held: Held) -> None:
        """Gives a prompt to the desk with the most free capacity."""
        held.num_tries += 1
        ask = replace(held.ask, request_id=held.request_id, priority=held.priority)
        forward = partial(self._forward, held, held.num_tries)
        while desks := self._living():
            desk = self._home_of(held, desks) or max(desks, key=lambda desk: desk.num_free)
            try:
                held.desk = desk
                held.inner = desk.submit(ask, forward, number=held.number, deadline=held.deadline)
                break
            except EngineError as error:
                if desk.death is None:  # it is closed
                    self._finish(held.number, error)
                    return
        else:
            self._finish(held.number, self.death)
        if held.inner is not None and held.number not in self._held:
            held.inner.abort()

    def _home_of(self, held: Held, desks: Sequence[Desk]) -> Desk | None:
        """Returns the desk of another prompt of the same group, which has computed its prefix."""
        group = held.ask.group
        if group is None:
            return None
        others = (each.desk for each in tuple(self._held.values()) if each.ask.group == group)
        return next((desk for desk in others if desk in desks), None)

    def _abort_begun(self, held: Held) -> bool:
        if held.inner is None:
            return False
        held.inner.abort()
        return True

    def _post(self, task: Callable[[], object]) -> None:
        for desk in self._living()[:1]:
            desk._post(task)

    def _forward(self, held: Held, num_tries: int, inner: Ticket) -> None:
        """Puts the outputs of a desk's ticket into the caller's ticket, or tries another desk."""
        ticket = held.ticket()
        while held.num_tries == num_tries and (output := inner.get_nowait()) is not None:
            is_lost = isinstance(inner.error, WorkerDiedError)
            num_deaths = held.ask.num_deaths + held.num_tries
            if is_lost and not held.has_output and again(num_deaths) == "together":
                self._begin(held)
                return
            held.has_output = True
            if inner.is_over:  # before its reader knows, as in LocalDesk
                self._finish(held.number)
            if ticket is not None:
                ticket.error = inner.error
                ticket.put(output)
        if held.num_tries == num_tries and inner.is_over:
            self._finish(held.number)

    def _ask_one(self, call: Callable[[RemoteDesk], Value]) -> Value:
        """Calls one desk; another one when it dies meanwhile."""
        while True:
            self.check()
            desk = self._living()[0]
            try:
                return call(desk)
            except EngineError:
                if desk.death is None:
                    raise
