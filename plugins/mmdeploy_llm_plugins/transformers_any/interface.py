"""Registers our attention under a name that a transformers config can select.

    model.forward --> layer --> ALL_ATTENTION_FUNCTIONS["mmdeploy_llm"](module, q, k, v, ...)
                                    --> module's Step.attn.attend(module.layer_idx, q, k, v, ...)

Shapes: T tokens of the step, H heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.forward import AttentionContext

NAME = "mmdeploy_llm"
STEP = "mmdeploy_llm_step"  # attribute of an attention module

# Arguments that transformers' models pass besides the tensors and that cannot change the result.
HARMLESS = frozenset(
    {
        "cache_position",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "deterministic",
        "dropout",
        "is_causal",
        "max_length_k",
        "max_length_q",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


@dataclass(slots=True)
class Step:
    """Holds the attention of the current step for all attention modules of one model, and says
    which of its tokens belong to long sequences (forward.ForwardInputs.is_long). Together is the
    only writer."""

    attn: AttentionContext | None = None
    is_long: Tensor | None = None


def register() -> None:
    """Registers the name with transformers; a second call changes nothing."""
    AttentionInterface.register(NAME, attend)


def connect(decoder: nn.Module, step: Step) -> None:
    """Gives `step` to every module of the decoder that has a layer_idx."""
    for module in decoder.modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            setattr(module, STEP, step)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Computes attention: `query` [1, H, T, D], `key` and `value` [1, K, T, D] -> [1, T, H, D of
    value].

    The tokens of all sequences of the step are concatenated. The engine applies the masks: that the
    model's own masks are the same was checked when it was built (see probe.py).
    """
    step: Step = getattr(module, STEP)
    assert step.attn is not None, "set by AnyModel.forward"
    size, own = query.shape[-1], value.shape[-1]
    if own < size:  # latent attention: the cache holds keys and values of one size
        value = F.pad(value, (0, size - own))
    out = step.attn.attend(
        int(module.layer_idx),  # type: ignore[arg-type]
        _rows(query),
        _rows(key),
        _rows(value),
        scale=scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=None if s_aux is None else s_aux.float(),
    )
    # Some models view the result, as they can that of transformers' own attention.
    return out[..., :own].contiguous().unsqueeze(0), None


def unknown_arguments(kwargs: Mapping[str, Any]) -> list[str]:
    """Returns the names of arguments that could change the result."""
    return sorted(
        name for name, value in kwargs.items() if name not in HARMLESS and _matters(value)
    )


class NotCausal(ModelNotSupportedError):
    """The model's tokens see later ones, which no cache can serve."""


def refused(
    model: str,
    layer: str,
    reason: str,
    kind: type[ModelNotSupportedError] = ModelNotSupportedError,
) -> ModelNotSupportedError:
    """Builds the error that says in one sentence why a model cannot run."""
    return kind(
        f"transformers_any cannot run {model}: {layer} {reason}; use a plugin made for this model"
    )


def _rows(x: Tensor) -> Tensor:
    """[1, heads, T, D] -> [T, heads, D]."""
    return x.squeeze(0).transpose(0, 1).contiguous()


def _matters(value: Any) -> bool:
    return value is not None and value is not False
