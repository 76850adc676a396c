"""How Qwen's models make vectors, as Qwen3-VL-Embedding does, and score pairs, as Qwen3-Reranker
and Qwen3-VL-Reranker do: by the logits of "yes" and "no" after a prompt of this form."""

from __future__ import annotations

from mmdeploy_llm.layers.pooling.rules import EmbeddingRules, PairRule

TASK = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
QWEN3 = EmbeddingRules(
    score_words=("yes", "no"),
    pairs=PairRule(
        template=f"<|im_start|>system\n{TASK}<|im_end|>\n<|im_start|>user\n"
        "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n",
        instruction="Given a web search query, retrieve relevant passages that answer the query",
    ),
)
QWEN3_VL = EmbeddingRules(
    system="Represent the user's input.",
    score_words=("yes", "no"),
    pairs=PairRule(
        system=TASK,
        template="<Instruct>: {instruction}<Query>:{query}\n<Document>:{document}",
        instruction="Given a search query, retrieve relevant candidates that answer the query.",
    ),
)
