"""Checks on a few tokens that the model as we run it equals transformers' own forward.

The check finds what the attention cannot show: a model that scales the embeddings before its
decoder, or that counts positions differently.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from mmdeploy_llm.errors import MMDeployLLMError, ModelNotSupportedError
from mmdeploy_llm.forward import Alibi, SequenceRows

from . import structure
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
        k: Tensor | None,
        v: Tensor | None,
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        alibi: Alibi | None = None,
    ) -> Tensor:
        """See forward.AttentionContext."""
        assert k is not None, "each layer has keys of its own"
        assert v is not None
        assert alibi is None, "no class passes linear biases"
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        repeats = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(repeats, 1).transpose(0, 1).float() for x in (k, v))
        scores = q.transpose(0, 1).float() @ k.transpose(1, 2) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        unseen = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
        if window is not None:
            unseen |= torch.ones_like(unseen).tril(-window)
        scores = scores.masked_fill(unseen, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(q), 1)), -1)
        weights = F.softmax(scores, -1)[..., : len(q)]
        return (weights @ v).transpose(0, 1).to(q.dtype)

    def causal(self) -> Whole:
        """See forward.AttentionContext."""
        return self


class Memory:
    """Keeps the cache of one sequence in memory over several steps; see forward.SequenceAttention.

    sequences: set by `begin`. `extend` adds the rows of a layer.
    """

    def __init__(self) -> None:
        self.sequences: tuple[SequenceRows, ...] = ()
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def begin(self, start: int, end: int) -> None:
        """Begins a step with the tokens start .. end of the sequence."""
        self.sequences = (SequenceRows(start=0, end=end - start, num_cached=start),)

    def extend(
        self, sequence: int, layer: int, k: Tensor, v: Tensor, num_kept: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """See forward.SequenceAttention."""
        pair = k, v
        if layer in self._kept:
            old_k, old_v = self._kept[layer]
            pair = _joined(old_k, k), _joined(old_v, v)
        self._kept[layer] = pair
        first = 0
        if num_kept is not None:
            first = max(0, self.sequences[sequence].num_cached - num_kept)
        return pair[0][first:], pair[1][first:]


class Several:
    """Shows several memories as the sequences of one step, in which each gets a token."""

    def __init__(self, memories: Sequence[Memory]) -> None:
        self._memories = memories
        self.sequences = tuple(
            SequenceRows(start=row, end=row + 1, num_cached=memory.sequences[0].num_cached)
            for row, memory in enumerate(memories)
        )

    def extend(
        self, sequence: int, layer: int, k: Tensor, v: Tensor, num_kept: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """See forward.SequenceAttention."""
        return self._memories[sequence].extend(0, layer, k, v, num_kept)

    def extend_each(
        self,
        sequences: Sequence[int],
        layer: int,
        k: Tensor,
        v: Tensor,
        num_kept: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See forward.SideBySideAttention."""
        pairs = [
            self.extend(number, layer, k[row : row + 1], v[row : row + 1], num_kept)
            for row, number in enumerate(sequences)
        ]
        keys, values = (
            pad_sequence([pair[which] for pair in pairs], batch_first=True, padding_side="left")
            for which in range(2)
        )
        return keys, values


def _joined(old: Tensor, new: Tensor) -> Tensor:
    """Concatenates rows [n, 1, channels]; the narrower ones are padded with zeros."""
    width = max(old.shape[2], new.shape[2])
    return torch.cat([F.pad(x, (0, width - x.shape[2])) for x in (old, new)])


def check_equal(
    name: str,
    model: Any,
    decoder: nn.Module,
    forward: Callable[[Tensor], Tensor],
    *,
    num_tokens: int = NUM_TOKENS,
    is_required: bool = False,
) -> float:
    """Returns the relative difference of our logits from transformers'; raises
    ModelNotSupportedError when it is more than rounding. When transformers' forward needs more than
    token ids, nothing is compared and a warning says so; `is_required` raises its error.

    forward: computes our logits [num_tokens, vocab] of token ids.
    """
    embeddings: Tensor = model.get_input_embeddings().weight
    ids = text_ids(model.config, embeddings, num_tokens)
    found = _tried(name, forward, ids)
    try:
        with attention_of(decoder.config, "eager"):
            wanted = _own_logits(model, decoder, ids)
    except Exception as error:  # transformers' code: anything may come
        if is_required:
            raise
        logger.warning(
            "%s was not compared with transformers' own forward, which failed on text alone: %s: "
            "%s",
            name,
            type(error).__name__,
            error,
        )
        return 0.0
    # Some heads return float32 of a model in half precision.
    allowed = ROUNDING.get(embeddings.dtype, ROUNDING_OF_HALF)
    difference = float((found - wanted).float().norm() / wanted.float().norm())
    if not difference <= allowed:
        raise ModelNotSupportedError(
            f"transformers_any cannot run {name}: its logits differ from those of transformers' "
            f"own forward by {difference:.0%} on a trial of {num_tokens} tokens, so it computes "
            "something around its layers that is not known here; use a plugin made for this model"
        )
    return difference


def _own_logits(model: Any, decoder: nn.Module, ids: Tensor) -> Tensor:
    """Returns the logits of transformers' own forward: of the whole model, or where that fails on
    text alone, as Llama 4's does in some versions, of the language model in it."""
    given = {"input_ids": ids.unsqueeze(0), "use_cache": False}
    try:
        logits: Tensor = model(**given).logits[0]
    except Exception:  # transformers' code: anything may come
        inner = structure.child_with(model, decoder)
        child: Any = getattr(model, str(inner), None)
        if child is decoder or getattr(child, "lm_head", None) is None:
            raise
        logits = child(**given).logits[0]
    return logits


def _tried(name: str, forward: Callable[[Tensor], Tensor], ids: Tensor) -> Tensor:
    """Returns our logits. Raises ModelNotSupportedError when transformers' code fails on them."""
    try:
        return forward(ids)
    except MMDeployLLMError:
        raise
    except Exception as error:  # transformers' code: anything may come
        raise ModelNotSupportedError(
            f"transformers_any cannot run {name}: its own code failed on a trial of {len(ids)} "
            f"tokens ({type(error).__name__}: {error}); use a plugin made for this model"
        ) from error


def text_ids(config: Any, embeddings: Tensor, num_tokens: int) -> Tensor:
    """Returns different token ids, none of them special."""
    special = {
        value
        for key, value in config.to_dict().items()
        if isinstance(value, int) and key.endswith(("_token_id", "_token_index"))
    }
    step = max(1, embeddings.shape[0] // (2 * num_tokens))
    ids = [token for token in range(step, embeddings.shape[0], step) if token not in special]
    return torch.tensor(ids[:num_tokens], device=embeddings.device)
