"""Has many prompts answered at the desk in one call."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from typing import Literal

from mmdeploy_llm.engine.desk.ask import Ask
from mmdeploy_llm.engine.desk.desk import Desk
from mmdeploy_llm.engine.desk.feed import Feed
from mmdeploy_llm.engine.desk.outcome import Answer, refused
from mmdeploy_llm.errors import EngineError
from mmdeploy_llm.values.outputs.request_output import RequestOutput
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.values.text.progress_bars import UseTqdm, open_bar, show_words

from .arguments import Asks

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
        show_words(self._bar, f"est. speed input: {read:.2f} toks/s, output: {written:.2f} toks/s")
        self._bar.update(1)


OnError = Literal["return", "raise"]
ParamsLike = SamplingParams | Sequence[SamplingParams] | None


def answers_of(feed: Feed, owner: object) -> Generator[Answer, None, None]:
    """Yields the answers of a feed. owner: the LLM, whose engine ends with it; it is held until the
    generator ends."""
    with closing(feed.answers()) as answers:
        yield from answers


def outputs_of(
    answers: Generator[Answer, None, None], asks: Asks | None = None
) -> Iterator[RequestOutput]:
    """Yields the outputs alone. Raises the error of the asks after the last one."""
    with closing(answers):
        for answer in answers:
            yield answer.output
    if asks is not None and asks.error is not None:
        raise asks.error


def collect(
    desk: Desk, asks: Sequence[Ask], use_tqdm: UseTqdm, on_error: OnError
) -> list[RequestOutput]:
    """Has the prompts answered and returns their outputs in order."""
    if on_error not in ("return", "raise"):
        raise ValueError(f"on_error must be 'return' or 'raise', got {on_error!r}")
    desk.check()
    done: dict[Ask, RequestOutput] = {}
    # Closing the iterator makes sure that an error leaves no request in the engine.
    with closing(Feed(desk, asks).answers()) as answers, Progress(len(asks), use_tqdm) as progress:
        try:
            for answer in answers:
                if on_error == "raise" and not answer.output.is_ok:
                    desk.check()
                    raise answer.exception
                done[answer.ask] = answer.output
                progress.count(answer.output)
        except EngineError as death:
            if on_error == "raise" or desk.death is None:
                raise
            done |= {ask: refused(ask, death) for ask in asks if ask not in done}
    return [done[ask] for ask in asks]
