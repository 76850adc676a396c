"""ReasoningEnds: the tokens that end the thinking of a model at reasoning_max_tokens."""

from __future__ import annotations

from mmdeploy_llm.errors import CheckpointError, RequestError
from mmdeploy_llm.values.params import SamplingParams

from .rules import TextRules


class ReasoningEnds:
    """Knows the markers of a reasoning parser. Raises CheckpointError for an end marker without
    ids."""

    def __init__(self, rules: TextRules) -> None:
        self._start, self._end = rules.reasoning_start_marker, rules.reasoning_end_marker
        self._ids = () if self._end is None else tuple(rules.tokenizer.encode(self._end))
        if self._end is not None and not self._ids:
            raise CheckpointError(
                f"the tokenizer has no ids for the reasoning end marker {self._end!r}"
            )

    def ids_for(self, params: SamplingParams, text: str) -> tuple[int, ...]:
        """Returns the ids that end the reasoning at reasoning_max_tokens; () when the prompt has
        closed it. text: of the prompt."""
        if params.reasoning_max_tokens is None:
            return ()
        if self._end is None:
            raise RequestError(
                "reasoning_max_tokens needs a reasoning parser with an end marker; "
                "set the option reasoning_parser"
            )
        if self._start is None:
            return self._ids
        is_closed = text.rfind(self._end) > text.rfind(self._start)
        return () if is_closed else self._ids
