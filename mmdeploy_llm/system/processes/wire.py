"""Messages between this package's own processes: pickled, with the bytes of tensors and arrays
outside the pickle.

Large buffers are passed in anonymous shared memory (memfd), which the system frees with the last
process that uses it, even a killed one.
"""

from __future__ import annotations

import copyreg
import io
import mmap
import os
import pickle
import struct
import sys
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

HEADER = struct.Struct("!I?")  # number of buffers, whether they are in shared memory
SIZE = struct.Struct("!Q")
ALIGNMENT = 64
MAX_INLINE = 256 * 2**10  # bytes up to which buffers go through the connection


class Message:
    """A serialized value that can be sent any number of times. Open files are sent as their
    remaining contents."""

    def __init__(self, value: Any) -> None:
        """Serializes the value. Raises pickle's errors for an unsupported value."""
        buffers: list[pickle.PickleBuffer] = []
        out = io.BytesIO()
        pickler = pickle.Pickler(out, pickle.HIGHEST_PROTOCOL, buffer_callback=buffers.append)
        pickler.dispatch_table = copyreg.dispatch_table.copy()
        pickler.dispatch_table.update(_reducers())
        pickler.dump(value)
        views = [buffer.raw() for buffer in buffers]
        sizes = [view.nbytes for view in views]
        self._fd: int | None = None
        self._inline = b""
        if sum(sizes) > MAX_INLINE and hasattr(os, "memfd_create"):
            self._fd = _shared(views)
        else:
            self._inline = b"".join(_padded(view) for view in views)
        header = HEADER.pack(len(sizes), self._fd is not None)
        self._head = header + b"".join(map(SIZE.pack, sizes)) + out.getvalue()

    def send(self, connection: Connection, pid: int) -> None:
        """Sends to the process `pid` at the other end. Raises OSError when it has ended."""
        connection.send_bytes(self._head)
        if self._fd is not None:
            send_handle(connection, self._fd, pid)
        elif self._inline:
            connection.send_bytes(self._inline)

    def close(self) -> None:
        """Releases the shared memory; receivers keep their mappings."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def receive(connection: Connection) -> Any:
    """Waits for the next value. Raises EOFError or OSError when the other end is closed."""
    head = memoryview(connection.recv_bytes())
    count, is_shared = HEADER.unpack_from(head)
    data = head[HEADER.size :]
    sizes = [SIZE.unpack_from(data, at * SIZE.size)[0] for at in range(count)]
    data = data[count * SIZE.size :]
    total = sum(map(_padded_size, sizes))
    if is_shared:
        fd = recv_handle(connection)
        whole = memoryview(mmap.mmap(fd, total, flags=mmap.MAP_PRIVATE))
        os.close(fd)
    else:
        whole = memoryview(bytearray(connection.recv_bytes() if total else b""))
    buffers, start = [], 0
    for size in sizes:
        buffers.append(whole[start : start + size])
        start += _padded_size(size)
    return pickle.loads(data, buffers=buffers)


def beside_pickle(data: bytes) -> Any:
    """Wraps bytes so that they are sent beside the pickle, uncopied; they arrive as a
    memoryview."""
    return pickle.PickleBuffer(data)


def _padded_size(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _padded(view: memoryview) -> bytes:
    return bytes(view).ljust(_padded_size(view.nbytes), b"\0")


def _shared(views: list[memoryview]) -> int:
    """Copies the buffers to a new memfd, aligned to ALIGNMENT; returns the file descriptor."""
    fd = os.memfd_create("message")
    total = sum(_padded_size(view.nbytes) for view in views)
    os.ftruncate(fd, total)
    with mmap.mmap(fd, total) as memory:
        start = 0
        for view in views:
            memory[start : start + view.nbytes] = view
            start += _padded_size(view.nbytes)
    return fd


def _reduce_tensor(tensor: Tensor) -> Any:
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data: Any = flat.view(torch.uint8).numpy()
    return _tensor, (pickle.PickleBuffer(data), tensor.dtype, tuple(tensor.shape))


def _tensor(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    import torch

    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype).view(shape)


def _reduce_file(file: Any) -> Any:
    """Reduces a file to its remaining contents; restores its position, so that it can be sent
    again."""
    position = file.tell() if file.seekable() else None
    contents = file.read()
    if position is not None:
        file.seek(position)
    return io.BytesIO, (contents,)


def _reducers() -> dict[Any, Any]:
    """Returns how values are reduced, by their type. Without torch in this process there is no
    tensor to send, and torch is not imported for it."""
    files = {io.BufferedReader: _reduce_file, io.FileIO: _reduce_file}
    torch = sys.modules.get("torch")
    return files if torch is None else {torch.Tensor: _reduce_tensor, **files}
