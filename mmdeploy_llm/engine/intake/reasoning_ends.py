"""ReasoningEnds: the tokens that end the thinking of a model at reasoning_max_tokens."""

from __future__ import annotations

from mmdeploy_llm.errors import CheckpointError, RequestError
from mmdeploy_llm.values.params import SamplingParams

from .tokenizer import PromptTokenizer


class ReasoningEnds:
    """Knows the markers of a reasoning parser, None for those that it does not have. Raises
    CheckpointError for an end marker without ids."""

    def __init__(
        self, start_marker: str | None, end_marker: str | None, tokenizer: PromptTokenizer
    ) -> None:
        self._start, self._end = start_marker, end_marker
        self._ids = () if end_marker is None else tuple(tokenizer.encode(end_marker))
        if end_marker is not None and not self._ids:
            raise CheckpointError(
                f"the tokenizer has no ids for the reasoning end marker {end_marker!r}"
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
