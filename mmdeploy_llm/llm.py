"""LLM: the one object through which Python uses this package. Lists of prompts in, lists of results
out; or any iterable in, results as they finish."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any, Literal

from .arguments import as_conversations, as_prompts, one_params, params_for
from .batch.ids import Selection
from .batch.job import BatchSettings, BatchSummary, plan_batch, run_batch
from .batch.previews import FilePreviews
from .batch.report import report_batch
from .config import EngineConfig
from .desk.belonging import Belonging
from .desk.drive import CLOSED, Driver
from .desk.fleet import Fleet
from .desk.fleet_engine import Ask
from .desk.jobs import Job, JobOutput, exception_of, refused
from .errors import ConfigError, WorkerDiedError
from .hooks import Model
from .intake.cache import CacheStats, add_stats
from .intake.intake import TokenCount
from .intake.prompts import as_prompt, is_conversation
from .messages import Conversation, Prompt, Prompts
from .outputs import RequestOutput
from .params import SamplingParams
from .progress import Progress
from .startup.media import open_media, open_reader
from .startup.start import start

OnError = Literal["return", "raise"]
ParamsLike = SamplingParams | Sequence[SamplingParams] | None


class LLM(Belonging):
    """A loaded model that answers prompts.

    model: a local folder, a hub id, or the name of a bundled model. Options are the fields of
    EngineConfig. Raises ConfigError, ModelError or PluginError when it cannot be loaded.

    An error in one prompt becomes that prompt's output (`finish_reason="error"`, an `error_code`
    other than 200 and a message) and leaves the other prompts untouched. With `on_error="raise"`
    the first such error is raised instead. A wrong call raises TypeError or ValueError at once.

    With tensor_parallel_size or data_parallel_size the model computes in other processes. When the
    last engine has died, requests that have not finished come back as errors, and later calls raise
    WorkerDiedError.

    An LLM belongs to the process and changes little of it. While one that computes in this process
    is open, freed memory is kept for later steps (glibc's mallopt) and LRU_CACHE_CAPACITY is set in
    the environment of the C library; cpu_affinity and numa_node place the threads that call it.
    During a step, torch computes with `num_threads` threads, and on the engine's card. `close`, or
    the last of several LLMs to close, puts all of it back. In a process that is forked from this
    one every method raises EngineError.

    plugins: the loaded plugins; observers may be registered there. With several engines only the
    observers of installed plugins are called, in each engine's process.
    model: the loaded module, None when other processes hold it.
    runtime: every option with its final value.
    """

    def __init__(self, model: str, **options: Any) -> None:
        super().__init__()
        self._config = EngineConfig.from_options(model, options)
        self._numbers = itertools.count()
        self._driver: Driver | Fleet
        self._fleet: Fleet | None = None
        self.model: Model | None = None
        if self._config.data_parallel_size > 1:
            self._driver = self._fleet = Fleet(self._config)
            self.plugins = self._fleet.plugins
            self.runtime = self._fleet.runtime
            return
        assembly = start(self._config)
        self._engine = assembly.engine
        self._intake = assembly.intake
        self.plugins = assembly.plugins
        self.model = assembly.model
        self.runtime = assembly.runtime
        self._driver = Driver(
            assembly.engine,
            num_threads=assembly.runtime.num_intake_threads,
            num_ahead=assembly.runtime.max_num_seqs + 2 * assembly.runtime.num_intake_threads,
        )

    def generate(
        self,
        prompts: Prompts,
        sampling_params: ParamsLike = None,
        use_tqdm: bool = True,
        *,
        on_error: OnError = "return",
    ) -> list[RequestOutput]:
        """Completes every prompt and returns the results in the order of the prompts, n for each
        prompt when `n` > 1.

        prompts: text, token ids, or {"prompt" | "prompt_token_ids" | "messages",
        "multimodal_data": {"image": ..., "video": ...}}; one of these, or any iterable of them.
        With "messages", also "tools" as in `chat`.
        sampling_params: one for all prompts, or a list with one for each.
        use_tqdm: whether a progress bar is shown.
        on_error: "return" or "raise", see LLM.
        """
        items = as_prompts(prompts)
        jobs = self._jobs(items, params_for(sampling_params, len(items), "prompts"))
        return self._collect(jobs, use_tqdm, on_error)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: ParamsLike = None,
        use_tqdm: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        tools: Any = None,
        *,
        on_error: OnError = "return",
    ) -> list[RequestOutput]:
        """Answers one conversation or several, rendered by the model's chat template.

        chat_template_kwargs: variables for the template, such as {"enable_thinking": False}.
        chat_template: another Jinja template, or a file with one.
        tools: functions that the model may call, each {"type": "function", "function": {"name",
        "description", "parameters": JSON schema}} or a Python function with types and a docstring.
        With `tool_call_parser` the calls are in `outputs.tool_calls`. To continue, append an
        assistant message with these calls and one message of role "tool" for each result.
        """
        items = as_conversations(messages)
        params = params_for(sampling_params, len(items), "messages")
        jobs = self._chat_jobs(items, params, chat_template_kwargs, chat_template, tools)
        return self._collect(jobs, use_tqdm, on_error)

    def generate_iter(
        self, prompts: Iterable[Prompt], sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Yields results in the order in which they finish, for any iterable, even an endless one.

        Prompts are taken from the iterable only when the engine has capacity for them, so memory
        does not depend on their number. `output.prompt` is the object that the iterable yielded.
        """
        if isinstance(prompts, (str, Mapping)):
            raise TypeError(
                "generate_iter takes an iterable of prompts; use generate for one prompt"
            )
        jobs = self._jobs(prompts, itertools.repeat(one_params(sampling_params)))
        return (item.output for item in self._driver.run(jobs))

    def answer_each(
        self, pairs: Iterable[tuple[Prompt, SamplingParams]]
    ) -> Generator[JobOutput, None, None]:
        """Yields results as generate_iter does, with sampling parameters for each prompt;
        `job.index` of a result counts the pairs from 0. Closing the generator aborts the requests
        that are still running."""
        return self._driver.run(self._pair_jobs(pairs))

    def run_batch(
        self,
        input: str | os.PathLike[str] | Iterable[Mapping[str, Any]],
        output: str | os.PathLike[str],
        *,
        resume: bool = False,
        overwrite: bool = False,
        retry_failed: bool = True,
        max_failures: int | None = None,
        shard: str | None = None,
        limit: int | None = None,
        prompt: str | None = None,
        sampling_params: SamplingParams | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        report: str | os.PathLike[str] | None = None,
        use_tqdm: bool = True,
    ) -> BatchSummary:
        """Answers a whole batch and appends each result to `output` as it finishes, as a JSON line.

        input: a JSONL file, a Parquet file, a folder of images and videos (`prompt` is asked about
        each), or an iterable of dicts: {"id", "prompt" | "prompt_token_ids" | "messages",
        "multimodal_data", "sampling_params", "chat_template_kwargs", "tools"}, read lazily; media
        paths in a file are relative to its folder.
        sampling_params, chat_template_kwargs: used where a line has none of its own.
        resume: keep the output and answer items that are missing or, with retry_failed, failed.
        overwrite: replace the output, which otherwise must not exist.
        shard: "2/8" answers the second of eight shards, by line number.
        limit, max_failures: read only the first lines; stop after this many failed items.
        report: path of an HTML page to write.
        Raises ConfigError for a wrong call; an item with an error becomes a line with that error.
        Ctrl-C raises KeyboardInterrupt once the output is closed; resume=True then continues.
        """
        if resume and overwrite:
            raise ConfigError("resume and overwrite contradict each other; give one of them")
        settings = BatchSettings(
            mode="resume" if resume else "overwrite" if overwrite else "new",
            sampling_params=one_params(sampling_params),
            chat_template_kwargs=dict(chat_template_kwargs or {}),
            question=prompt,
            selection=Selection.parse(shard, limit),
            max_failures=max_failures,
            is_failed_redone=retry_failed,
            is_progress_shown=None if use_tqdm else False,
        )
        summary = run_batch(plan_batch(input, output, settings), self._lent)
        if summary.ending == "interrupted":
            raise KeyboardInterrupt
        if report is not None:
            self._report(summary, report, settings)
        return summary

    def _report(
        self, summary: BatchSummary, path: str | os.PathLike[str], settings: BatchSettings
    ) -> None:
        """Writes the HTML page of a batch, with the frames of its videos."""
        config, intake = self._config, None if self._fleet is not None else self._intake
        previews = FilePreviews(
            lambda: open_reader(config) if intake is None else intake.media,
            lambda: open_media(config) if intake is None else intake.media,
        )
        report_batch(summary, path, settings, model=config.model, previews=previews)

    def stream(
        self,
        prompts: Prompts | Conversation,
        sampling_params: ParamsLike = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        tools: Any = None,
    ) -> Iterator[RequestOutput]:
        """Yields deltas: each output holds only the text, reasoning and token ids generated since
        the previous one.

        prompts: as for `generate`, or one conversation as for `chat`. The last output of a prompt
        has `finished`, `outputs.finish_reason` and the metrics.
        """
        if is_conversation(prompts):
            params = params_for(sampling_params, 1, "messages")
            kwargs = chat_template_kwargs
            jobs = self._chat_jobs([prompts], params, kwargs, chat_template, tools, True)
        else:
            items = as_prompts(prompts)
            params = params_for(sampling_params, len(items), "prompts")
            jobs = self._jobs(items, params, stream=True)
        return (item.output for item in self._driver.run(jobs))

    def count_tokens(self, prompt: Prompt | Conversation) -> TokenCount:
        """Counts prompt and media tokens without generating. Raises RequestError for a prompt that
        cannot be prepared."""
        self._driver.check_open(CLOSED)
        prompt = as_prompt(prompt)
        if self._fleet is not None:
            count: TokenCount = self._fleet.ask_one("count_tokens", prompt)
            return count
        return self._intake.count_tokens(prompt)

    def cache_stats(self) -> Mapping[str, CacheStats]:
        """Returns hits, misses and bytes of the media caches, summed over all engines: "processed"
        items, and items "fetched" by URL."""
        self._home.check()
        if self._fleet is not None:
            return add_stats(self._fleet.ask("cache_stats"))
        return self._intake.cache_stats()

    def close(self) -> None:
        """Stops the engine and its threads and frees the model. The object cannot be used again.

        May be called twice, and from any thread: calls that run in others end with EngineError
        after the step that is being computed.
        """
        self._home.check()
        if self._fleet is not None:
            self._fleet.close()
            return
        self._intake.interrupt()  # so that a plugin or template that hangs does not delay close
        self._driver.close()
        self._intake.close()

    def _jobs(
        self, prompts: Iterable[Any], params: Iterable[SamplingParams], stream: bool = False
    ) -> Iterator[Job]:
        return self._pair_jobs(zip(prompts, params, strict=False), stream)

    def _pair_jobs(
        self, pairs: Iterable[tuple[Any, SamplingParams]], stream: bool = False
    ) -> Iterator[Job]:
        for index, (prompt, own) in enumerate(pairs):
            accept = self._ask("accept", prompt, own, stream=stream, number=next(self._numbers))
            yield Job(index=index, prompt=prompt, num_outputs=own.n, accept=accept)

    def _chat_jobs(
        self,
        conversations: Iterable[Any],
        params: Iterable[SamplingParams],
        template_kwargs: Mapping[str, Any] | None,
        template: str | None,
        tools: Any,
        stream: bool = False,
    ) -> Iterator[Job]:
        if template_kwargs is not None and not isinstance(template_kwargs, Mapping):
            raise ValueError(
                f"chat_template_kwargs must be a dict, got {type(template_kwargs).__name__}"
            )
        for index, (messages, own) in enumerate(zip(conversations, params, strict=False)):
            accept = self._ask(
                "accept_chat",
                messages,
                own,
                chat_template_kwargs=template_kwargs,
                chat_template=template,
                tools=tools,
                stream=stream,
                number=next(self._numbers),
            )
            yield Job(index=index, prompt=messages, num_outputs=own.n, accept=accept)

    def _ask(self, method: str, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """Returns a call of the intake that is made later, in the process that has the intake."""
        if self._fleet is not None:
            return Ask(method=method, args=args, kwargs=kwargs)
        return partial(getattr(self._intake, method), *args, **kwargs)

    def _collect(
        self, jobs: Iterator[Job], use_tqdm: bool, on_error: OnError
    ) -> list[RequestOutput]:
        """Runs the jobs and returns all outputs, ordered by job and sample."""
        if on_error not in ("return", "raise"):
            raise ValueError(f"on_error must be 'return' or 'raise', got {on_error!r}")
        todo = list(jobs)
        done: dict[tuple[int, int], RequestOutput] = {}
        self._driver.check()
        # Closing the iterator makes sure that an error leaves no request in the engine.
        with closing(self._driver.run(todo)) as items, Progress(len(todo), use_tqdm) as progress:
            try:
                for item in items:
                    if on_error == "raise" and not item.output.is_ok:
                        self._driver.check()
                        raise exception_of(item)
                    done[item.job.index, item.output.outputs.index] = item.output
                    progress.count(item)
            except WorkerDiedError as death:
                if on_error == "raise":
                    raise
                lost = (item for job in todo for item in refused(job, death))
                for item in lost:
                    done.setdefault((item.job.index, item.output.outputs.index), item.output)
        return [done[job.index, index] for job in todo for index in range(job.num_outputs)]
