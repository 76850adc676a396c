"""The contract of logits processors. Nothing here imports torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsProcessorSpec:
    """A named logits processor; `aliases` are other names for it.

    factory: "module:Class", called as factory(context) with a LogitsContext, once in each process
        of an engine that needs it.
    arguments: names under which requests give its arguments in `logits_processors_args`.
    """

    name: str
    factory: str
    arguments: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsContext:
    """Says of a model what a logits processor may need.

    vocab_size: number of logits of a token. tokenizer: transformers' fast tokenizer.
    """

    vocab_size: int
    tokenizer: Any
    eos_token_ids: Collection[int] = ()


@dataclass(slots=True, kw_only=True, eq=False)
class LogitsRow:
    """One request, as a logits processor sees it.

    arguments: those of the processor's arguments that the request gives.
    prompt_token_ids, output_token_ids: the tokens so far; the second grows with each step. A
        processor reads both and changes neither.
    state: what the processor's `start` returned.
    num_before: how many tokens the processor alone chooses at the beginning of the output, since
        they belong to the prompt, such as a language that the model recognizes. Set by `start`. The
        grammar and the bans of the request, and processors without it, begin after them.
    """

    arguments: Mapping[str, Any]
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    state: Any = field(default=None)
    num_before: int = 0


class LogitsProcessor(ABC):
    """Changes the logits of those requests that use it, all at once. One instance per engine and
    process; under tensor parallelism every rank has its own and must compute the same.

    A row of the result depends on the same row of the logits and its LogitsRow only: not on other
    rows, on how often `apply` was called, or on chance.
    """

    def __init__(self, context: LogitsContext) -> None:  # noqa: B027 - optional to override
        """Called before the first request."""

    def check(self, arguments: Mapping[str, Any]) -> None:  # noqa: B027 - optional to override
        """Raises ValueError for arguments that are wrong, saying what was found and what is
        allowed. Called in intake threads, once per request."""

    def start(self, row: LogitsRow) -> Any:
        """Returns the state of a request, such as its arguments as arrays. Called when the request
        starts, and again after a preemption with the tokens that it has by then."""
        return None

    @abstractmethod
    def apply(self, logits: Tensor, rows: Sequence[LogitsRow]) -> Tensor:
        """Returns the changed logits of R requests, from float32 `logits` [R, V] on any device;
        they may be changed in place. rows: [R].

        A logit of -inf bans its token; NaN and +inf fail the request. The request's own rules, such
        as its grammar, are applied afterwards and have the last word.
        """
