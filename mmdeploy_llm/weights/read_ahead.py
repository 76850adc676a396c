"""Reads files of weights in a thread while an engine's start imports torch, which takes a second:
on a disk that is slow, or just started, the weights are in memory when they are wanted."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterable
from contextlib import closing, suppress
from hashlib import blake2b
from pathlib import Path

from mmdeploy_llm.errors import ModelError
from mmdeploy_llm.system.portable.files import NO_WAIT
from mmdeploy_llm.system.portable.machine import free_ram
from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.values.options.model_names import GGUF_SUFFIX, find_model

SLICE = 2**22
NUM_PROBES = 16  # bytes of a file that are asked for
RAM_SHARE = 2  # files that are more than half of the free memory are left alone
KEPT_SUFFIX = ".weights"  # of a file in the folder of the option weight_cache


def cache_folder(option: str | bool) -> Path | None:
    """Returns the folder that the option weight_cache names, None for False. Raises RuntimeError
    where the user has no home."""
    if isinstance(option, str):
        return Path(option).expanduser()
    return Path.home() / ".cache" / "mmdeploy_llm" / "weights" if option else None


def mark_of(model: str) -> str:
    """Returns what the names of files in the cache begin with that were kept for this name of a
    model. It is a hint: their whole names say what they hold."""
    return blake2b(model.encode(errors="surrogateescape"), digest_size=5).hexdigest()


def read_ahead(model: str, options: EngineConfig) -> threading.Thread | None:
    """Begins to read what a start of the model will read: its last file in the cache of weights,
    else its own files. Returns the thread, None where there are none on this machine."""
    paths = _paths(model, options)
    if not paths:
        return None
    thread = threading.Thread(target=_read, args=(paths,), name="read-ahead", daemon=True)
    thread.start()
    return thread


def _paths(model: str, options: EngineConfig) -> list[Path]:
    if options.load_format == "dummy":
        return []
    with suppress(OSError, RuntimeError, ModelError):  # told by who reads them
        place = cache_folder(options.weight_cache)
        kept = [] if place is None else [*place.glob(f"{mark_of(model)}-*{KEPT_SUFFIX}")]
        if kept:
            return [max(kept, key=lambda path: path.stat().st_mtime_ns)]
        found = find_model(model)
        if found is not None and found.is_dir():
            return sorted((*found.glob("*.safetensors"), *found.glob(f"*{GGUF_SUFFIX}")))
        return [] if found is None else [found]
    return []


def _read(paths: Iterable[Path]) -> None:
    with suppress(OSError):  # told by who reads them
        if sum(path.stat().st_size for path in paths) > free_ram() // RAM_SHARE:
            return
        for path in paths:
            with closing(open(os.open(path, os.O_RDONLY | NO_WAIT), "rb", buffering=0)) as file:
                found = os.fstat(file.fileno())
                if stat.S_ISREG(found.st_mode) and not _is_in_memory(file.fileno(), found.st_size):
                    buffer = bytearray(SLICE)
                    while file.readinto(buffer):
                        pass


def _is_in_memory(fd: int, size: int) -> bool:
    """Whether the system has a file in memory, as far as some of its bytes show; not every file
    system tells, such as tmpfs and those of networks."""
    no_wait = getattr(os, "RWF_NOWAIT", None)
    if no_wait is None:
        return False
    try:
        for number in range(NUM_PROBES):
            os.preadv(fd, [bytearray(1)], size * number // NUM_PROBES, no_wait)
    except OSError:  # of which BlockingIOError says no
        return False
    return True
