"""The loop of a captioning run: paths -> prompts -> LLM -> records, as they finish.

Nothing here grows with the pictures: prompts hold paths, and only as many as the engine took.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tqdm import tqdm

from mmdeploy_llm.messages import Prompt
from mmdeploy_llm.outputs import RequestOutput
from mmdeploy_llm.params import SamplingParams

from .records import CaptionRecord, record_of


class Captioner(Protocol):
    """The part of LLM that a run uses."""

    def generate_iter(
        self, prompts: Iterable[Prompt], sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """As LLM.generate_iter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptionTask:
    """What is asked about each image. chat_template_kwargs: such as {"enable_thinking": False}."""

    prompt: str
    sampling_params: SamplingParams
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def prompt_for(self, path: str) -> dict[str, Any]:
        """The prompt for one image. The path is made absolute, so that no name reads as a URL."""
        content = [
            {"type": "image", "image": os.path.abspath(path)},
            {"type": "text", "text": self.prompt},
        ]
        return {
            "messages": [{"role": "user", "content": content}],
            "chat_template_kwargs": dict(self.chat_template_kwargs),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """What a run did. elapsed: seconds, loading of the model not included."""

    num_images: int
    num_failed: int
    num_output_tokens: int
    elapsed: float
    is_interrupted: bool = False

    @property
    def images_per_second(self) -> float:
        """Images that ended, failed ones included, by time."""
        return self.num_images / max(self.elapsed, 1e-9)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens by time."""
        return self.num_output_tokens / max(self.elapsed, 1e-9)


def caption_images(
    llm: Captioner,
    paths: Sequence[str],
    task: CaptionTask,
    write: Callable[[CaptionRecord], None],
    *,
    is_progress_shown: bool | None = None,
) -> RunSummary:
    """Captions every path and hands each record to `write` as soon as it is there.

    Records come in the order in which they finish. Ctrl-C ends the run; what was written stays.
    is_progress_shown: a bar on stderr; None shows it on a terminal only.
    """
    tally = _Tally(total=len(paths), is_shown=is_progress_shown)
    asked: dict[int, tuple[Prompt, str]] = {}  # id of a prompt in the engine -> it, its path
    is_interrupted = False
    try:
        for output in llm.generate_iter(_prompts(paths, task, asked), task.sampling_params):
            _, path = asked.pop(id(output.prompt))
            record = record_of(path, output)
            write(record)
            tally.count(record)
    except KeyboardInterrupt:
        is_interrupted = True
    finally:
        tally.close()
    return tally.summary(is_interrupted)


def _prompts(
    paths: Iterable[str], task: CaptionTask, asked: dict[int, tuple[Prompt, str]]
) -> Iterator[Prompt]:
    """The prompts, one when it is asked for; notes in `asked` which path each belongs to."""
    for path in paths:
        prompt = task.prompt_for(path)
        asked[id(prompt)] = (prompt, path)
        yield prompt


class _Tally:
    """Counts of a run and its progress bar; written by caption_images only."""

    def __init__(self, *, total: int, is_shown: bool | None) -> None:
        self._begin = time.perf_counter()
        self._num_images = 0
        self._num_failed = 0
        self._num_tokens = 0
        hidden = None if is_shown is None else not is_shown
        self._bar = tqdm(
            total=total, desc="Captioning", unit="image", dynamic_ncols=True, disable=hidden
        )

    def count(self, record: CaptionRecord) -> None:
        """Takes one record into account."""
        self._num_images += 1
        self._num_failed += not record.is_ok
        self._num_tokens += record.num_output_tokens
        speed = self.summary(False).tokens_per_second
        self._bar.set_postfix_str(f"{speed:.0f} tokens/s, {self._num_failed} failed", refresh=False)
        self._bar.update(1)

    def summary(self, is_interrupted: bool) -> RunSummary:
        """The counts so far."""
        return RunSummary(
            num_images=self._num_images,
            num_failed=self._num_failed,
            num_output_tokens=self._num_tokens,
            elapsed=time.perf_counter() - self._begin,
            is_interrupted=is_interrupted,
        )

    def close(self) -> None:
        """Ends the bar."""
        self._bar.close()
