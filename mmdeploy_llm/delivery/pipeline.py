"""Token ids of one request to content and reasoning.

ids --> Detokenizer --> StopStrings --> ReasoningParser --> content, reasoning
                               |
                               +--> raw text, undivided
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mmdeploy_llm.errors import PluginContractError, PluginError
from mmdeploy_llm.hooks.contracts import ReasoningParser, Segment
from mmdeploy_llm.hooks.names import error_text
from mmdeploy_llm.hooks.records import FAULTS
from mmdeploy_llm.params import SamplingParams
from mmdeploy_llm.plan import RequestFailure

from .detokenizer import Detokenizer, Vocabulary
from .stop import StopStrings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserSource:
    """Where the parsers come from. create: one parser a request. name: for messages."""

    create: Callable[[], ReasoningParser]
    name: str


class TextPipeline:
    """The text of one request. The result does not depend on how the ids are cut into pieces.

    Stop strings look at the raw text, so at reasoning and markers too. A raising parser ends up in
    `failure`; from then on the text is only collected undivided. Writer: Delivery.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        params: SamplingParams,
        parsers: ParserSource | None,
        prompt: str,
    ) -> None:
        self.failure: RequestFailure | None = None
        self._parsers = parsers
        self._parser: ReasoningParser | None = None
        markers: Sequence[str] = ()
        if parsers is not None:
            markers = self._start_parser(parsers, prompt)
        self._detokenizer = Detokenizer(
            vocabulary, skip_special_tokens=params.skip_special_tokens, markers=markers
        )
        self._stops: StopStrings | None = None
        if params.stop:
            self._stops = StopStrings(params.stop, is_included=params.include_stop_str_in_output)
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._raw: list[str] = []
        self._pieces: dict[str, list[str]] = {"content": [], "reasoning": []}

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._stops is not None and self._stops.is_stopped

    @property
    def raw_text(self) -> str:
        """The text so far, tags included, cut at the stop string."""
        return "".join(self._raw)

    def push(self, token_ids: Sequence[int]) -> None:
        """Takes the next tokens."""
        if self._stops is None:
            self._pass_on(self._detokenizer.push(token_ids))
            return
        for token_id in token_ids:  # one at a time: min_tokens counts tokens
            self._num_tokens += 1
            text = self._detokenizer.push((token_id,))
            self._pass_on(self._stops.feed(text, can_stop=self._can_stop()))

    def finish(self) -> None:
        """Releases all that was held back; no token follows."""
        text = self._detokenizer.finish()
        if self._stops is not None:
            text = self._stops.feed(text, can_stop=self._can_stop()) + self._stops.finish()
        self._pass_on(text)
        if self._parser is not None:
            self._divide(self._parser.finish)

    def take(self, kind: str) -> str:
        """The text of one kind ("content" or "reasoning") that is new since the last call."""
        text = "".join(self._pieces[kind])
        self._pieces[kind].clear()
        return text

    def _can_stop(self) -> bool:
        return self._num_tokens >= self._min_tokens

    def _pass_on(self, text: str) -> None:
        if not text:
            return
        self._raw.append(text)
        parser = self._parser
        if parser is not None:
            self._divide(lambda: parser.feed(text))
        elif self._parsers is None:
            self._pieces["content"].append(text)

    def _start_parser(self, parsers: ParserSource, prompt: str) -> Sequence[str]:
        """Sets the parser and gives its markers; `failure` when it cannot be built or started."""
        try:
            parser = parsers.create()
            parser.start(prompt)
            self._parser = parser
            return tuple(parser.markers)
        except FAULTS as error:
            self._fail(parsers, error)
            return ()

    def _divide(self, settle: Callable[[], list[Segment]]) -> None:
        """Collects the segments that `settle`, a call of the parser, gives."""
        assert self._parsers is not None
        try:
            for segment in settle():
                self._collect(segment)
        except FAULTS as error:
            self._fail(self._parsers, error)

    def _collect(self, segment: Segment) -> None:
        if not isinstance(segment, Segment) or segment.kind not in self._pieces:
            raise PluginContractError(
                f"it gave {segment!r}; it must give a list of Segments of kind "
                "'content' or 'reasoning'"
            )
        self._pieces[segment.kind].append(segment.text)

    def _fail(self, parsers: ParserSource, error: BaseException) -> None:
        logger.warning("reasoning parser %s failed", parsers.name, exc_info=error)
        self._parser = None
        self.failure = RequestFailure(
            code=PluginError.code,
            message=f"reasoning parser {parsers.name} failed: {error_text(error)}; "
            "the text is given undivided",
        )
