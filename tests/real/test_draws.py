"""Tokens that are drawn with a temperature and seeds are distributed as float32 says."""

from collections import Counter

import pytest
import torch
from scipy.stats import chisquare

from mmdeploy_llm import LLM, SamplingParams
from tests.real.closeness import dequantised, transformers_model

# Two blocks of the KV cache, which all draws share, and one token, which each computes.
PROMPT = (
    "We had planned the walk for the first week of May, with the tents and the old stove, and my "
    "brother had found a map. But the weather there was"
)
BLOCK_SIZE = 16
DRAWS, TEMPERATURE = 10_000, 0.7
DRAWN = {"temperature": TEMPERATURE, "top_p": 1.0, "top_k": 0, "max_tokens": 1}
LEAST = 5  # expected draws of a token that is counted by itself, as the test needs it


@pytest.fixture(scope="module")
def expected():
    """Returns the ids of the prompt, and transformers' probability of each next token."""
    from transformers import AutoTokenizer

    folder = dequantised("smollm2")
    ids = AutoTokenizer.from_pretrained(folder)(PROMPT)["input_ids"]
    with torch.inference_mode():
        logits = transformers_model(folder)(torch.tensor([ids])).logits[0, -1]
    return ids, (logits.double() / TEMPERATURE).softmax(-1)


def test_draws_follow_the_distribution(expected):
    """A seed for each, so the draws of a machine are the same each time. In bfloat16, the default,
    which moves the distribution by less than 10,000 draws can tell."""
    ids, probabilities = expected
    assert len(ids) % BLOCK_SIZE == 1
    params = [SamplingParams(**DRAWN, seed=number) for number in range(DRAWS)]
    with LLM(
        str(dequantised("smollm2")), dtype="bfloat16", kv_cache_memory=2**28, block_size=BLOCK_SIZE
    ) as llm:
        llm.generate([{"prompt_token_ids": ids}], params[:1], use_tqdm=False)
        outputs = llm.generate([{"prompt_token_ids": ids}] * DRAWS, params, use_tqdm=False)
    counts = Counter(output.outputs.token_ids[0] for output in outputs)
    often = (probabilities * DRAWS >= LEAST).nonzero().flatten().tolist()
    found = [counts[token] for token in often]
    wanted = [float(probabilities[token]) * DRAWS for token in often]
    found.append(DRAWS - sum(found))
    wanted.append(DRAWS - sum(wanted))
    assert len(often) > 50
    assert chisquare(found, wanted).pvalue >= 0.01
