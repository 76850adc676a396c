"""Guide: what a constraint lets the next token of one request be, in the answer and before it.

    thinking      free     any token but the end of sequence
       |          tag      only a tag that stands between thinking and answer
    answer                 the grammar; no token that completes a marker of the parser

The parser says where the answer begins, from the same text that delivery divides later. A token
that ends the thinking ends with it, so that the answer begins with a token. At the beginning of a
text both may be allowed: the tag that opens the thinking, or an answer without any.
"""

from __future__ import annotations

import codecs
import copy
import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from mmdeploy_llm.hooks import NextText, ReasoningParser, Segment
from mmdeploy_llm.hooks.objects.parsing import PROBE
from mmdeploy_llm.hooks.records import FAULTS

from .matcher import GrammarMatcher
from .token_texts import BITS, TokenTexts, Words, ban_ids, is_begun, num_begun

logger = logging.getLogger(__name__)


class Guide:
    """The state of one request in its constraint. Its SlotState is the only writer.

    thoughts: follows the text up to the answer; None for text that is all answer. texts: of the
    tokens, for messages.
    """

    def __init__(
        self,
        matcher: GrammarMatcher,
        thoughts: Thoughts | None = None,
        texts: Sequence[bytes] = (),
    ) -> None:
        self._matcher = matcher
        self._thoughts, self._texts = thoughts, texts
        self.must_end = False  # the answer is complete: after `fill`, whether nothing may follow

    @property
    def is_answering(self) -> bool:
        """Whether the answer has begun."""
        return self._thoughts is None or self._thoughts.are_over

    def accept(self, token_id: int) -> None:
        """Advances by the next token."""
        if self._thoughts is None:
            self._matcher.accept(token_id)
        else:
            self._thoughts.accept(token_id, self._matcher)

    def fill(self, mask: Tensor, row: int) -> None:
        """Writes which tokens are allowed next as bits of mask[row], int32 [ceil(V / 32)] on the
        host."""
        size = mask.shape[1]
        if self._thoughts is None:
            words = self._matcher.words(size)
        else:
            words = self._thoughts.words(size, self._matcher)
        self.must_end = self.is_answering and self._matcher.is_only_end(words)
        mask[row] = torch.from_numpy(words.view(np.int32))

    def allowed(self, vocab_size: int) -> list[str]:
        """Returns the texts of the tokens that are allowed next, for messages."""
        mask = torch.zeros((1, -(-vocab_size // BITS)), dtype=torch.int32)
        self.fill(mask, 0)
        bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")[:vocab_size]
        ids = np.flatnonzero(bits).tolist()
        return [self._texts[i].decode(errors="replace") for i in ids if i < len(self._texts)]


class Thoughts:
    """Follows a text up to the answer, and keeps markers out of the answer. Its Guide is the only
    writer. After a failure of the parser, which delivery reports, everything is free."""

    def __init__(
        self,
        parser: ReasoningParser,
        texts: TokenTexts,
        eos_token_ids: Sequence[int],
        matcher: GrammarMatcher,
        prompt: str = "",
    ) -> None:
        """prompt: the text before, from which the parser starts."""
        self._parser = parser
        self._texts = texts
        self._eos_token_ids = tuple(eos_token_ids)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._markers = tuple(marker.encode() for marker in parser.markers if marker)
        self._max_tail = max(map(len, self._markers), default=1) - 1
        self._tail = b""  # the end of the text so far, where a marker may have begun
        self._begun = b""  # of a tag, or of the answer, where both are possible
        self._banned: tuple[bytes, ...] = ()  # markers that may not come next
        self._may_answer = False  # where tags are possible: whether the grammar allows the text
        self.are_over = False
        self._next = NextText(kind="tag")
        end = parser.end_marker
        self._is_closed = end is not None and prompt.rstrip().endswith(end)
        try:
            parser.start(prompt)
            self._enter(matcher)
        except FAULTS:
            self._give_up()

    def accept(self, token_id: int, matcher: GrammarMatcher) -> None:
        """Advances by the next token."""
        piece = self._texts[token_id]
        self._tail = (self._tail + piece)[-self._max_tail :] if self._max_tail else b""
        if self.are_over:
            matcher.accept(token_id)
            return
        self._may_answer = self._may_answer and matcher.try_accept(token_id)
        if self._next.tags:
            self._begun += piece
        try:
            content = self._fed(piece)
            if self._next.kind == "free" or self._has_tag():
                self._enter(matcher, content)
            elif not is_begun(self._begun, self._tags, self._blanks):
                self._leave_tags(matcher, content)
        except FAULTS:
            self._give_up()

    def words(self, size: int, matcher: GrammarMatcher) -> Words:
        """Returns the tokens that are allowed next."""
        if self._next.kind == "free" and not self.are_over:
            words = np.full(size, 0xFFFFFFFF, dtype=np.uint32)
            ban_ids(words, self._eos_token_ids)
            for marker in self._markers:
                for count in num_begun(self._tail, marker):
                    self._ban(words, self._texts.overshooting(marker, count))
        elif self.are_over or self._may_answer:
            words = matcher.words(size)
        else:
            words = np.zeros(size, dtype=np.uint32)
        for marker in self._banned:
            for count in num_begun(self._tail, marker):
                self._ban(words, self._texts.completing(marker, count))
        if self._next.tags and not self.are_over:
            found = self._texts.spelling(self._tags, self._blanks, self._begun)[:size]
            words[: len(found)] |= found
        return words

    @property
    def _tags(self) -> tuple[bytes, ...]:
        return tuple(tag.encode() for tag in self._next.tags)

    @property
    def _blanks(self) -> bytes:
        return self._next.blanks.encode()

    @staticmethod
    def _ban(words: Words, banned: Words) -> None:
        words[: len(banned)] &= ~banned[: len(words)]

    def _fed(self, piece: bytes) -> str:
        """Feeds the parser; returns the text that it found to be of the answer."""
        text = self._decoder.decode(piece)
        return _answer_in(self._parser, text) if text else ""

    def _has_tag(self) -> bool:
        return self._begun.lstrip(self._blanks) in self._tags

    def _enter(self, matcher: GrammarMatcher, content: str = "") -> None:
        """Asks the parser what comes next. content: of the answer already, by the last token."""
        before = self._next
        self._next = self._parser.next_text()
        if self._is_closed or before.kind == "free":  # the thinking is over
            opening = self._parser.start_marker
            tags = tuple(tag for tag in self._next.tags if tag != opening)
            self._next, self._is_closed = replace(self._next, tags=tags), False
        self._begun, self._may_answer = b"", self._next.kind == "answer"
        if before.tags:
            matcher.restart()  # it may have read a tag as an answer
        if self._next.kind == "free":
            if before.kind != "free":
                self._banned = self._ends_that_break(matcher)
            return
        if content:
            matcher.accept_text(content)
        self._banned = self._breaking_markers()
        if self._may_answer and (content or not self._next.tags):
            self._begin_answer()

    def _leave_tags(self, matcher: GrammarMatcher, content: str) -> None:
        """Goes on after a text that is none of the tags: with the answer, unless something forced
        a token that is no part of it either, such as the end of a thinking that had no begin."""
        if self._may_answer:
            self._begin_answer()
            return
        end = self._parser.end_marker
        is_end = bool(end) and self._begun.endswith(str(end).encode())
        self._next = NextText(kind="free")
        matcher.restart()  # it may have read the blanks before as an answer
        if is_end:
            self._enter(matcher, content)

    def _give_up(self) -> None:
        logger.debug("a reasoning parser failed; delivery will say so", exc_info=True)
        self._next, self._parser, self._banned = NextText(kind="free"), _Silent(), ()

    def _begin_answer(self) -> None:
        self.are_over = True
        self._next = NextText(kind="answer")
        self._banned = self._breaking_markers()

    def _ends_that_break(self, matcher: GrammarMatcher) -> tuple[bytes, ...]:
        """Returns the markers that end the thinking as a part of an answer that the grammar does
        not allow, such as a tool call in place of JSON."""
        found = []
        for marker in self._parser.markers:
            kept = _answer_in(copy.deepcopy(self._parser), marker + PROBE).removesuffix(PROBE)
            if kept and not matcher.allows_text(kept):
                found.append(marker.encode())
        return tuple(found)

    def _breaking_markers(self) -> tuple[bytes, ...]:
        """Returns the markers that an answer must not contain: the end of the thinking, and those
        that would divide it."""
        parser, found = self._parser, []
        for marker in parser.markers:
            text = PROBE + marker + PROBE
            if marker == parser.end_marker or not _answer_in(
                copy.deepcopy(parser), text, is_whole=True
            ).endswith(text):
                found.append(marker.encode())
        return tuple(filter(None, found))


class _Silent(ReasoningParser):
    """Takes the place of a parser that has failed."""

    def feed(self, text: str) -> list[Segment]:
        return []

    def finish(self) -> list[Segment]:
        return []

    def next_text(self) -> NextText:
        return NextText(kind="free")


def _answer_in(parser: ReasoningParser, text: str, *, is_whole: bool = False) -> str:
    """Feeds a text and returns what of it is answer. is_whole: it is the end of the text."""
    segments = parser.parse(text) if is_whole else parser.feed(text)
    return "".join(segment.text for segment in segments if segment.kind != "reasoning")
