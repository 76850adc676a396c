"""Object stores through fsspec, tested on its file system in memory and on made-up ones."""

import sys
from dataclasses import replace

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from mmdeploy_llm_processors.remote import KNOWN_STORES, fetch_media, stores

from mmdeploy_llm.errors import (
    MediaError,
    MediaLimitError,
    MediaTimeoutError,
    UnsupportedMediaError,
)
from mmdeploy_llm.hooks import MediaLimits, MediaRef


def fetch(uri, **limits):
    limits = {"allowed_schemes": ("memory",), **limits}
    return fetch_media(MediaRef(kind="image", uri=uri), replace(MediaLimits(), **limits))


@pytest.fixture
def store():
    files = fsspec.filesystem("memory")
    files.pipe("/bucket/folder/photo.png", b"content")
    yield files
    files.rm("/bucket", recursive=True)


class OddFileSystem(MemoryFileSystem):
    """A file system whose subclasses misbehave; each has its own instance."""

    protocol = "odd"
    cachable = False

    @classmethod
    def _strip_protocol(cls, path):
        return path.removeprefix("odd://")


@pytest.fixture
def odd(monkeypatch):
    """Makes a class the file system of odd://."""
    return lambda kind: monkeypatch.setattr(stores, "_file_system", lambda scheme: kind())


def test_an_object_gives_its_bytes(store):
    assert fetch("memory://bucket/folder/photo.png") == b"content"
    assert fetch(" MEMORY://bucket/folder/photo.png") == b"content"


def test_stores_are_off_until_their_scheme_is_allowed(store):
    for scheme in sorted(KNOWN_STORES):
        with pytest.raises(UnsupportedMediaError, match=rf"allowed_media_schemes=\('{scheme}',\)"):
            fetch(f"{scheme}://bucket/folder/photo.png", allowed_schemes=())
    with pytest.raises(UnsupportedMediaError, match="s3:// is off"):
        fetch("s3://bucket/x.png")
    assert fetch("ftp://host/x.png") is None


def test_the_size_is_checked_before_reading(odd):
    class Huge(OddFileSystem):
        def info(self, path):
            return {"name": path, "size": 10**12, "type": "file"}

        def open(self, *args):
            raise AssertionError("was opened")

    odd(Huge)
    with pytest.raises(MediaLimitError, match="1000000000000 bytes, 268435456 are"):
        fetch("odd://bucket/x.png", allowed_schemes=("odd",))


@pytest.mark.parametrize("told", [1, None])
def test_reading_is_bounded_whatever_the_store_reports(odd, told):
    class Endless:
        num_read = 0

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def read(self, num_bytes):
            self.num_read += num_bytes
            return b"x" * num_bytes

    class Liar(OddFileSystem):
        def info(self, path):
            return {"name": path, "size": told, "type": "file"}

        def open(self, *args):
            return endless

    endless = Endless()
    odd(Liar)
    with pytest.raises(MediaLimitError):
        fetch("odd://bucket/x.png", allowed_schemes=("odd",), max_bytes=5_000_000)
    assert endless.num_read == 5_000_001


def test_exactly_the_limit_is_allowed(store):
    assert fetch("memory://bucket/folder/photo.png", max_bytes=7) == b"content"
    with pytest.raises(MediaLimitError, match="7 bytes, 6 are allowed"):
        fetch("memory://bucket/folder/photo.png", max_bytes=6)


def test_missing_objects_and_folders(store):
    with pytest.raises(MediaError, match=r"memory://.../gone.png does not exist") as caught:
        fetch("memory://bucket/folder/gone.png?versionId=secret")
    assert "folder" not in str(caught.value)
    assert "secret" not in str(caught.value)
    with pytest.raises(MediaError, match="is a folder"):
        fetch("memory://bucket/folder")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (PermissionError("account 12345"), "access denied; check the credentials"),
        (RuntimeError("account 12345"), "cannot be read: RuntimeError"),
    ],
)
def test_errors_of_stores_do_not_tell_accounts(odd, error, message):
    class Broken(OddFileSystem):
        def info(self, path):
            raise error

    odd(Broken)
    with pytest.raises(MediaError, match=message) as caught:
        fetch("odd://bucket/x.png", allowed_schemes=("odd",))
    assert "12345" not in str(caught.value)


def test_a_slow_reader_stops_at_the_deadline(odd, clock):
    pieces = []

    class Slow(OddFileSystem):
        def info(self, path):
            return {"name": path, "size": None, "type": "file"}

        def open(self, *args):
            return self

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def read(self, num_bytes):
            clock.pass_by(50)
            pieces.append(1)
            return b"x"

    odd(Slow)
    with pytest.raises(MediaTimeoutError, match=r"not fetched within 200 s"):
        fetch("odd://bucket/x.png", allowed_schemes=("odd",), fetch_timeout=200)
    assert 1 <= len(pieces) <= 4


def test_chained_urls_open_nothing_else(store, tmp_path):
    (tmp_path / "secret.png").write_bytes(b"secret")
    for uri in (
        f"memory://bucket/x.png::file://{tmp_path}/secret.png",
        f"memory://::file://{tmp_path}/secret.png",
        f"memory://../../..{tmp_path}/secret.png",
    ):
        with pytest.raises(MediaError):
            fetch(uri)
    for scheme in ("simplecache", "zip", "dir", "reference", "generic"):
        with pytest.raises(UnsupportedMediaError, match="cannot be allowed"):
            fetch(f"{scheme}://file://{tmp_path}/secret.png", allowed_schemes=(scheme,))


def test_what_is_missing_is_named(monkeypatch):
    with pytest.raises(UnsupportedMediaError, match="fsspec cannot open nothing://"):
        fetch("nothing://bucket/x.png", allowed_schemes=("nothing",))
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(UnsupportedMediaError, match=r"s3:// needs a package: .*[Ii]nstall s3fs"):
        fetch("s3://bucket/x.png", allowed_schemes=("s3",))
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(UnsupportedMediaError, match=r"pip install mmdeploy-llm\[fsspec\]"):
        fetch("memory://bucket/x.png")
