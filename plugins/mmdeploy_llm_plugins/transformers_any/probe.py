"""Finds out what a decoder requires of its attention by running it once on a few tokens, before
weights are read: which layers call it, with which masks, windows, sizes and further arguments.

What the engine cannot do is an error that names the layer, never a wrong token. See mixing.py for
what only weights can show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from mmdeploy_llm.caches import PagedKV, State
from mmdeploy_llm.errors import MMDeployLLMError, ModelNotSupportedError

from .interface import STEP, NotCausal, refused, unknown_arguments
from .structure import NOT_OURS, decoder_layers, parts_of

PROBE = "mmdeploy_llm_probe"
NOT_CAUSAL = "is not causal"
NUM_TOKENS = 6
ATTENTION_TYPES = ("full_attention", "sliding_attention")
FAR = 100_000  # a position past any window in use
CHECKED_POSITIONS = (0, 1, 7, 100, 4095, 4096, FAR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Says what the engine keeps for the model. layers: keys and values of each. has_sinks: whether
    a layer has attention sinks. states: what the model keeps besides keys and values."""

    layers: tuple[PagedKV, ...]
    has_sinks: bool = False
    states: State | None = None


class TrialFailed(Exception):
    """The trial run raised an error in the model's code."""


class _MaskUsed(Exception):
    """The model computes with the mask, so it has an attention of its own."""


class _Mask:
    """Replaces a mask tensor by its function (batch, head, query, key) -> whether it is visible.

    Any computation with it raises _MaskUsed.
    """

    def __init__(self, sees: Callable[..., Any]) -> None:
        self.sees = sees

    def _refuse(*_: object, **__: object) -> Any:
        raise _MaskUsed

    __add__ = __radd__ = __mul__ = __rmul__ = __getitem__ = __getattr__ = _refuse
    __torch_function__ = staticmethod(_refuse)


@dataclass(slots=True)
class Probe:
    """Collects the attention calls of one forward pass.

    names: id of a module -> its name in messages. layers: index of each layer that called -> its
    keys and values. modules: ids of the modules that called. has_sinks: see Sizes. `see` is the
    only writer.
    """

    model: str
    names: dict[int, str]
    layers: dict[int, PagedKV] = field(default_factory=dict)
    modules: set[int] = field(default_factory=set)
    has_sinks: bool = False

    def see(self, module: nn.Module, q: Tensor, k: Tensor, mask: object, **more: Any) -> None:
        """Records one call. Raises ModelNotSupportedError for what the engine cannot do."""
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        reason = _reason(module, q, k, mask, **more)
        if reason is None and layer in self.layers:
            reason = "shares the keys and values of its layer with another attention"
        if reason is not None:
            kind = NotCausal if reason == NOT_CAUSAL else ModelNotSupportedError
            raise refused(
                self.model, self.names.get(id(module), type(module).__name__), reason, kind
            )
        self.layers[layer] = PagedKV(
            num_kv_heads=int(k.shape[1]), head_dim=int(q.shape[-1]), window=more["window"]
        )
        self.has_sinks |= more["sinks"] is not None
        self.modules.add(id(module))


def register() -> None:
    """Registers the probe with transformers; a second call changes nothing."""
    AttentionInterface.register(PROBE, _attend)
    AttentionMaskInterface.register(PROBE, _mask)


def observe(model: str, decoder: nn.Module, forward: Callable[[], object]) -> Sizes:
    """Runs `forward`, a pass of `decoder` over NUM_TOKENS tokens, and checks its attention calls.

    Raises ModelNotSupportedError for what the engine cannot do, TrialFailed when the pass fails.
    """
    register()
    probe = Probe(model, {id(m): f"{path} ({type(m).__name__})" for path, m in _named(decoder)})
    config: Any = decoder.config
    layers = decoder_layers(decoder)
    _check_types(model, config, layers)
    before = {id(m): m.__dict__.get(STEP) for _, m in _named(decoder)}
    for _, module in _named(decoder):
        setattr(module, STEP, probe)
    entered: list[str] = []
    hooks = [
        layer.register_forward_pre_hook(lambda *_, path=path: entered.append(path))
        for path, layer in layers.items()
    ]
    try:
        with attention_of(config, PROBE):
            forward()
    except _MaskUsed:
        raise refused(model, _last(entered, layers, decoder), NOT_OURS) from None
    except MMDeployLLMError:
        raise
    except Exception as error:  # transformers' code: anything may come
        raise TrialFailed(
            f"{_last(entered, layers, decoder)} failed on a trial of {NUM_TOKENS} tokens "
            f"({type(error).__name__}: {error})"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
        for _, module in _named(decoder):
            setattr(module, STEP, before.get(id(module)))  # a model may replace its modules
    for path, layer in layers.items():
        if not any(id(part) in probe.modules for part in layer.modules()):
            raise refused(model, f"{path} ({parts_of(layer)})", NOT_OURS)
    return _sizes(model, probe)


@contextmanager
def attention_of(config: Any, name: str) -> Iterator[None]:
    """Selects the attention `name` in the decoder's config while the block runs."""
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before


def _last(entered: list[str], layers: dict[str, nn.Module], decoder: nn.Module) -> str:
    """Describes the layer that was entered last, or the decoder when none was."""
    if not entered:
        return f"its decoder ({type(decoder).__name__})"
    return f"{entered[-1]} ({parts_of(layers[entered[-1]])})"


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Records a call with the arguments of interface.attend. Returns zeros."""
    probe: Probe = getattr(module, STEP)
    options = {"window": sliding_window, "sinks": s_aux, **kwargs}
    probe.see(module, query, key, attention_mask, value=value, **options)
    shape = (query.shape[0], query.shape[2], query.shape[1], value.shape[-1])
    return query.new_zeros(shape), None


def _mask(*, mask_function: Callable[..., Any], **_: Any) -> _Mask:
    return _Mask(mask_function)


def _reason(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    mask: object,
    *,
    value: Tensor,
    window: int | None,
    sinks: Tensor | None,
    **kwargs: Any,
) -> str | None:
    """Returns why the engine cannot compute this attention, None when it can."""
    if k.shape[2] != q.shape[2]:
        return f"attends from {q.shape[2]} tokens to {k.shape[2]} others (cross attention)"
    says_so = getattr(module, "is_causal", True) is False or kwargs.get("is_causal") is False
    if says_so and not (isinstance(mask, _Mask) and _is_causal(mask, window)):
        return NOT_CAUSAL  # a mask that is causal after all counts for more (PaliGemma's)
    if value.shape[-1] > q.shape[-1]:
        return "has values with more channels than its keys"
    if sinks is not None and sinks.shape != (q.shape[1],):
        return f"has attention sinks of the shape {tuple(sinks.shape)}, not one for each head"
    unknown = unknown_arguments(kwargs)
    if unknown:
        return f"passes {', '.join(unknown)}, which paged attention here does not compute"
    if isinstance(mask, _Mask):
        return None if _is_causal(mask, window) else _other_mask(window)
    return None if mask is None else "adds a mask or bias of its own to the scores"


def _is_causal(mask: _Mask, window: int | None) -> bool:
    """Returns whether the mask equals that of the engine's attention, at some positions."""
    edges = {FAR - (window or 1), FAR + 1 - (window or 1), FAR - 1, FAR + 1}
    positions = edges.union(CHECKED_POSITIONS)
    for query in (0, 7, FAR):
        for key in sorted(position for position in positions if position >= 0):
            wanted = key <= query and (window is None or key > query - window)
            try:
                indices = [torch.tensor(at, device="cpu") for at in (0, 0, query, key)]
                found = bool(mask.sees(*indices))
            except Exception:  # a mask that reads tensors of the step
                return False
            if found != wanted:
                return False
    return True


def _other_mask(window: int | None) -> str:
    kind = "causal" if window is None else f"causal with a window of {window} tokens"
    return f"attends to other tokens than attention that is {kind}"


def _check_types(model: str, config: Any, layers: dict[str, nn.Module]) -> None:
    """Raises ModelNotSupportedError for a layer that config.json says is not attention."""
    types = getattr(config, "layer_types", None) or ()
    for path, kind in zip(layers, types, strict=False):
        if kind not in ATTENTION_TYPES:
            raise refused(model, f"{path} ({parts_of(layers[path])})", f"is of the type {kind!r}")


def _sizes(model: str, probe: Probe) -> Sizes:
    if not probe.layers:
        raise refused(model, "no layer", NOT_OURS)
    other = replace(next(iter(probe.layers.values())), window=None)
    numbers = range(max(probe.layers) + 1)
    return Sizes(
        layers=tuple(probe.layers.get(number, other) for number in numbers),
        has_sinks=probe.has_sinks,
    )


def _named(decoder: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, module in decoder.named_modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            yield path, module
