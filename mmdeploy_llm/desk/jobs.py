"""Makes jobs of prompts and conversations, with the call of the intake that prepares each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from mmdeploy_llm.params import SamplingParams

from .fleet_engine import Ask
from .outcome import Job

if TYPE_CHECKING:
    from mmdeploy_llm.intake.intake import Intake


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """Options that hold for all conversations of a call, as the intake takes them."""

    template_kwargs: Mapping[str, Any] | None = None
    template: str | None = None
    tools: Any = None


class JobMaker:
    """Makes the jobs of one LLM and numbers their prompts. intake: None where other processes have
    it."""

    def __init__(self, intake: Intake | None) -> None:
        self._intake = intake
        self._numbers = itertools.count()

    def of_prompts(
        self, pairs: Iterable[tuple[Any, SamplingParams]], stream: bool = False
    ) -> Iterator[Job]:
        """Yields a job for each prompt with its sampling parameters."""
        for index, (prompt, own) in enumerate(pairs):
            accept = self._ask("accept", prompt, own, stream=stream, number=next(self._numbers))
            yield Job(index=index, prompt=prompt, num_outputs=own.n, accept=accept)

    def of_conversations(
        self,
        pairs: Iterable[tuple[Any, SamplingParams]],
        options: ChatOptions,
        stream: bool = False,
    ) -> Iterator[Job]:
        """Yields a job for each conversation with its sampling parameters."""
        for index, (messages, own) in enumerate(pairs):
            accept = self._ask(
                "accept_chat",
                messages,
                own,
                chat_template_kwargs=options.template_kwargs,
                chat_template=options.template,
                tools=options.tools,
                stream=stream,
                number=next(self._numbers),
                index=index,
            )
            yield Job(index=index, prompt=messages, num_outputs=own.n, accept=accept)

    def _ask(self, method: str, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """Returns a call of the intake that is made later, in the process that has the intake."""
        if self._intake is None:
            return Ask(method=method, args=args, kwargs=kwargs)
        return partial(getattr(self._intake, method), *args, **kwargs)
