"""Item: one prompt of a batch; Media: one media item of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmdeploy_llm.values.params import SamplingParams
    from mmdeploy_llm.values.pooling_request import Wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Media:
    """A media item of a line.

    kind: "image", "video", or a kind that a plugin adds.
    name: its path or URL, or a description such as "(data: URL)" when it has neither.
    pages: of a document, as its option of this name; None: all.
    """

    kind: str
    name: str
    pages: str | None = None

    @property
    def is_file(self) -> bool:
        """Whether `name` is an absolute path."""
        return os.path.isabs(self.name)


def kind_of_path(path: str) -> str:
    """Returns what a record about a file without `media` means: a video by its name, else an image,
    whatever plugins are installed. Files of all other kinds, or of other names, have `media`."""
    from mmdeploy_llm.data.rows.names import BUILT_IN_KINDS  # which imports hooks: --help does not

    return BUILT_IN_KINDS.of_name(path) or "image"


def part_of(own: str | int | None, path: str | None) -> str:
    """Returns the end of an item's id that names a part of its file, such as "#page=3"; "" for all
    of it."""
    name = os.path.basename(path or "")
    return str(own).rpartition(name)[2] if name and name in str(own) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One of several questions about an item. name: of its answer. prompt: the whole prompt."""

    name: str
    prompt: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One prompt of a batch.

    line: its line number in the input, from 1.
    path: the media file it asks about, when the input is a list of files.
    question: the first MAX_QUESTION characters of the question.
    digest: of the item's input: what the line itself says, and the state of its files.
    columns: values of the input that the record repeats.
    size: bytes of its file, where the source knows those of all its items.
    endpoint: that a line of OpenAI's format was meant for; "" for others.
    questions: all questions where they have names; `prompt` is the first one's then.
    wanted: a vector of the prompt instead of an answer.
    """

    line: int
    id: str | int
    prompt: Mapping[str, Any]
    params: SamplingParams
    path: str | None = None
    media: tuple[Media, ...] = ()
    question: str | None = None
    digest: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict)
    size: int | None = None
    questions: tuple[Question, ...] = ()
    endpoint: str = ""
    wanted: Wanted | None = None
