"""Log-probabilities of the tokens of a prompt."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from mmdeploy_llm.engine.runner.sampling import prompt_logprobs
from mmdeploy_llm.values.outputs.request_output import TokenLogprobs
from mmdeploy_llm.values.plan import NewRequest, ScheduledTokens

MAX_ROWS = 256  # rows of logits at once: those of a whole step would take gigabytes


def wants_prompt_logprobs(request: NewRequest, item: ScheduledTokens) -> bool:
    """Whether the item holds prompt tokens whose log-probabilities were requested."""
    return request.params.prompt_logprobs is not None and item.start < request.prompt_len


def prompt_entries(
    request: NewRequest,
    item: ScheduledTokens,
    hidden: Tensor,
    logits_of: Callable[[Tensor], Tensor],
    of_rows: Callable[[slice], AbstractContextManager[object]] = nullcontext,
) -> tuple[TokenLogprobs | None, ...]:
    """Returns an entry for each prompt token that follows one of the item's tokens: the logits at
    token i score token i + 1. The entries of a prompt's first item begin with None, for its first
    token; None stands, too, for a token that the model embeds but has no logit of.

    hidden: [num_tokens, hidden], the item's hidden states. of_rows: says within its context which
    of these rows the logits are of."""
    count = request.params.prompt_logprobs
    assert count is not None, "checked by wants_prompt_logprobs"
    num_next = min(item.num_tokens, request.prompt_len - 1 - item.start)
    following = torch.tensor(request.token_ids[item.start + 1 : item.start + 1 + num_next])
    entries: list[TokenLogprobs | None] = [None] if item.start == 0 else []
    for first in range(0, num_next, MAX_ROWS):
        chunk = slice(first, min(first + MAX_ROWS, num_next))
        with of_rows(chunk):
            logits = logits_of(hidden[chunk])
        has_logit = following[chunk] < logits.shape[1]
        found = prompt_logprobs(logits, following[chunk] * has_logit, count)
        entries += [own if has else None for own, has in zip(found, has_logit, strict=True)]
    return tuple(entries)
