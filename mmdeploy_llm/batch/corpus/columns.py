"""Which columns of a corpus hold the images, the videos, the question and the id: what the caller
says, or else what the first rows show."""

from __future__ import annotations

import os
import re
import string
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypedDict

from mmdeploy_llm.datasets.folders import METADATA
from mmdeploy_llm.datasets.names import IMAGE_SUFFIXES, VIDEO_SUFFIXES, is_media_name, is_video_name
from mmdeploy_llm.errors import ConfigError, RequestError

IMAGE_NAMES = frozenset(("image", "images", *(name[1:] for name in IMAGE_SUFFIXES)))
VIDEO_NAMES = frozenset(("video", "videos", *(name[1:] for name in VIDEO_SUFFIXES)))
MAX_NAMES, MAX_NAME = 40, 60  # columns in a message, and characters of each
IMAGE_MARKS = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"BM", b"II*\0", b"MM\0*")
VIDEO_MARKS = (b"\x1a\x45\xdf\xa3", b"\0\0\x01\xba", b"\0\0\x01\xb3")


class ColumnArguments(TypedDict, total=False):
    """Arguments of `LLM.run_batch` that name columns. columns: those that records repeat."""

    image_column: str | None
    video_column: str | None
    prompt_column: str | None
    id_column: str | None
    columns: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnOptions:
    """The columns of a corpus that a caller names.

    image, video, prompt, id: names of columns. carried: those that records repeat.
    """

    image: str | None = None
    video: str | None = None
    prompt: str | None = None
    id: str | None = None
    carried: tuple[str, ...] = ()

    @classmethod
    def given(cls, arguments: ColumnArguments) -> ColumnOptions:
        """Builds the options from arguments of a call. Raises ConfigError for a wrong one."""
        columns = arguments.get("columns", ())
        if isinstance(columns, str):
            raise ConfigError(f"columns must be a list of names, got the text {columns!r}")
        return cls(
            image=arguments.get("image_column"),
            video=arguments.get("video_column"),
            prompt=arguments.get("prompt_column"),
            id=arguments.get("id_column"),
            carried=tuple(columns),
        )

    def values(self) -> dict[str, Any]:
        """Returns the options that are set, by name."""
        return {name: value for name, value in asdict(self).items() if value}

    @property
    def names(self) -> tuple[str, ...]:
        """The columns that are named."""
        named = (self.image, self.video, self.prompt, self.id, *self.carried)
        return tuple(name for name in named if name is not None)


class Template:
    """A question with columns in it: "Describe {title}."; {{ and }} are braces.

    Only plain names are allowed, so that a template can reach nothing but the columns. Raises
    ConfigError for anything else.
    """

    def __init__(self, text: str) -> None:
        self._parts: list[tuple[str, str | None]] = []
        try:
            found = list(string.Formatter().parse(text))
        except ValueError as error:
            raise ConfigError(_fault(text, str(error))) from None
        for words, name, spec, conversion in found:
            if name is not None and (not name or spec or conversion or set(name) & set(".[]")):
                raise ConfigError(_fault(text, f"{{{name}}} is not the plain name of a column"))
            self._parts.append((words, name))

    @property
    def names(self) -> tuple[str, ...]:
        """The columns in it."""
        return tuple(name for _, name in self._parts if name is not None)

    def fill(self, values: Mapping[str, Any]) -> str:
        """Returns the question of a row. Raises RequestError for a column without a text."""
        return "".join(
            words + ("" if name is None else text_of(values, name)) for words, name in self._parts
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column with media. kind: "image" or "video"."""

    kind: str
    name: str


def text_of(values: Mapping[str, Any], name: str) -> str:
    """Returns the value of a column as text. Raises RequestError without one."""
    value = values.get(name)
    if name not in values:
        raise RequestError(f"the row has no column {name!r}; it has {shown(values)}")
    if value is None:
        raise RequestError(f"the column {name!r} is empty in this row")
    if isinstance(value, (str, int, float)):
        return str(value)
    raise RequestError(
        f"the column {name!r} must be a text or a number, got {type(value).__name__}"
    )


def check_columns(
    columns: Sequence[str], options: ColumnOptions, templates: Iterable[Template]
) -> None:
    """Raises ConfigError for a column that a table does not have."""
    wanted = (*options.names, *(name for own in templates for name in own.names))
    for name in wanted:
        if name not in columns:
            raise ConfigError(f"there is no column {name!r}; the columns are {shown(columns)}")


def check_no_columns(question: str, paths: Iterable[str]) -> None:
    """Raises ConfigError for a question about files that names a column: files have none, and it
    would be asked as it stands. Braces around anything but a name are text."""
    named = re.findall(r"(?<!\{)\{([^\W\d]\w*)\}(?!\})", question)
    if not named:
        return
    own = dict.fromkeys(os.path.dirname(path) for path in paths)
    folders = dict.fromkeys((*own, *map(os.path.dirname, own)))
    tables = [f for f in folders if any(os.path.isfile(os.path.join(f, m)) for m in METADATA)]
    advice = f"; {tables[0]!r} has metadata: name that folder" if tables else ""
    raise ConfigError(
        f"no column fills {{{named[0]}}} in the prompt {question[:MAX_NAME]!r}: files have no "
        f"columns{advice}"
    )


def detect(rows: Iterable[Mapping[str, Any]]) -> tuple[Column, ...]:
    """Returns the column with media that the first rows of a table show, () if none does. Raises
    ConfigError when there are several.

    A column has media when its values are the bytes of an image or a video or the struct of Hugging
    Face datasets, or when it has texts and is named after media, such as "image" or "mp4".
    """
    found: dict[str, Column] = {}
    for values in rows:
        for name, value in values.items():
            kind = _kind(name, value)
            if kind is not None:
                found.setdefault(name, Column(kind=kind, name=name))
    if len(found) > 1:
        raise ConfigError(
            f"several columns have images or videos: {shown(found)}; choose with --image-column or "
            "--video-column (in Python image_column, video_column)"
        )
    return tuple(found.values())


def by_suffix(values: Mapping[str, Any]) -> Iterator[Column]:
    """Yields the columns whose name ends like that of a media file and that hold bytes."""
    for name, value in values.items():
        if isinstance(value, bytes) and is_media_name(f"x.{name}"):
            yield Column(kind="video" if is_video_name(f"x.{name}") else "image", name=name)


def shown(names: Collection[str]) -> str:
    """Returns names for a message."""
    first = [repr(str(name)[:MAX_NAME]) for name in list(names)[:MAX_NAMES]]
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f"{', '.join(first) or 'none'}{more}"


def _fault(text: str, reason: str) -> str:
    return (
        f"the prompt {text[:MAX_NAME]!r} cannot be filled: {reason}; write columns as {{title}}, "
        "and a brace that is meant as {{ or }}"
    )


def _kind(name: str, value: Any) -> str | None:
    """Returns the kind of media in a cell; None if it is none."""
    if isinstance(value, list) and value:
        return _kind(name, value[0])
    by_name = "image" if name.lower() in IMAGE_NAMES else None
    by_name = "video" if name.lower() in VIDEO_NAMES else by_name
    if isinstance(value, Mapping):
        path = value.get("path")
        if not ({"bytes", "path"} & set(value)) or not set(value) <= {"bytes", "path"}:
            return None
        if isinstance(value.get("bytes"), bytes) and (kind := _kind_of_bytes(value["bytes"])):
            return kind
        if isinstance(path, str) and is_media_name(path):
            return "video" if is_video_name(path) else "image"
        return by_name
    if isinstance(value, bytes):
        return _kind_of_bytes(value) or by_name
    return by_name if isinstance(value, str) else None


def _kind_of_bytes(data: bytes) -> str | None:
    """Returns the kind of a media file by its first bytes."""
    if data.startswith(VIDEO_MARKS) or (data[:4] == b"RIFF" and data[8:12] == b"AVI "):
        return "video"
    if data[4:8] == b"ftyp":
        return "image" if data[8:12] in (b"avif", b"avis") else "video"
    is_image = data.startswith(IMAGE_MARKS) or (data[:4] == b"RIFF" and data[8:12] == b"WEBP")
    return "image" if is_image else None
