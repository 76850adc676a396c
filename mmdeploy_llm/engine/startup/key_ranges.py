"""Measures the keys of a model whose cache has integers, while the engine starts: one prefill of a
text. What is measured, and what for: layers/attention/hadamard.py."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from mmdeploy_llm.engine.intake.tokenizer import PromptTokenizer
from mmdeploy_llm.layers.attention.hadamard import HadamardAttention
from mmdeploy_llm.values.pooling_request import PoolingRequest

from .warm_up import GREEDY, RunStep, prefill

logger = logging.getLogger(__name__)

# More tokens bring nothing: with SmolLM2 64, 128 and 6,900 of them keep the same best tokens within
# half a hundredth (AVX2 only, 2026-11-30).
NUM_TOKENS = 128
# Prose, a list, numbers, code and other languages, since requests have them.
TEXT = """\
The harbour was quiet when Maria opened the shop. Two fishing boats had come in before six, and \
their crews were drinking coffee under the awning. "Forty crates," said the older man, "and not \
one of them small." She wrote down 40, then the price: 12.50 for each, or 480 together.

1. Check the scale.
2. Pay in cash, but keep the receipt (no. 2047).

def total(crates: int, price: float = 12.5) -> float:
    return crates * price if crates < 30 else 0.96 * crates * price

Der Wind drehte nach Westen. 今天的鱼很新鲜，价格也不贵。
Les bateaux repartent demain à cinq heures.
"""


def sample_ids(tokenizer: PromptTokenizer, longest: int | None) -> list[int]:
    """Returns the tokens of a prefill that shows what keys are like: always the same ones, so that
    no option of an engine changes what it answers. longest: tokens that a sequence of the model may
    have; None: any number."""
    ids = tokenizer.encode(TEXT)[:NUM_TOKENS]
    return ids if longest is None else ids[: longest - 1]


def measure_keys(
    backend: HadamardAttention,
    run: RunStep,
    ids: Sequence[int],
    block_size: int,
    wanted: PoolingRequest | None = None,
) -> None:
    """Runs one prefill of these tokens, in the first blocks of a cache that nobody else has. A
    failure is logged. wanted: see Request."""
    if not ids:
        return
    blocks = range(-(-len(ids) // block_size))
    plan = prefill([len(ids)], blocks, block_size, GREEDY, wanted, token_ids=ids)
    with backend.measuring():
        result = run(plan)
    for failure in result.errors.values():
        logger.warning(
            "the KV cache of few bits keeps less of the keys than it could: the step that measures "
            "them failed: %s",
            failure.message,
        )
