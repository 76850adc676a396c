"""What a decoder asks of its attention, found out by running it once on a few tokens.

    observe       on the meta device, before weights are read: which layers came to us, with what
                  masks, windows, sizes and further arguments
    check_mixing  on the weights: with attention that gives zeros, no token may depend on another

so that what the engine cannot do is an error that names the layer, never a wrong token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from .interface import STEP, refused, unknown_arguments

PROBE = "mmdeploy_llm_probe"
NUM_TOKENS = 6
ATTENTION_TYPES = ("full_attention", "sliding_attention")
FAR = 100_000  # a place behind any window that is in use
CHECKED_PLACES = (0, 1, 7, 100, 4095, 4096, FAR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What the KV cache needs to know."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


class _MaskUsed(Exception):
    """Somebody computes with the mask: an attention of the model's own."""


class _Mask:
    """In place of a mask tensor: the function (batch, head, query, key) -> is it seen."""

    def __init__(self, sees: Callable[..., Any]) -> None:
        self.sees = sees

    def _refuse(*_: object, **__: object) -> Any:
        raise _MaskUsed

    __add__ = __radd__ = __mul__ = __rmul__ = __getitem__ = __getattr__ = _refuse
    __torch_function__ = staticmethod(_refuse)


@dataclass(slots=True)
class Probe:
    """Collects what arrives in one forward pass. sizes: layer -> (K, D)."""

    model: str
    names: dict[int, str]  # id of a module -> how to call it
    sizes: dict[int, tuple[int, int]] = field(default_factory=dict)
    modules: set[int] = field(default_factory=set)

    def see(self, module: nn.Module, q: Tensor, k: Tensor, mask: object, **more: Any) -> None:
        """Records one call. Raises ModelNotSupportedError for what the engine cannot do."""
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        reason = _reason(module, q, k, mask, **more)
        if reason is None and layer in self.sizes:
            reason = "shares the keys and values of its layer with another attention"
        if reason is not None:
            raise refused(self.model, self.names[id(module)], reason)
        self.sizes[layer] = (int(k.shape[1]), int(q.shape[-1]))
        self.modules.add(id(module))


def register() -> None:
    """Makes the probe known to transformers; doing so again changes nothing."""
    AttentionInterface.register(PROBE, _attend)
    AttentionMaskInterface.register(PROBE, _mask)


def observe(model: str, decoder: nn.Module, forward: Callable[[], object]) -> Sizes:
    """Runs `forward`, a pass of `decoder` over NUM_TOKENS tokens, and checks all that it asked for.

    Raises ModelNotSupportedError; whatever else comes is the pass's own.
    """
    register()
    probe = Probe(model, {id(m): f"{path} ({type(m).__name__})" for path, m in _named(decoder)})
    config: Any = decoder.config
    layers = decoder_layers(decoder)
    _check_types(model, config, layers)
    before = {id(m): m.__dict__.get(STEP) for _, m in _named(decoder)}
    for _, module in _named(decoder):
        setattr(module, STEP, probe)
    entered = [""]
    hooks = [
        layer.register_forward_pre_hook(lambda *_, path=path: entered.append(path))
        for path, layer in layers.items()
    ]
    try:
        with told(config, PROBE):
            forward()
    except _MaskUsed:
        layer = layers.get(entered[-1], decoder)
        raise refused(model, f"{entered[-1]} ({_parts(layer)})", NOT_OURS) from None
    finally:
        for hook in hooks:
            hook.remove()
        for _, module in _named(decoder):
            setattr(module, STEP, before[id(module)])
    for path, layer in layers.items():
        if not any(id(part) in probe.modules for part in layer.modules()):
            raise refused(model, f"{path} ({_parts(layer)})", NOT_OURS)
    return _sizes(model, probe)


NOT_OURS = "has no attention that goes through transformers' attention interface"


@contextmanager
def told(config: Any, name: str) -> Iterator[None]:
    """The decoder's config names this attention while the block runs."""
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before


def check_mixing(
    model: str, decoder: nn.Module, hidden_size: int, forward: Callable[[Tensor], object]
) -> None:
    """With attention that gives zeros, a token must not depend on those before it.

    forward: a pass over [NUM_TOKENS, hidden]. Raises ModelNotSupportedError with the first layer
    that mixes tokens in another way: a state space, a convolution, an attention of its own.
    """
    weight = next(decoder.parameters())
    rows = torch.randn(NUM_TOKENS, hidden_size, generator=torch.Generator().manual_seed(0))
    other = torch.cat([-rows[:1], rows[1:]])
    seen: list[dict[str, Tensor]] = []
    for embeds in (rows, other):
        found: dict[str, Tensor] = {}
        hooks = [
            layer.register_forward_hook(_keeper(found, path))
            for path, layer in decoder_layers(decoder).items()
        ]
        try:
            forward(embeds.to(weight.device, weight.dtype))
        finally:
            for hook in hooks:
                hook.remove()
        seen.append(found)
    for path, out in seen[0].items():
        if not torch.allclose(out, seen[1][path], rtol=1e-2, atol=1e-3, equal_nan=True):
            layer = decoder.get_submodule(path)
            raise refused(
                model,
                f"{path} ({_parts(layer)})",
                "mixes tokens in another way than through transformers' attention interface",
            )


def decoder_layers(decoder: nn.Module) -> dict[str, nn.Module]:
    """Path -> layer, of the decoder's longest list of modules. {} where there is none."""
    lists = [
        (path, module)
        for path, module in decoder.named_modules()
        if isinstance(module, nn.ModuleList) and "." not in path
    ]
    if not lists:
        return {}
    path, layers = max(lists, key=lambda item: len(item[1]))
    return {f"{path}.{number}": layer for number, layer in enumerate(layers)}


def describe_layers(decoder: nn.Module) -> list[str]:
    """The classes of its first layer and of what that consists of; [] without layers."""
    layers = decoder_layers(decoder)
    return [_parts(next(iter(layers.values())))] if layers else []


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """As interface.attend; gives zeros."""
    probe: Probe = getattr(module, STEP)
    probe.see(module, query, key, attention_mask, value=value, window=sliding_window, **kwargs)
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
    **kwargs: Any,
) -> str | None:
    """Why this attention cannot be computed by the engine; None when it can."""
    if k.shape[2] != q.shape[2]:
        return f"attends to {k.shape[2]} other places than its own {q.shape[2]} (cross attention)"
    if getattr(module, "is_causal", True) is False or kwargs.get("is_causal") is False:
        return "is not causal"
    if value.shape[-1] > q.shape[-1]:
        return "has values that are larger than its keys"
    unknown = unknown_arguments(kwargs)
    if unknown:
        return f"passes {', '.join(unknown)}, which paged attention here does not compute"
    if isinstance(mask, _Mask):
        return None if _is_causal(mask, window) else _other_mask(window)
    return None if mask is None else "adds a mask or bias of its own to the scores"


def _is_causal(mask: _Mask, window: int | None) -> bool:
    """Whether the mask is what the engine's attention does."""
    places = set(CHECKED_PLACES) | {FAR - (window or 1), FAR + 1 - (window or 1), FAR - 1, FAR + 1}
    for query in (0, 7, FAR):
        for key in sorted(place for place in places if place >= 0):
            wanted = key <= query and (window is None or key > query - window)
            try:
                indices = [torch.tensor(at, device="cpu") for at in (0, 0, query, key)]
                found = bool(mask.sees(*indices))
            except Exception:  # a mask that looks into tensors of the step
                return False
            if found != wanted:
                return False
    return True


def _other_mask(window: int | None) -> str:
    kind = "causal" if window is None else f"causal with a window of {window} tokens"
    return f"sees other tokens than attention that is {kind}"


def _check_types(model: str, config: Any, layers: dict[str, nn.Module]) -> None:
    """Layers that config.json calls something else than attention."""
    types = getattr(config, "layer_types", None) or ()
    for path, kind in zip(layers, types, strict=False):
        if kind not in ATTENTION_TYPES:
            raise refused(model, f"{path} ({_parts(layers[path])})", f"is of the type {kind!r}")


def _sizes(model: str, probe: Probe) -> Sizes:
    if not probe.sizes:
        raise refused(model, "no layer", NOT_OURS)
    num_layers = max(probe.sizes) + 1
    heads = {layer: heads for layer, (heads, _) in sorted(probe.sizes.items())}
    dims = {layer: dim for layer, (_, dim) in sorted(probe.sizes.items())}
    for name, values in (("key/value heads", heads), ("channels in a head", dims)):
        first = next(iter(values.values()))
        for layer, value in values.items():
            if value != first:
                reason = f"has {value} {name}, layer {next(iter(values))} has {first}"
                raise refused(model, f"layer {layer}", reason)
    return Sizes(
        num_layers=num_layers,
        num_kv_heads=next(iter(heads.values())),
        head_dim=next(iter(dims.values())),
    )


def _named(decoder: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, module in decoder.named_modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            yield path, module


def _parts(layer: nn.Module) -> str:
    """The class of a layer and of what it consists of, norms and the like left out."""
    children = [type(child).__name__ for child in layer.children()]
    kept = [name for name in children if "Norm" not in name and "MLP" not in name]
    return ", ".join([type(layer).__name__, *kept[:3]])


def _keeper(found: dict[str, Tensor], path: str) -> Callable[..., None]:
    def keep(_module: nn.Module, _args: object, out: Any) -> None:
        hidden = out[0] if isinstance(out, tuple) else out
        found[path] = hidden.detach().reshape(NUM_TOKENS, -1)[1:].float()

    return keep
