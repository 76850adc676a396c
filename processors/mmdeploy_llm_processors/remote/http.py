"""Fetches http(s) URLs: checks every redirect, limits bytes and time, retries where it may help."""

from __future__ import annotations

import functools
import ssl
import time
from dataclasses import dataclass
from http import HTTPStatus

import httpcore2

from mmdeploy_llm.errors import MediaError
from mmdeploy_llm.hooks import MediaLimits, MediaRef

from .addresses import resolve
from .connection import CheckedBackend
from .deadline import Deadline
from .url import Target, is_listed, parse

MAX_REDIRECTS = 5
PAUSES = (1.0, 2.0)  # seconds before the second and the third attempt
REDIRECTS = frozenset({301, 302, 303, 307, 308})
REPEATED = frozenset({429, 500, 502, 503, 504})
HEADERS = (
    (b"User-Agent", b"mmdeploy-llm"),
    (b"Accept", b"image/*, video/*, */*;q=0.1"),
    (b"Accept-Encoding", b"identity"),  # so that the counted bytes are those of the file
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A server's response. reason: why an attempt failed that may be retried, else None."""

    body: bytes = b""
    location: str | None = None
    reason: str | None = None


def fetch_http(ref: MediaRef, limits: MediaLimits) -> bytes:
    """Returns the body of the URL after at most 5 redirects and 3 attempts.

    Raises MediaError for a refused URL or host, a status other than 200 and a broken connection,
    MediaLimitError for more than `max_bytes`, MediaTimeoutError after `fetch_timeout` in total.
    """
    target = parse(ref.uri)
    name = f"{ref.kind} {target}"
    deadline = Deadline(limits.fetch_timeout, name)
    pauses = iter(PAUSES)
    num_tries = 0
    while True:
        num_tries += 1
        answer = _follow(target, name, limits, deadline)
        if answer.reason is None:
            return answer.body
        pause = next(pauses, None)
        if pause is None or not deadline.has(pause):
            tries = "1 try" if num_tries == 1 else f"{num_tries} tries"
            raise MediaError(f"{name}: {answer.reason} ({tries})")
        time.sleep(pause)


def _follow(target: Target, name: str, limits: MediaLimits, deadline: Deadline) -> Answer:
    """Makes one attempt and follows its redirects; each target is checked like the first URL."""
    for _ in range(MAX_REDIRECTS + 1):
        _check_host(target, name, limits)
        answer = _get(target, name, limits, deadline)
        if answer.location is None:
            return answer
        target = target.redirected(answer.location)
    raise MediaError(f"{name}: more than {MAX_REDIRECTS} redirects")


def _check_host(target: Target, name: str, limits: MediaLimits) -> None:
    if limits.allowed_domains and not is_listed(target.host, limits.allowed_domains):
        raise MediaError(
            f"{name}: the host {target.host} is not in allowed_media_domains "
            f"({', '.join(limits.allowed_domains)})"
        )


def _get(target: Target, name: str, limits: MediaLimits, deadline: Deadline) -> Answer:
    """Makes one request on a new connection. Raises MediaError and its subclasses."""
    is_own = limits.allow_private_addresses and is_listed(target.host, limits.allowed_domains)
    backend = CheckedBackend(resolve, deadline, allow_private=is_own)
    context = tls_context() if target.scheme == "https" else None
    url = httpcore2.URL(
        scheme=target.scheme.encode(),
        host=target.host.encode(),
        port=target.port,
        target=target.path.encode(),
    )
    headers = [(b"Host", target.authority.encode()), *HEADERS]
    try:
        with (
            httpcore2.ConnectionPool(ssl_context=context, network_backend=backend) as pool,
            pool.stream("GET", url, headers=headers) as response,
        ):
            return _read(response, name, limits)
    except httpcore2.TimeoutException:
        if deadline.has(0):  # time is left: only one address of several did not answer
            return Answer(reason="the server cannot be reached in time")
        raise deadline.error() from None
    except httpcore2.ConnectError as error:
        return _unreachable(error, name)
    except (httpcore2.NetworkError, httpcore2.ProtocolError):
        return Answer(reason="the connection broke before the end")


def _unreachable(error: httpcore2.ConnectError, name: str) -> Answer:
    causes = (*error.args, error.__cause__, error.__context__)
    cause = next((each for each in causes if isinstance(each, ssl.SSLError)), None)
    if isinstance(cause, ssl.SSLCertVerificationError):
        raise MediaError(f"{name}: the server's certificate is not valid: {cause.verify_message}")
    if cause is not None:
        raise MediaError(f"{name}: no secure connection: {cause.reason}")
    is_resolved = "resolved" not in str(error)
    return Answer(reason="no connection" if is_resolved else "its host's name is not known")


def _read(response: httpcore2.Response, name: str, limits: MediaLimits) -> Answer:
    headers = {key.lower(): value.decode("latin-1") for key, value in response.headers}
    status = response.status
    location = headers.get(b"location")
    if status in REDIRECTS and location is not None:
        return Answer(location=location)
    if status in REPEATED:
        return Answer(reason=f"the server answered {_described(status)}")
    if status != HTTPStatus.OK:
        raise MediaError(f"{name}: the server answered {_described(status)}")
    encoding = headers.get(b"content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise MediaError(f"{name}: the server compresses it although the request says identity")
    return Answer(body=_body(response, headers.get(b"content-length"), name, limits))


def _body(
    response: httpcore2.Response, declared: str | None, name: str, limits: MediaLimits
) -> bytes:
    """Reads the bytes; checks their declared number first and the real one while they arrive."""
    if declared is not None and declared.isdecimal():
        limits.check_bytes(int(declared), name)
    body = bytearray()
    for chunk in response.iter_stream():
        body += chunk
        limits.check_bytes(len(body), name, is_all=False)
    return bytes(body)


def _described(status: int) -> str:
    """Returns text such as "404 Not Found". The server's own phrase is untrusted and not used."""
    known = {each.value: each.phrase for each in HTTPStatus}
    return f"{status} {known[status]}" if status in known else str(status)


@functools.cache
def tls_context() -> ssl.SSLContext:
    """Returns a context that verifies certificates and names by the system's authorities. Cached,
    because reading these is slow."""
    return httpcore2.default_ssl_context()
