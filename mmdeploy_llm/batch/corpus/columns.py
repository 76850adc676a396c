"""Which columns of a corpus hold the media, the question and the id: what the caller says, or else
what the first rows show."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mmdeploy_llm.data.files.chosen_kinds import check_kinds
from mmdeploy_llm.data.files.kinds import FILMS, kind_of_bytes
from mmdeploy_llm.data.files.question_fields import OF_FILES, OF_PAGES
from mmdeploy_llm.data.records.template import MAX_NAME, Template, shown
from mmdeploy_llm.data.rows.formats.folders import METADATA
from mmdeploy_llm.data.rows.names import BUILT_IN_KINDS, is_url
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.hooks import KindTable
from mmdeploy_llm.messages import MEDIA_KINDS

from .arguments import ColumnArguments
from .cells import is_array, kind_of_cell, looks_like_media

ALL = "*"  # among the carried columns: all that a record can repeat


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnOptions:
    """The columns of a corpus that a caller names.

    image, video, audio, prompt, id: names of columns. media: further ones, as (kind, name).
    carried: those that records repeat.
    """

    image: str | None = None
    video: str | None = None
    audio: str | None = None
    media: tuple[tuple[str, str], ...] = ()
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
            audio=arguments.get("audio_column"),
            media=tuple(_pairs(arguments.get("media_column") or {})),
            prompt=arguments.get("prompt_column"),
            id=arguments.get("id_column"),
            carried=tuple(columns),
        )

    def values(self) -> dict[str, Any]:
        """Returns the options that are set, by name."""
        return {name: value for name, value in asdict(self).items() if value}

    @property
    def media_columns(self) -> tuple[Column, ...]:
        """The columns with media that are named, each once."""
        own = (("image", self.image), ("video", self.video), ("audio", self.audio), *self.media)
        return tuple(dict.fromkeys(Column(kind=kind, name=name) for kind, name in own if name))

    @property
    def names(self) -> tuple[str, ...]:
        """The columns that are named."""
        carried = (name for name in self.carried if name != ALL)
        named = (*(own.name for own in self.media_columns), self.prompt, self.id, *carried)
        return tuple(name for name in named if name is not None)

    def check(self, kinds: KindTable) -> None:
        """Raises ConfigError for a column of a kind that no plugin provides."""
        check_kinds((own.kind for own in self.media_columns), kinds)


def _pairs(given: Mapping[str, str | Sequence[str]]) -> Iterator[tuple[str, str]]:
    if not isinstance(given, Mapping):
        raise ConfigError('media_column must be a dict such as {"audio": "sound"}')
    for kind, names in given.items():
        yield from ((kind, name) for name in ([names] if isinstance(names, str) else names))


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column with media of a kind."""

    kind: str
    name: str

    def __str__(self) -> str:
        noun = f"{self.kind}s" if self.kind in MEDIA_KINDS else self.kind
        return f"{noun}: column {self.name!r}"


def check_columns(
    columns: Sequence[str], options: ColumnOptions, templates: Iterable[Template]
) -> None:
    """Raises ConfigError for a column that a table does not have."""
    wanted = (*options.names, *(name for own in templates for name in own.names))
    for name in wanted:
        if name not in columns:
            raise ConfigError(f"there is no column {name!r}; the columns are {shown(columns)}")


def check_no_columns(question: str, paths: Iterable[str], known: Sequence[str] = OF_FILES) -> None:
    """Raises ConfigError for a question about files that names a column: files have none, and it
    would be asked as it stands. Braces around anything but a name are text. known: the names that
    files have, see data/files/question_fields.py."""
    found = re.findall(r"(?<!\{)\{([^\W\d]\w*)\}(?!\})", question)
    named = [name for name in found if name not in known]
    if not named:
        return
    own = dict.fromkeys(os.path.dirname(path) for path in paths)
    folders = dict.fromkeys((*own, *map(os.path.dirname, own)))
    tables = [f for f in folders if any(os.path.isfile(os.path.join(f, m)) for m in METADATA)]
    advice = f"; {tables[0]!r} has metadata: name that folder" if tables else ""
    if named[0] in OF_PAGES:
        advice = "; pages of documents do, with --by-page (in Python by_page)"
    raise ConfigError(
        f"no column fills {{{named[0]}}} in the prompt {question[:MAX_NAME]!r}: files have no "
        f"columns{advice}"
    )


def detect(
    rows: Iterable[Mapping[str, Any]], kinds: KindTable = BUILT_IN_KINDS
) -> tuple[Column, ...]:
    """Returns the column with media that the first rows of a table show, () if none does. Raises
    ConfigError when there are several.

    A column has media when its values are the bytes of media or the struct of Hugging Face
    datasets, or when it has names of files and is named after media, such as "image" or "mp4".
    """
    found: dict[str, Column] = {}
    for values in rows:
        for name, value in values.items():
            kind = _kind(name, value, kinds)
            if kind is not None:
                found.setdefault(name, Column(kind=kind, name=name))
    if len(found) > 1:
        raise ConfigError(
            f"several columns have media: {shown(found)}; choose with --image-column, "
            "--video-column or --audio-column (in Python image_column, ...), or several with "
            f"--media-column {next(iter(found.values())).kind}=NAME"
        )
    return tuple(found.values())


def by_suffix(values: Mapping[str, Any], kinds: KindTable) -> Iterator[Column]:
    """Yields the columns that hold bytes and whose name ends like that of a media file; of films
    and sounds their tracks say which they are."""
    for name, value in values.items():
        if not isinstance(value, bytes):
            continue
        kind = kinds.of_name(f"x.{name}")
        if kind is None or kind in FILMS:
            kind = kind_of_bytes(value, kinds) or kind
        if kind is not None:
            yield Column(kind=kind, name=name)


def unused(rows: Iterable[Mapping[str, Any]], read: Collection[str], kinds: KindTable) -> list[str]:
    """Returns the columns of the first rows that look like media and are not among those that are
    read."""
    found = dict.fromkeys(
        name
        for values in rows
        for name, value in values.items()
        if name not in read and (looks_like_media(value, kinds) or _is_named(name, value, kinds))
    )
    return list(found)


def names_of_files(rows: Sequence[Mapping[str, Any]], kinds: KindTable) -> list[str]:
    """Returns the columns of the first rows that hold nothing but names of files of media."""
    held: dict[str, list[bool]] = {}
    for values in rows:
        for name, value in values.items():
            if value is not None:
                is_name = isinstance(value, str) and kinds.of_name(value) is not None
                held.setdefault(name, []).append(is_name)
    return [name for name, are_names in held.items() if all(are_names)]


def _kind(name: str, value: Any, kinds: KindTable) -> str | None:
    """Returns the kind of media in a cell; None if it is none."""
    kind, first = kind_of_cell(value, kinds)
    by_name = kinds.of_column(name)
    if isinstance(first, str) and not isinstance(value, Mapping):
        return by_name if _may_be_name(first, kinds) else None
    if kind is not None or isinstance(first, (bytes, str, Mapping)):
        return kind or by_name
    if not is_array(first):
        return None
    return by_name if first.ndim > 1 or by_name == "audio" else None  # not a vector


def _is_named(name: str, value: Any, kinds: KindTable) -> bool:
    """Whether a cell has media by its column's name, in a form that is read or in another one."""
    is_text = isinstance(value, str) and bool(value) and kinds.of_column(name) is not None
    return is_text or _kind(name, value, kinds) is not None


def _may_be_name(text: str, kinds: KindTable) -> bool:
    """Returns whether a text can be the name of a file: a sentence is none, unless it ends so."""
    return len(text.split()) == 1 or is_url(text) or kinds.of_name(text) is not None
