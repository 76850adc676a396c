"""Log-probabilities of chosen tokens and of the most probable ones, from unchanged logits."""

from __future__ import annotations

from torch import Tensor

from mmdeploy_llm.outputs import Logprob, TokenLogprobs


def token_logprobs(logits: Tensor, token_ids: Tensor, count: int) -> tuple[TokenLogprobs, ...]:
    """For each row of `logits` [N, V]: the token of `token_ids` [N] first, then the `count` most
    probable ones by rank; -1 for the whole vocabulary. `decoded_token` is left open."""
    num_vocab = logits.shape[1]
    count = num_vocab if count == -1 else min(count, num_vocab)
    values = logits.float().log_softmax(-1)
    chosen = values.gather(1, token_ids.to(values.device)[:, None])
    ranks = (values > chosen).sum(-1) + 1
    top, ids = values.topk(count, dim=-1)
    columns = (token_ids, chosen[:, 0], ranks, ids, top)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return tuple(_entry(*row) for row in rows)


def _entry(
    token_id: int, value: float, rank: int, ids: list[int], values: list[float]
) -> TokenLogprobs:
    entry = {token_id: Logprob(logprob=value, rank=rank)}
    for place, (other, found) in enumerate(zip(ids, values, strict=True), start=1):
        if other != token_id:
            entry[other] = Logprob(logprob=found, rank=place)
    return entry
