"""LLM: the whole toolkit behind one object. Lists in, lists out; or iterables in, results as they
finish."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

from tqdm import tqdm

from .batch.ids import Selection
from .batch.job import BatchSettings, BatchSummary, plan_batch, run_batch
from .batch.previews import VideoStrip, file_previews
from .batch.report import report_batch
from .config import EngineConfig
from .drive import Driver, Job, JobOutput, refused
from .errors import ConfigError, EngineError, RequestError, WorkerDiedError
from .fleet import Ask, Fleet
from .hooks import Model
from .intake.cache import CacheStats, add_stats
from .intake.intake import TokenCount
from .messages import Conversation, Prompt, Prompts
from .outputs import RequestOutput
from .params import SamplingParams
from .startup.media import open_media
from .startup.start import start

OnError = Literal["return", "raise"]
ParamsLike = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model, ready to answer.

    model: a local folder, a hub id, or the name of a bundled model. Options are the fields of
    EngineConfig. Raises ConfigError, ModelError or PluginError when it cannot be loaded.

    What is wrong with one prompt becomes that prompt's output (`finish_reason="error"`, an
    `error_code` other than 200 and a message); the others are not touched. With `on_error="raise"`
    the first such error is raised instead. A wrong call raises TypeError or ValueError at once.

    What computes may live in processes of its own (tensor_parallel_size, data_parallel_size). When
    no engine is left, since a process died, requests that have not ended come back in error, and
    later calls raise WorkerDiedError.

    plugins: the loaded plugins; observers may be registered there, but with several engines only
    those of installed plugins are told, in each engine's process. model: the loaded module; None
    where it is in other processes. runtime: every option as it was resolved.
    """

    def __init__(self, model: str, **options: Any) -> None:
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
        """Completes every prompt; results in the order of the prompts, n for each with `n` > 1.

        prompts: text, token ids, or {"prompt" | "prompt_token_ids" | "messages",
        "multimodal_data": {"image": ..., "video": ...}}; one of these, or any iterable of them.
        With "messages", also "tools" as in `chat`.
        sampling_params: one for all, or as many as there are prompts.
        """
        items = _as_prompts(prompts)
        jobs = self._jobs(items, _params_for(sampling_params, len(items), "prompts"))
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
        """Answers one conversation or several, through the model's chat template.

        chat_template_kwargs: variables for the template, such as {"enable_thinking": False}.
        chat_template: another Jinja template, or a file with one. tools: what the model may call,
        each {"type": "function", "function": {"name", "description", "parameters": JSON schema}}
        or a Python function with types and a docstring. With `tool_call_parser` the calls are in
        `outputs.tool_calls`; an assistant message with them, and a message of role "tool" for each
        result, go on with the conversation.
        """
        items = _as_conversations(messages)
        params = _params_for(sampling_params, len(items), "messages")
        jobs = self._chat_jobs(items, params, chat_template_kwargs, chat_template, tools)
        return self._collect(jobs, use_tqdm, on_error)

    def generate_iter(
        self, prompts: Iterable[Prompt], sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Results in the order in which they finish, of any iterable, endless ones too.

        Prompts are taken when there is room for them; memory does not depend on their number.
        `output.prompt` is the very object the iterable gave.
        """
        if isinstance(prompts, (str, Mapping)):
            raise TypeError(
                "generate_iter takes an iterable of prompts; use generate for one prompt"
            )
        jobs = self._jobs(prompts, itertools.repeat(_one_params(sampling_params)))
        return (item.output for item in self._driver.run(jobs))

    def answer_each(
        self, pairs: Iterable[tuple[Prompt, SamplingParams]]
    ) -> Generator[JobOutput, None, None]:
        """As generate_iter, with sampling parameters for each prompt; `job.index` of a result
        counts the pairs from 0. Closing the generator aborts what is running."""
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
        """Answers a whole batch and appends each result to `output`, a line of JSON (see
        batch/records.py), as soon as it is there.

        input: a JSONL file, a Parquet file, a folder of images and videos (`prompt` is asked about
        each), or an iterable of dicts: {"id", "prompt" | "prompt_token_ids" | "messages",
        "multimodal_data", "sampling_params", "chat_template_kwargs", "tools"}, read lazily. A
        file's media paths are relative to its folder. sampling_params, chat_template_kwargs: what
        a line does not say itself. resume: keep the output and do what is missing, and what failed
        unless `retry_failed` is False. overwrite: replace it; else it must not exist. shard: "2/8",
        the second of eight parts by line number; limit: the first lines only. max_failures: end
        when so many items failed. report: write an HTML page there.

        An item that is wrong is a line with its error. Raises ConfigError for a wrong call. Ctrl-C
        raises KeyboardInterrupt after the output is closed; the same call with resume=True goes on.
        """
        if resume and overwrite:
            raise ConfigError("resume and overwrite contradict each other; give one of them")
        settings = BatchSettings(
            mode="resume" if resume else "overwrite" if overwrite else "new",
            sampling_params=_one_params(sampling_params),
            chat_template_kwargs=dict(chat_template_kwargs or {}),
            question=prompt,
            selection=Selection.parse(shard, limit),
            max_failures=max_failures,
            is_failed_redone=retry_failed,
            is_progress_shown=None if use_tqdm else False,
        )
        summary = run_batch(plan_batch(input, output, settings), lambda: nullcontext(self))
        if summary.ending == "interrupted":
            raise KeyboardInterrupt
        if report is not None:
            self._report(summary, report, settings)
        return summary

    def _report(
        self, summary: BatchSummary, path: str | os.PathLike[str], settings: BatchSettings
    ) -> None:
        """The page of a batch, with the frames of its videos."""
        config, intake = self._config, None if self._fleet is not None else self._intake
        strip = VideoStrip(lambda: open_media(config) if intake is None else intake.media)
        previews = file_previews(strip)
        model = self._config.model
        report_batch(summary, path, settings, model=model, make_previews=previews)

    def stream(
        self,
        prompts: Prompts | Conversation,
        sampling_params: ParamsLike = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        tools: Any = None,
    ) -> Iterator[RequestOutput]:
        """What is new, as it comes: each output holds only the text, reasoning and ids
        since the last.

        Takes what `generate` takes, or one conversation as `chat` does. The last output of a prompt
        has `finished`, `outputs.finish_reason` and the metrics.
        """
        if _is_conversation(prompts):
            params = _params_for(sampling_params, 1, "messages")
            kwargs = chat_template_kwargs
            jobs = self._chat_jobs([prompts], params, kwargs, chat_template, tools, True)
        else:
            items = _as_prompts(prompts)
            params = _params_for(sampling_params, len(items), "prompts")
            jobs = self._jobs(items, params, stream=True)
        return (item.output for item in self._driver.run(jobs))

    def count_tokens(self, prompt: Prompt) -> TokenCount:
        """Prompt and media tokens of a prompt, without generating. Raises RequestError."""
        if self._fleet is not None:
            count: TokenCount = self._fleet.ask_one("count_tokens", prompt)
            return count
        return self._intake.count_tokens(prompt)

    def cache_stats(self) -> Mapping[str, CacheStats]:
        """Hits, misses and bytes of the caches of media: "processed" and, by URL, "fetched"; of all
        engines together."""
        if self._fleet is not None:
            return add_stats(self._fleet.ask("cache_stats"))
        return self._intake.cache_stats()

    def close(self) -> None:
        """Ends the engine and its threads and drops the model; the object cannot be used again."""
        if self._fleet is not None:
            self._fleet.close()
            return
        self._intake.media.interrupt()  # a plugin that hangs does not hold up the end
        self._driver.close()
        self._intake.close()
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

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
        """A call of the intake, to be made when its turn comes, where the intake is."""
        if self._fleet is not None:
            return Ask(method=method, args=args, kwargs=kwargs)
        return partial(getattr(self._intake, method), *args, **kwargs)

    def _collect(
        self, jobs: Iterator[Job], use_tqdm: bool, on_error: OnError
    ) -> list[RequestOutput]:
        """All outputs, by job and sample."""
        if on_error not in ("return", "raise"):
            raise ValueError(f"on_error must be 'return' or 'raise', got {on_error!r}")
        todo = list(jobs)
        done: dict[tuple[int, int], RequestOutput] = {}
        self._driver.check()
        # Closed here, so that an error leaves no request behind in the engine.
        with closing(self._driver.run(todo)) as items, _Progress(len(todo), use_tqdm) as progress:
            try:
                for item in items:
                    if on_error == "raise" and not item.output.is_ok:
                        self._driver.check()
                        raise _exception(item)
                    done[item.job.index, item.output.outputs.index] = item.output
                    progress.count(item)
            except WorkerDiedError as death:
                if on_error == "raise":
                    raise
                lost = (item for job in todo for item in refused(job, death))
                for item in lost:
                    done.setdefault((item.job.index, item.output.outputs.index), item.output)
        return [done[job.index, index] for job in todo for index in range(job.num_outputs)]


class _Progress:
    """The progress bar: prompts done, input and output tokens per second so far."""

    def __init__(self, total: int, is_shown: bool) -> None:
        self._bar = tqdm(
            total=total, desc="Processed prompts", dynamic_ncols=True, disable=not is_shown
        )
        self._left: dict[int, int] = {}
        self._num_input = 0
        self._num_output = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def count(self, item: JobOutput) -> None:
        """Takes a finished output into account; a prompt is done with the last of its n samples."""
        self._num_output += len(item.output.outputs.token_ids)
        left = self._left.pop(item.job.index, item.job.num_outputs) - 1
        if left:
            self._left[item.job.index] = left
            return
        self._num_input += len(item.output.prompt_token_ids)
        elapsed = max(self._bar.format_dict["elapsed"], 1e-9)
        self._bar.set_postfix_str(
            f"est. speed input: {self._num_input / elapsed:.2f} toks/s, "
            f"output: {self._num_output / elapsed:.2f} toks/s",
            refresh=False,
        )
        self._bar.update(1)


def _exception(item: JobOutput) -> Exception:
    """The error of an output as an exception: intake's own, or one by its code."""
    if item.error is not None:
        return item.error
    kind = RequestError if item.output.error_code < 500 else EngineError
    return kind(item.output.error_msg)


def _as_prompts(prompts: Any) -> list[Any]:
    """One prompt or an iterable of them as a list, each of a known type. Raises TypeError,
    ValueError."""
    if prompts is None:
        raise ValueError(
            "prompts must not be None; give a text, token ids, a dict, or a list of these"
        )
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise TypeError(_wrong_type(prompts))
    items = list(prompts)
    if items and all(_is_token_id(item) for item in items):
        return [prompts if isinstance(prompts, Sequence) else items]
    for item in items:
        if not isinstance(item, (str, Mapping, list, tuple)):
            raise TypeError(_wrong_type(item))
    return items


def _wrong_type(item: Any) -> str:
    return (
        f"Invalid type for 'prompt': {type(item).__name__}, "
        "expected one of ['str', 'list', 'dict']: a text, a list of token ids, "
        "or a dict with 'prompt', 'prompt_token_ids' or 'messages'"
    )


def _is_token_id(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def _is_conversation(value: Any) -> bool:
    is_list = isinstance(value, (list, tuple)) and bool(value)
    return is_list and all(isinstance(item, Mapping) and "role" in item for item in value)


def _as_conversations(messages: Any) -> list[Any]:
    """One conversation or a list of them as a list. Raises TypeError."""
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Iterable):
        raise TypeError(
            f"messages must be a list of message dicts, or a list of such lists, got "
            f"{type(messages).__name__}"
        )
    items = list(messages)
    if items and all(isinstance(item, Mapping) for item in items):
        return [messages if isinstance(messages, Sequence) else items]
    for item in items:
        if isinstance(item, (str, Mapping)) or not isinstance(item, Sequence):
            raise TypeError(
                f"a conversation must be a list of message dicts, got {type(item).__name__}"
            )
    return items


def _one_params(params: Any) -> SamplingParams:
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise TypeError(f"sampling_params must be SamplingParams, got {type(params).__name__}")
    return params


def _params_for(params: Any, count: int, what: str) -> list[SamplingParams]:
    """One SamplingParams for each prompt. Raises TypeError, and ValueError for a wrong number."""
    if isinstance(params, (list, tuple)):
        if len(params) not in (1, count):
            raise ValueError(
                f"{what} and sampling_params must be the same length, got {count} {what} and "
                f"{len(params)} sampling_params; give one for each, or one for all"
            )
        each = [_one_params(own) for own in params]
        return each * count if len(each) == 1 else each
    return [_one_params(params)] * count
