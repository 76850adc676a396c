"""Claims outputs: while one run writes a file or a folder, another run that wants it is told so.

    captions.html        the output
    .captions.html.lock  locked while a run writes it; says which process that is
    photos/.txt.lock     of what is written into a folder that is no output itself

The lock ends with its process. A file that is left says that the process was killed.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import IO

from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.system.portable import files

logger = logging.getLogger(__name__)

LOCK = ".lock"  # in a folder, or ends the name of one beside an output
MAX_TRIES = 100  # a lock that others make and remove meanwhile
_WRITER = re.compile(rb"process \d{1,20} on [\w.-]{1,255}\n")


@contextmanager
def claimed(
    output: str | os.PathLike[str], *, is_folder: bool = False, suffix: str = ""
) -> Iterator[None]:
    """Holds an output for this run alone. Not reentrant: a process has it once.

    is_folder: whether the lock lies in the output, a folder that stays, instead of beside it.
    suffix: of the files in a folder that are written, where other runs may write others. Raises
    ConfigError where another run writes it, and OSError where nobody can.
    """
    path, name = Path(os.path.abspath(output)), str(Path(output))
    place = path / f"{suffix}{LOCK}" if is_folder else path.with_name(f".{path.name}{LOCK}")
    file, before = held(lambda: _opened(place, name), lambda own: _is_at(own, place), name)
    if before:
        logger.warning(
            "a run that did not end (%s) had begun to write %r; this one takes over", before, name
        )
    try:
        yield
    finally:
        if not files.CAN_RENAME_OPEN:  # Windows removes no open file
            file.close()
        with suppress(OSError):
            place.unlink()
        file.close()


def lock(file: IO[bytes] | FileIO, path: str | Path, writer: str = "") -> None:
    """Locks a file of an output against other runs. Raises ConfigError when one has it. writer: who
    that is, if it is known."""
    try:
        files.lock(file)
    except BlockingIOError:
        who = f" ({writer})" if writer else ""
        raise ConfigError(
            f"another run{who} is writing to {str(path)!r}; wait for its end, or name another "
            "output"
        ) from None
    except OSError as error:  # some network file systems have no locks
        logger.warning(
            "%r cannot be locked (%s): make sure that no other run writes to it",
            str(path),
            error.strerror,
        )


def held(
    opened: Callable[[], FileIO], is_there: Callable[[FileIO], bool], output: str
) -> tuple[FileIO, str]:
    """Returns the locked lock file of an output, which says who this process is, and who had left
    it ("": nobody). opened: opens it, made where it is missing. is_there: whether it has its name
    still: the run that had it may have removed it. Raises ConfigError as `lock` does."""
    for _ in range(MAX_TRIES):
        file = opened()
        try:
            before = _writer(file)
            lock(file, output, before)
            if is_there(file):
                _sign(file)
                return file, before
        except BaseException:
            file.close()
            raise
        file.close()
    raise ConfigError(f"{output!r} is taken again and again; name another output")


def _is_at(file: FileIO, place: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.lstat(place))
    except FileNotFoundError:
        return False


def _opened(place: Path, output: str) -> FileIO:
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        fd = files.open_unfollowed(place, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        _check_lock(place, output, error)
        # The lock is of no interest to who wants the output.
        raise OSError(error.errno, error.strerror, output) from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _in_the_way(place)
    return FileIO(fd, "rb+")


def _check_lock(place: Path, output: str, error: OSError) -> None:
    """Raises ConfigError where what has the name of the lock is at fault, and not the output."""
    with suppress(OSError):
        is_regular = stat.S_ISREG(place.lstat().st_mode)
        if not is_regular:
            raise _in_the_way(place) from None
        if error.errno in (errno.EACCES, errno.EPERM):
            raise ConfigError(
                f"{str(place)!r}, the lock of {output!r}, cannot be opened ({error.strerror}): "
                "another user's run writes that output, or left the lock; remove it when none runs"
            ) from None


def _in_the_way(place: Path) -> ConfigError:
    return ConfigError(f"{str(place)!r} is in the way of a lock: it is no regular file; remove it")


def _writer(file: FileIO) -> str:
    """Returns who a lock says it belongs to; "" where it does not say that."""
    file.seek(0)
    found = _WRITER.match(file.read(512) or b"")
    return found[0].decode().strip() if found else ""


def _sign(file: FileIO) -> None:
    """Writes who has the lock."""
    host = (
        re.sub(r"[^\w.-]", "", socket.gethostname(), flags=re.ASCII)[:255]
        or "a-machine-without-name"
    )
    with suppress(OSError):  # a full disk is told by what is written
        file.seek(0)
        file.truncate()
        file.write(f"process {os.getpid()} on {host}\n".encode())
