"""Says what transcripts were made of, in a file beside them, so that a transcript of another sound,
or by another model or other options, is never taken for this one.

talks/a.srt, talks/a.txt  transcripts
talks/a.source            {"srt": {"source": "a.mp3", "bytes": ..., "modified": ..., "digest": ...,
                          "model": ..., "values": {...}, "skipped": {...}}, "txt": {...}}

source is a path beneath the folder of the file. modified: nanoseconds since 1970. digest: BLAKE2b
of 160 bits of the bytes. values: what else decides the words, as in the configuration of a batch.
skipped: {"seconds", "of"}, seconds without speech that were not heard, of so many of all channels;
absent where no detector of voices was asked.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Any

from mmdeploy_llm.data.records.configuration import Configuration, differences
from mmdeploy_llm.data.records.files import open_regular
from mmdeploy_llm.data.records.identity import file_state
from mmdeploy_llm.errors import ConfigError

from .writing import write

SUFFIX = ".source"
MAX_BYTES = 2**22


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A file of sound as it was read. digest: of its bytes; num_bytes, modified: see above."""

    path: Path
    digest: str
    num_bytes: int
    modified: int


class Sources:
    """Keeps what transcripts of one name were made of. stem: that name, with its folder."""

    def __init__(self, stem: Path) -> None:
        self._path = stem.with_name(f"{stem.name}{SUFFIX}")
        self._known: dict[str, Any] | None = None

    def difference(self, name: str, path: Path, made_by: Configuration) -> str | None:
        """Returns why a transcript that is there is not that of a file; None: it is. name: of its
        format. The file is read where its place, size or time is another one."""
        entry = self._read().get(name)
        if not isinstance(entry, dict) or not isinstance(entry.get("values"), dict):
            return f"nothing says what it is made of ({self._path.name!r} does not)"
        if not self._is_of(entry, path):
            return f"it was made of another sound, {entry.get('source')!r}"
        found = differences(entry, made_by)
        return "; ".join(found) or None

    def write(
        self,
        names: Iterable[str],
        source: Source,
        made_by: Configuration,
        skipped: tuple[float, float] | None = None,
    ) -> None:
        """Says what transcripts of these formats were made of; those of others stay as they are.
        skipped: see Transcript."""
        entry: dict[str, Any] = {
            "source": self._relative(source.path),
            "bytes": source.num_bytes,
            "modified": source.modified,
            "digest": source.digest,
            "model": made_by.model,
            "values": dict(made_by.values),
        }
        if skipped is not None:
            entry["skipped"] = {"seconds": round(skipped[0], 3), "of": round(skipped[1], 3)}
        known = {**self._read(), **dict.fromkeys(names, entry)}
        write(self._path, json.dumps(known, indent=1, default=repr) + "\n")

    def _is_of(self, entry: Mapping[str, Any], path: Path) -> bool:
        state = file_state(str(path))
        if state is None or state[0] != entry.get("bytes"):
            return False
        is_place = entry.get("source") == self._relative(path)
        if is_place and state[1] == entry.get("modified"):
            return True
        return digest_of_file(path) == entry.get("digest")

    def _relative(self, path: Path) -> str:
        try:
            return Path(os.path.relpath(path, self._path.parent)).as_posix()
        except ValueError:  # on another drive
            return Path(os.path.abspath(path)).as_posix()

    def _read(self) -> dict[str, Any]:
        if self._known is None:
            try:
                with open_regular(self._path, os.O_RDONLY) as file:
                    known = json.loads(file.read(MAX_BYTES) or b"")
            except FileNotFoundError:
                known = {}
            except (OSError, ValueError, RecursionError):
                known = None
            if not isinstance(known, dict):
                raise ConfigError(
                    f"{str(self._path)!r} does not say what transcripts are made of; move it away"
                )
            self._known = known
        return self._known


def digest_of_file(path: Path) -> str | None:
    """Returns the digest of a file's bytes, as SoundDecoder has it; None for one that cannot be
    read."""
    try:
        with open_regular(path.resolve(), os.O_RDONLY) as file:
            return file_digest(file, partial(blake2b, digest_size=20)).hexdigest()
    except (ConfigError, OSError):
        return None
