"""Claims outputs: while one run writes a file or a folder, another run that wants it is told so.

    captions.html        the output
    .captions.html.lock  locked while a run writes it; says which process that is

The lock ends with its process. A file that is left says that the process was killed.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import IO

from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.portable import files, locks

logger = logging.getLogger(__name__)

LOCK = ".lock"  # in a folder, or ends the name of one beside an output
MAX_TRIES = 100  # a lock that others make and remove meanwhile
_WRITER = re.compile(rb"process \d{1,20} on [\w.-]{1,255}\n")


@contextmanager
def claimed(output: str | os.PathLike[str], *, is_folder: bool = False) -> Iterator[None]:
    """Holds an output for this run alone. Not reentrant: a process has it once.

    is_folder: whether the lock lies in the output, a folder that stays, instead of beside it.
    Raises ConfigError where another run writes it, and OSError where nobody can.
    """
    path = Path(os.path.abspath(output))
    place = path / LOCK if is_folder else path.with_name(f".{path.name}{LOCK}")
    file = _open_locked(place, Path(output))
    try:
        yield
    finally:
        if not files.CAN_RENAME_OPEN:  # Windows removes no open file
            file.close()
        with suppress(OSError):
            place.unlink()
        file.close()


def lock(file: IO[bytes] | FileIO, path: Path, writer: str = "") -> None:
    """Locks a file of an output against other runs. Raises ConfigError when one has it. writer: who
    that is, if it is known."""
    try:
        locks.lock(file)
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


def _open_locked(place: Path, output: Path) -> FileIO:
    """Opens the lock of an output, made where it is missing, and says in it who this process is."""
    for _ in range(MAX_TRIES):
        file = _opened(place, output)
        try:
            writer = _writer(file)
            lock(file, output, writer)
            if os.path.samestat(os.fstat(file.fileno()), os.lstat(place)):
                _sign(file, output, writer)
                return file
        except FileNotFoundError:  # its run has ended and removed it
            file.close()
            continue
        except BaseException:
            file.close()
            raise
        file.close()  # and a third run has made another
    raise ConfigError(f"{str(output)!r} is taken again and again; name another output")


def _opened(place: Path, output: Path) -> FileIO:
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        fd = files.open_unfollowed(place, os.O_RDWR | os.O_CREAT)
    except OSError as error:  # the lock is of no interest to who wants the output
        raise OSError(error.errno, error.strerror, str(output)) from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ConfigError(f"{str(place)!r} is in the way: it is no regular file; remove it")
    return FileIO(fd, "rb+")


def _writer(file: FileIO) -> str:
    """Returns who a lock says it belongs to; "" where it does not say that."""
    file.seek(0)
    found = _WRITER.match(file.read(512) or b"")
    return found[0].decode().strip() if found else ""


def _sign(file: FileIO, output: Path, before: str) -> None:
    """Writes who has the lock. before: whoever left it."""
    if before:
        logger.warning(
            "a run that did not end (%s) had begun to write %r; this one takes over",
            before,
            str(output),
        )
    host = (
        re.sub(r"[^\w.-]", "", socket.gethostname(), flags=re.ASCII)[:255]
        or "a-machine-without-name"
    )
    with suppress(OSError):  # a full disk is told by what is written
        file.seek(0)
        file.truncate()
        file.write(f"process {os.getpid()} on {host}\n".encode())
