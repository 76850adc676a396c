"""Searches files of vectors with queries that a model embeds, for LLM.search."""

from __future__ import annotations

import logging
from contextlib import closing
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mmdeploy_llm.batch.engine import describe_engine
from mmdeploy_llm.client.arguments import as_prompts
from mmdeploy_llm.client.embedding import wanted_vector
from mmdeploy_llm.data.vectors.opened import Vectors
from mmdeploy_llm.data.vectors.origin import origin_of
from mmdeploy_llm.data.vectors.search import Found, Names, open_vectors, search
from mmdeploy_llm.engine.desk.answerer import Answerer
from mmdeploy_llm.engine.desk.ask import Ask
from mmdeploy_llm.engine.startup.kinds import known_kinds
from mmdeploy_llm.errors import RequestError
from mmdeploy_llm.layers.pooling.rules import EmbeddingRules
from mmdeploy_llm.messages import Prompts
from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.values.outputs.pooled import PooledOutput
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.values.pooling_request import PoolingRequest, TooLong

logger = logging.getLogger(__name__)


def search_vectors(
    llm: Answerer,
    config: EngineConfig,
    rules: EmbeddingRules,
    vectors: Names | Vectors,
    queries: Prompts,
    top_k: int,
    *,
    similarity: str | None,
    instruction: str | None,
    column: str | None,
    too_long: TooLong,
) -> list[list[Found]]:
    """Returns the items that are nearest to each query, see LLM.search. config, rules: the options
    of the model that embeds the queries, and how its folder says that it is used."""
    wanted_vector(None, None, None, None, too_long)  # a wrong choice is told first
    opened = vectors
    if not isinstance(opened, Vectors):
        opened = open_vectors(opened, column, known_kinds(config))
    wanted = PoolingRequest(instruction=rules.query_prompt if instruction is None else instruction)
    if opened.configurations:  # of others nobody says how they were made
        origin = origin_of(opened)
        origin.check(describe_engine(config).values)
        wanted = origin.query(wanted.instruction)
    found = _vectors_of(llm, queries, replace(wanted, too_long=too_long))
    chosen = similarity or ("dot" if rules.similarity == "dot" else "cosine")
    return search(opened, found, top_k, similarity=chosen)


def _vectors_of(
    llm: Answerer, queries: Prompts, wanted: PoolingRequest
) -> list[NDArray[np.float32]]:
    """Returns the vectors of queries, in their order. Raises RequestError."""
    asks = [
        Ask(prompt=own, params=SamplingParams(), item=number, wanted=wanted)
        for number, own in enumerate(as_prompts(queries))
    ]
    found: dict[int, NDArray[np.float32]] = {}
    with closing(llm.answer_each(asks)) as answers:
        for answer in answers:
            output = answer.output
            vector = output.vector if isinstance(output, PooledOutput) else None
            if vector is None:
                raise RequestError(f"the query cannot be embedded: {output.error_msg}")
            for note in output.media_notes:
                logger.warning("query %d: %s", answer.ask.item + 1, note)
            found[answer.ask.item] = vector
    return [found[number] for number in range(len(asks))]
