"""A reasoning parser as data: the modes a text goes through, and the tags between them.

A mode says how its text is read. There are two sorts of modes:

    scan     text belongs to the mode until one of its tags comes
    look     (`blanks` is set) decides at the first character that is not a blank: a tag there leads
             to the tag's mode, anything else to `otherwise`, which then reads the blanks too
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

# Tokens that templates put between turns, such as <|im_end|>, <｜Assistant｜>, </s>, [/INST].
TURN = re.compile(
    r"<[|\uff5c][^\s<>]+[|\uff5c]>|</s>|\[/?INST\]|<(?:start|end)_of_turn>|<seed:[be]os>"
)

Decided = Literal["reasoning", "content"]
# "held": not decided yet; the exit that is taken, or the end of the text, decides.
Kind = Literal["reasoning", "content", "tool_calls", "held", "dropped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """The transition that a tag makes.

    mode: the next mode. held: how undecided text before the tag is read. is_kept: the tag is part
    of the next mode's text.
    """

    mode: str
    held: Decided = "reasoning"
    is_kept: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """One mode of a grammar.

    kind: how its text is read (in a look mode: the blanks before a tag). exits: tag -> transition.
    is_stripped: white space at both ends is dropped. blanks: characters that a look mode skips.
    otherwise: the mode after a look mode that finds no tag.
    """

    kind: Kind
    exits: Mapping[str, Exit] = field(default_factory=dict)
    is_stripped: bool = False
    blanks: str | None = None
    otherwise: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The mode in which a text begins. is_decided: whether the prompt's last turn has opened or
    closed the thinking."""

    mode: str
    is_decided: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """All modes of a parser. No tag of a mode contains another tag of the same mode, so the first
    one in the text is the one to follow, however the text is split into pieces.

    entries: tag -> the mode to begin in when that tag is the last one in the prompt.
    default: the mode to begin in when the prompt has none of them.
    openings: entries that count only in the last turn of the prompt; in an earlier turn they may be
        text that somebody wrote.
    Held text that no tag decides is content.
    """

    modes: Mapping[str, Mode]
    entries: Mapping[str, str]
    default: str
    openings: frozenset[str] = frozenset()

    @property
    def tags(self) -> tuple[str, ...]:
        """All tags of all modes and of `entries`, sorted."""
        in_modes = {tag for mode in self.modes.values() for tag in mode.exits}
        return tuple(sorted(in_modes.union(self.entries)))

    def entry(self, prompt: str) -> Entry:
        """Returns where the text after `prompt` begins."""
        position, tag = max(((prompt.rfind(tag), tag) for tag in self.entries), default=(-1, ""))
        is_old = TURN.search(prompt, position + len(tag)) is not None
        if position < 0 or (is_old and tag in self.openings):
            return Entry(mode=self.default)
        return Entry(mode=self.entries[tag], is_decided=not is_old)
