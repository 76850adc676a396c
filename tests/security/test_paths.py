"""Paths that strangers name or change: no way out of the root, also while folders are replaced."""

import errno
import fcntl
import os
import stat
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from mmdeploy_llm_processors.sources import fetch_media

from mmdeploy_llm.errors import MediaError
from mmdeploy_llm.hooks import MediaLimits, MediaRef
from mmdeploy_llm.media import beneath

NUM_READS = 5_000
WAYS = ("openat2", "real path")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="openat2 and /proc are Linux's")


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    """Both ways to open: openat2, and the check of the descriptor's real path."""
    used = []
    by_openat2, by_real_path = beneath._openat2, beneath._by_real_path

    def openat2(*args):
        used.append("openat2")
        return by_openat2(*args)

    def real_path(*args):
        used.append("real path")
        return by_real_path(*args)

    if request.param == "real path":
        monkeypatch.setattr(beneath, "OPENAT2", {})
    monkeypatch.setattr(beneath, "_openat2", openat2)
    monkeypatch.setattr(beneath, "_by_real_path", real_path)
    yield request.param
    if "real path" in used and request.param == "openat2":
        pytest.skip("this kernel has no openat2")
    assert set(used) <= {request.param}


@pytest.fixture
def root(tmp_path):
    """A root with a folder, a secret beside it, and links of every kind that lead there."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    for folder in (root / "folder", outside):
        folder.mkdir(parents=True)
    (root / "folder" / "x.png").write_bytes(b"inside")
    (outside / "x.png").write_bytes(b"secret")
    (root / "file_link").symlink_to(outside / "x.png")
    (root / "absolute").symlink_to(outside)
    (root / "relative").symlink_to("../outside")
    (root / "chain").symlink_to("relative")
    (root / "magic").symlink_to("/proc/self/root")
    (root / "inner").symlink_to("folder")
    return root


def read(path, root):
    return fetch_media(MediaRef(kind="image", uri=str(path)), MediaLimits(allowed_root=root))


WAYS_OUT = (
    "file_link",
    "absolute/x.png",
    "relative/x.png",
    "chain/x.png",
    "folder/../../outside/x.png",
    "../outside/x.png",
    "magic/{outside}/x.png",
    "{outside}/x.png",
)


@pytest.mark.one_is_quick
@pytest.mark.parametrize("path", WAYS_OUT)
def test_no_path_leads_out_of_an_open_root(way, root, path):
    """It opens after a check that a swapped link has made worthless."""
    path = Path(path.format(outside=root.parent / "outside"))
    with pytest.raises(OSError) as caught:
        os.close(beneath.open_beneath(root, path))
    assert caught.value.errno in (errno.EXDEV, errno.ELOOP)


@pytest.mark.one_is_quick
@pytest.mark.parametrize("path", WAYS_OUT)
def test_the_caller_is_told_that_it_is_outside(way, root, path):
    named = root / path.format(outside=root.parent / "outside")
    with pytest.raises(MediaError, match="outside the folder that media may be read from"):
        read(named, root)


def test_links_that_stay_inside_are_followed(way, root):
    (root / "deep").symlink_to(root / "inner")
    for path in ("folder/x.png", "inner/x.png", "deep/x.png", "folder/../inner/x.png"):
        assert read(root / path, root) == b"inside"
    (root.parent / "from_outside").symlink_to(root / "inner")
    assert read(root.parent / "from_outside" / "x.png", root) == b"inside"


def test_files_outside_are_not_told_from_files_that_do_not_exist(root):
    messages = set()
    for name in ("x.png", "absent.png"):
        with pytest.raises(MediaError) as caught:
            read(root.parent / "outside" / name, root)
        messages.add(str(caught.value).replace(name, ""))
    assert len(messages) == 1


@pytest.mark.full
@pytest.mark.parametrize("target", ["file", pytest.param("folder", marks=pytest.mark.full)])
def test_a_swapped_link_gives_no_file_from_outside(way, root, target):
    """One thread replaces a folder, or a file, by a link again and again while another reads."""
    place = root / "folder" if target == "folder" else root / "folder" / "x.png"
    aside, link = place.with_name("aside"), place.with_name("link")
    beyond = root.parent / "outside"
    link.symlink_to(beyond if target == "folder" else beyond / "x.png")
    done = threading.Event()

    def swap():
        while not done.is_set():
            os.rename(place, aside)
            os.rename(link, place)
            os.rename(place, link)
            os.rename(aside, place)

    thread = threading.Thread(target=swap)
    thread.start()
    found, path = [], root / "folder" / "x.png"
    try:
        for _ in range(NUM_READS):
            with suppress(MediaError):
                found.append(read(path, root))
    finally:
        done.set()
        thread.join()
    assert set(found) == {b"inside"}
    assert len(found) < NUM_READS, "no read met the link"


@pytest.mark.parametrize("name", ["absolute", "relative"])
def test_a_link_that_comes_between_check_and_opening(way, root, monkeypatch, name):
    """The same swap at the worst moment: when the path has been resolved."""
    folder, resolve = root / "folder", Path.resolve

    def resolve_and_swap(path, strict=False):
        found = resolve(path, strict)
        if found.name == "x.png":
            folder.rename(root / "aside")
            (root / name).rename(folder)
        return found

    monkeypatch.setattr(Path, "resolve", resolve_and_swap)
    with pytest.raises(MediaError, match="allowed_media_root"):
        read(folder / "x.png", root)


@pytest.mark.parametrize("kind", ["fifo", "device", "folder"])
def test_what_takes_a_file_s_place_after_the_check_is_not_read(way, root, monkeypatch, kind):
    """A FIFO without a writer neither hangs nor counts; nor do a device and a folder."""
    path, regular = root / "folder" / "x.png", (root / "folder" / "x.png").lstat()
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        try:
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero
        except PermissionError:
            pytest.skip("only root makes devices")
    monkeypatch.setattr(Path, "lstat", lambda self: regular)  # what the check saw
    # A folder fails when it is opened as a file, a device where its file system forbids devices.
    for allowed in (root, None):
        with pytest.raises(MediaError, match=r"not a regular file|directory|permission denied"):
            read(path, allowed)


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EPERM])
def test_kernels_and_filters_without_openat2(root, monkeypatch, code):
    monkeypatch.setattr(beneath, "_openat2", lambda *args: (-1, code))
    assert read(root / "folder" / "x.png", root) == b"inside"
    with pytest.raises(OSError, match="cross-device"):
        beneath.open_beneath(root, Path("absolute/x.png"))


def test_a_kernel_that_asks_to_try_again(root, monkeypatch):
    real, answers = beneath._openat2, iter([(-1, errno.EAGAIN)] * 3)
    monkeypatch.setattr(beneath, "_openat2", lambda *args: next(answers, None) or real(*args))
    assert read(root / "folder" / "x.png", root) == b"inside"
    monkeypatch.setattr(beneath, "_openat2", lambda *args: (-1, errno.EAGAIN))
    with pytest.raises(MediaError, match="cannot be read"):
        read(root / "folder" / "x.png", root)


def test_where_nothing_can_be_checked_nothing_is_read(root, monkeypatch):
    monkeypatch.setattr(beneath, "OPENAT2", {})
    monkeypatch.setattr(beneath.files, "real_path", lambda fd: None)
    with pytest.raises(MediaError, match="cannot be checked against allowed_media_root"):
        read(root / "folder" / "x.png", root)


def test_no_descriptor_stays_open(way, root):
    before = len(os.listdir("/proc/self/fd"))
    for path in ("folder/x.png", "absolute/x.png", "folder", "absent"):
        with suppress(MediaError):
            read(root / path, root)
        with suppress(OSError):
            os.close(beneath.open_beneath(root, Path(path)))
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_real_path_where_fcntl_has_it(root, monkeypatch):
    """macOS has no /proc: fcntl fills a buffer with the path."""
    asked = []

    def get_path(fd, command, buffer):
        asked.append(command)
        return os.fsencode(os.readlink(f"/proc/self/fd/{fd}")).ljust(len(buffer), b"\0")

    monkeypatch.setattr(beneath, "OPENAT2", {})
    monkeypatch.setattr(fcntl, "F_GETPATH", 50, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", get_path)
    assert read(root / "folder" / "x.png", root) == b"inside"
    with pytest.raises(OSError, match="cross-device"):
        beneath.open_beneath(root, Path("absolute/x.png"))
    assert asked == [50] * 4
