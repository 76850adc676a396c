"""Asks at the desk for vectors, scores and labels, and makes outputs of the answers. Each object
here has `asks`, whose outputs it is given in the same order."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache
from typing import Any, get_args

from mmdeploy_llm.engine.desk.ask import Ask
from mmdeploy_llm.engine.desk.outcome import Answer
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.layers.pooling.abilities import Abilities
from mmdeploy_llm.values.outputs.pooled import (
    ClassifyOutput,
    EmbeddingOutput,
    PooledOutput,
    ScoreOutput,
)
from mmdeploy_llm.values.outputs.request_output import RequestOutput
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.values.pooling_request import Pooling, PoolingRequest, TooLong

from .arguments import as_prompt, as_prompts, is_conversation

logger = logging.getLogger(__name__)

GROUPS = itertools.count(2**32)  # apart from the numbers that a batch gives its groups
NO_PAIRS = (
    "this model generates text: it has no head that scores pairs and was not trained for vectors. "
    "Load a reranker or an embedding model for rerank and score; classify compares labels"
)


@cache  # one warning for each folder
def _warn_of_assumption(folder: str) -> None:
    logger.warning(
        "%r does not say that it is a reranker: its scores are the probability of 'yes' against "
        "'no' after the prompt of its family's rerankers, for which it may not be trained. Where "
        "it is one, have 'rerank' in the name of its folder",
        folder,
    )


def wanted_vector(
    dimensions: int | None,
    normalize: bool | None,
    instruction: str | None,
    pooling: Pooling | str | None,
    too_long: TooLong = "error",
) -> PoolingRequest:
    """Returns what `embed` wants. Raises TypeError and ValueError for wrong arguments."""
    is_whole = isinstance(dimensions, int) and not isinstance(dimensions, bool)
    if dimensions is not None and not (is_whole and dimensions > 0):
        raise ValueError(f"dimensions must be a whole number above 0 or None, got {dimensions!r}")
    if normalize is not None and not isinstance(normalize, bool):
        raise TypeError(f"normalize must be True, False or None, got {normalize!r}")
    if instruction is not None and not isinstance(instruction, str):
        raise TypeError(f"instruction must be a text or None, got {type(instruction).__name__}")
    if pooling not in (None, "last", "cls", "mean", "tokens"):
        raise ValueError(
            f"pooling must be 'last', 'cls', 'mean', 'tokens' or None, got {pooling!r}"
        )
    if too_long not in get_args(TooLong):
        raise ValueError(f"too_long must be 'error', 'cut' or 'chunk', got {too_long!r:.40}")
    if pooling == "tokens":
        return PoolingRequest(
            what="token_vectors",
            dimensions=dimensions,
            normalize=normalize,
            instruction=instruction,
            too_long=too_long,
        )
    return PoolingRequest(
        what=None if pooling is None else "vector",
        pooling=pooling,
        dimensions=dimensions,
        normalize=normalize,
        instruction=instruction,
        too_long=too_long,
    )


def embed_asks(prompts: Iterable[Any], wanted: PoolingRequest) -> Iterator[Ask]:
    """Yields what is asked for the vectors of prompts."""
    for prompt in prompts:
        yield _ask(prompt, wanted)


def embedding_of(output: RequestOutput) -> EmbeddingOutput:
    """Returns the vector of a prompt as callers see it."""
    return EmbeddingOutput(embedding=_vector(output), **_shared(output))


def embeddings_of(answers: Generator[Answer, None, None]) -> Iterator[EmbeddingOutput]:
    """Yields the vectors of answers, which are closed at the end."""
    with closing(answers):
        for answer in answers:
            yield embedding_of(answer.output)


class Scoring:
    """A query, or one for each document, and documents to compare: by a head that scores pairs, or
    by their vectors. Raises ConfigError for a model that can do neither, TypeError and ValueError
    for wrong arguments."""

    def __init__(
        self, abilities: Abilities, query: Any, documents: Any, instruction: str | None
    ) -> None:
        queries, self._documents = as_prompts(as_prompt(query)), as_documents(documents)
        if len(queries) not in (1, len(self._documents)):
            raise ValueError(
                f"score takes one query, or one for each document; got {len(queries)} queries and "
                f"{len(self._documents)} documents"
            )
        self._rules, self._num_queries = abilities.rules, len(queries)
        each = queries * len(self._documents) if len(queries) == 1 else queries
        self._is_paired = abilities.can_score
        if self._is_paired:
            if self._rules.assumed_of is not None:
                _warn_of_assumption(self._rules.assumed_of)
            wanted = PoolingRequest(what="score", instruction=instruction)
            pairs = zip(each, self._documents, strict=True)
            self.asks = [
                _ask({"query": one, "document": two}, wanted, item=two) for one, two in pairs
            ]
        elif abilities.gives_vectors:
            of_query = PoolingRequest(
                instruction=self._rules.query_prompt if instruction is None else instruction
            )
            of_document = PoolingRequest(instruction=self._rules.document_prompt)
            self.asks = [
                *(_ask(one, of_query) for one in queries),
                *(_ask(one, of_document) for one in self._documents),
            ]
        else:
            raise ConfigError(NO_PAIRS)

    def outputs(self, outputs: Sequence[RequestOutput]) -> list[ScoreOutput]:
        """Returns the scores in the order of the documents."""
        if self._is_paired:
            return [
                ScoreOutput(
                    score=None if (own := _vector(output)) is None else float(own[0]),
                    index=index,
                    **_shared(output),
                )
                for index, output in enumerate(outputs)
            ]
        queries, documents = outputs[: self._num_queries], outputs[self._num_queries :]
        each = [*queries] * len(documents) if len(queries) == 1 else queries
        pairs = zip(each, documents, strict=True)
        return [self._compared(index, *pair) for index, pair in enumerate(pairs)]

    def _compared(self, index: int, query: RequestOutput, document: RequestOutput) -> ScoreOutput:
        from .similarity import similarity  # which imports numpy

        one, two, shared = _vector(query), _vector(document), _shared(document)
        if one is None:
            words = f"the query failed: {query.error_msg}"
            shared |= {"error_code": query.error_code, "error_msg": words}
        if one is None or two is None:
            return ScoreOutput(index=index, **shared)
        score = similarity(one, two, self._rules.similarity)
        return ScoreOutput(score=score, index=index, **shared)


def ranked(scores: Sequence[ScoreOutput], top_n: int | None) -> list[ScoreOutput]:
    """Returns the best scores first, those of equal ones in the order of the documents, and errors
    last. top_n: how many; None: all. Raises ValueError for a wrong number."""
    if top_n is not None and (isinstance(top_n, bool) or not isinstance(top_n, int) or top_n < 1):
        raise ValueError(f"top_n must be a whole number above 0 or None, got {top_n!r}")

    def place(output: ScoreOutput) -> tuple[bool, float]:
        return output.score is None, 0.0 if output.score is None else -output.score

    return sorted(scores, key=place)[:top_n]


class Classifying:
    """Prompts and the labels whose likelihood after each is compared. Raises ValueError for labels
    that cannot be compared."""

    def __init__(self, prompts: Any, labels: Any, *, normalize_length: bool) -> None:
        self._labels, self._by_length = _labels(labels), normalize_length
        items = [prompts] if is_conversation(prompts) else as_prompts(prompts)
        self.asks = [
            replace(_ask(as_prompt(item), wanted, item=item), group=group)
            for item in items
            for group in (next(GROUPS),)
            for wanted in (PoolingRequest(what="likelihood", label=label) for label in self._labels)
        ]

    def outputs(self, outputs: Sequence[RequestOutput]) -> list[ClassifyOutput]:
        """Returns an output for each prompt, in their order."""
        count = len(self._labels)
        starts = range(0, len(outputs), count)
        return [self._output(outputs[start : start + count]) for start in starts]

    def _output(self, outputs: Sequence[RequestOutput]) -> ClassifyOutput:
        failed = next((output for output in outputs if not output.is_ok), None)
        if failed is not None:
            return ClassifyOutput(**_shared(failed))
        import numpy as np  # which `from mmdeploy_llm import LLM` need not wait for

        found = [_vector(output) for output in outputs]
        sums = np.array([own for own in found if own is not None], dtype=np.float64)
        values = sums[:, 0] / sums[:, 1] if self._by_length else sums[:, 0]
        weights = np.exp(values - values.max())
        shares = (weights / weights.sum()).tolist()
        return ClassifyOutput(
            label=self._labels[int(values.argmax())],
            probabilities=dict(zip(self._labels, shares, strict=True)),
            logprobs=dict(zip(self._labels, values.tolist(), strict=True)),
            **_shared(outputs[0]),
        )


def as_documents(documents: Any) -> list[Any]:
    """Returns documents as a list of prompts. Raises TypeError and ValueError as as_prompts does,
    and for one text, which would be one document."""
    if isinstance(documents, (str, Mapping)):
        raise TypeError("documents must be a list, also of one document: [document]")
    return as_prompts(documents)


def _labels(labels: Any) -> list[str]:
    if isinstance(labels, str) or not isinstance(labels, Iterable):
        raise TypeError(f"labels must be a list of texts, got {type(labels).__name__}")
    found = list(labels)
    wrong = next((own for own in found if not isinstance(own, str) or not own), None)
    if wrong is not None or len(found) < 2 or len(set(found)) < len(found):
        raise ValueError(f"labels must be two or more texts that differ, got {found!r:.200}")
    return found


def _ask(prompt: Any, wanted: PoolingRequest, item: Any = None) -> Ask:
    return Ask(prompt=as_prompt(prompt), item=item, params=SamplingParams(), wanted=wanted)


def _vector(output: RequestOutput) -> Any:
    return output.vector if isinstance(output, PooledOutput) and output.is_ok else None


def _shared(output: RequestOutput) -> dict[str, Any]:
    """Returns the fields that outputs of all kinds have."""
    names = (
        "item",
        "request_id",
        "prompt_token_ids",
        "num_input_image_tokens",
        "num_input_video_tokens",
        "num_cached_tokens",
        "media_notes",
        "metrics",
        "error_code",
        "error_msg",
    )
    return {name: getattr(output, name) for name in names}
