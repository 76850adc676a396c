"""Profiles a round with timers around the engine's components and the model's layers.

Times are exclusive: the time of a nested call counts for the callee only. A timer costs about a
microsecond, and each layer has two. Timers exist only inside `Profiler.watching`, on the objects
of one engine.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import nn

from mmdeploy_llm.client.llm import LLM
from mmdeploy_llm.engine.desk.local import LocalDesk
from mmdeploy_llm.layers.basic.experts import Experts
from mmdeploy_llm.layers.basic.linear import Embedding, Linear
from mmdeploy_llm.layers.basic.mlp import MLP, GatedMLP
from mmdeploy_llm.layers.basic.norm import LayerNorm, RMSNorm
from mmdeploy_llm.layers.basic.rotary import Rotary
from mmdeploy_llm.layers.decoder import Attention
from mmdeploy_llm.layers.moe import Router, SoftmaxRouter
from mmdeploy_llm.layers.vision import PatchEmbed, PositionTable, VisionAttention

PHASES = ("schedule", "prepare", "encode", "forward", "sample", "deliver", "engine")
# Attribute paths from the LLM to the timed methods, and the phase that each belongs to.
TIMED_METHODS = (
    ("_desk.engine.step", "engine"),
    ("_desk.engine._scheduler.plan", "schedule"),
    ("_desk.engine._scheduler.plan_next", "schedule"),
    ("_desk.engine._scheduler.commit", "schedule"),
    ("_desk.engine._scheduler.release", "schedule"),
    ("_desk.engine._runner.start", "prepare"),
    ("_desk.engine._runner._finish", "prepare"),
    ("_desk.engine._runner._encoder.encode", "encode"),
    ("_desk.engine._runner._sampler.launch", "sample"),
    ("_desk.engine._delivery.deliver", "deliver"),
    ("model.forward", "forward"),
)
INTAKE = "_desk.intake.accept"
KINDS: Mapping[type[nn.Module], str] = {
    Linear: "linear",
    PatchEmbed: "linear",
    Experts: "linear",
    Router: "linear",
    SoftmaxRouter: "linear",
    Attention: "attention",
    VisionAttention: "attention",
    RMSNorm: "norm",
    LayerNorm: "norm",
    Rotary: "rotary",
    GatedMLP: "activation",  # its matrix products are layers of their own
    MLP: "activation",
    Embedding: "embedding",
    PositionTable: "embedding",
}
KERNELS = {
    "attend": "attention",
    "write_cache": "attention",
    "rms_norm": "norm",
    "rotate": "rotary",
    "gated_mul": "activation",
}
OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRow:
    """The time of a phase, or of one kind of layer in it.

    phase: one of PHASES, "between steps" or "intake".
    kind: the kind of layer, "" for the whole phase.
    share: fraction of the round's time.
    """

    phase: str
    kind: str
    seconds: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The profile of a round of `seconds`. The phases except "intake" add up to it; intake runs in
    other threads, concurrently with the steps."""

    rows: tuple[ProfileRow, ...]
    num_steps: int
    seconds: float


class Clock:
    """Accumulates exclusive times by phase and kind, in one thread."""

    def __init__(self, thread: threading.Thread, synchronize: Callable[[], None] | None) -> None:
        """synchronize: waits for an asynchronous device; None on the CPU."""
        self.seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._synchronize = synchronize
        self._thread = thread.ident
        self._stack: list[tuple[str, str]] = []
        self._since = 0.0

    def enter(self, phase: str | None, kind: str) -> None:
        """Starts counting for `kind`; phase None keeps the current phase."""
        if threading.get_ident() != self._thread:
            return
        self._settle()
        self._stack.append((phase or (self._stack[-1][0] if self._stack else OTHER), kind))

    def leave(self) -> None:
        """Resumes counting for what ran before the last `enter`."""
        if threading.get_ident() == self._thread:
            self._settle()
            self._stack.pop()

    def timed(self, call: Callable[..., Any], phase: str | None, kind: str) -> Callable[..., Any]:
        """Wraps `call` so that its time is counted."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self.enter(phase, kind)
            try:
                return call(*args, **kwargs)
            finally:
                self.leave()

        return run

    def _settle(self) -> None:
        if self._synchronize is not None:
            self._synchronize()
        now = time.perf_counter()
        if self._stack:
            self.seconds[self._stack[-1]] += now - self._since
        self._since = now


class Profiler:
    """Profiles one LLM. Used once."""

    def __init__(self, llm: LLM) -> None:
        device = torch.device(llm.runtime.device)
        is_cuda = device.type == "cuda"
        self._llm = llm
        synchronize = partial(torch.cuda.synchronize, device) if is_cuda else None
        assert isinstance(llm._desk, LocalDesk), "others compute in other processes"
        self._clock = Clock(llm._desk.thread, synchronize)
        self._lock = threading.Lock()
        self._intake = 0.0
        self._num_steps = 0
        self._seconds = 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Times what the engine runs inside the block; restores the LLM afterwards."""
        with ExitStack() as stack:
            for path, phase in TIMED_METHODS:
                self._replace(stack, path, partial(self._clock.timed, phase=phase, kind=OTHER))
            self._replace(stack, INTAKE, self._timed_intake)
            self._replace(stack, "_desk.engine.step", self._counted_step)
            self._replace(
                stack, "model.logits", partial(self._clock.timed, phase="forward", kind="logits")
            )
            self._replace(stack, "_desk.engine._runner._forward._backend.begin", self._timed_begin)
            self._watch_layers(stack)
            begin = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - begin

    def profile(self) -> Profile:
        """Returns the times that `watching` measured."""
        by_phase: defaultdict[str, float] = defaultdict(float)
        for (phase, _), seconds in self._clock.seconds.items():
            by_phase[phase] += seconds
        rows = []
        for phase in PHASES:
            rows.append(self._row(phase, "", by_phase[phase]))
            if phase in ("encode", "forward"):
                rows += self._kinds(phase)
        between = max(0.0, self._seconds - sum(by_phase.values()))
        rows.append(self._row("between steps", "", between))
        rows.append(self._row("intake", "", self._intake))
        return Profile(rows=tuple(rows), num_steps=self._num_steps, seconds=self._seconds)

    def _kinds(self, phase: str) -> list[ProfileRow]:
        found = [
            (kind, seconds) for (own, kind), seconds in self._clock.seconds.items() if own == phase
        ]
        found.sort(key=lambda item: -item[1])
        return [self._row(phase, kind, seconds) for kind, seconds in found]

    def _row(self, phase: str, kind: str, seconds: float) -> ProfileRow:
        return ProfileRow(phase=phase, kind=kind, seconds=seconds, share=seconds / self._seconds)

    def _replace(
        self, stack: ExitStack, path: str, wrap: Callable[[Callable[..., Any]], Any]
    ) -> None:
        """Wraps the LLM's method at attribute path `path` until the stack is closed."""
        *parents, name = path.split(".")
        owner = reduce(getattr, parents, self._llm)
        _wrap(stack, owner, name, wrap)

    def _watch_layers(self, stack: ExitStack) -> None:
        model = self._llm.model
        if not isinstance(model, nn.Module):
            return
        kernels = {id(found): found for module in model.modules() for found in _kernels(module)}
        for found in kernels.values():
            for name, kind in KERNELS.items():
                _wrap(stack, found, name, partial(self._clock.timed, phase=None, kind=kind))
        for module in model.modules():
            own = next((kind for cls, kind in KINDS.items() if isinstance(module, cls)), None)
            if own is not None:
                self._watch(stack, module, own)

    def _watch(self, stack: ExitStack, module: nn.Module, kind: str) -> None:
        before = module.register_forward_pre_hook(lambda *_: self._clock.enter(None, kind))
        stack.callback(before.remove)
        after = module.register_forward_hook(lambda *_: self._clock.leave(), always_call=True)
        stack.callback(after.remove)
        if isinstance(module, Rotary):
            rotation = module.register_forward_hook(self._time_rotation)
            stack.callback(rotation.remove)

    def _time_rotation(self, _: nn.Module, __: Any, rope: Any) -> None:
        """Times each rotation of heads by the angles that the module computed."""
        rope.rotate = self._clock.timed(rope.rotate, None, "rotary")

    def _timed_begin(self, begin: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps the backend's `begin` so that the attention of its context is timed."""

        def run(*args: Any, **kwargs: Any) -> Any:
            context = begin(*args, **kwargs)
            context.attend = self._clock.timed(context.attend, None, "attention")
            return context

        return run

    def _counted_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def run() -> Any:
            self._num_steps += 1
            return step()

        return run

    def _timed_intake(self, accept: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps an intake method, which any thread may call, so that its time is counted."""

        def run(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return accept(*args, **kwargs)
            finally:
                with self._lock:
                    self._intake += time.perf_counter() - begin

        return run


def _wrap(
    stack: ExitStack, owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Any]
) -> None:
    """Wraps the method `owner.name` on this object alone until the stack is closed."""
    own = vars(owner).get(name)
    setattr(owner, name, wrap(getattr(owner, name)))
    stack.callback(setattr, owner, name, own) if own else stack.callback(delattr, owner, name)


def _kernels(module: nn.Module) -> list[Any]:
    found = getattr(module, "kernels", None)
    return [found] if found is not None and found.is_compiled else []
