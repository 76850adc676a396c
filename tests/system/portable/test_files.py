"""Each call that replaces one which a system lacks does the same."""

import errno
import os
import sys
import threading
from types import SimpleNamespace

import pytest

from mmdeploy_llm.system.portable import files, folders, limits, machine


@pytest.fixture(params=["own", "others"])
def reads(request, monkeypatch):
    """Reads with the calls of this system, and without."""
    if request.param == "others":
        for name in ("pread", "preadv"):
            monkeypatch.delattr(os, name, raising=False)


def test_reads_at_an_offset_from_several_threads(reads, tmp_path):
    (tmp_path / "file").write_bytes(bytes(range(256)))
    with (tmp_path / "file").open("rb", buffering=0) as file:
        file.seek(7)
        found = [b""] * 8

        def read(number):
            for _ in range(50):
                found[number] = files.read_at(file.fileno(), 16, 16 * number)

        threads = [threading.Thread(target=read, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert b"".join(found) == bytes(range(128))
        view = memoryview(bytearray(20))
        assert files.read_into(file.fileno(), view, 250) == 6
        assert view[:6] == bytes(range(250, 256))
        assert files.read_into(file.fileno(), view, 256) == 0
        assert file.tell() == 7


@pytest.mark.parametrize("has_call", [True, False])
def test_room_is_reserved(tmp_path, monkeypatch, has_call):
    """A file has its blocks before anybody writes it, also where the system has no call for it."""
    if not has_call:
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
    size = 2**22 + 7
    with (tmp_path / "file").open("wb") as file:
        files.reserve(file.fileno(), size)
        status = os.fstat(file.fileno())
    assert status.st_size == size
    assert getattr(status, "st_blocks", size) * 512 >= size


@pytest.fixture(params=["by the system", "by comparison"])
def refusal(request, monkeypatch):
    """Returns how a link is refused."""
    if request.param == "by comparison":
        monkeypatch.setattr(files, "NOFOLLOW", 0)
    return request.param


def test_no_link_is_opened(refusal, tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to("file")
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    os.close(files.open_unfollowed(tmp_path / "file", os.O_RDONLY))
    with pytest.raises(OSError, match="symbolic links") as caught:
        files.open_unfollowed(tmp_path / "link", os.O_RDONLY)
    assert caught.value.errno == errno.ELOOP
    with pytest.raises(FileNotFoundError):
        files.open_unfollowed(tmp_path / "none", os.O_RDONLY)
    if before is not None:
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_link_that_takes_the_place_meanwhile(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "NOFOLLOW", 0)
    (tmp_path / "file").write_bytes(b"mine")
    (tmp_path / "secret").write_bytes(b"other")
    real = os.open

    def swapped(path, *args, **kwargs):
        (tmp_path / "file").unlink()
        (tmp_path / "file").symlink_to("secret")
        return real(path, *args, **kwargs)

    monkeypatch.setattr(files.os, "open", swapped)
    with pytest.raises(OSError, match="symbolic links"):
        files.open_unfollowed(tmp_path / "file", os.O_RDONLY)


@pytest.fixture(params=["by descriptor", "by path"])
def folder(request, tmp_path, monkeypatch):
    if request.param == "by path":
        monkeypatch.setattr(os, "supports_dir_fd", set())
    elif os.open not in os.supports_dir_fd:
        pytest.skip("a folder's descriptor is Linux's and macOS's")
    opened = folders.open_folder(tmp_path)
    yield opened
    opened.close()


def test_a_folder(folder, tmp_path):
    os.close(folder.open("a", os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    folder.make_folder("inner")
    with pytest.raises(FileExistsError):
        folder.make_folder("inner")
    inner = folder.open_folder("inner")
    os.close(inner.open("b", os.O_WRONLY | os.O_CREAT))
    folder.rename("a", "c")
    folder.sync()
    assert sorted(folder.names()) == ["c", "inner"]
    assert os.path.samestat(folder.status("c"), (tmp_path / "c").stat())
    assert os.path.samestat(folder.own_status(), tmp_path.stat())
    assert folder.place() == str(tmp_path)
    with pytest.raises(OSError, match=r".*"):
        folder.remove_folder("inner")
    inner.remove("b")
    inner.close()
    folder.remove_folder("inner")
    folder.remove("c")
    assert os.listdir(tmp_path) == []


def test_no_link_in_a_folder_is_followed(folder, tmp_path):
    outside = tmp_path.with_name(f"{tmp_path.name}-outside")
    outside.mkdir()
    (outside / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to(outside)
    (tmp_path / "file").symlink_to(outside / "file")
    with pytest.raises(OSError, match=r".*"):
        folder.open_folder("link")
    with pytest.raises(OSError, match="symbolic links"):
        folder.open("file", os.O_RDONLY)
    folder.remove("file")
    assert (outside / "file").exists()


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_a_folder_that_is_replaced(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(os, "supports_dir_fd", set())
    (tmp_path / "out").mkdir()
    opened = folders.open_folder(tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "moved")
    (tmp_path / "other").mkdir()
    if kind == "folder":
        (tmp_path / "other").rename(tmp_path / "out")
    else:
        (tmp_path / "out").symlink_to("other")
    for use in (
        lambda: opened.open("a", os.O_WRONLY | os.O_CREAT),
        lambda: opened.names(),
        lambda: opened.make_folder("a"),
        lambda: opened.open("../moved/a", os.O_WRONLY | os.O_CREAT),
    ):
        with pytest.raises(OSError, match=r".*"):
            use()
    assert opened.place() is None
    assert not any((tmp_path / "moved").iterdir())


def test_the_path_of_an_open_file(tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to("file")
    with (tmp_path / "link").open("rb") as file:
        found = files.real_path(file.fileno())
    assert found in (None, (tmp_path / "file").resolve())
    assert files.real_path(10**6) is None


def test_where_files_cannot_be_locked(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with (tmp_path / "file").open("wb") as file, pytest.raises(OSError, match="no locks"):
        files.lock(file)


def test_a_lock_of_windows_is_of_a_byte_that_no_file_has(tmp_path, monkeypatch):
    """One that another process has raises what flock raises."""
    asked = []

    def locking(fd, mode, size):
        asked.append((os.lseek(fd, 0, os.SEEK_CUR), mode, size))
        if len(asked) > 1:
            raise PermissionError(errno.EACCES, "denied")

    windows = SimpleNamespace(locking=locking, LK_NBLCK=2)
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setitem(sys.modules, "msvcrt", windows)
    with (tmp_path / "file").open("wb") as file:
        file.write(b"abc")
        files.lock(file)
        assert file.tell() == 3
        with pytest.raises(BlockingIOError):
            files.lock(file)
    assert asked == [(files.PLACE, 2, 1)] * 2


def test_without_limits(monkeypatch, caplog):
    monkeypatch.setattr(limits, "resource", None)
    limits.set_limit("memory", 1)  # would end this process
    assert (limits.has_limits(), limits.address_space(), limits.peak_memory()) == (False, None, 0)
    limits.tell_what_is_unlimited.cache_clear()
    for _ in range(2):
        limits.tell_what_is_unlimited()
    assert caplog.text.count("cannot limit the memory of a process") == 1
    limits.tell_what_is_unlimited.cache_clear()


def test_the_memory_and_the_cpus_of_another_machine(monkeypatch):
    for name in ("sysconf", "sched_getaffinity", "sched_setaffinity"):
        monkeypatch.delattr(os, name, raising=False)

    def refuse(*args, **kwargs):
        raise FileNotFoundError

    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", refuse)
        assert machine.free_ram() == machine.UNKNOWN_RAM // 2
    assert machine.usable_cpus() == tuple(range(os.cpu_count()))
    assert not machine.run_on((0,))
