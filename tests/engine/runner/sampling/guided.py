"""Finds what a constraint bans, for tests."""

import torch

from mmdeploy_llm.engine.runner.sampling.grammar import ban_tokens


def banned(guide, vocab_size, dtype=torch.float32):
    """Returns [V] bool: the tokens that the guide bans next."""
    logits = torch.zeros(1, vocab_size, dtype=dtype)
    ban_tokens(logits, {0: guide})
    assert set(logits.unique().tolist()) <= {0.0, -torch.inf}
    return logits[0].isneginf()
