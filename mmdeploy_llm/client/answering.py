"""AnsweringClient: a model that answers many prompts in one call."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from typing import Any, Literal

from mmdeploy_llm.engine.desk.ask import Ask
from mmdeploy_llm.engine.desk.feed import Feed
from mmdeploy_llm.engine.desk.outcome import Answer, refused
from mmdeploy_llm.errors import EngineError
from mmdeploy_llm.messages import Conversation, Prompt, Prompts
from mmdeploy_llm.values.adapter_ref import AnyAdapter
from mmdeploy_llm.values.outputs.request_output import RequestOutput
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.values.text.progress_bars import UseTqdm, open_bar, show_words

from .arguments import Asks, asks_of_stream, chat_options
from .client import EngineClient

logger = logging.getLogger(__name__)


class Progress(AbstractContextManager["Progress"]):
    """A bar that counts finished prompts and shows tokens per second, and after it a warning when
    prompts have failed. Without a bar nothing is shown."""

    def __init__(self, total: int, use_tqdm: UseTqdm) -> None:
        self._bar = open_bar(use_tqdm or False, total=total, desc="Processed prompts")
        self._begin = time.monotonic()
        self._num_input, self._num_output, self._total = 0, 0, total if use_tqdm else 0
        self._failed: list[RequestOutput] = []

    def __exit__(self, *_: object) -> None:
        self._bar.close()
        if self._failed and self._total:
            self._tell()

    def _tell(self) -> None:
        first = self._failed[0]
        logger.warning(
            "%d of %d prompts failed (their outputs have is_ok False, an error_code and an "
            "error_msg); the first with error %d: %s",
            len(self._failed),
            self._total,
            first.error_code,
            first.error_msg,
        )

    def count(self, output: RequestOutput) -> None:
        """Counts one finished prompt."""
        self._failed += [] if output.is_ok else [output]
        self._num_output += sum(len(completion.token_ids) for completion in output.outputs)
        self._num_input += len(output.prompt_token_ids)
        seconds = max(time.monotonic() - self._begin, 1e-9)
        read, written = self._num_input / seconds, self._num_output / seconds
        words = f"est. speed input: {read:.2f} toks/s, output: {written:.2f} toks/s"
        show_words(self._bar, words)
        self._bar.update(1)


OnError = Literal["return", "raise"]
ParamsLike = SamplingParams | Sequence[SamplingParams] | None


class AnsweringClient(EngineClient):
    """Base of LLM's parts that answer prompts."""

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
        return self._outputs(self.answer_each(asks), asks)

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
        feed = Feed(self._desk, self._with_adapters(asks, adapter))
        feed.fill()
        return self._outputs(self._answers(feed))

    def answer_each(self, asks: Iterable[Ask]) -> Generator[Answer, None, None]:
        """Yields results as generate_iter does, each with its ask. Closing the generator aborts the
        requests that are still running."""
        return self._answers(Feed(self._desk, asks))

    def _answers(self, feed: Feed) -> Generator[Answer, None, None]:
        """Yields the answers of a feed; holds this object, whose engine would end with it."""
        with closing(feed.answers()) as answers:
            yield from answers

    def _outputs(
        self, answers: Generator[Answer, None, None], asks: Asks | None = None
    ) -> Iterator[RequestOutput]:
        """Yields the outputs alone. Raises the error of the asks after the last one."""
        with closing(answers):
            for answer in answers:
                yield answer.output
        if asks is not None and asks.error is not None:
            raise asks.error

    def _collect(
        self, asks: Sequence[Ask], use_tqdm: UseTqdm, on_error: OnError
    ) -> list[RequestOutput]:
        """Has the prompts answered and returns their outputs in order."""
        if on_error not in ("return", "raise"):
            raise ValueError(f"on_error must be 'return' or 'raise', got {on_error!r}")
        self._desk.check()
        done: dict[Ask, RequestOutput] = {}
        # Closing the iterator makes sure that an error leaves no request in the engine.
        with (
            closing(Feed(self._desk, asks).answers()) as answers,
            Progress(len(asks), use_tqdm) as progress,
        ):
            try:
                for answer in answers:
                    if on_error == "raise" and not answer.output.is_ok:
                        self._desk.check()
                        raise answer.exception
                    done[answer.ask] = answer.output
                    progress.count(answer.output)
            except EngineError as death:
                if on_error == "raise" or self._desk.death is None:
                    raise
                done |= {ask: refused(ask, death) for ask in asks if ask not in done}
        return [done[ask] for ask in asks]
