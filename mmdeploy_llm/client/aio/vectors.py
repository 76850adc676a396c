"""AsyncVectors: AsyncLLM's methods for vectors, scores and labels."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Literal

from mmdeploy_llm.client.arguments import as_prompts
from mmdeploy_llm.client.client import EngineClient
from mmdeploy_llm.client.embedding import (
    Classifying,
    Scoring,
    embed_asks,
    embedding_of,
    ranked,
    wanted_vector,
)
from mmdeploy_llm.engine.desk.ask import Ask
from mmdeploy_llm.messages import Prompt, Prompts
from mmdeploy_llm.values.outputs.pooled import ClassifyOutput, EmbeddingOutput, ScoreOutput
from mmdeploy_llm.values.outputs.request_output import RequestOutput
from mmdeploy_llm.values.pooling_request import Pooling, TooLong


class AsyncVectors(EngineClient):
    """Base of AsyncLLM. The arguments of its methods, and their results, are those of LLM's;
    cancelling their task aborts what they ask. An error of one prompt is in its output."""

    async def embed(
        self,
        prompts: Prompts,
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        instruction: str | None = None,
        pooling: Pooling | Literal["tokens"] | None = None,
        too_long: TooLong = "error",
    ) -> list[EmbeddingOutput]:
        """Returns the vector of each prompt, in their order; see LLM.embed."""
        wanted = wanted_vector(dimensions, normalize, instruction, pooling, too_long)
        asks = list(embed_asks(as_prompts(prompts), wanted))
        return [embedding_of(output) for output in await self._answered(asks)]

    async def score(
        self, query: Prompt | Prompts, documents: Prompts, *, instruction: str | None = None
    ) -> list[ScoreOutput]:
        """Returns how well each document fits the query, in their order; see LLM.score."""
        self._home.check()
        scoring = Scoring(self._desk.abilities, query, documents, instruction)
        return scoring.outputs(await self._answered(scoring.asks))

    async def rerank(
        self,
        query: Prompt,
        documents: Prompts,
        top_n: int | None = None,
        *,
        instruction: str | None = None,
    ) -> list[ScoreOutput]:
        """Returns the scores of documents, best first; see LLM.rerank."""
        ranked((), top_n)  # a wrong number is told before anything is computed
        return ranked(await self.score(query, documents, instruction=instruction), top_n)

    async def classify(
        self, prompts: Prompts, labels: Iterable[str], *, normalize_length: bool = False
    ) -> list[ClassifyOutput]:
        """Returns how probable each label is after each prompt; see LLM.classify."""
        work = Classifying(prompts, labels, normalize_length=normalize_length)
        return work.outputs(await self._answered(work.asks))

    @abstractmethod
    async def _answered(self, asks: Sequence[Ask]) -> list[RequestOutput]:
        """Returns the outputs of asks in their order."""
