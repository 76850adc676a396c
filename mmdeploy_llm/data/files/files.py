"""Expands files, folders and globs into the media in them, in natural order."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from mmdeploy_llm.data.rows.files import suffix_of
from mmdeploy_llm.data.rows.names import is_url
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.hooks import KindTable

from .chosen_kinds import ChosenKinds
from .kinds import PAGED, Media, NotMedia, read_kinds
from .missing import is_gone, nowhere
from .names import Patterns
from .skipped import Skip, Skipped
from .walk import Place, Walker, common_root

Animated = Literal["image", "video"]
MAX_NAMED = 3  # of the inputs that have nothing, in a message
LEFT_OUT = {  # what a file has several of -> nouns with verbs, and what is used
    "frames": (
        "image has",
        "images have",
        "of which the first is used; --animated video takes them as videos",
    ),
    "pages": (
        "image has",
        "images have",
        "of which the first is used; `mmdeploy-llm read` reads all, --by-page asks about each, "
        f"--kinds image,{PAGED} about all at once",
    ),
    "pictures": (
        "HEIF or AVIF file has",
        "HEIF or AVIF files have",
        "of which the main one is used; save the others as files of their own to have them read",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundFile:
    """A file of media. kind: what its bytes are. left_out: what it has beyond the picture that is
    used, keys of LEFT_OUT."""

    place: Place
    kind: str
    left_out: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """Its path, as its folder was named."""
        return os.path.normpath(self.place.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The files that were found. root: the folder that the ids of files are relative to. kinds:
    those that were known."""

    files: Sequence[FoundFile]
    skipped: Skipped
    root: str
    kinds: KindTable


def find_media(
    paths: Iterable[str],
    *,
    is_recursive: bool = False,
    exclude: Iterable[str] = (),
    animated: str = "image",
    wanted: ChosenKinds | None = None,
) -> Found:
    """Returns the media that `paths` name, each once: in the order of `paths`, and in natural order
    within a folder or glob (2.png before 10.png).

    A folder yields its files, and with `is_recursive` those of its subfolders. What a file is, its
    first bytes say; other files are skipped with a reason. A single file is taken whatever it is;
    of several, as a shell makes them of a pattern, those that are no media are skipped too, and one
    that does not exist is taken: its item fails. A single table or shard is refused.
    exclude: patterns, see names.Patterns. animated: what images of several frames are. wanted: the
    kinds that become items; None: images and videos.
    Raises ConfigError when no path exists, or when nothing is found.
    """
    given, wanted = tuple(dict.fromkeys(paths)), wanted or ChosenKinds()
    check_animated(animated)
    skipped, patterns = Skipped(), Patterns(exclude)
    walker = Walker(skipped, patterns, is_recursive=is_recursive)
    places: dict[str, Place] = {}
    empty, gone = [], set[str]()
    for path in given:
        num_skipped = len(skipped)
        found = list(_expand(path, walker, is_alone=len(given) == 1))
        if not found and is_gone(path):
            found = [walker.gone(path)]
            gone.add(found[0].real_path)
        elif not found and len(skipped) == num_skipped:
            empty.append(path)
        for place in found:
            places.setdefault(place.real_path, place)
    if gone and gone.issuperset(places):
        raise ConfigError(nowhere(given))
    is_single = len(given) == 1 and os.path.exists(given[0]) and not os.path.isdir(given[0])
    kept = gone if not is_single else places
    files = list(_judged([*places.values()], animated, skipped, kept, wanted))
    files = list(_taken(files, skipped, kept, wanted))
    _note_left_out(files, skipped)
    if not files:
        raise ConfigError(_nothing(given, is_recursive, skipped, wanted))
    skipped.forget(file.place.real_path for file in files)
    _note(skipped, empty, patterns)
    return Found(files=files, skipped=skipped, root=common_root(given), kinds=wanted.table)


def check_animated(animated: str) -> None:
    """Raises ConfigError for an unknown choice."""
    if animated not in get_args(Animated):
        raise ConfigError(
            f"animated must be one of {', '.join(get_args(Animated))}, got {animated[:40]!r}"
        )


def _expand(path: str, walker: Walker, *, is_alone: bool) -> Iterator[Place]:
    if os.path.isdir(path):
        return walker.folder(path, is_alone=is_alone)
    if os.path.lexists(path):
        return walker.file(path, is_alone=is_alone)
    if is_url(path):
        raise ConfigError(f"{path[:80]!r} is a URL; give files, folders or globs on this machine")
    return walker.glob(path)


def _judged(
    places: Sequence[Place],
    animated: str,
    skipped: Skipped,
    kept: Container[str],
    wanted: ChosenKinds,
) -> Iterator[FoundFile]:
    """Yields the media among the files. kept: real paths of those that are taken whatever they
    are."""
    kinds = read_kinds([place.path for place in places], kinds=wanted.table)
    for place, found in zip(places, kinds, strict=True):
        if isinstance(found, Media):
            kind = animated if found.is_animated else found.kind
            if found.is_paged and wanted.takes_pages:
                kind = PAGED
            yield FoundFile(place=place, kind=kind, left_out=tuple(_left_out(found, kind)))
        elif place.real_path in kept:
            if os.path.exists(place.path) and _name_corpora([place.path], wanted.table):
                raise ConfigError(
                    f"{place.path!r} is no file of media, but one that names or holds items: "
                    f"`mmdeploy-llm batch {shlex.quote(place.path)} --output answers.jsonl` reads "
                    "it, and run_batch in Python"
                )
            yield FoundFile(place=place, kind=wanted.table.of_name(place.path) or "image")
        else:
            skipped.add(_skip(place.path, found))


def _name_corpora(paths: Iterable[str], kinds: KindTable) -> bool:
    """Returns whether one of the names is that of a table or a shard."""
    from mmdeploy_llm.data.rows.formats.formats import all_suffixes  # not above: few inputs need it

    suffixes = all_suffixes(kinds)
    return any(suffix_of(path, suffixes) is not None for path in paths)


def _left_out(found: Media, kind: str) -> Iterator[str]:
    """Yields what is not used of a file that is taken as this kind."""
    if found.is_animated and kind == "image":
        yield "frames"
    if found.is_paged and kind != PAGED:
        yield "pages"
    if found.is_collection:
        yield "pictures"


def _note_left_out(files: Sequence[FoundFile], skipped: Skipped) -> None:
    """Notes how many of the files that are taken are not used whole."""
    counts = Counter(name for file in files for name in file.left_out)
    for name, (one, many, words) in LEFT_OUT.items():
        if counts[name]:
            noun = one if counts[name] == 1 else many
            skipped.notes.append(f"{counts[name]} {noun} several {name}, {words}")


def _taken(
    files: Sequence[FoundFile], skipped: Skipped, kept: Container[str], wanted: ChosenKinds
) -> Iterator[FoundFile]:
    """Yields the files of the kinds that are wanted, and those that are kept."""
    others = [file for file in files if file.place.real_path not in kept]
    skip_of = wanted.skips(file.kind for file in others)
    for file in files:
        is_kept = file.place.real_path in kept
        skip = None if is_kept else skip_of(file.place.path, file.kind)
        if skip is None:
            yield file
        else:
            skipped.add(skip)


def _skip(path: str, found: NotMedia) -> Skip:
    return Skip(path=path, label=found.label, reason=found.reason, hint=found.hint)


def _note(skipped: Skipped, empty: Sequence[str], patterns: Patterns) -> None:
    """Notes the inputs that name no file, and the patterns that fit nothing."""
    if empty:
        more = f" and {len(empty) - MAX_NAMED} more" if len(empty) > MAX_NAMED else ""
        names = ", ".join(map(repr, empty[:MAX_NAMED]))
        skipped.notes.append(f"no file is in {names}{more}")
    for pattern in patterns.unused:
        skipped.notes.append(f"--exclude {pattern!r} fits nothing")


def _nothing(
    given: Sequence[str], is_recursive: bool, skipped: Skipped, wanted: ChosenKinds
) -> str:
    names = ", ".join(map(repr, given[:MAX_NAMED])) or "an empty list of paths"
    hint = "" if is_recursive else "; --no-recursive left out subfolders"
    if _name_corpora((skip.path for skip in skipped), wanted.table):
        hint += "; `mmdeploy-llm batch` reads tables and shards"
    passed = f" ({skipped.text})" if skipped.text else ""
    return f"no {wanted.words} in {names}{passed}{hint}"
