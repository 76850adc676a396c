"""Checks on a few tokens that the model as we run it equals transformers' own forward.

The check finds what the attention cannot show: a model that scales the embeddings before its
decoder, or that counts positions differently.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmdeploy_llm.errors import ModelNotSupportedError

from .probe import NUM_TOKENS, attention_of

logger = logging.getLogger(__name__)

# Largest relative difference of the logits that rounding may cause.
ROUNDING = {torch.float32: 1e-3}
ROUNDING_OF_HALF = 0.25  # rounding may route a token to another expert


class Whole:
    """Causal attention over a step that holds one whole sequence."""

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """See forward.AttentionContext."""
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        repeats = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(repeats, 1).transpose(0, 1).float() for x in (k, v))
        scores = q.transpose(0, 1).float() @ k.transpose(1, 2) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        unseen = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
        if window is not None:
            unseen |= torch.ones_like(unseen).tril(-window)
        weights = F.softmax(scores.masked_fill(unseen, -torch.inf), -1)
        return (weights @ v).transpose(0, 1).to(q.dtype)


def check_equal(
    name: str, model: Any, decoder: nn.Module, forward: Callable[[Tensor], Tensor]
) -> None:
    """Raises ModelNotSupportedError when our logits differ from transformers'. When transformers'
    forward needs more than token ids, nothing is compared and a warning says so.

    forward: computes our logits [NUM_TOKENS, vocab] of token ids.
    """
    ids = _text_ids(model.config, model.get_input_embeddings().weight)
    try:
        with attention_of(decoder.config, "eager"):
            wanted: Tensor = model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0]
    except Exception as error:  # transformers' code: anything may come
        logger.warning(
            "%s was not compared with transformers' own forward, which failed on text alone: %s: "
            "%s",
            name,
            type(error).__name__,
            error,
        )
        return
    found = forward(ids)
    allowed = ROUNDING.get(found.dtype, ROUNDING_OF_HALF)
    difference = float((found - wanted).float().norm() / wanted.float().norm())
    if not difference <= allowed:
        raise ModelNotSupportedError(
            f"transformers_any cannot run {name}: its logits differ from those of transformers' "
            f"own forward by {difference:.0%} on a trial of {NUM_TOKENS} tokens, so it computes "
            "something around its layers that is not known here; use a plugin made for this model"
        )


def _text_ids(config: Any, embeddings: Tensor) -> Tensor:
    """Returns NUM_TOKENS different token ids, none of them special."""
    special = {
        value
        for key, value in config.to_dict().items()
        if isinstance(value, int) and key.endswith(("_token_id", "_token_index"))
    }
    step = max(1, embeddings.shape[0] // (2 * NUM_TOKENS))
    ids = [token for token in range(step, embeddings.shape[0], step) if token not in special]
    return torch.tensor(ids[:NUM_TOKENS], device=embeddings.device)
