"""BackendSubject: an attention backend that is checked, and what its checks share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.hooks import AttentionBackend, AttentionBackendSpec, AttentionSetup
from mmdeploy_llm.hooks.factories import imported
from mmdeploy_llm.kernels import TORCH, Kernels
from mmdeploy_llm.kernels import cpu as native
from mmdeploy_llm.testing.models.base import (
    CheckFailed,
    CheckSkipped,
    attributed,
    demand,
    factory_of,
)

from .cases import TOLERANCE, Shape, Step, make_step

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HEAD_DIMS = (16, 64, 80, 128)
SHAPES = (
    Shape(query_lens=(1,), earlier=(0,)),
    Shape(query_lens=(1, 1, 9), earlier=(5, 40, 0)),
    Shape(query_lens=(1, 1, 1), earlier=(0, 3, 31)),
    Shape(query_lens=(7, 12), earlier=(0, 6), heads=6, kv_heads=2),
    Shape(query_lens=(1, 5), earlier=(15, 8), heads=8, kv_heads=1),
)


@dataclass(frozen=True, kw_only=True)
class BackendSubject:
    """A backend to check; see AttentionBackendConformance for the fields."""

    spec: AttentionBackendSpec
    tolerance: float | None = None
    make: Callable[[AttentionSetup], AttentionBackend] | None = None

    @cached_property
    def device(self) -> torch.device:
        """The device on which it is checked. Raises CheckSkipped where this machine has none."""
        if self.make is not None or "cpu" in self.spec.devices:
            return torch.device("cpu")
        for kind in self.spec.devices:
            if kind == "cuda" and torch.cuda.is_available():
                return torch.device("cuda")
        raise CheckSkipped(
            f"it computes on {' and '.join(self.spec.devices)}, which this machine does not have; "
            "run the check on one that has it, or give `make` where an interpreter computes"
        )

    @cached_property
    def kernels(self) -> Kernels:
        """The kernels of an engine on this machine."""
        try:
            return native.load() if self.device.type == "cpu" else TORCH
        except native.BuildError:
            return TORCH

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The declared dtypes, float32 first."""
        return tuple(dtype for name, dtype in DTYPES.items() if name in self.spec.dtypes)

    @property
    def head_dims(self) -> tuple[int, ...]:
        """Declared sizes of heads: usual ones, the smallest and the largest."""
        spec = self.spec
        upper = spec.max_head_dim or max(HEAD_DIMS)
        sizes = {size for size in HEAD_DIMS if size <= upper and size % spec.head_multiple == 0}
        sizes |= {max(spec.head_multiple, 8 // spec.head_multiple * spec.head_multiple)}
        return tuple(sorted(sizes | {upper // spec.head_multiple * spec.head_multiple}))

    def new(self, dtype: torch.dtype, cache_dtype: str | None = None) -> AttentionBackend:
        """Builds a backend for an engine. Raises CheckSkipped where it says why it cannot be used
        here, and CheckFailed where it cannot be built."""
        name = str(dtype).removeprefix("torch.")
        setup = AttentionSetup(
            device=self.device,
            dtype=name,
            kv_cache_dtype=cache_dtype or name,
            capability=torch.cuda.get_device_capability() if self.device.type == "cuda" else None,
            kernels=self.kernels.attention,
        )
        spec = self.spec
        if spec.available is not None and self.make is None:
            with attributed(f"{spec.available}(setup)", "return None, or why it cannot be used"):
                problem = imported(spec.available)(setup)
            demand(
                problem is None or isinstance(problem, str),
                f"{spec.available}(setup) returns {problem!r}; return None or a text",
            )
            if problem is not None:
                raise CheckSkipped(f"{spec.name} {problem}")
        with attributed(f"{spec.factory}(setup)", "accept an AttentionSetup"):
            built = (self.make or factory_of(spec))(setup)
        demand(
            isinstance(built, AttentionBackend),
            f"{spec.factory}(setup) returns a {type(built).__name__}; derive it from "
            "mmdeploy_llm.hooks.AttentionBackend",
        )
        demand(built.name == spec.name, f"its name is {built.name!r}, not {spec.name!r}")
        return built

    def step(self, shape: Shape, **how: Any) -> Step:
        """Returns a random step that the spec allows."""
        size = shape.block_size * self.spec.block_multiple
        dim = self.head_dim(shape.head_dim)
        return make_step(replace(shape, block_size=size, head_dim=dim), device=self.device, **how)

    def head_dim(self, wanted: int) -> int:
        """Returns the declared size next to the wanted one."""
        return min(self.head_dims, key=lambda size: abs(size - wanted))

    def attend(self, backend: AttentionBackend, step: Step, **options: Any) -> Tensor:
        """Returns the backend's attention of a step, checked for its form."""
        with attributed(f"begin(layout of {step.shape})", "accept every step"):
            context = backend.begin(step.layout, step.cache)
        with attributed(f"attend(0, q, k, v, {shown(options)}) of {step.shape}", "accept it"):
            found = context.attend(0, step.q, step.k, step.v, **options)
        wanted = step.expected()
        demand(
            isinstance(found, Tensor) and found.shape == wanted.shape,
            f"attend returns {tuple(getattr(found, 'shape', ()))} for {step.shape}; return "
            "[T, H, D] of the step's tokens",
        )
        demand(
            found.dtype == step.q.dtype,
            f"attend returns {found.dtype} for queries in {step.q.dtype}",
        )
        return found

    def compare(self, found: Tensor, wanted: Tensor, about: str, advice: str) -> None:
        """Raises CheckFailed where two results differ by more than rounding; names the row."""
        bound = self.tolerance or TOLERANCE[found.dtype]
        apart = (found.double() - wanted).abs() - bound * wanted.abs()
        bad = (~(apart <= bound)).flatten(1).any(1).nonzero().flatten().tolist()
        if bad:
            heads = (~(apart <= bound))[bad[0]].any(-1).nonzero().flatten().tolist()
            raise CheckFailed(
                f"{about}: rows {bad[:8]} of {len(found)} differ from plain attention by up to "
                f"{apart.max():.3g} beyond the tolerance {bound:g} (row {bad[0]}: heads "
                f"{heads[:8]}); {advice}"
            )

    def computes(self, step: Step, advice: str, **options: Any) -> None:
        """Compares a step with plain attention."""
        backend = self.new(step.q.dtype)
        found = self.attend(backend, step, **options)
        about = f"{step.q.dtype}, {step.shape}, {shown(options)}"
        self.compare(found, step.expected(**options), about, advice)

    def refuses(self, step: Step, option: str, field: str, **options: Any) -> None:
        """Checks that an option that the spec does not declare raises ModelNotSupportedError."""
        backend = self.new(step.q.dtype)
        try:
            found = backend.begin(step.layout, step.cache).attend(
                0, step.q, step.k, step.v, **options
            )
        except ModelNotSupportedError as error:
            demand(str(error), f"{option} raises an error without a message")
            return
        except Exception as error:
            raise CheckFailed(
                f"{option} raises {type(error).__name__}: {error}; the spec does not declare "
                f"`{field}`: raise ModelNotSupportedError that says so"
            ) from error
        wanted = step.expected(**options).to(found.dtype)
        right = torch.allclose(found, wanted, atol=0.05, rtol=0.05)
        what = "is computed: declare it" if right else "is ignored: raise ModelNotSupportedError"
        raise CheckFailed(f"the spec does not declare `{field}`, and {option} {what}")


def shown(options: dict[str, Any]) -> str:
    """Returns options for messages; () without any."""
    texts = {name: "..." if isinstance(x, Tensor) else repr(x) for name, x in options.items()}
    return ", ".join(f"{name}={text}" for name, text in texts.items()) or "no options"


def each_step(subject: BackendSubject, shapes: Sequence[Shape] = SHAPES) -> list[Step]:
    """Returns steps of these shapes, in the first declared dtype."""
    return [subject.step(x, seed=n, dtype=subject.dtypes[0]) for n, x in enumerate(shapes)]
