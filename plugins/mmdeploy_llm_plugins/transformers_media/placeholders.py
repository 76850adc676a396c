"""Finds the token ids for which transformers embeds another id. Some models do so for placeholders
of media, also for those that a model has generated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class _Embedded(Exception):
    """Ends a forward pass once its ids are embedded."""

    def __init__(self, ids: Tensor) -> None:
        super().__init__()
        self.ids = ids


def replaced_ids(model: Any) -> Mapping[int, int]:
    """Returns token id -> the id that transformers' forward of a text embeds instead; only those
    that differ."""
    embeddings: nn.Module = model.get_input_embeddings()
    weight: Any = embeddings.weight
    given = sorted(
        value
        for name, value in model.config.to_dict().items()
        if name.endswith(("_token_id", "_token_index"))
        and type(value) is int
        and 0 <= value < weight.shape[0]
    )
    if not given:
        return {}
    ids = torch.tensor([given], device=weight.device)
    hook = embeddings.register_forward_pre_hook(_stop)
    try:
        model(input_ids=ids, use_cache=False)
    except _Embedded as found:
        taken = found.ids
    except Exception:  # transformers' code: anything may come; the trial reports what fails on text
        return {}
    else:
        return {}
    finally:
        hook.remove()
    if taken.shape != ids.shape:
        return {}
    pairs = zip(given, taken[0].tolist(), strict=True)
    return {token: other for token, other in pairs if token != other}


def replace(ids: Tensor, replaced: Mapping[int, int]) -> Tensor:
    """Returns the ids with those of `replaced` exchanged."""
    for token, other in replaced.items():
        ids = ids.masked_fill(ids == token, other)
    return ids


def _stop(_: nn.Module, inputs: tuple[Any, ...]) -> None:
    raise _Embedded(inputs[0])
