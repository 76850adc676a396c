"""Each broken fetcher fails its check, whose message says what to do."""

import re
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import mmdeploy_llm_processors.remote as remote
import mmdeploy_llm_processors.sources as sources
import pytest

from mmdeploy_llm.errors import MediaError
from mmdeploy_llm.hooks import MediaRef
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


@pytest.mark.one_is_quick
@pytest.mark.parametrize(("fetch", "name", "message"), BROKEN)
def test_a_broken_fetcher_fails(failures, monkeypatch, fetch, name, message):
    if "has not ended" in message:
        monkeypatch.setattr(fetchers, "SECONDS", 1.0)
    check = CHECKS[NAMES.index(name)]
    found = failures([check], FetcherSubject(fetch=fetch, serves={}))
    assert re.search(message, found[name]), found[name]


def test_every_check_has_a_broken_fetcher():
    assert {name for _, name, _ in BROKEN} == set(NAMES)


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
