"""Exports to the layouts of training sets, in which each answer is beside its picture.

    kohya         FOLDER/10_ohwx/a.png  FOLDER/10_ohwx/a.txt ...     trainers of LoRAs read it
    sidecar       texts beside the pictures that are beneath FOLDER already

Pictures that are not beneath the folder are copied into it, files and what tars hold.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from mmdeploy_llm.data.outputs.sidecars.places import Spot
from mmdeploy_llm.data.outputs.sidecars.writer import (
    JOINED,
    NO_ANSWER,
    Sidecars,
    page_of,
    picture_of,
    write_beside,
)
from mmdeploy_llm.data.records.files import Folder
from mmdeploy_llm.data.records.media import Blob, LeftOutError
from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.data.records.unicode_text import replaced
from mmdeploy_llm.data.rows.names import is_media_name, is_url
from mmdeploy_llm.errors import ConfigError, RequestError
from mmdeploy_llm.hooks import KindTable
from mmdeploy_llm.system.guarding.claims import LOCK, claimed
from mmdeploy_llm.values.text.display import listed

from .export import Export, Exported

logger = logging.getLogger(__name__)

COPY_BYTES = 2**20
KEPT = "its sidecar was there and stays"
MAX_NAME_BYTES = 200  # ids may be longer than names of files
_NO_NAME = re.compile(r"[\x00-\x1f\x7f/\\:*?\"<>|]+")


def write_kohya(export: Export) -> None:
    """Writes a folder of pictures and captions, named after repeats and trigger words."""
    options = export.options
    words = " ".join(options.sidecar.text.trigger) or "captions"
    folder = Path(export.output)
    with (
        free(export, folder),
        Folder.open(folder) as outer,
        outer.inner(f"{options.repeats}_{plain(words)}") as opened,
    ):
        pictures, num_joined = Pictures(opened, options.kinds, is_copied=True), 0
        for item in answered(export):
            try:
                built = options.sidecar.text.of(item.record, item.path or item.relative)
                name = pictures.take(item, os.path.basename(item.relative))
            except (LeftOutError, RequestError) as error:
                export.leave_out(str(error))
                continue
            own = os.path.splitext(name)[0] + options.sidecar.suffix
            write_beside(opened, own, [built.text.encode() + b"\n"])
            num_joined += built.has_several_lines
    if num_joined:
        export.notes.append(f"{num_joined} {JOINED}")


def write_sidecars(export: Export) -> None:
    """Writes texts beside the pictures that are beneath the output."""
    root, base = export.output, os.fspath(export.options.media_root or "")
    if is_url(root) or not os.path.isdir(root):
        raise ConfigError(f"{root!r} is no folder; sidecars need the folder that has the pictures")

    def spot_of(record: Record) -> Spot:
        return Spot.beneath(root, os.path.join(base, picture_of(record)), page_of(record))

    options = export.options
    sidecars = Sidecars(options.sidecar, spot_of, export.inputs, options.kinds)
    with _claimed_texts(root, options.sidecar.suffix), sidecars:
        counts = sidecars.counts
        for item in answered(export):
            num_kept, left_out = counts.num_kept, counts.left_out.copy()
            sidecars.take(item.record)
            for reason in counts.left_out - left_out:
                export.leave_out(reason)
            if counts.num_kept > num_kept:
                export.leave_out(KEPT, is_lost=False)
    if counts.num_joined:
        export.notes.append(f"{counts.num_joined} {JOINED}")


@contextmanager
def _claimed_texts(root: str, suffix: str) -> Iterator[None]:
    """Claims the texts of a suffix beneath a folder. It may be one that nothing is written to: only
    folders in it have pictures."""
    with ExitStack() as stack:
        try:
            stack.enter_context(claimed(root, is_folder=True, suffix=suffix))
        except OSError as error:
            logger.warning(
                "%r has no lock (%s): make sure that no other run writes %s beneath it",
                root,
                error.strerror,
                suffix,
            )
        yield


def answered(export: Export) -> Iterator[Exported]:
    """Yields the items that have an answer; the others are left out."""
    for item in export.items():
        if item.record.outcome in NO_ANSWER:
            export.leave_out(f"its outcome is {item.record.outcome}", is_lost=False)
        else:
            yield item


class Pictures:
    """The pictures of a folder: names those that are beneath it, copies others into it.

    kinds: of files that are pictures. is_copied: whether it may; else a picture elsewhere is left
    out.
    """

    def __init__(self, folder: Folder, kinds: KindTable, *, is_copied: bool) -> None:
        self._folder, self._kinds, self._is_copied = folder, kinds, is_copied
        self._root = os.path.realpath(folder.path)
        self._taken: set[str] = set()

    def take(self, item: Exported, wanted: str) -> str:
        """Returns the path of an item's picture beneath the folder. wanted: of a copy. Raises
        LeftOutError where there is no picture."""
        with item.media() as (blob, path):
            if path is not None:
                place = os.path.relpath(os.path.realpath(path), self._root)
                if not place.startswith(os.pardir):
                    return place
            if not self._is_copied:
                raise LeftOutError(f"it is not beneath {str(self._folder.path)!r}")
            if not is_media_name(f"x.{blob.suffix}", self._kinds):
                raise LeftOutError(f"it is no {listed(self._kinds.kinds)}")
            name = self._free(wanted, blob)
            with ExitStack() as stack:
                folder = self._folder
                for part in name.split("/")[:-1]:
                    folder = stack.enter_context(folder.inner(part))
                write_beside(folder, os.path.basename(name), _pieces(blob))
            return name

    def _free(self, wanted: str, blob: Blob) -> str:
        """Returns a name that no other picture of this export has, nor one with another suffix:
        both would have one caption."""
        stem, suffix = os.path.splitext(wanted)
        if not is_media_name(f"x{suffix}", self._kinds):
            stem, suffix = wanted, f".{blob.suffix}"
        parts = [plain(part) for part in stem.split("/")]
        stem = "/".join(part for part in parts if part.strip(".")) or "picture"
        name, number = stem, 1
        while name.casefold() in self._taken:
            number += 1
            name = f"{stem}-{number}"
        self._taken.add(name.casefold())
        return f"{name}{suffix}"


def _pieces(blob: Blob) -> Iterator[bytes]:
    left = blob.size
    while left > 0:
        piece = blob.file.read(min(left, COPY_BYTES))
        if not piece:
            raise LeftOutError("it is shorter than it was")
        left -= len(piece)
        yield piece


def plain(name: str) -> str:
    """Returns a name without the characters that some systems do not allow in names, and short
    enough for all of them."""
    own = _NO_NAME.sub("_", replaced(name)).encode()[:MAX_NAME_BYTES]
    return own.decode("utf-8", "ignore").strip() or "_"


@contextmanager
def free(export: Export, folder: Path) -> Iterator[None]:
    """Claims a folder. Raises ConfigError for one that has something in it, also since the claim
    was asked for, unless it may be replaced: then files of the same names are."""
    _check_free(export, folder)
    with claimed(folder, is_folder=True):
        _check_free(export, folder)
        yield


def _check_free(export: Export, folder: Path) -> None:
    export.check_local()
    is_there = os.path.lexists(folder)
    if is_there and not folder.is_dir():
        raise ConfigError(f"{export.output!r} is a file, and this format is a folder")
    is_free = not is_there or set(os.listdir(folder)) <= {LOCK}  # which a killed run leaves
    if not is_free and not export.options.is_overwritten:
        raise ConfigError(
            f"{export.output!r} has files already; --overwrite replaces those of the same names, "
            "--output writes elsewhere"
        )
