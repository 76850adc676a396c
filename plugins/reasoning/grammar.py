"""A reasoning parser as data: the modes a text goes through, and the tags between them.

A mode says what its text is. Two sorts of modes:

    scan     text belongs to the mode until one of its tags comes
    look     (`blanks` is set) decides on the first character that is no blank: a tag here leads to
             the tag's mode, anything else to `otherwise`, which then reads the blanks too
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

# What templates put between turns: tokens such as <|im_end|>, <｜Assistant｜>, </s>, [/INST].
TURN = re.compile(
    r"<[|\uff5c][^\s<>]+[|\uff5c]>|</s>|\[/?INST\]|<(?:start|end)_of_turn>|<seed:[be]os>"
)

Decided = Literal["reasoning", "content"]
# "held": not decided yet; the exit that is taken, or the end of the text, decides.
Kind = Literal["reasoning", "content", "tool_calls", "held", "dropped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """Where a tag leads. held: what the undecided text before the tag turns out to be.

    is_kept: the tag is text of the mode it leads to.
    """

    mode: str
    held: Decided = "reasoning"
    is_kept: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """One mode. kind: what its text is (in a look mode: the blanks before a tag).

    is_stripped: white space at both ends is dropped. blanks: characters a look mode passes over.
    """

    kind: Kind
    exits: Mapping[str, Exit] = field(default_factory=dict)
    is_stripped: bool = False
    blanks: str | None = None
    otherwise: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """All modes of a parser. No tag of a mode stands inside another tag of it, so that the first
    one in the text is the one to follow, wherever the text is cut.

    entries: tag -> the mode to begin in when that tag is the last one in the prompt; `default`
    when there is none. openings: those of them that count in the turn that the prompt leaves open
    only; in an earlier one they are what somebody wrote. Held text that no tag decides is content.
    """

    modes: Mapping[str, Mode]
    entries: Mapping[str, str]
    default: str
    openings: frozenset[str] = frozenset()

    @property
    def tags(self) -> tuple[str, ...]:
        """Every tag of any mode, and those looked for in the prompt; sorted."""
        in_modes = {tag for mode in self.modes.values() for tag in mode.exits}
        return tuple(sorted(in_modes.union(self.entries)))

    def entry(self, prompt: str) -> str:
        """The mode that `prompt` leaves the text in."""
        place, tag = max(((prompt.rfind(tag), tag) for tag in self.entries), default=(-1, ""))
        is_old = tag in self.openings and TURN.search(prompt, place + len(tag)) is not None
        return self.default if place < 0 or is_old else self.entries[tag]
