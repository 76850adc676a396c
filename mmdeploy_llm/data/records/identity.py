"""Digests by which a resumed run notices that an item's input or the configuration has changed."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from mmdeploy_llm.system.portable import files

DIGEST_BYTES = 8
NUM_SAMPLES, SAMPLE_BYTES = 64, 4096  # of a file of weights
MAX_WHOLE_BYTES = 64 * 2**20  # other files up to this size are read whole
WEIGHTS = (".safetensors", ".gguf")
TEXTS = (".json", ".jinja", ".txt", ".model", ".ttf")
MODEL_SUFFIXES = frozenset((*TEXTS, *WEIGHTS))


class _Hasher(Protocol):
    def update(self, data: bytes | memoryview, /) -> None: ...


def digest_of(*values: Any) -> str:
    """Returns a digest of nested values. The order of keys does not matter. Loaded objects other
    than bytes and arrays count by their type and size only."""
    hasher = blake2b(digest_size=DIGEST_BYTES)
    try:
        # What a file holds: ten times as fast.
        hasher.update(json.dumps(values, sort_keys=True).encode())
    except (TypeError, ValueError):  # objects of a Python program
        _feed(hasher, values)
    return hasher.hexdigest()


def _feed(hasher: _Hasher, value: Any) -> None:
    """Adds a value with its type and length, so that no two values give the same bytes."""
    if isinstance(value, Mapping):
        items = sorted(((str(name), item) for name, item in value.items()), key=lambda own: own[0])
        hasher.update(f"map {len(items)}\0".encode())
        for item in items:
            _feed(hasher, item)
    elif isinstance(value, (list, tuple)):
        hasher.update(f"list {len(value)}\0".encode())
        for item in value:
            _feed(hasher, item)
    elif isinstance(value, os.PathLike):
        _feed(hasher, os.fspath(value))
    elif isinstance(value, str):
        data = value.encode("utf-8", "surrogatepass")
        hasher.update(f"text {len(data)}\0".encode())
        hasher.update(data)
    elif value is None or isinstance(value, (bool, int, float)):
        hasher.update(f"{type(value).__name__} {value!r}\0".encode())
    else:
        _feed_object(hasher, value)


def _feed_object(hasher: _Hasher, value: Any) -> None:
    """Adds bytes and arrays by their content; others, such as a PIL image that is not loaded yet,
    without reading them: they may be huge, or a pipe."""
    try:
        view = memoryview(value)
    except (TypeError, ValueError, BufferError):
        found = [getattr(value, name, None) for name in ("size", "shape", "mode", "dtype")]
        size = [str(fact) for fact in found if not callable(fact)]  # a tensor's size is a method
        name = getattr(value, "filename", None)
        state = file_state(name) if isinstance(name, str) and name else None
        _feed(hasher, (type(value).__name__, size, state))
        return
    hasher.update(f"bytes {view.format} {view.shape} {view.nbytes}\0".encode())
    is_flat = view.c_contiguous and view.nbytes > 0
    hasher.update(view.cast("B") if is_flat else view.tobytes())


def file_state(path: str) -> tuple[int, int] | None:
    """Returns size and modification time (ns) of a file, None when there is none. A file that
    changes keeps both only when somebody puts the time back."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_size, status.st_mtime_ns


def file_paths(url: str) -> Sequence[str]:
    """Returns the path in a file:// URL; () for other URLs."""
    if url.lstrip()[:5].lower() != "file:":
        return ()
    try:
        return (unquote(urlsplit(url.strip()).path),)
    except ValueError:
        return ()


def model_digest(place: Path) -> str:
    """Returns a digest of the files of a model, which is a folder or a file in one: names,
    sizes and contents; of weights a sample of NUM_SAMPLES pieces for each file, which differ after
    another training. Raises CheckpointError for a folder with several GGUF models."""
    # Imports torch, which programs that only read records do without.
    from mmdeploy_llm.weights.gguf import GGUF_SUFFIX, find_gguf, find_tower

    hasher = blake2b(digest_size=DIGEST_BYTES)
    folder = place if place.is_dir() else place.parent
    others = {path.name for path in folder.glob(f"*{GGUF_SUFFIX}")}
    tower = find_tower(place) if others else None
    others -= {path.name for path in (*find_gguf(place), *((tower,) if tower else ()))}
    listed = os.listdir(folder)
    # Where there are none of these, a plugin reads another file.
    is_other = not any(Path(name).suffix in WEIGHTS for name in listed)
    own = {place.name} if place.is_file() else {name for name in listed if is_other}
    names = sorted(
        name
        for name in listed
        if (Path(name).suffix in MODEL_SUFFIXES or name in own) and name not in others
    )
    for name in names:
        # Links are followed: the cache of the hub consists of links. A file that cannot be read is
        # none of the model's.
        with suppress(OSError):
            _feed_file(hasher, folder / name)
    return hasher.hexdigest()


def _feed_file(hasher: _Hasher, path: Path) -> None:
    # O_NONBLOCK: a FIFO in a model folder must not wait.
    fd = os.open(path, os.O_RDONLY | files.NO_WAIT)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return
        size = status.st_size
        _feed(hasher, (path.name, size))
        is_whole = size <= MAX_WHOLE_BYTES and path.suffix in TEXTS
        if is_whole or size <= NUM_SAMPLES * SAMPLE_BYTES:
            hasher.update(files.read_at(fd, size, 0))
            return
        for number in range(NUM_SAMPLES):
            begin = (size - SAMPLE_BYTES) * number // (NUM_SAMPLES - 1)
            hasher.update(files.read_at(fd, SAMPLE_BYTES, begin))
    finally:
        os.close(fd)
