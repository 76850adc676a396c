"""Selects the attention backend: by name, or of those that can serve the model the one of highest
priority. What each can compute is declared by its AttentionBackendSpec."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from types import MappingProxyType

import torch

from mmdeploy_llm.errors import ConfigError, PluginConflictError
from mmdeploy_llm.hooks import PluginManager
from mmdeploy_llm.hooks.factories import imported_for
from mmdeploy_llm.hooks.names import error_text, normalise
from mmdeploy_llm.hooks.objects.attention import (
    AttentionBackend,
    AttentionBackendSpec,
    AttentionSetup,
    Capability,
)
from mmdeploy_llm.hooks.objects.attention_names import named_backend
from mmdeploy_llm.hooks.records import FAULTS
from mmdeploy_llm.kernels import TORCH, Kernels
from mmdeploy_llm.values.options.runtime_config import AttentionChoice, AttentionNeeds

logger = logging.getLogger(__name__)

INSTEAD = "; use attention_backend='auto'"
SHOWN = MappingProxyType({"float8_e4m3fn": "fp8"})  # as the option says it
# Fields of needs and specs, and what it means that a backend lacks one.
LACKS = MappingProxyType(
    {
        "media_spans": "cannot let the tokens of a media item attend to each other in both "
        "directions, which the model needs",
        "windows": "cannot compute attention with a window, which the model has",
        "softcaps": "cannot cap attention scores, which the model does",
        "sinks": "cannot compute attention sinks, which the model has",
        "alibi": "cannot add linear biases of positions (ALiBi), which the model has",
        "sequences": "does not run a model that computes attention itself, as this one does",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The machine, as the choice of a backend needs it. kernels: those of the engine's device.
    capabilities: compute capability of each CUDA device."""

    kernels: Kernels = TORCH
    capabilities: Sequence[Capability] = ()

    def setup(self, needs: AttentionNeeds) -> AttentionSetup:
        """Returns what a backend learns of the engine."""
        device = torch.device(needs.device)
        index, known = device.index or 0, device.type == "cuda"
        known &= index < len(self.capabilities)
        return AttentionSetup(
            device=device,
            dtype=needs.dtype,
            kv_cache_dtype=needs.kv_cache_dtype,
            head_dims=needs.head_dims,
            block_size=needs.block_size,
            capability=self.capabilities[index] if known else None,
            kernels=self.kernels.attention,
        )


def select(needs: AttentionNeeds, plugins: PluginManager, host: Host) -> AttentionChoice:
    """Selects the backend for `needs`. Raises ConfigError when the named one cannot serve, or none
    can, and PluginConflictError when several of equal standing can."""
    if needs.name == "auto":
        return _best(needs, plugins, host)
    spec = named_backend(plugins, needs.name)
    problem = _problem(spec, needs, plugins, host)
    if problem:
        raise ConfigError(f"attention_backend = {spec.name!r} {problem}")
    return _choice(spec, needs, f"attention backend: {spec.name!r} of {plugins.origin(spec)}")


def suited(
    chosen: str, asked: str, needs: AttentionNeeds, plugins: PluginManager, host: Host
) -> str:
    """Returns the backend of a model that is built: `chosen`, which was selected before, unless it
    lacks what the model turns out to need; then another one that takes the same blocks. Raises as
    `select` does. asked: the option."""
    own = replace(needs, name=chosen)
    if asked == "auto" and _problem(named_backend(plugins, chosen), own, plugins, host):
        own = replace(needs, name="auto")
    return select(own, plugins, host).name


def create(name: str, plugins: PluginManager, setup: AttentionSetup) -> AttentionBackend:
    """Builds a backend. Raises ConfigError when its library cannot be imported, and PluginError,
    naming the plugin, when its factory fails."""
    return plugins.build(named_backend(plugins, name), setup)


def examined(
    needs: AttentionNeeds, plugins: PluginManager, host: Host
) -> Iterator[tuple[AttentionBackendSpec, str | None]]:
    """Yields the backends in the order of "auto", and why each cannot serve; None if it can."""
    for spec in _candidates(plugins):
        yield spec, _problem(spec, needs, plugins, host)


def _candidates(plugins: PluginManager) -> list[AttentionBackendSpec]:
    """Returns the backends in the order of "auto", each name once: that which its plugin serves."""
    specs = plugins.provided(AttentionBackendSpec)
    if not specs:
        raise ConfigError(
            "no loaded plugin provides an attention backend; if plugin 'attention' of this package "
            "is in blocked_plugins, take it out, and after an update of an editable installation "
            f"install it again{plugins.failure_note()}"
        )
    names = dict.fromkeys(normalise(spec.name) for spec in specs)
    found = [named_backend(plugins, name) for name in names]
    return sorted({id(spec): spec for spec in found}.values(), key=lambda x: _rank(x, plugins))


def _rank(spec: AttentionBackendSpec, plugins: PluginManager) -> tuple[int, int]:
    return -spec.priority, -plugins.origin(spec).standing


def _best(needs: AttentionNeeds, plugins: PluginManager, host: Host) -> AttentionChoice:
    passed: list[str] = []
    candidates = iter(_candidates(plugins))
    for spec in candidates:
        problem = _problem(spec, needs, plugins, host)
        if problem is not None:
            passed.append(f"{spec.name} {problem.removesuffix(INSTEAD)}")
            continue
        origin = plugins.origin(spec)
        for other in candidates:
            if _rank(other, plugins) != _rank(spec, plugins):
                break
            if plugins.origin(other) != origin and not _problem(other, needs, plugins, host):
                raise PluginConflictError(
                    f"attention backends {spec.name!r} of {origin} and {other.name!r} of "
                    f"{plugins.origin(other)} can both serve, at priority {spec.priority}; choose "
                    f"with attention_backend={spec.name!r} or {other.name!r}"
                )
        why = f"attention backend 'auto': {spec.name!r} of {origin}, priority {spec.priority}"
        return _choice(spec, needs, "; ".join((why, *(f"not {reason}" for reason in passed))))
    raise ConfigError(
        "attention_backend = 'auto': no backend can serve this model with these options"
        + "".join(f"\n - {reason}" for reason in passed)
        + plugins.failure_note()
    )


def _choice(spec: AttentionBackendSpec, needs: AttentionNeeds, why: str) -> AttentionChoice:
    size = spec.block_size if needs.block_size is None else needs.block_size
    return AttentionChoice(name=spec.name, block_size=size, why=why)


def _problem(
    spec: AttentionBackendSpec, needs: AttentionNeeds, plugins: PluginManager, host: Host
) -> str | None:
    """Returns why the backend cannot serve `needs`, as the end of a sentence; None if it can."""
    setup = host.setup(needs)
    return (
        _place_problem(spec, needs, setup)
        or _head_problem(spec, needs)
        or _cache_problem(spec, needs, plugins)
        or _block_problem(spec, needs)
        or _lack(spec, needs, plugins)
        or _unavailable(spec, setup, plugins)
    )


def _place_problem(
    spec: AttentionBackendSpec, needs: AttentionNeeds, setup: AttentionSetup
) -> str | None:
    if setup.device.type not in spec.devices or needs.dtype not in spec.dtypes:
        places = {"cpu": "a CPU", "cuda": "a CUDA device"}
        devices = " or ".join(places.get(kind, kind) for kind in spec.devices)
        return (
            f"needs {devices} and {' or '.join(spec.dtypes)}, got device = {needs.device!r} and "
            f"dtype = {needs.dtype!r}{INSTEAD}"
        )
    found = setup.capability
    if found is None:
        return None
    has = f"{needs.device} has {found[0]}.{found[1]}{INSTEAD}"
    if spec.min_capability is not None and found < spec.min_capability:
        return "needs compute capability {}.{}, but ".format(*spec.min_capability) + has
    if spec.below_capability is not None and found >= spec.below_capability:
        return (
            "does not support compute capability {}.{}, but ".format(*spec.below_capability) + has
        )
    return None


def _head_problem(spec: AttentionBackendSpec, needs: AttentionNeeds) -> str | None:
    step, upper = spec.head_multiple, spec.max_head_dim
    for size in needs.head_dims:
        if size % step or (upper is not None and size > upper):
            bound = "" if upper is None else f" up to {upper}"
            return (
                f"cannot compute heads of {size} channels, which the model has (multiples of "
                f"{step}{bound}); use attention_backend='auto' or 'reference'"
            )
    return None


def _cache_problem(
    spec: AttentionBackendSpec, needs: AttentionNeeds, plugins: PluginManager
) -> str | None:
    wanted = needs.kv_cache_dtype
    if wanted == needs.dtype or wanted in spec.cache_dtypes:
        return None
    able = _able(plugins, lambda other: wanted in other.cache_dtypes)
    return (
        f"does not support kv_cache_dtype = {SHOWN.get(wanted, wanted)!r} for dtype = "
        f"{needs.dtype!r}: use {able}, or leave kv_cache_dtype out"
    )


def _block_problem(spec: AttentionBackendSpec, needs: AttentionNeeds) -> str | None:
    size, multiple = needs.block_size, spec.block_multiple
    if size is None or size % multiple == 0:
        return None
    return (
        f"does not suit block_size = {size}; use a multiple of {multiple}, or "
        "attention_backend='auto'"
    )


def _lack(spec: AttentionBackendSpec, needs: AttentionNeeds, plugins: PluginManager) -> str | None:
    for feature, text in LACKS.items():
        if getattr(needs, feature) and not getattr(spec, feature):
            able = _able(plugins, attrgetter(feature))
            return f"{text}; use 'auto' or {able}"
    if needs.deterministic and not spec.deterministic:
        able = _able(plugins, lambda other: other.deterministic)
        return f"adds in an order that depends on the batch; deterministic=True needs {able}"
    return None


def _able(plugins: PluginManager, can: Callable[[AttentionBackendSpec], bool]) -> str:
    """Names the backends that can do something, with their devices."""
    found = [
        f"{spec.name!r} ({' and '.join(spec.devices)})"
        for spec in plugins.provided(AttentionBackendSpec)
        if can(spec)
    ]
    return " or ".join(found) or "a backend that can (none is installed)"


def _unavailable(
    spec: AttentionBackendSpec, setup: AttentionSetup, plugins: PluginManager
) -> str | None:
    """Asks the backend's own function. One that fails is the same as a backend that cannot be
    used, and says so: another one serves, unless this one is named."""
    if spec.available is None:
        return None
    try:
        found = imported_for(spec.available, str(plugins.origin(spec)))(setup)
    except FAULTS as error:
        logger.warning("%s: %s failed: %s", plugins.origin(spec), spec.available, error_text(error))
        return f"cannot be used: {spec.available} of {plugins.origin(spec)}: {error_text(error)}"
    if found is None:
        return None
    if not isinstance(found, str) or not found:
        return (
            f"cannot be used: {spec.available} of {plugins.origin(spec)} must return None or a "
            f"text, got {found!r:.80}"
        )
    return found
