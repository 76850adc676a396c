"""How queries are written: with a word before, and tokens after that the training has filled with
what else the query might mean."""

from __future__ import annotations

from mmdeploy_llm.layers.pooling.rules import EmbeddingRules


def _rules(before: str, token: str, after: str = "\n") -> EmbeddingRules:
    return EmbeddingRules(
        pooling="tokens",
        similarity="maxsim",
        prompts={"query": before},
        suffixes={"query": token * 10 + after},
        default_prompt="query",
    )


PALI = _rules("<bos>Question: ", "<pad>")
QWEN = _rules("Query: ", "<|endoftext|>")
MODERN = _rules("", "<end_of_utterance>", "")
# Its checkpoints have the words in their chat templates, by task.
NEOMME = EmbeddingRules(pooling="tokens", similarity="maxsim")
