"""Where a round's time goes, taken by timers around the engine's parts and the model's layers.

Times are exclusive: what a part hands on to another is that one's. A timer costs about a
microsecond, and there are two for each layer; it is there only while the profiler watches, on the
objects of one engine.
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

from mmdeploy_llm.layers.decoder import Attention
from mmdeploy_llm.layers.linear import Embedding, Linear
from mmdeploy_llm.layers.mlp import MLP, GatedMLP
from mmdeploy_llm.layers.moe import Experts, Router, SoftmaxRouter
from mmdeploy_llm.layers.norm import LayerNorm, RMSNorm
from mmdeploy_llm.layers.rotary import Rotary
from mmdeploy_llm.layers.vision import PatchEmbed, PositionTable, VisionAttention
from mmdeploy_llm.llm import LLM

PHASES = ("schedule", "prepare", "encode", "forward", "sample", "deliver", "engine")
# Parts of the engine, seen from the LLM, and the phase that begins there.
PARTS = (
    ("_engine.step", "engine"),
    ("_engine._scheduler.plan", "schedule"),
    ("_engine._scheduler.plan_next", "schedule"),
    ("_engine._scheduler.commit", "schedule"),
    ("_engine._scheduler.release", "schedule"),
    ("_engine._runner.start", "prepare"),
    ("_engine._runner._finish", "prepare"),
    ("_engine._runner._encoder.encode", "encode"),
    ("_engine._runner._sampler.launch", "sample"),
    ("_engine._delivery.deliver", "deliver"),
    ("model.forward", "forward"),
)
INTAKE = ("_intake.accept", "_intake.accept_chat")
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
    GatedMLP: "activation",  # the products in it are layers of their own
    MLP: "activation",
    Embedding: "embedding",
    PositionTable: "embedding",
}
KERNELS = {
    "attend": "attention",
    "write_cache": "attention",
    "rms_norm": "norm",
    "rotate": "rotary",
    "silu_mul": "activation",
}
OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRow:
    """phase: one of PHASES, "between steps" or "intake". kind: of layer, "" for the whole phase.
    share: of the round's time."""

    phase: str
    kind: str
    seconds: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """seconds: of the whole round. Whole phases but "intake" add up to it; intake runs beside the
    steps, in threads of its own."""

    rows: tuple[ProfileRow, ...]
    num_steps: int
    seconds: float


class Clock:
    """Exclusive times by phase and kind, of one thread. Its own only writer."""

    def __init__(self, synchronize: Callable[[], None] | None) -> None:
        """synchronize: waits for a device that computes by itself."""
        self.seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._synchronize = synchronize
        self._thread = threading.get_ident()
        self._stack: list[tuple[str, str]] = []
        self._since = 0.0

    def enter(self, phase: str | None, kind: str) -> None:
        """Time is now that of `kind`; phase: None stays in the one that runs."""
        if threading.get_ident() != self._thread:
            return
        self._settle()
        self._stack.append((phase or (self._stack[-1][0] if self._stack else OTHER), kind))

    def leave(self) -> None:
        """Time is that of what ran before again."""
        if threading.get_ident() == self._thread:
            self._settle()
            self._stack.pop()

    def timed(self, call: Callable[..., Any], phase: str | None, kind: str) -> Callable[..., Any]:
        """`call`, its time taken."""

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
    """Watches one LLM. Used once."""

    def __init__(self, llm: LLM) -> None:
        device = torch.device(llm.runtime.device)
        is_cuda = device.type == "cuda"
        self._llm = llm
        self._clock = Clock(partial(torch.cuda.synchronize, device) if is_cuda else None)
        self._lock = threading.Lock()
        self._intake = 0.0
        self._num_steps = 0
        self._seconds = 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Times what this thread runs inside the block; afterwards the LLM is as it was."""
        with ExitStack() as stack:
            for path, phase in PARTS:
                self._replace(stack, path, partial(self._clock.timed, phase=phase, kind=OTHER))
            for path in INTAKE:
                self._replace(stack, path, self._prepared)
            self._replace(stack, "_engine.step", self._counted)
            self._replace(
                stack, "model.logits", partial(self._clock.timed, phase="forward", kind="logits")
            )
            self._replace(stack, "_engine._runner._forward._backend.begin", self._begun)
            self._watch_layers(stack)
            begin = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - begin

    def profile(self) -> Profile:
        """What was seen."""
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
        """The method at `path` of the LLM is wrapped until the stack ends."""
        *way, name = path.split(".")
        owner = reduce(getattr, way, self._llm)
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
            turned = module.register_forward_hook(self._turning)
            stack.callback(turned.remove)

    def _turning(self, _: nn.Module, __: Any, rope: Any) -> None:
        """The angles of a step are rotary, and so is each turn with them."""
        rope.rotate = self._clock.timed(rope.rotate, None, "rotary")

    def _begun(self, begin: Callable[..., Any]) -> Callable[..., Any]:
        """The attention of a step."""

        def run(*args: Any, **kwargs: Any) -> Any:
            context = begin(*args, **kwargs)
            context.attend = self._clock.timed(context.attend, None, "attention")
            return context

        return run

    def _counted(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def run() -> Any:
            self._num_steps += 1
            return step()

        return run

    def _prepared(self, accept: Callable[..., Any]) -> Callable[..., Any]:
        """Intake, in any thread."""

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
    """owner.name is wrapped on this one object until the stack ends."""
    had = vars(owner).get(name)
    setattr(owner, name, wrap(getattr(owner, name)))
    stack.callback(setattr, owner, name, had) if had else stack.callback(delattr, owner, name)


def _kernels(module: nn.Module) -> list[Any]:
    found = getattr(module, "kernels", None)
    return [] if found is None else [found]
