"""Which columns of a corpus hold the images, the videos, the question and the id: what the caller
says, or else what the first rows show."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypedDict

from mmdeploy_llm.datasets.folders import METADATA
from mmdeploy_llm.datasets.names import IMAGE_SUFFIXES, VIDEO_SUFFIXES, is_media_name, is_video_name
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.finding.signatures import HEAD, format_of
from mmdeploy_llm.messages import MEDIA_KINDS
from mmdeploy_llm.records.template import MAX_NAME, Template, shown
from mmdeploy_llm.sidecars.places import IN_QUESTION

IMAGE_NAMES = frozenset(("image", "images", *(name[1:] for name in IMAGE_SUFFIXES)))
VIDEO_NAMES = frozenset(("video", "videos", *(name[1:] for name in VIDEO_SUFFIXES)))
ALL = "*"  # among the carried columns: all that a record can repeat


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
        carried = (name for name in self.carried if name != ALL)
        named = (self.image, self.video, self.prompt, self.id, *carried)
        return tuple(name for name in named if name is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column with media. kind: "image" or "video"."""

    kind: str
    name: str


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
    would be asked as it stands. Braces around anything but a name are text, and {sidecar} stands
    for the text beside a file."""
    named = re.findall(r"(?<!\{)\{([^\W\d]\w*)\}(?!\})", IN_QUESTION.sub("", question))
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
    found = format_of(data[:HEAD])
    return found.kind if found is not None and found.kind in MEDIA_KINDS else None
