"""AnsweringClient: a model that answers many prompts in one call."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from typing import Literal

from mmdeploy_llm.desk.feed import Feed
from mmdeploy_llm.desk.outcome import Answer, refused
from mmdeploy_llm.desk.ticket import Ask
from mmdeploy_llm.errors import EngineError
from mmdeploy_llm.outputs import RequestOutput
from mmdeploy_llm.progress_bars import UseTqdm

from .arguments import Asks
from .client import EngineClient
from .progress import Progress

OnError = Literal["return", "raise"]


class AnsweringClient(EngineClient):
    """Base of LLM."""

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
