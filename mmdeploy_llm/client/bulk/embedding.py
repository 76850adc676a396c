"""EmbeddingClient: LLM's methods for the vectors of whole corpora, and for searching them."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, Literal, Unpack

from mmdeploy_llm.batch.arguments import EmbedArguments, check_known
from mmdeploy_llm.client.arguments import as_prompts
from mmdeploy_llm.engine.desk.ask import Ask
from mmdeploy_llm.errors import RequestError
from mmdeploy_llm.messages import Prompts
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.values.text.progress_bars import UseTqdm
from mmdeploy_llm.values.text.signatures import takes

from .client import BulkClient

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from mmdeploy_llm.batch.summary import BatchSummary
    from mmdeploy_llm.data.vectors.opened import Vectors
    from mmdeploy_llm.data.vectors.search import Found
    from mmdeploy_llm.values.pooling_request import PoolingRequest

TOP_K = 10
Names = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


class EmbeddingClient(BulkClient):
    """Base of LLM."""

    @takes(EmbedArguments)
    def embed_batch(
        self,
        input: str | os.PathLike[str] | Iterable[Mapping[str, Any]],
        output: str | os.PathLike[str],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        instruction: str | None = None,
        pooling: str | None = None,
        prompt: str | None = None,
        resume: bool | Literal["anyway"] = False,
        overwrite: bool = False,
        retry_failed: bool | Collection[int | str] | str = True,
        report: str | os.PathLike[str] | None = None,
        live: bool | int = False,
        use_tqdm: UseTqdm = True,
        **options: Unpack[EmbedArguments],
    ) -> BatchSummary:
        """Makes a vector of each item of a corpus, as the command `embed`, and adds each to
        `output` as it finishes: NAME.parquet, .npy, .lance, .jsonl or .tar, see docs/embeddings.md.

        dimensions, normalize, instruction, pooling: as for `embed`. prompt: the text of each item,
        embedded with its media; of a corpus it may have columns. options: see EmbedArguments; the
        other arguments are those of run_batch, and so are the errors.
        """
        from mmdeploy_llm.batch.documents.sources import Sources
        from mmdeploy_llm.batch.job import plan_batch
        from mmdeploy_llm.batch.options import option_settings
        from mmdeploy_llm.client.vector_asks import vector_asks
        from mmdeploy_llm.data.vectors.written import finish

        asks = vector_asks(
            dimensions=dimensions, normalize=normalize, instruction=instruction, pooling=pooling
        )
        check_known("embed_batch", options, EmbedArguments, "report")
        fields = {**option_settings(options), "question": prompt, "asks": asks}
        settings = self._settings(resume, overwrite, retry_failed, None, use_tqdm, **fields)
        with Sources(self._config, settings.finding.pages) as sources:
            job = plan_batch(input, output, self._informed(settings, sources))
            return self._batch(job, report, live, after=lambda summary: finish(summary.sink))

    def search(
        self,
        vectors: Names | Vectors,
        queries: Prompts,
        top_k: int = TOP_K,
        *,
        similarity: str | None = None,
        instruction: str | None = None,
        column: str | None = None,
    ) -> list[list[Found]]:
        """Returns the `top_k` items of files of vectors that are nearest to each query, the best
        first, exactly, as the command `search`.

        vectors: an output of `embed_batch`, other tables in Parquet or .npy files, or several.
        queries: prompts as for `embed`, such as texts and {"multimodal_data": {"image": path}}.
        similarity: "cosine" or "dot"; None: as the model's folder says. instruction: of the
        queries; None: the model's own for queries. column: of a table that embed_batch has not
        written. Memory does not grow with the files.

        Raises ConfigError for vectors of another model, and RequestError for a query that cannot be
        embedded.
        """
        from mmdeploy_llm.batch.engine import describe_engine
        from mmdeploy_llm.data.vectors.opened import Vectors
        from mmdeploy_llm.data.vectors.origin import origin_of
        from mmdeploy_llm.data.vectors.search import open_vectors, search
        from mmdeploy_llm.values.pooling_request import PoolingRequest

        opened = vectors if isinstance(vectors, Vectors) else open_vectors(vectors, column)
        rules = self._desk.abilities.rules
        wanted = PoolingRequest(instruction=instruction or rules.query_prompt)
        if opened.configurations:  # of others nobody says how they were made
            origin = origin_of(opened)
            origin.check(describe_engine(self._config).values)
            wanted = origin.query(wanted.instruction)
        found = self._vectors_of(queries, wanted)
        chosen = similarity or ("dot" if rules.similarity == "dot" else "cosine")
        return search(opened, found, top_k, similarity=chosen)

    def _vectors_of(self, queries: Prompts, wanted: PoolingRequest) -> list[NDArray[np.float32]]:
        """Returns the vectors of queries, in their order. Raises RequestError."""
        from mmdeploy_llm.values.outputs.pooled import PooledOutput

        asks = [
            Ask(prompt=own, params=SamplingParams(), item=number, wanted=wanted)
            for number, own in enumerate(as_prompts(queries))
        ]
        found: dict[int, NDArray[np.float32]] = {}
        with closing(self.answer_each(asks)) as answers:
            for answer in answers:
                output = answer.output
                vector = output.vector if isinstance(output, PooledOutput) else None
                if vector is None:
                    raise RequestError(f"the query cannot be embedded: {output.error_msg}")
                found[answer.ask.item] = vector
        return [found[number] for number in range(len(asks))]
