"""LLM: the one object through which Python uses this package. Prompts in, results out.

Its methods import what a batch needs when they are called, so that importing LLM is quick.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

from mmdeploy_llm.batch.answers import VALIDATE_RETRIES
from mmdeploy_llm.batch.arguments import BatchOptions, EmbedArguments, check_known
from mmdeploy_llm.batch.documents.reading.options import ReadArguments
from mmdeploy_llm.batch.estimate import NUM_ITEMS
from mmdeploy_llm.data.vectors import TOP_K
from mmdeploy_llm.engine.desk.ask import Ask
from mmdeploy_llm.engine.desk.feed import Feed
from mmdeploy_llm.engine.desk.outcome import Answer
from mmdeploy_llm.messages import Conversation, Prompt, Prompts
from mmdeploy_llm.values.adapter_ref import AnyAdapter
from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.values.outputs.request_output import RequestOutput
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.values.pooling_request import Pooling, TooLong
from mmdeploy_llm.values.text.progress_bars import UseTqdm
from mmdeploy_llm.values.text.signatures import takes
from mmdeploy_llm.values.text.spelling import naming_elsewhere

from .answering import OnError, ParamsLike, answers_of, collect, outputs_of
from .arguments import (
    Asks,
    as_conversations,
    as_prompts,
    asks_of,
    asks_of_chats,
    asks_of_stream,
    chat_options,
    iterable_prompts,
    one_params,
    params_for,
    with_adapters,
)
from .client import EngineClient
from .keywords import explaining_keywords

if TYPE_CHECKING:
    from mmdeploy_llm.batch.estimate.result import Estimate
    from mmdeploy_llm.batch.summary import BatchSummary
    from mmdeploy_llm.data.vectors.opened import Vectors
    from mmdeploy_llm.data.vectors.search import Found, Names
    from mmdeploy_llm.values.outputs.pooled import ClassifyOutput, EmbeddingOutput, ScoreOutput
    from mmdeploy_llm.values.params.option_dicts import EngineOptions

    from .bulk.batches import BatchModel


_ELSEWHERE = {
    "encode": "embed(prompts), which returns vectors; get_tokenizer() for token ids",
    "reward": "score(query, documents)",
    "similarity": "score(query, documents), which compares as the model's folder says",
}


@naming_elsewhere(_ELSEWHERE)
@explaining_keywords
class LLM(EngineClient):
    """A loaded model that answers prompts.

    model: a local folder, a hub id, or the name of a bundled model. Options are the fields of
    EngineConfig. Raises ConfigError, ModelError or PluginError when it cannot be loaded.

    An error in one prompt becomes that prompt's output (`finish_reason="error"`, an `error_code`
    other than 200 and a message) and leaves the other prompts untouched. With `on_error="raise"`
    the first such error is raised instead. A wrong call raises TypeError or ValueError at once.

    The model computes in a thread of its own, or with tensor_parallel_size or data_parallel_size in
    other processes; the methods may be called from any thread. Ctrl-C ends the call that it
    interrupts and aborts its prompts. When the last engine has died, requests that have not
    finished come back as errors, and later calls raise WorkerDiedError.

    An LLM belongs to the process and changes little of it. While one that computes in this process
    is open, freed memory is kept for later steps (glibc's mallopt), LRU_CACHE_CAPACITY is set in
    the environment of the C library, and Python's garbage collector leaves out the objects that
    existed when the model was loaded (gc.freeze); while others want the CPUs OpenMP has some idle
    threads, so that it does not spin; cpu_affinity and numa_node place its own threads.
    During a step, torch computes with `num_threads` threads, and on the engine's card. `close`, or
    the last of several LLMs to close, puts all of it back. In a process that is forked from this
    one every method raises EngineError.

    plugins: the loaded plugins; observers and fetchers may be registered there. With several
    engines only those of installed plugins are called, in each engine's process.
    num_kv_blocks: blocks of the KV cache, each for `runtime.block_size` tokens; of several engines,
    those of the one with fewest.
    runtime: every option with its final value, see RuntimeConfig.
    """

    @takes(EngineConfig)
    def __init__(self, model: str | PathLike[str], **options: Unpack[EngineOptions]) -> None:
        super().__init__(EngineConfig.from_options(model, options))

    def generate(
        self,
        prompts: Prompts,
        sampling_params: ParamsLike = None,
        use_tqdm: UseTqdm = True,
        *,
        adapter: AnyAdapter = None,
        on_error: OnError = "return",
    ) -> list[RequestOutput]:
        """Completes every prompt and returns one result for each, in the order of the prompts; with
        `n` > 1 it holds n completions.

        prompts: text, token ids, or {"prompt" | "prompt_token_ids" | "messages",
        "multimodal_data": {"image": ..., "video": ...}}; one of these, or any iterable of them.
        With "messages", also "tools" as in `chat`. What a tokenizer returns is accepted too: its
        "input_ids" are one prompt or a batch, without the padding of its "attention_mask".
        sampling_params: one for all prompts, or a list with one for each.
        use_tqdm: whether a progress bar is shown, or what makes it, called as tqdm is, such as
        functools.partial(tqdm, leave=False).
        adapter: the name of a LoRA adapter for all prompts, or a list with one for each; a prompt's
        own "adapter" precedes it. None: the model alone.
        on_error: "return" or "raise", see LLM.
        """
        items = as_prompts(prompts)
        params = params_for(sampling_params, len(items), "prompts")
        asks = with_adapters(asks_of(items, params), adapter, self._adapter)
        return collect(self._desk, asks, use_tqdm, on_error)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: ParamsLike = None,
        use_tqdm: UseTqdm = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        tools: Any = None,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        adapter: AnyAdapter = None,
        on_error: OnError = "return",
    ) -> list[RequestOutput]:
        """Answers one conversation or several, rendered by the model's chat template.

        chat_template_kwargs: variables for the template, such as {"enable_thinking": False}.
        chat_template: another Jinja template, or a file with one.
        tools: functions that the model may call, each {"type": "function", "function": {"name",
        "description", "parameters": JSON schema}} or a Python function with types and a docstring.
        With `tool_call_parser` the calls are in `outputs.tool_calls`. To continue, append an
        assistant message with these calls and one message of role "tool" for each result.
        add_generation_prompt: whether the prompt ends with the beginning of an assistant message;
        None: unless continue_final_message is True.
        continue_final_message: whether the model continues the last message, one of the assistant.
        adapter: as for `generate`.
        """
        options = chat_options(
            chat_template_kwargs,
            chat_template,
            tools,
            add_generation_prompt,
            continue_final_message,
        )
        items = as_conversations(messages)
        params = params_for(sampling_params, len(items), "messages")
        asks = with_adapters(asks_of_chats(items, params, options), adapter, self._adapter)
        return collect(self._desk, asks, use_tqdm, on_error)

    def generate_iter(
        self,
        prompts: Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """Yields results in the order in which they finish, for any iterable, even an endless one.

        Prompts are taken from the iterable only when the engine has capacity for them, so memory
        does not depend on their number. `output.item` is the object that the iterable yielded.

        sampling_params: one for all prompts, or an iterable with one for each. When its length
        differs from that of `prompts`, ValueError is raised after the results of the pairs.
        """
        asks = Asks(prompts, sampling_params)
        return outputs_of(self.answer_each(asks), asks)

    def stream(
        self,
        prompts: Prompts | Conversation,
        sampling_params: ParamsLike = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        tools: Any = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        adapter: AnyAdapter = None,
    ) -> Iterator[RequestOutput]:
        """Starts prompts and yields deltas: each output holds only the text, reasoning and token
        ids generated since the previous one of its completion was read.

        prompts: as for `generate`, or one conversation as for `chat`, whose options the others are.
        The last output of a completion has `finished`, `outputs.finish_reason` and the metrics.
        With `n` > 1 each output holds one completion; `outputs.index` says which.
        adapter: as for `generate`.
        """
        options = chat_options(
            chat_template_kwargs,
            chat_template,
            tools,
            add_generation_prompt,
            continue_final_message,
        )
        self._desk.check()
        asks = asks_of_stream(prompts, sampling_params, options)
        feed = Feed(self._desk, with_adapters(asks, adapter, self._adapter))
        feed.fill()
        return outputs_of(answers_of(feed, self))

    def extract(
        self,
        prompts: Prompts | Conversation,
        schema: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        *,
        retries: int = VALIDATE_RETRIES,
    ) -> list[Any]:
        """Returns an object of a class for each prompt, in their order, or an ItemError in its
        place: `llm.extract(prompts, MyModel) -> list[MyModel | ItemError]`.

        prompts: as for `generate`, or one conversation.
        schema: a class of pydantic; with a JSON schema, or a file with one, the results are its
        values. Answers are generated by it; one that breaks it, such as a validator of the class,
        is asked again up to `retries` times. One that was cut off is an ItemError.
        """
        from .bulk.extracting import extract

        return extract(self, prompts, schema, sampling_params, use_tqdm, retries)

    @takes(BatchOptions)
    def run_batch(
        self,
        input: str | PathLike[str] | Iterable[Mapping[str, Any]],
        output: str | PathLike[str],
        *,
        resume: bool | Literal["anyway"] = False,
        overwrite: bool = False,
        retry_failed: bool | Collection[int | str] | str = True,
        prompt: str | None = None,
        sampling_params: SamplingParams | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        report: str | PathLike[str] | None = None,
        live: bool | int = False,
        use_tqdm: UseTqdm = True,
        **options: Unpack[BatchOptions],
    ) -> BatchSummary:
        """Answers a whole batch and adds each result to `output` as it finishes: a line of a JSONL
        file, or by its suffix or URL an item of a part.

        input: a folder of images, videos and other media (`prompt` is asked about each), a corpus
        in one of the formats of docs/corpus.md, or an iterable of dicts with the keys of a JSONL
        line, read lazily; media paths in a file are relative to its folder.
        options: see BatchOptions. Of a corpus `prompt` may name columns too: "Describe {title}."
        sampling_params, chat_template_kwargs: used where a line has none of its own.
        resume: keep the output; answer items that are missing, have changed or, with retry_failed,
        failed: True for all of these, or error codes and outcomes, such as [408, "empty"].
        "anyway": also if other results are of another model or of other parameters.
        overwrite: replace the output, which otherwise must not exist. report: an HTML page.
        live: serve it on 127.0.0.1 meanwhile, at this port or, True, a free one, which is logged.
        Raises ConfigError for a wrong call, and when the output is lost, OutputLostError or
        OutputWriteError, which say how to continue; an item with an error becomes a line with it.
        Ctrl-C raises KeyboardInterrupt once the output is closed; resume=True then continues.
        """
        from mmdeploy_llm.batch.options import option_settings

        from .bulk.batches import run_input, written_settings

        settings = written_settings(
            self._config,
            resume,
            overwrite,
            retry_failed,
            chat_template_kwargs,
            use_tqdm,
            sampling_params=one_params(sampling_params),
            question=prompt,
            **option_settings(options),
        )
        return run_input(self._for_batches(), input, output, settings, report, live)

    @takes(BatchOptions)
    def estimate_batch(
        self,
        input: str | PathLike[str] | Iterable[Mapping[str, Any]],
        *,
        num_items: int = NUM_ITEMS,
        seed: int = 0,
        prompt: str | None = None,
        sampling_params: SamplingParams | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[BatchOptions],
    ) -> Estimate:
        """Answers `num_items` items of a batch, drawn at random, and returns what all of them will
        take on this machine, see Estimate. Writes nothing; `print(estimate)` shows it.

        seed: the same one draws the same items. The other arguments are those of run_batch. The
        items of an iterator are read to its end.
        """
        from mmdeploy_llm.batch.options import option_settings

        from .bulk.batches import estimate_input

        fields = {
            "sampling_params": one_params(sampling_params),
            "chat_template_kwargs": dict(chat_template_kwargs or {}),
            "question": prompt,
            **option_settings(options),
        }
        return estimate_input(self, self._config, input, fields, num_items=num_items, seed=seed)

    @takes(ReadArguments)
    def read(
        self,
        documents: str | PathLike[str] | Iterable[str | PathLike[str]],
        output: str | PathLike[str],
        *,
        markdown: str | PathLike[str] | None = None,
        resume: bool | Literal["anyway"] = False,
        overwrite: bool = False,
        retry_failed: bool | Collection[int | str] | str = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        report: str | PathLike[str] | None = None,
        live: bool | int = False,
        use_tqdm: UseTqdm = True,
        **options: Unpack[ReadArguments],
    ) -> BatchSummary:
        """Reads documents page by page, as the command `read`: a record for each page in `output`,
        and Markdown in the folder `markdown`, if one is named.

        documents: a file, folder or glob, or several. options: see ReadArguments; other arguments
        are those of run_batch, and so are the errors. The budget of a page is the engine's
        `image_tokens`. What is told of the Markdown is logged.
        """
        from mmdeploy_llm.batch.documents.reading.arguments import read_arguments

        from .bulk.batches import written_settings
        from .bulk.reading import read_documents

        wish, fields = read_arguments(options, markdown if markdown is None else Path(markdown))
        settings = written_settings(
            self._config, resume, overwrite, retry_failed, chat_template_kwargs, use_tqdm, **fields
        )
        model = self._for_batches()
        return read_documents(model, documents, output, wish, settings, report, live)

    def embed(
        self,
        prompts: Prompts,
        use_tqdm: UseTqdm = True,
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        instruction: str | None = None,
        pooling: Pooling | Literal["tokens"] | None = None,
        too_long: TooLong = "error",
        on_error: OnError = "return",
    ) -> list[EmbeddingOutput]:
        """Returns the vector of each prompt, in their order; a generating model gives the last
        hidden state.

        prompts: as for `generate`; media alone are a prompt too: {"multimodal_data": {"image":
        image}}.
        dimensions: the vectors are cut to; None: all of them.
        normalize: whether they have length 1, also when they are cut; None: as the model's folder
        says, else they have, and are cut after that, as sentence-transformers does it.
        instruction: what the vectors are for: the name of one of the folder's prompts, such as
        "query", or a text, which stands before the prompt or as the system message, as the model
        was trained; None: the model's default.
        pooling: the state of the "last" token or of the first ("cls"), the "mean" of all, or all
        ("tokens"); None: as the model's folder says, else "last".
        too_long: a text of more tokens than the model reads is an "error" of that prompt, is "cut"
        to them, or "chunk": the mean of the vectors of windows that follow each other. What was
        done is in `media_notes` of the output.
        """
        from .embedding import embed_asks, embedding_of, wanted_vector

        wanted = wanted_vector(dimensions, normalize, instruction, pooling, too_long)
        asks = list(embed_asks(as_prompts(prompts), wanted))
        return [embedding_of(output) for output in collect(self._desk, asks, use_tqdm, on_error)]

    def embed_iter(
        self,
        prompts: Iterable[Prompt],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        instruction: str | None = None,
        pooling: Pooling | Literal["tokens"] | None = None,
        too_long: TooLong = "error",
    ) -> Iterator[EmbeddingOutput]:
        """Yields vectors in the order in which they finish, for any iterable, as generate_iter
        does; `output.item` is the object that it yielded."""
        from .embedding import embed_asks, embeddings_of, wanted_vector

        wanted = wanted_vector(dimensions, normalize, instruction, pooling, too_long)
        asks = embed_asks(iterable_prompts(prompts, "embed"), wanted)
        return embeddings_of(self.answer_each(asks))

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
        from .embedding import Scoring

        scoring = Scoring(self._desk.abilities, query, documents, instruction)
        return scoring.outputs(collect(self._desk, scoring.asks, use_tqdm, on_error))

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
        from .embedding import ranked

        ranked((), top_n)  # a wrong number is told before anything is computed
        scores = self.score(query, documents, use_tqdm, instruction=instruction, on_error=on_error)
        return ranked(scores, top_n)

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
        from .embedding import Classifying

        work = Classifying(prompts, labels, normalize_length=normalize_length)
        return work.outputs(collect(self._desk, work.asks, use_tqdm, on_error))

    @takes(EmbedArguments)
    def embed_batch(
        self,
        input: str | PathLike[str] | Iterable[Mapping[str, Any]],
        output: str | PathLike[str],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        instruction: str | None = None,
        pooling: str | None = None,
        too_long: str = "error",
        prompt: str | None = None,
        resume: bool | Literal["anyway"] = False,
        overwrite: bool = False,
        retry_failed: bool | Collection[int | str] | str = True,
        report: str | PathLike[str] | None = None,
        live: bool | int = False,
        use_tqdm: UseTqdm = True,
        **options: Unpack[EmbedArguments],
    ) -> BatchSummary:
        """Makes a vector of each item of a corpus, as the command `embed`, and adds each to
        `output` as it finishes: NAME.parquet, .npy, .lance, .jsonl or .tar, see docs/embeddings.md.

        dimensions, normalize, instruction, pooling, too_long: as for `embed`. prompt: the text of
        each item, embedded with its media; of a corpus it may have columns. options: see
        EmbedArguments; the other arguments are those of run_batch, and so are the errors.
        """
        from mmdeploy_llm.batch.options import option_settings
        from mmdeploy_llm.data.vectors.written import finish

        from .bulk.batches import run_input, written_settings
        from .vector_asks import vector_asks

        asks = vector_asks(
            dimensions=dimensions,
            normalize=normalize,
            instruction=instruction,
            pooling=pooling,
            too_long=too_long,
        )
        check_known("embed_batch", options, EmbedArguments, "report")
        fields = {**option_settings(options), "question": prompt, "asks": asks}
        settings = written_settings(
            self._config, resume, overwrite, retry_failed, None, use_tqdm, **fields
        )
        model = self._for_batches()
        return run_input(
            model, input, output, settings, report, live, after=lambda done: finish(done.sink)
        )

    def search(
        self,
        vectors: Names | Vectors,
        queries: Prompts,
        top_k: int = TOP_K,
        *,
        similarity: str | None = None,
        instruction: str | None = None,
        column: str | None = None,
        too_long: TooLong = "error",
    ) -> list[list[Found]]:
        """Returns the `top_k` items of files of vectors that are nearest to each query, the best
        first, exactly, as the command `search`.

        vectors: an output of `embed_batch`, other tables in Parquet or .npy files, or several.
        queries: prompts as for `embed`, such as texts and {"multimodal_data": {"image": path}}.
        similarity: "cosine" or "dot"; None: as the model's folder says. instruction: of the
        queries; None: the model's own for queries. column: of a table that embed_batch has not
        written. too_long: of a query, as for `embed`, and told in the log. Memory does not grow
        with the files.

        Raises ConfigError for vectors of another model, and RequestError for a query that cannot be
        embedded.
        """
        from .bulk.searching import search_vectors

        return search_vectors(
            self,
            self._config,
            self._desk.abilities.rules,
            vectors,
            queries,
            top_k,
            similarity=similarity,
            instruction=instruction,
            column=column,
            too_long=too_long,
        )

    def answer_each(self, asks: Iterable[Ask]) -> Generator[Answer, None, None]:
        """Yields results as generate_iter does, each with its ask. Closing the generator aborts the
        requests that are still running."""
        return answers_of(Feed(self._desk, asks), self)

    def _for_batches(self) -> BatchModel:
        """Returns what whole batches need of this object."""
        from .bulk.batches import BatchModel

        return BatchModel(config=self._config, media=self._desk.media, lend=self._lent)
