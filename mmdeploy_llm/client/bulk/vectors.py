"""VectorClient: LLM's methods for vectors, scores and labels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Literal

from mmdeploy_llm.client.answering import AnsweringClient, OnError
from mmdeploy_llm.client.arguments import as_prompts, iterable_prompts
from mmdeploy_llm.messages import Prompt, Prompts
from mmdeploy_llm.values.pooling_request import Pooling
from mmdeploy_llm.values.text.progress_bars import UseTqdm

if TYPE_CHECKING:
    from mmdeploy_llm.values.outputs.pooled import ClassifyOutput, EmbeddingOutput, ScoreOutput


class VectorClient(AnsweringClient):
    """Base of LLM."""

    def embed(
        self,
        prompts: Prompts,
        use_tqdm: UseTqdm = True,
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        instruction: str | None = None,
        pooling: Pooling | Literal["tokens"] | None = None,
        on_error: OnError = "return",
    ) -> list[EmbeddingOutput]:
        """Returns the vector of each prompt, in their order; a generating model gives the last
        hidden state.

        prompts: as for `generate`; media alone are a prompt too: {"multimodal_data": {"image":
        image}}.
        dimensions: the vectors are cut to, before they are normalised; None: all of them.
        normalize: whether they have length 1; None: as the model's folder says, else they have.
        instruction: what the vectors are for: the name of one of the folder's prompts, such as
        "query", or a text, which stands before the prompt or as the system message, as the model
        was trained; None: the model's default.
        pooling: the state of the "last" token or of the first ("cls"), the "mean" of all, or all
        ("tokens"); None: as the model's folder says, else "last".
        """
        from mmdeploy_llm.client.embedding import embed_asks, embedding_of, wanted_vector

        wanted = wanted_vector(dimensions, normalize, instruction, pooling)
        asks = list(embed_asks(as_prompts(prompts), wanted))
        return [embedding_of(output) for output in self._collect(asks, use_tqdm, on_error)]

    def embed_iter(
        self,
        prompts: Iterable[Prompt],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        instruction: str | None = None,
        pooling: Pooling | Literal["tokens"] | None = None,
    ) -> Iterator[EmbeddingOutput]:
        """Yields vectors in the order in which they finish, for any iterable, as generate_iter
        does; `output.item` is the object that it yielded."""
        from mmdeploy_llm.client.embedding import embed_asks, embedding_of, wanted_vector

        wanted = wanted_vector(dimensions, normalize, instruction, pooling)
        answers = self.answer_each(embed_asks(iterable_prompts(prompts, "embed"), wanted))

        def outputs() -> Iterator[EmbeddingOutput]:
            with closing(answers):
                for answer in answers:
                    yield embedding_of(answer.output)

        return outputs()

    def score(
        self,
        query: Prompt | Prompts,
        documents: Prompts,
        use_tqdm: UseTqdm = True,
        *,
        instruction: str | None = None,
        on_error: OnError = "return",
    ) -> list[ScoreOutput]:
        """Returns how well each document fits the query, in the order of the documents: what a
        reranker says of the pair, or how alike the vectors of an embedding model are (cosine, or
        what its folder says; MaxSim of vectors of tokens).

        query, documents: prompts as for `embed`; a list of queries has one for each document.
        instruction: what the query is for, as for `embed`. Raises ConfigError for a model that
        neither scores pairs nor was made for vectors.
        """
        from mmdeploy_llm.client.embedding import Scoring

        scoring = Scoring(self._desk.abilities, query, documents, instruction)
        return scoring.outputs(self._collect(scoring.asks, use_tqdm, on_error))

    def rerank(
        self,
        query: Prompt,
        documents: Prompts,
        top_n: int | None = None,
        use_tqdm: UseTqdm = True,
        *,
        instruction: str | None = None,
        on_error: OnError = "return",
    ) -> list[ScoreOutput]:
        """Returns the scores of `score`, best first and errors last; `index` and `item` say whose
        each is. top_n: how many; None: all."""
        from mmdeploy_llm.client.embedding import ranked

        ranked((), top_n)  # a wrong number is told before anything is computed
        options = {"instruction": instruction, "on_error": on_error}
        return ranked(self.score(query, documents, use_tqdm, **options), top_n)  # type: ignore[arg-type]

    def classify(
        self,
        prompts: Prompts,
        labels: Iterable[str],
        use_tqdm: UseTqdm = True,
        *,
        normalize_length: bool = False,
        on_error: OnError = "return",
    ) -> list[ClassifyOutput]:
        """Returns the most probable of the labels for each prompt, and the probability of each,
        as answers of a generating model; the prompt and its media are computed once.

        prompts: as for `generate`, or a list of conversations or one, which the chat template
        renders. labels: texts that follow the prompt as they are, a space before them included.
        normalize_length: compare the mean log-likelihood of a label's tokens and not their sum, so
        that long labels are not at a disadvantage.
        """
        from mmdeploy_llm.client.embedding import Classifying

        work = Classifying(prompts, labels, normalize_length=normalize_length)
        return work.outputs(self._collect(work.asks, use_tqdm, on_error))
