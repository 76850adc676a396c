"""The folder that a checkpoint is written to: it grows as NAME.partial, which a run that was cut
off leaves for the next one, and is renamed once it is whole."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mmdeploy_llm.errors import CheckpointError, ConfigError
from mmdeploy_llm.system.guarding.claims import claimed
from mmdeploy_llm.system.guarding.folder_files import MAX_INDEX_BYTES, check_new_folder, read_object
from mmdeploy_llm.weights.find import INDEX_FILE, PICKLE_SUFFIXES

logger = logging.getLogger(__name__)

MARK = ".being-written"  # a file in a folder that is not whole yet: its digest, and what is done
NEW = ".new"  # ends the name of a file while it is written


@contextmanager
def written(output: Path, digest: str, *, overwrite: bool = False) -> Iterator[Partial]:
    """Opens the folder that OUTPUT grows in, for this run alone, and finishes it unless something
    was raised. Raises ConfigError as `claimed`, `check_new_folder` and `Partial` do."""
    with claimed(output):
        check_new_folder(output, overwrite=overwrite)  # again: another run may have written it
        partial = Partial(output, digest)
        yield partial
        partial.finish()


class Partial:
    """A folder that is being written. state: what the run that was cut off had done, {} for none;
    `record` is the only writer of the file that holds it."""

    def __init__(self, output: Path, digest: str) -> None:
        """Opens OUTPUT.partial. One that an earlier run with the same digest left is continued, and
        one of another digest removed. Raises ConfigError for anything else of that name."""
        self.folder = output.with_name(f"{output.name}.partial")
        self.output, self._digest = output, digest
        self.state = self._found()
        if not self.state:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.record({})
        self._begun = self.folder.stat()

    def _found(self) -> Mapping[str, Any]:
        """Returns the state of an earlier run that can be continued; {} for none."""
        folder = self.folder
        if not (folder / MARK).is_file():
            if folder.is_symlink() or (folder.exists() and not _is_begun(folder)):
                raise ConfigError(
                    f"{folder} is in the way, and no run that was cut off left it: move it, or "
                    "give another folder"
                )
            return {}
        try:
            state = read_object(folder / MARK, MAX_INDEX_BYTES)
        except CheckpointError:  # written by a run that died as it began
            state = {}
        if state.get("digest") == self._digest:
            logger.info("%s, which a run that was cut off left, is continued", folder)
            return state
        logger.warning("%s, which a run of other options or weights left, is removed", folder)
        shutil.rmtree(folder)
        return {}

    def record(self, state: Mapping[str, Any]) -> None:
        """Says what is done; a run that is cut off later continues from here."""
        whole = json.dumps({**state, "digest": self._digest})
        write_whole(self.folder / MARK, whole.encode())

    def finish(self) -> None:
        """Renames the folder to its final name. A folder that is there is moved aside first and
        removed last, so that one of the two is whole whenever the run is killed. Raises ConfigError
        when somebody else has replaced the folder."""
        if not self.folder.is_dir() or not os.path.samestat(self.folder.stat(), self._begun):
            raise ConfigError(
                f"{self.folder} was moved or replaced while files were written to it, and does not "
                "have all of them; find out by whom, then write them again"
            )
        aside = self.output.with_name(f"{self.output.name}.replaced")
        if self.output.exists() and aside.exists():
            raise ConfigError(f"{aside} is in the way: move it. The new folder is {self.folder}")
        if self.output.exists():
            self.output.rename(aside)
        self.folder.rename(self.output)
        (self.output / MARK).unlink()
        if aside.exists():
            shutil.rmtree(aside)


def _is_begun(folder: Path) -> bool:
    """Whether a run left the folder that was killed before it wrote the mark."""
    return folder.is_dir() and {path.name for path in folder.iterdir()} <= {f"{MARK}{NEW}"}


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file that is never seen half written."""
    new = path.with_name(f"{path.name}{NEW}")
    with new.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def digest_of(options: Mapping[str, Any], files: Sequence[Path]) -> str:
    """Returns a digest of options and of the names, sizes and times of files."""
    states = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(json.dumps([options, states], sort_keys=True).encode()).hexdigest()


def check_output(output: Path, source: Path, *, overwrite: bool) -> None:
    """Raises ConfigError for a folder that cannot be written to."""
    if source.resolve().is_relative_to(output.resolve()):
        raise ConfigError(f"{output} holds the model itself; give another folder")
    check_new_folder(output, overwrite=overwrite)


def copy_others(source: Path, target: Path) -> None:
    """Copies tokenizer, processors' configs and the like; subfolders are left out."""
    for path in source.iterdir():
        is_weight = path.suffix in (".safetensors", *PICKLE_SUFFIXES) or path.name == INDEX_FILE
        if path.is_file() and not is_weight and not (target / path.name).exists():
            shutil.copyfile(path, target / path.name)
