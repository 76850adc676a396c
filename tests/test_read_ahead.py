"""While a start imports torch, the files that it will read are read, and no others."""

import errno
import os

import pytest

from mmdeploy_llm.system.portable.files import make_fifo
from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.weights import read_ahead as module
from mmdeploy_llm.weights.read_ahead import mark_of, read_ahead


@pytest.fixture
def read(monkeypatch):
    """read(model, **options) -> the names of the files that were read, and their bytes."""

    def run(model, is_in_memory=False, **options):
        found = {}

        class File:
            def __init__(self, fd, *args, **kwargs):
                self._fd, self.name = fd, os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))

            def fileno(self):
                return self._fd

            def readinto(self, buffer):
                data = os.read(self._fd, len(buffer))
                found[self.name] = found.get(self.name, 0) + len(data)
                return len(data)

            def close(self):
                os.close(self._fd)

        monkeypatch.setattr(module, "open", File, raising=False)
        monkeypatch.setattr(module, "_is_in_memory", lambda fd, size: is_in_memory)
        thread = read_ahead(str(model), EngineConfig(model=str(model), **options))
        if thread is not None:
            thread.join()
        return found

    return run


@pytest.fixture
def folder(tmp_path):
    """A model's folder and a cache of weights."""
    place = tmp_path / "model"
    place.mkdir()
    for name in ("a.safetensors", "b.safetensors", "config.json"):
        (place / name).write_bytes(b"x" * 100)
    (tmp_path / "cache").mkdir()
    return place


def kept(folder, name, age):
    path = folder.parent / "cache" / name
    path.write_bytes(b"y" * 50)
    os.utime(path, (1000 - age, 1000 - age))


def test_the_first_start_reads_the_weights(read, folder):
    cache = folder.parent / "cache"
    whole = {"a.safetensors": 100, "b.safetensors": 100}
    assert read(folder, weight_cache=cache) == read(folder, weight_cache=False) == whole
    kept(folder, f"{mark_of('another')}-1.weights", 0)
    assert read(folder, weight_cache=cache) == whole
    assert read(folder, weight_cache=cache, load_format="dummy") == {}


def test_the_next_start_reads_the_file_that_was_used_last(read, folder):
    mark = mark_of(str(folder))
    for name, age in (("1.weights", 5), ("2.weights", 2), ("3.weights", 9), ("4.unusable", 0)):
        kept(folder, f"{mark}-{name}", age)
    assert read(folder, weight_cache=folder.parent / "cache") == {f"{mark}-2.weights": 50}


def test_what_is_in_memory_or_too_large_for_it_is_not_read(read, folder, monkeypatch):
    assert read(folder, weight_cache=False, is_in_memory=True) == {}
    monkeypatch.setattr(module, "free_ram", lambda: 399)
    assert read(folder, weight_cache=False) == {}


def test_what_is_no_file_is_not_waited_for(read, folder):
    make_fifo(folder / "0.safetensors")
    assert read(folder, weight_cache=False)["b.safetensors"] == 100
    (folder / "a.safetensors").unlink()
    (folder / "a.safetensors").symlink_to(folder / "b.safetensors")
    assert read(folder, weight_cache=False)["b.safetensors"] == 200
    (folder / "a.safetensors").unlink()
    (folder / "a.safetensors").symlink_to(folder / "nowhere")
    assert read(folder, weight_cache=False) == {}  # told by who reads the weights


@pytest.mark.parametrize("model", ["", "nowhere", "someone/nowhere", "~nobody/x", "x" * 5000])
def test_other_names_read_nothing(read, model):
    assert read(model or "x", weight_cache=False) == {}


def test_a_file_system_that_does_not_tell_what_is_in_memory(tmp_path, monkeypatch):
    """A file that was just written is in memory, if its file system tells that."""

    def refuse(*given):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    path = tmp_path / "file"
    path.write_bytes(bytes(100_000))
    with path.open("rb") as file:
        if module._is_in_memory(file.fileno(), 100_000):
            monkeypatch.setattr(os, "preadv", refuse)
        assert not module._is_in_memory(file.fileno(), 100_000)
