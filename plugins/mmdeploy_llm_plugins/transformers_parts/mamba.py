"""Replaces transformers' mixers of Mamba-2 by the engine's, which run on its kernels: the weights
have the same names. Their states are in transformers' cache, in the engine's layout."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from mmdeploy_llm.layers import Mamba2, Mamba2Config

from .cache import carriers
from .cache.states import CONV, RECURRENT, StateLayer
from .linear import AnyLinear

logger = logging.getLogger(__name__)

CHILDREN = frozenset({"in_proj", "conv1d", "norm", "out_proj"})
PARAMETERS = frozenset({"A_log", "D", "dt_bias"})
SIZES = ("hidden_size", "num_heads", "head_dim", "ssm_state_size", "n_groups", "conv_kernel_size")
FACTORS = "mup_vector"  # a buffer of Falcon H1's, which also have ssm_in_multiplier
NUM_TOKENS = 7  # of the prompt of the comparison
ROUNDING, ROUNDING_OF_HALF = 1e-3, 0.05
# Tokens that transformers' own scan computes as one square of scores, with padding up to it.
CHUNK = 32


class AnyMamba2(Mamba2):
    """Has the parameters and the arguments of the mixer that it replaces."""

    ssm_in_multiplier: float  # of a mixer with factors

    def __init__(self, plain: Any, config: Mamba2Config) -> None:
        with torch.device("meta"):
            super().__init__(config, int(plain.layer_idx))
        self.in_proj, self.out_proj = AnyLinear(plain.in_proj), AnyLinear(plain.out_proj)
        self.conv1d.weight, self.conv1d.bias = plain.conv1d.weight, plain.conv1d.bias
        if config.has_norm:
            self.norm.weight = plain.norm.weight
        for name, buffer in plain.named_buffers():
            self.register_buffer(name, buffer, persistent=False)
        for name in PARAMETERS:  # which the kernels read in float32
            setattr(self, name, nn.Parameter(getattr(plain, name).float(), requires_grad=False))
        for name, value in vars(plain).items():  # which layers around it may read
            if name not in vars(self):
                setattr(self, name, value)
        self.__dict__["_plain"] = plain  # no submodule: it has no weights of its own

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, cache: Any = None, *_: Any, **more: Any
    ) -> Tensor:
        """Computes the layer, [B, n, hidden] -> [B, n, hidden]. There is no padding among the
        tokens of a pass, so its mask says nothing."""
        given = (cache, *(more.get(name) for name in carriers.NAMES))
        states = _Passed(self, next((own for own in given if own is not None), None), hidden_states)
        x = hidden_states.flatten(0, 1)
        out = super().forward(
            x * self.ssm_in_multiplier if self.factors() is not None else x, states
        )
        states.keep()
        return out.view(hidden_states.shape)

    def factors(self) -> Tensor | None:
        """Returns what each channel of the projection is multiplied by; None of most models."""
        return self._buffers.get(FACTORS)

    def projected(self, x: Tensor) -> Tensor:
        """See Mamba2."""
        out, factors = super().projected(x), self.factors()
        return out if factors is None else out * factors.view(-1)

    def plain(self) -> Any:
        """Returns transformers' mixer with these weights."""
        plain: Any = self.__dict__["_plain"]
        plain.in_proj, plain.out_proj = self.in_proj, self.out_proj
        plain.conv1d.weight, plain.conv1d.bias = self.conv1d.weight, self.conv1d.bias
        if self.config.has_norm:
            plain.norm.weight = self.norm.weight
        plain._buffers.update(self._buffers)
        for name in PARAMETERS:
            setattr(plain, name, getattr(self, name))
        return plain


class _Passed:
    """The states of a pass, in a layer of transformers' cache or the rows that this was lent; see
    forward.StateContext. In the cache, each is written where it was read, and those of sequences
    that begin are zero."""

    def __init__(self, mixer: AnyMamba2, cache: Any, x: Tensor) -> None:
        count, length, _ = x.shape
        self._layer: Any = None if cache is None else cache.layers[mixer.layer]
        self.read = self.write = torch.arange(count, device=x.device)
        self._tensors: tuple[Tensor, ...]
        lent = getattr(self._layer, "lent", None)
        if lent is not None:
            self._layer, self._tensors = None, lent.tensors
            self.read, self.write = lent.read, lent.write
        elif self._layer is not None and self._layer.has_previous_state[0]:
            self._tensors = self._layer.conv_states[0], self._layer.recurrent_states[0]
        else:
            dtypes = x.dtype, torch.float32
            pairs = zip(mixer.config.state.shapes[:2], dtypes, strict=True)
            self._tensors = tuple(
                torch.zeros(count, *shape, dtype=dtype, device=x.device) for shape, dtype in pairs
            )
        self.source, self.target = self.read, self.write
        self.starts = torch.arange(0, (count + 1) * length, length)
        self.query_lens = (length,) * count
        self.num_decode = count if length == 1 else 0

    def tensors(self, layer: int) -> tuple[Tensor, ...]:
        """See forward.StateContext."""
        return self._tensors

    def keep(self) -> None:
        """Gives the states to the cache."""
        if self._layer is not None:
            for name, state in zip((CONV, RECURRENT), self._tensors, strict=True):
                self._layer.resume(name, 0, state)


def layers_of_mixers(decoder: nn.Module) -> list[int]:
    """Returns the layers whose mixers are the engine's."""
    return [module.layer for module in decoder.modules() if isinstance(module, AnyMamba2)]


def use_engine_mixers(model: nn.Module) -> None:
    """Replaces the mixers of `model` in place, where the engine's may compute the same."""
    for parent in list(model.modules()):
        children: list[tuple[str, Any]] = list(parent.named_children())
        for name, child in children:
            config = _config_of(child)
            if config is not None:
                setattr(parent, name, AnyMamba2(child, config))
            elif hasattr(child, "A_log") and type(getattr(child, "chunk_size", None)) is int:
                child.chunk_size = min(child.chunk_size, CHUNK)


def check_mixers(model: nn.Module) -> None:
    """Puts transformers' mixers back where the engine's compute something else with the loaded
    weights, and says so. One of each configuration is compared."""
    found = [
        (parent, name, child)
        for parent in list(model.modules())
        for name, child in parent.named_children()
        if isinstance(child, AnyMamba2)
    ]
    is_same: dict[tuple[type, Mamba2Config], bool] = {}
    for parent, name, child in found:
        plain = child.plain()
        kind = type(plain), child.config
        if kind not in is_same:
            is_same[kind] = _is_same(child, plain)
            if not is_same[kind]:
                logger.warning(
                    "the engine's layers of Mamba-2 compute something else than %s, which stays",
                    type(plain).__name__,
                )
        if not is_same[kind]:
            setattr(parent, name, plain)


def _is_same(mixer: AnyMamba2, plain: Any) -> bool:
    """Whether both give the same for a prompt and for a token that continues from its states."""
    weight = mixer.conv1d.weight
    random = torch.Generator().manual_seed(0)
    x = torch.randn(1, NUM_TOKENS + 1, mixer.config.hidden_size, generator=random).to(weight)
    allowed = ROUNDING if weight.dtype == torch.float32 else ROUNDING_OF_HALF
    with torch.inference_mode():
        pairs = zip(*(_passes(each, x, mixer.layer) for each in (mixer, plain)), strict=True)
        return all(bool((a - b).norm() <= allowed * b.norm()) for a, b in pairs)


def _passes(mixer: Any, x: Tensor, layer: int) -> list[Tensor]:
    cache = Cache(layers=[StateLayer() for _ in range(layer + 1)])
    return [mixer(part, cache).float() for part in (x[:, :NUM_TOKENS], x[:, NUM_TOKENS:])]


def _config_of(plain: Any) -> Mamba2Config | None:
    """Returns the sizes of a mixer; None where it has other parts than the engine's."""
    children = {name for name, _ in plain.named_children()}
    params = {name for name, _ in plain.named_parameters(recurse=False)}
    sizes = [getattr(plain, name, None) for name in SIZES]
    if children - {"act"} != CHILDREN or params != PARAMETERS:
        return None
    if {name for name, _ in plain.named_buffers()} - {FACTORS}:
        return None
    if not all(type(size) is int for size in sizes) or getattr(plain, "activation", "") != "silu":
        return None
    hidden, heads, head_dim, state_size, groups, kernel_size = (int(size or 0) for size in sizes)
    has_norm = not isinstance(plain.norm, nn.Identity)
    low, high = getattr(plain, "time_step_limit", (0.0, float("inf")))
    config = Mamba2Config(
        hidden_size=hidden,
        num_heads=heads,
        head_dim=head_dim,
        state_size=state_size,
        num_groups=groups,
        kernel_size=kernel_size,
        norm_eps=float(getattr(plain.norm, "variance_epsilon", 0.0)),
        conv_bias=plain.conv1d.bias is not None,
        bias=plain.in_proj.bias is not None,
        has_norm=has_norm,
        time_step_limit=(float(low), float(high)),
    )
    inner = config.inner_size
    wanted = {
        "in_proj": (inner + config.conv_size + heads, hidden),
        "conv1d": (config.conv_size, 1, kernel_size),
        "out_proj": (hidden, inner),
    }
    wanted |= {"norm": (inner,)} if has_norm else {}
    found = {name: tuple(plain.get_submodule(name).weight.shape) for name in wanted}
    own = inner // int(getattr(plain.norm, "n_groups", 1))
    is_grouped = getattr(plain.norm, "group_size", own) * groups == inner
    return config if found == wanted and (is_grouped or not has_norm) else None
