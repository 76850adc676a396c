"""Checks of a plugin that fetches media: what it passes, what it reads, and what it must refuse.

Whether it reads local files or http URLs is found out by trying, or told by its author.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote, unquote

from mmdeploy_llm.errors import MediaError, MediaLimitError
from mmdeploy_llm.hooks import MediaLimits, MediaRef
from mmdeploy_llm.system.portable.files import make_fifo
from mmdeploy_llm.testing.models.base import Check, CheckFailed, CheckSkipped, demand, since

from .bombs import write_bomb
from .bounded import Peak, bounded
from .web import BODY, Web

CONTENT = bytes(range(256)) * 8
FOREIGN = ("conformance-check://nothing/here", "conformance-check+x://user:pass@host/a?b#c")
ODD = (
    *("", " ", ".", "..", "~", "?", "%2e%2e", "\0", "a\0b", "\ud800", "x" * 5000, "C:\\a.png"),
    *("//host/x", "file:", "file://", "file://host/x", "http://", "http://[::", "https://a:b:c/"),
    *("data:", "data:,", "s3://"),
)
SECONDS = 8.0  # until which anything must have ended
GIANT = 3 * 2**30  # bytes of a file that takes none on disk
MOST_BYTES = 64 * 2**20  # of memory until a giant is refused
MOST_SMALL, UNPACKED = 10_000, 96 * 2**20  # bytes: allowed, and those of a member of an archive
SIZELESS = Path("/proc/self/smaps")  # a regular file of many bytes, whose size is said to be 0
SECRET = "geheim-4711"
NUM_THREADS = 8
REFUSE = "raise MediaError from mmdeploy_llm.errors"


@dataclass(kw_only=True)
class FetcherSubject:
    """A fetcher to check; see FetcherConformance for the fields."""

    fetch: Callable[..., bytes | None]
    serves: Mapping[str, bytes]
    foreign: Sequence[str] = FOREIGN
    limits: MediaLimits = field(default_factory=MediaLimits)
    uri_of: Callable[[Path], str | None] | None = None
    url_of: Callable[[str], str | None] | None = None

    def get(self, uri: str, limits: MediaLimits | None = None) -> bytes | MediaError | None:
        """Returns what the fetcher returns, or the MediaError that it raises; anything else is a
        failure, and so is a call that does not end."""
        what = f"fetch_media of {uri!r:.120}"
        ref = MediaRef(kind="image", uri=uri)
        try:
            found = bounded(
                lambda: self.fetch(ref=ref, limits=limits or self.limits),
                SECONDS,
                what,
                "keep to limits.fetch_timeout, and never wait for what may not come",
            )
        except MediaError as error:
            demand(str(error), f"{what}: the error has no message; say what was wrong")
            return error
        except CheckFailed:
            raise
        except (Exception, SystemExit) as error:
            raise CheckFailed(
                f"{what} raised {type(error).__name__}: {error}; {REFUSE}, or return None for what "
                "is another plugin's"
            ) from error
        demand(
            found is None or type(found) is bytes,
            f"{what} returns a {type(found).__name__}; return bytes, or None to pass",
        )
        return found

    @cached_property
    def file_uri(self) -> Callable[[Path], str] | None:
        """How a local file is named for the fetcher; None: it reads none."""
        with TemporaryDirectory() as folder:
            path = Path(folder, "item.bin")
            path.write_bytes(CONTENT)
            for name in (self.uri_of,) if self.uri_of else (os.fspath, Path.as_uri):
                uri = name(path)
                if uri is not None and self.get(uri) == CONTENT:
                    return name  # type: ignore[return-value]
        return None

    @cached_property
    def web_limits(self) -> MediaLimits:
        """Limits with which URLs of this machine may be fetched."""
        return replace(
            self.limits,
            allow_urls=True,
            allowed_domains=("127.0.0.1",),
            allow_private_addresses=True,
            fetch_timeout=2.0,
        )

    @cached_property
    def web_uri(self) -> Callable[[str], str] | None:
        """How a URL is named for the fetcher; None: it fetches none."""
        with Web().running() as web:
            name = self.url_of or str
            uri = name(web.url("ok"))
            if uri is not None and self.get(uri, self.web_limits) == BODY:
                return name  # type: ignore[return-value]
        return None

    @contextmanager
    def files(self) -> Iterator[tuple[Path, Callable[[Path], str]]]:
        """Yields an empty folder, and how a file is named. Raises CheckSkipped for a fetcher that
        reads no files."""
        if self.file_uri is None:
            raise CheckSkipped(
                "it reads no local files; if it does under names of its own, add `uri_of`"
            )
        with TemporaryDirectory() as folder:
            yield Path(folder).resolve(), self.file_uri

    @contextmanager
    def web(self) -> Iterator[tuple[Web, Callable[[str], str]]]:
        """Yields a running server, and how a URL is named. Raises CheckSkipped for a fetcher that
        fetches none."""
        if self.web_uri is None:
            raise CheckSkipped(
                "it fetches no http URLs; if it does under names of its own, add `url_of`"
            )
        with Web().running() as web:
            yield web, self.web_uri


def passes_what_is_not_its_own(subject: FetcherSubject) -> None:
    """URIs of other plugins yield None; odd ones yield None, bytes or MediaError."""
    for uri in subject.foreign:
        found = subject.get(uri)
        demand(
            found is None,
            f"fetch_media of {uri!r} {_shown(found)}; return None for schemes that are not yours, "
            "so that other plugins are asked",
        )
    for uri in ODD:
        subject.get(uri)


def returns_the_bytes(subject: FetcherSubject) -> None:
    """Items come back byte for byte, from eight threads at once too."""
    with _all(subject) as (served, limits):
        if not served:
            raise CheckSkipped("it is not known what it serves; add URIs with bytes to `serves`")
        for uri, content in served.items():
            with ThreadPoolExecutor(NUM_THREADS) as pool:
                tasks = [pool.submit(subject.get, uri, limits) for _ in range(NUM_THREADS)]
            for task in tasks:
                found = task.result()
                demand(
                    found == content,
                    f"fetch_media of {uri!r:.120} {_shown(found)}; it must return the "
                    f"{len(content)} bytes that are there, in any thread",
                )


def bytes_are_limited(subject: FetcherSubject) -> None:
    """An item of exactly max_bytes is returned, a larger one raises MediaLimitError."""
    with _all(subject) as (served, limits):
        if not served:
            raise CheckSkipped("it is not known what it serves; add URIs with bytes to `serves`")
        for uri, content in served.items():
            for most in (len(content), len(content) - 1):
                found = subject.get(uri, replace(limits, max_bytes=most))
                is_right = found == content if most == len(content) else _is_over(found)
                demand(
                    is_right,
                    f"fetch_media of {len(content)} bytes with max_bytes={most} {_shown(found)}; "
                    "call limits.check_bytes, which allows exactly max_bytes",
                )


def giants_are_refused(subject: FetcherSubject) -> None:
    """A file or an answer over max_bytes is refused by its size, or as soon as more has come."""
    limits = replace(subject.limits, max_bytes=10_000)
    checked = False
    if subject.file_uri is not None:
        checked = True
        with subject.files() as (folder, name):
            path = folder / "giant.bin"
            with path.open("wb") as file:
                file.truncate(GIANT)
            _demand_refused(subject, name(path), limits, f"a file of {GIANT >> 30} GiB")
    if subject.web_uri is not None:
        checked = True
        with subject.web() as (web, url):
            limits = replace(subject.web_limits, max_bytes=10_000)
            _demand_refused(subject, url(web.url("claims")), limits, "an answer that claims 1 TiB")
            _demand_refused(subject, url(web.url("endless")), limits, "an answer without end")
            demand(
                web.num_sent < MOST_BYTES,
                f"{web.num_sent >> 20} MiB of an answer without end were read with max_bytes=10000;"
                " stop at the first byte too much",
            )
    if not checked:
        raise CheckSkipped("it reads neither files nor URLs; add `uri_of` or `url_of` if it does")


@since(1, 2)
def sizes_are_not_believed(subject: FetcherSubject) -> None:
    """No more than max_bytes come of a file or an answer that has more than it says, or that is
    packed, or of a member of an archive."""
    limits, checked = replace(subject.limits, max_bytes=MOST_SMALL), False
    if subject.file_uri is not None and SIZELESS.is_file():
        checked = True
        _demand_few(
            subject, subject.file_uri(SIZELESS), limits, "a file whose size is said to be 0"
        )
    if subject.web_uri is not None:
        checked = True
        limits = replace(subject.web_limits, max_bytes=MOST_SMALL)
        with subject.web() as (web, url):
            _demand_few(subject, url(web.url("packed")), limits, "an answer packed by gzip")
    for uri, raw, path in _named(subject.serves):
        with TemporaryDirectory() as folder:
            bomb = Path(folder).resolve() / path.name
            if not write_bomb(path, bomb, unquote(uri), UNPACKED):
                continue
            checked = True
            own = replace(subject.limits, max_bytes=MOST_SMALL)
            what = f"a member of {UNPACKED >> 20} MiB in an archive"
            _demand_refused(subject, uri.replace(raw, os.fspath(bomb)), own, what)
    if not checked:
        raise CheckSkipped("it reads neither files nor URLs, nor a zip file that `serves` names")


def _demand_few(subject: FetcherSubject, uri: str, limits: MediaLimits, what: str) -> None:
    found = subject.get(uri, limits)
    demand(
        not isinstance(found, bytes) or len(found) <= limits.max_bytes,
        f"{what} with max_bytes={limits.max_bytes} {_shown(found)}; read no more than max_bytes + "
        "1 and call limits.check_bytes, whatever the size that is said",
    )


def _demand_refused(subject: FetcherSubject, uri: str, limits: MediaLimits, what: str) -> None:
    peak = Peak()
    found, taken = subject.get(uri, limits), peak.taken()
    demand(
        _is_over(found),
        f"{what} with max_bytes={limits.max_bytes} {_shown(found)}; raise MediaLimitError",
    )
    demand(
        taken < MOST_BYTES,
        f"{what} took {taken >> 20} MiB until it was refused; look at the size before you read",
    )


def files_outside_the_root_are_refused(subject: FetcherSubject) -> None:
    """Files outside `allowed_root` are refused, by links and `..` too; those inside are
    read."""
    with subject.files() as (folder, name):
        root, other = folder / "root", folder / "root-other"
        for made in (root, other):
            made.mkdir()
            (made / "item.bin").write_bytes(CONTENT)
        (root / "link.bin").symlink_to(other / "item.bin")
        (root / "relative.bin").symlink_to("../root-other/item.bin")
        (root / "folder").symlink_to(other, target_is_directory=True)
        limits = replace(subject.limits, allowed_root=root)
        found = subject.get(name(root / "item.bin"), limits)
        demand(found == CONTENT, f"a file beneath allowed_root {_shown(found)}; return its bytes")
        ways = {
            "a file beside the root": other / "item.bin",
            "a path with ..": root / ".." / "root-other" / "item.bin",
            "a link to a file outside": root / "link.bin",
            "a relative link to a file outside": root / "relative.bin",
            "a file in a link to a folder outside": root / "folder" / "item.bin",
        }
        for what, path in ways.items():
            found = subject.get(name(path), limits)
            demand(
                isinstance(found, MediaError),
                f"{what} {_shown(found)} with allowed_root; resolve links, open beneath the root "
                f"(mmdeploy_llm.media has it ready), and {REFUSE} for the rest",
            )
            demand(
                MediaError is type(found) or "exist" not in str(found),
                f"{what}: the error says whether a file exists outside the root; say only that it "
                "is outside",
            )


@since(1, 2)
def names_it_serves_stay_in_the_root(subject: FetcherSubject) -> None:
    """A name like those of `serves` leads to no file outside `allowed_root`: neither by `..`, nor
    where the name of an archive is one."""
    if not subject.serves:
        raise CheckSkipped("it is not known what it serves; add URIs with bytes to `serves`")
    with TemporaryDirectory() as folder:
        root, other = (Path(folder, name).resolve() for name in ("root", "root-other"))
        for made in (root, other):
            made.mkdir()
        (other / "item.bin").write_bytes(CONTENT)
        limits = replace(subject.limits, allowed_root=root)
        for uri in subject.serves:
            for name in _climbing(uri, other / "item.bin"):
                _demand_outside(name, subject.get(name, limits))
        for uri, raw, path in _named(subject.serves):
            inside = root / f"inside{path.suffix}"
            for copy in (inside, other / path.name):
                copy.write_bytes(path.read_bytes())
            if not isinstance(subject.get(uri.replace(raw, os.fspath(inside)), limits), bytes):
                continue  # it needs more than this file
            (root / path.name).symlink_to(other / path.name)
            for way in (other, root, root / ".." / "root-other"):
                name = uri.replace(raw, os.fspath(way / path.name))
                _demand_outside(name, subject.get(name, limits))


def _demand_outside(uri: str, found: bytes | MediaError | None) -> None:
    demand(
        not isinstance(found, bytes),
        f"fetch_media of {uri!r}, a file outside allowed_root, {_shown(found)}; resolve links and "
        f"`..`, open beneath the root (mmdeploy_llm.media has it ready), and {REFUSE} for the rest",
    )


def _climbing(uri: str, path: Path) -> Iterator[str]:
    """Yields names like a URI that may lead to a path."""
    begin = uri[: max(map(uri.rfind, "/#!?=:")) + 1]
    bare = os.fspath(path).lstrip("/")
    for up in ("../", "%2e%2e/", "..%2f", "..\\"):
        yield begin + up * 16 + bare
    yield begin + os.fspath(path)
    yield begin + quote(os.fspath(path), safe="")


def _named(uris: Iterable[str]) -> Iterator[tuple[str, str, Path]]:
    """Yields the URIs that name a local file: the URI, what in it is the path, and the file."""
    for uri in uris:
        _, _, rest = uri.partition(":")
        at = f"/{rest.lstrip('/')}"
        ends = [n for n, sign in enumerate(at) if sign in "/#!?|:"] + [len(at)]
        for end in reversed(ends):
            path = Path(unquote(at[:end]))
            if path.suffix and path.is_file() and at[:end] in uri:
                yield uri, at[:end], path
                break


def what_is_no_file_is_refused(subject: FetcherSubject) -> None:
    """Folders, missing files, pipes and devices raise MediaError, and nothing waits for them."""
    with subject.files() as (folder, name):
        pipe = folder / "pipe"
        make_fifo(pipe)
        (folder / "loop").symlink_to(folder / "loop")
        for path in (folder, folder / "missing", pipe, folder / "loop", Path("/dev/zero")):
            found = subject.get(name(path), replace(subject.limits, max_bytes=10_000))
            demand(
                isinstance(found, MediaError),
                f"{path.name!r}, which is no regular file, {_shown(found)}; {REFUSE} for anything "
                "but regular files",
            )


def urls_are_off_until_allowed(subject: FetcherSubject) -> None:
    """Nothing is asked of a server unless URLs, its name and its address are allowed."""
    with subject.web() as (web, url):
        on = subject.web_limits
        ways = {
            "allow_urls=False": replace(on, allow_urls=False),
            "another host in allowed_domains": replace(on, allowed_domains=("example.com",)),
            "a private address": replace(on, allow_private_addresses=False, allowed_domains=()),
        }
        for what, limits in ways.items():
            found = subject.get(url(web.url("ok")), limits)
            demand(
                not isinstance(found, bytes) and not web.asked,
                f"with {what}, a URL {_shown(found)} and the server was asked for {web.asked}; "
                "look at limits.allow_urls, allowed_domains and allow_private_addresses before "
                "you connect, and at the address to which a name resolves",
            )


def redirects_are_checked(subject: FetcherSubject) -> None:
    """A redirect to a host that is not allowed, to a file, or without end raises MediaError."""
    with subject.web() as (web, url), TemporaryDirectory() as folder:
        path = Path(folder, "item.bin")
        path.write_bytes(CONTENT)
        for what, to in {
            "to another host": "elsewhere",
            "to a file": f"file{path}",
            "without end": "again",
        }.items():
            found = subject.get(url(web.url(to)), subject.web_limits)
            demand(
                isinstance(found, MediaError),
                f"a redirect {what} {_shown(found)}; check each target as the first URL, follow "
                f"few of them, and {REFUSE}",
            )
        demand(
            "/ok/elsewhere" not in web.asked,
            "a redirect to a host that is not in allowed_domains was followed; check the host "
            "before you connect",
        )


def servers_cannot_hold_it(subject: FetcherSubject) -> None:
    """A server that is silent, slow or breaks off, and one that says no, end in MediaError in
    time."""
    with subject.web() as (web, url):
        limits = replace(subject.web_limits, fetch_timeout=0.5)
        for path in ("silent", "slow", "torn", "missing"):
            found = subject.get(url(web.url(path)), limits)
            demand(
                isinstance(found, MediaError),
                f"a server whose answer is {path} {_shown(found)} with fetch_timeout=0.5; {REFUSE},"
                " and count the time of the whole answer, not of its pieces",
            )


def secrets_are_not_shown(subject: FetcherSubject) -> None:
    """No error shows the password or the query of a URL, which may hold a signature."""
    with subject.web() as (web, url):
        uris = (web.url("missing", user=f"me:{SECRET}"), web.url(f"missing?sign={SECRET}"))
        for uri in uris:
            found = subject.get(url(uri), subject.web_limits)
            demand(
                not isinstance(found, MediaError) or SECRET not in str(found),
                f"the error of {uri!r} shows its secret: {found!s}; show a URL without credentials "
                "and query",
            )


CHECKS: tuple[Check, ...] = (
    passes_what_is_not_its_own,
    returns_the_bytes,
    bytes_are_limited,
    giants_are_refused,
    sizes_are_not_believed,
    files_outside_the_root_are_refused,
    names_it_serves_stay_in_the_root,
    what_is_no_file_is_refused,
    urls_are_off_until_allowed,
    redirects_are_checked,
    servers_cannot_hold_it,
    secrets_are_not_shown,
)


@contextmanager
def _all(subject: FetcherSubject) -> Iterator[tuple[dict[str, bytes], MediaLimits]]:
    """Yields all that the fetcher serves, with what is found out by trying, and limits for it."""
    served, limits = dict(subject.serves), subject.limits
    with TemporaryDirectory() as folder, Web().running() as web:
        if subject.file_uri is not None:
            path = Path(folder).resolve() / "an item.bin"
            path.write_bytes(CONTENT)
            served[subject.file_uri(path)] = CONTENT
        if subject.web_uri is not None:
            served[subject.web_uri(web.url("ok"))] = BODY
            limits = subject.web_limits
        yield served, limits


def _is_over(found: Any) -> bool:
    return isinstance(found, MediaLimitError)


def _shown(found: Any) -> str:
    if isinstance(found, BaseException):
        return f"raises {type(found).__name__} ({found!s:.200})"
    return "returns None" if found is None else f"returns {len(found)} bytes"
