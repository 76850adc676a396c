"""Memory in large pages."""

import errno
import gc
import logging
import mmap
import os
import re

import pytest
import torch

from mmdeploy_llm.kernels.cpu import LargePages
from mmdeploy_llm.kernels.cpu.memory import ALIGNMENT, CHUNK_SIZE, MIN_SIZE, PAGE_SIZE


def test_tensors_are_apart():
    """Each tensor keeps its values, whatever the sizes; large ones share chunks."""
    memory = LargePages()
    shapes = [(MIN_SIZE + 3,), (5, MIN_SIZE), (3,), (CHUNK_SIZE // 2,), (2 * CHUNK_SIZE,)]
    tensors = [memory.empty(shape, dtype=torch.uint8) for shape in shapes]
    for value, tensor in enumerate(tensors):
        tensor.fill_(value)
    for value, (shape, tensor) in enumerate(zip(shapes, tensors, strict=True)):
        assert tensor.shape == shape
        assert bool((tensor == value).all())
        assert tensor.numel() < MIN_SIZE or tensor.data_ptr() % ALIGNMENT == 0


def test_dtypes():
    tensor = LargePages().empty((MIN_SIZE, 3), dtype=torch.bfloat16)
    assert tensor.dtype is torch.bfloat16
    assert tensor.is_contiguous()


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="no large pages on this system")
def test_chunks_begin_where_large_pages_do():
    assert LargePages().empty((CHUNK_SIZE,), dtype=torch.uint8).data_ptr() % PAGE_SIZE == 0


@pytest.mark.full
def test_values_stay_while_pages_move(caplog):
    """Pages become large ones, as many as the system finds, without a change of their content;
    memory without tensors is skipped."""
    caplog.set_level(logging.DEBUG)
    memory = LargePages()
    gone = memory.empty((CHUNK_SIZE,), dtype=torch.uint8)
    values = torch.arange(3 * CHUNK_SIZE // 4, dtype=torch.int32)
    kept = memory.empty(tuple(values.shape), dtype=torch.int32).copy_(values)
    before = _large_pages()
    del gone
    thread = memory.settle()
    if thread is None:
        pytest.skip("no large pages on this system")
    thread.join()
    assert torch.equal(kept, values)
    moved = int(re.search(r"(\d+) MiB of weights are in large pages", caplog.text)[1]) * 2**20
    assert _large_pages() >= before + min(moved, CHUNK_SIZE)  # some were large before
    assert memory.settle() is None


def _large_pages():
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) * 1024 for line in file if "AnonHugePages" in line)


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="no large pages on this system")
def test_memory_goes_back():
    """A chunk is returned to the system when its last tensor is freed."""
    tensor = LargePages().empty((4 * CHUNK_SIZE,), dtype=torch.uint8).fill_(1)
    address = tensor.data_ptr()
    assert _is_mapped(address)
    del tensor
    gc.collect()
    assert not _is_mapped(address)


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTNEED"), reason="pages stay on this system")
def test_a_part_goes_back():
    """The whole pages of the part, which are zeros when they are read again; nothing beside it, and
    nothing that was allocated elsewhere."""
    memory = LargePages()
    memory.empty((MIN_SIZE,), dtype=torch.uint8)
    tensor = memory.empty((8 * MIN_SIZE,), dtype=torch.uint8).fill_(1)
    part, before = tensor[100 : 100 + 4 * MIN_SIZE], _resident()
    memory.release(part)
    assert _resident() <= before - 3 * MIN_SIZE
    assert bool((tensor[:100] == 1).all())
    assert bool((tensor[100 + 4 * MIN_SIZE :] == 1).all())
    assert 4 * MIN_SIZE - 2 * mmap.PAGESIZE <= int((part == 0).sum()) <= 4 * MIN_SIZE
    own = torch.ones(MIN_SIZE)
    memory.release(own)
    assert bool((own == 1).all())


@pytest.mark.skipif(not hasattr(mmap, "MADV_REMOVE"), reason="MADV_REMOVE is Linux's")
def test_pages_of_files(tmp_path, caplog):
    """They keep their values, no name is left in the folder, what is released is zeros, and later
    tensors are in memory again, as they are where the folder takes no file."""
    memory = LargePages()
    with memory.in_files(tmp_path):
        tensor = memory.empty((8 * MIN_SIZE,), dtype=torch.uint8).fill_(1)
        others = [memory.empty((MIN_SIZE,), dtype=torch.uint8).fill_(each) for each in (2, 3)]
    assert not list(tmp_path.iterdir())
    assert _name_of(tensor).startswith(str(tmp_path))
    assert _name_of(others[1]) == _name_of(tensor)
    assert memory.release(tensor[: 4 * MIN_SIZE])
    assert not memory.release(torch.ones(MIN_SIZE))
    assert not tensor[: 4 * MIN_SIZE].any()
    assert bool((tensor[4 * MIN_SIZE :] == 1).all())
    assert [int(other.min()) for other in others] == [2, 3]
    assert not _name_of(memory.empty((MIN_SIZE,), dtype=torch.uint8))
    memory.settle()
    with memory.in_files(tmp_path / "nowhere"):
        assert not _name_of(memory.empty((MIN_SIZE,), dtype=torch.uint8))
    assert "nowhere takes no file for weights" in caplog.text


@pytest.mark.skipif(not hasattr(mmap, "MADV_REMOVE"), reason="MADV_REMOVE is Linux's")
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EOPNOTSUPP])
def test_room_on_the_disk_is_taken_at_once(tmp_path, monkeypatch, caplog, code):
    """A page that finds no room when it is written would kill the process: weights are in memory
    where the disk is full. A file system that cannot reserve room is used without."""

    def refuse(*given):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    memory = LargePages()
    with memory.in_files(tmp_path):
        tensor = memory.empty((MIN_SIZE,), dtype=torch.uint8).fill_(1)
    is_full = code == errno.ENOSPC
    assert bool(_name_of(tensor)) == (not is_full)
    assert ("No space left on device" in caplog.text) == is_full


def _name_of(tensor):
    """The file whose pages a tensor is, "" of other memory."""
    with open("/proc/self/maps") as file:
        for line in file:
            begin, end = (int(each, 16) for each in line.split()[0].split("-"))
            if begin <= tensor.data_ptr() < end:
                return " ".join(line.split()[5:])
    return ""


def _resident():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


def _is_mapped(address):
    with open("/proc/self/maps") as file:
        ranges = [line.split()[0].split("-") for line in file]
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)
