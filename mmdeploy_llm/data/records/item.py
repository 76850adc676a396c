"""Item: one prompt of a batch; Media: one media item of it."""

from __future__ import annotations

import base64
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmdeploy_llm.values.params import SamplingParams
    from mmdeploy_llm.values.pooling_request import PoolingRequest
    from mmdeploy_llm.values.prompt import PromptParts

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_NUMBERS = 2**28  # of one item: a gigabyte


@dataclass(frozen=True, slots=True, kw_only=True)
class Vector:
    """Numbers as text. shape: [size] or [tokens, size]. float32: little endian, in base64."""

    shape: tuple[int, ...]
    float32: str

    @classmethod
    def of(cls, numbers: NDArray[np.float32]) -> Vector:
        """Returns the vector of an array."""
        data = numbers.astype("<f4", copy=False).tobytes()
        return cls(shape=numbers.shape, float32=base64.b64encode(data).decode("ascii"))

    @classmethod
    def from_json(cls, value: Any) -> Vector | None:
        """Returns the vector of a record's JSON, None of null. Raises ValueError for anything else
        than {"shape": [...], "float32": text of the right length}."""
        if value is None:
            return None
        text = value.get("float32") if isinstance(value, Mapping) else None
        shape = value.get("shape") if isinstance(value, Mapping) else None
        if not isinstance(text, str) or not isinstance(shape, (list, tuple)):
            raise ValueError("its embedding is not an object with shape and float32")
        is_shape = len(shape) in (1, 2) and all(type(own) is int and own > 0 for own in shape)
        if not is_shape or math.prod(shape) > MAX_NUMBERS:
            raise ValueError("the shape of its embedding is neither [size] nor [tokens, size]")
        if len(text) != 4 * -(-4 * math.prod(shape) // 3):
            raise ValueError(f"its embedding has not the numbers of its shape {list(shape)}")
        return cls(shape=tuple(shape), float32=text)

    def array(self) -> NDArray[np.float32]:
        """Returns the numbers, in an array of this shape that must not be written to. Raises
        ValueError for a text that is not base64."""
        import numpy as np

        return np.frombuffer(base64.b64decode(self.float32, validate=True), "<f4").reshape(
            self.shape
        )


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
    prompt: PromptParts


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
    prompt: PromptParts
    params: SamplingParams
    path: str | None = None
    media: tuple[Media, ...] = ()
    question: str | None = None
    digest: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict)
    size: int | None = None
    questions: tuple[Question, ...] = ()
    endpoint: str = ""
    wanted: PoolingRequest | None = None

    @property
    def prompts(self) -> tuple[PromptParts, ...]:
        """All that is asked: the prompt of each question, or the only one."""
        return tuple(own.prompt for own in self.questions) or (self.prompt,)
