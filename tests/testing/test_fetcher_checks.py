"""Each broken fetcher fails its check, whose message says what to do."""

import gzip
import io
import os
import re
import time
import urllib.request
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

import mmdeploy_llm_processors.remote as remote
import mmdeploy_llm_processors.sources as sources
import pytest

from mmdeploy_llm.errors import MediaError
from mmdeploy_llm.hooks import MediaRef
from mmdeploy_llm.media import read_beneath
from mmdeploy_llm.testing.plugins import fetchers
from mmdeploy_llm.testing.plugins.fetchers import CHECKS, FetcherSubject

NAMES = [check.__name__ for check in CHECKS]


def local(change):
    """Returns a fetcher of files: the built-in one with something changed."""

    def fetch(ref, limits):
        if ref.scheme not in ("", "file"):
            return None
        return change(ref, limits)

    return fetch


def within(path, limits):
    """Checks the root by names alone."""
    root = limits.allowed_root
    if root is not None and not path.startswith(f"{root}"):
        raise MediaError("the file is outside")


def opened(url, timeout=2.0):
    try:
        with urllib.request.urlopen(url, timeout=timeout) as answer:
            return answer.read(2**20)
    except (OSError, ValueError) as error:
        raise MediaError(f"not read: {type(error).__name__}") from error


def over_http(ref, limits):
    """Fetches URLs and checks only whether they are on."""
    if ref.scheme != "http" or "." not in ref.uri:
        return None
    if not limits.allow_urls:
        raise MediaError("URLs are off")
    blob = opened(ref.uri, limits.fetch_timeout)
    limits.check_bytes(len(blob), "it")
    return blob


def as_in_tree(**changed):
    return lambda ref, limits: remote.fetch_media(ref, replace(limits, **changed))


def takes_all(ref, limits):
    if ref.scheme == "conformance-check":
        raise MediaError("only names of mine")
    return sources.fetch_media(ref, limits)


def reads_first(ref, limits):
    with open(ref.uri, "rb") as file:
        blob = file.read(2**27)
    limits.check_bytes(len(blob), "the file")
    return blob


def by_names(ref, limits):
    within(ref.uri, limits)
    return sources.fetch_media(ref, replace(limits, allowed_root=None))


def by_size(ref, limits):
    if Path(ref.uri).stat().st_size >= limits.max_bytes:
        raise MediaError("too large")
    return sources.fetch_media(ref, limits)


def waits_for_pipes(ref, limits):
    if Path(ref.uri).is_fifo():
        time.sleep(60)
    return sources.fetch_media(ref, limits)


def shows_all(ref, limits):
    try:
        return remote.fetch_media(ref, limits)
    except MediaError as error:
        raise type(error)(f"{ref.uri}: {error}") from error


def by_pieces(ref, limits):
    if urlsplit(ref.uri).path == "/slow":
        return remote.fetch_media(ref, replace(limits, fetch_timeout=20.0))
    return remote.fetch_media(ref, limits)


BROKEN = [
    # fetcher, check that fails, regex for its message
    (takes_all, "passes_what_is_not_its_own", "raises MediaError .only names of mine.; return Non"),
    (
        local(lambda ref, limits: bytearray(sources.fetch_media(ref, limits))),
        "returns_the_bytes",
        "returns a bytearray; return bytes, or None to pass",
    ),
    (
        local(lambda ref, limits: Path(ref.uri).read_bytes()),
        "what_is_no_file_is_refused",
        "raised IsADirectoryError: .*; raise MediaError from",
    ),
    (local(by_size), "bytes_are_limited", "with max_bytes=2048 raises MediaError .too large"),
    (
        local(lambda ref, limits: sources.fetch_media(ref, replace(limits, max_bytes=2**20))),
        "bytes_are_limited",
        "fetch_media of 2048 bytes with max_bytes=2047 returns 2048 bytes",
    ),
    (
        local(reads_first),
        "giants_are_refused",
        r"a file of 3 GiB took \d+ MiB until it was refused",
    ),
    (local(by_names), "files_outside_the_root_are_refused", "a file beside the root returns"),
    (
        local(lambda ref, limits: sources.fetch_media(ref, replace(limits, allowed_root=None))),
        "files_outside_the_root_are_refused",
        "a file beside the root returns 2048 bytes with allowed_root; resolve links",
    ),
    (local(waits_for_pipes), "what_is_no_file_is_refused", "pipe' has not ended after 1 s"),
    (as_in_tree(allow_urls=True), "urls_are_off_until_allowed", "with allow_urls=False, a URL r"),
    (
        as_in_tree(allowed_domains=("127.0.0.1", "localhost")),
        "redirects_are_checked",
        "a redirect to another host returns 10240 bytes",
    ),
    (over_http, "redirects_are_checked", "a redirect to another host returns 10240 bytes"),
    (shows_all, "secrets_are_not_shown", "shows its secret: .*geheim"),
    (by_pieces, "servers_cannot_hold_it", "slow' has not ended after 1 s"),
]


def by_stat(ref, limits):
    """Looks at the size that the system tells, and reads all that comes."""
    limits.check_bytes(Path(ref.uri).stat().st_size, "the file")
    return Path(ref.uri).read_bytes()


def in_pieces(ref, limits):
    """Looks at the limit before each piece, not after the last one."""
    found = b""
    with open(ref.uri, "rb") as file:
        while piece := file.read(2**16):
            limits.check_bytes(len(found), "the file")
            found += piece
    return found


def unpacked(ref, limits):
    """Unpacks an answer that came within the limit."""
    if ref.scheme != "http":
        return None
    try:
        with urllib.request.urlopen(ref.uri, timeout=2.0) as answer:
            blob = answer.read(limits.max_bytes + 1)
            limits.check_bytes(len(blob), "it")
            is_packed = answer.headers["Content-Encoding"] == "gzip"
    except OSError as error:
        raise MediaError("not read") from error
    return gzip.decompress(blob) if is_packed else blob


BROKEN += [
    (local(by_stat), "sizes_are_not_believed", r"whose size is said to be 0 .* returns \d+ bytes"),
    (local(in_pieces), "bytes_are_limited", "with max_bytes=2047 returns 2048 bytes"),
    (unpacked, "sizes_are_not_believed", "an answer packed by gzip .* returns 8388608 bytes"),
]


@pytest.mark.one_is_quick
@pytest.mark.parametrize(("fetch", "name", "message"), BROKEN)
def test_a_broken_fetcher_fails(failures, monkeypatch, fetch, name, message):
    if "has not ended" in message:
        monkeypatch.setattr(fetchers, "SECONDS", 1.0)
    check = CHECKS[NAMES.index(name)]
    found = failures([check], FetcherSubject(fetch=fetch, serves={}))
    assert re.search(message, found[name]), found[name]


def test_every_check_has_a_broken_fetcher():
    found = {name for _, name, _ in BROKEN} | {check for _, check in STORES.values()}
    assert found == set(NAMES)


class Zips:
    """Fetches members of zip files: zip:///path/of.zip#member."""

    def __init__(self, folder):
        self.folder = folder

    def serves(self):
        path = self.folder / "of.zip"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("a.png", bytes(range(200)) * 20)
            archive.writestr("b.png", bytes(999))
        return {f"zip://{path}#a.png": bytes(range(200)) * 20}

    def __call__(self, ref, limits):
        if ref.scheme != "zip":
            return None
        path, _, name = unquote(ref.uri.removeprefix("zip://")).partition("#")
        held = io.BytesIO(self.read(path, replace(limits, max_bytes=2**30)))
        try:
            with zipfile.ZipFile(held) as archive:
                blob = self.member(archive, name, limits)
        except (KeyError, OSError, zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise MediaError(f"not in the zip file: {type(error).__name__}") from None
        limits.check_bytes(len(blob), name)
        return blob

    def read(self, path, limits):
        return read_beneath(path, limits)

    def member(self, archive, name, limits):
        with archive.open(name) as file:
            return file.read(limits.max_bytes + 1)


class WholeMembers(Zips):
    def member(self, archive, name, limits):
        return archive.read(name)


class ArchiveLimited(Zips):
    """Compares the size of the archive with the limit, and not that of the member."""

    def __call__(self, ref, limits):
        if ref.scheme == "zip":
            path = unquote(ref.uri.removeprefix("zip://")).partition("#")[0]
            limits.check_bytes(len(self.read(path, replace(limits, max_bytes=2**30))), "the zip")
        return super().__call__(ref, replace(limits, max_bytes=2**30))


class ArchivesAnywhere(Zips):
    def read(self, path, limits):
        try:
            return Path(path).read_bytes()
        except (OSError, ValueError) as error:
            raise MediaError("no such file") from error


class ArchivesByName(ArchivesAnywhere):
    def read(self, path, limits):
        within(path, limits)
        return super().read(path, limits)


class ArchivesByLink(ArchivesAnywhere):
    def read(self, path, limits):
        if not Path(os.path.normpath(path)).is_relative_to(limits.allowed_root or "/"):
            raise MediaError("outside")
        return super().read(path, limits)


class Boxes(Zips):
    """Fetches files of a folder of its own: box://name."""

    def serves(self):
        (self.folder / "a.png").write_bytes(bytes(99))
        return {"box://a.png": bytes(99)}

    def __call__(self, ref, limits):
        if ref.scheme != "box":
            return None
        blob = self.read(self.path(ref.uri.removeprefix("box://")), limits)
        limits.check_bytes(len(blob), "it")
        return blob

    def path(self, name):
        return unquote(name)

    def read(self, path, limits):
        try:
            path = self.folder.joinpath(path).resolve()
            if self.folder not in path.parents:
                raise MediaError("outside of the box")
            return path.read_bytes()
        except (OSError, ValueError, RuntimeError) as error:
            raise MediaError("not in the box") from error


class OpenBoxes(Boxes):
    def read(self, path, limits):
        try:
            return self.folder.joinpath(path).read_bytes()
        except (OSError, ValueError) as error:
            raise MediaError("not in the box") from error


class BoxesOfQuotedNames(OpenBoxes):
    """Looks for .. before a name is unquoted."""

    def path(self, name):
        if ".." in name or name.startswith("/"):
            raise MediaError("outside of the box")
        return unquote(name)


STORES = {
    "a member that is read as a whole": (WholeMembers, "sizes_are_not_believed"),
    "the size of the archive compared": (ArchiveLimited, "bytes_are_limited"),
    "archives anywhere": (ArchivesAnywhere, "names_it_serves_stay_in_the_root"),
    "archives compared by name": (ArchivesByName, "names_it_serves_stay_in_the_root"),
    "links to archives": (ArchivesByLink, "names_it_serves_stay_in_the_root"),
    "names with ..": (OpenBoxes, "names_it_serves_stay_in_the_root"),
    "names with .. quoted": (BoxesOfQuotedNames, "names_it_serves_stay_in_the_root"),
}


@pytest.mark.one_is_quick
@pytest.mark.parametrize("bug", STORES)
def test_a_broken_store_fails(failures, tmp_path, bug):
    kind, name = STORES[bug]
    fetch = kind(tmp_path.resolve())
    found = failures(
        [CHECKS[NAMES.index(name)]], FetcherSubject(fetch=fetch, serves=fetch.serves())
    )
    assert name in found
    print(f"{bug}: {found}")


@pytest.mark.one_is_quick
@pytest.mark.parametrize("kind", [Zips, Boxes])
def test_a_store_passes(failures, tmp_path, kind):
    fetch = kind(tmp_path.resolve())
    assert failures(CHECKS, FetcherSubject(fetch=fetch, serves=fetch.serves())) == {}


def test_names_of_its_own(failures):
    """A fetcher says by which names it reads files, and what else it serves."""

    def fetch(ref, limits):
        if ref.scheme == "vault" and ref.uri == "vault://known":
            return b"known"
        if ref.scheme != "vault":
            return None
        return sources.fetch_media(MediaRef(kind="image", uri=ref.uri[8:]), limits)

    subject = FetcherSubject(
        fetch=fetch, serves={"vault://known": b"known"}, uri_of=lambda path: f"vault://{path}"
    )
    found = failures(CHECKS, subject)
    assert list(found) == ["bytes_are_limited"]
    assert "fetch_media of 5 bytes with max_bytes=4 returns 5 bytes" in found["bytes_are_limited"]
