"""The one parser of http(s) URLs. Checks, name resolution, connection and headers all use its
result, so that no two of them can disagree about the URL."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import quote, urljoin, urlsplit

from mmdeploy_llm.errors import MediaError

PORTS = {"http": 80, "https": 443}
MAX_URL = 8192  # characters
MAX_SHOWN_NAME = 40  # characters of a path's last component in a message

HOST = r"[a-z0-9](?:[a-z0-9_-]*[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9_-]*[a-z0-9])?)*\.?"
AUTHORITY = re.compile(rf"(?:(?P<host>{HOST})|\[(?P<ipv6>[0-9a-f:.]+)\])(?::(?P<port>\d{{1,5}})?)?")
FORBIDDEN = re.compile(r"[\x00-\x1f\x7f\\\ud800-\udfff]")  # parsers drop or reinterpret these
IN_PATH = "/%:@!$&'()*+,;=~-._"
IN_QUERY = IN_PATH + "?[]|"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A checked URL. host: a lower-case ASCII name or an IP address without brackets. path: path
    and query, percent-encoded, as sent to the server."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def authority(self) -> str:
        """The host, and the port unless it is the scheme's default, as in a Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"

    def __str__(self) -> str:
        """Returns the URL for messages, without folders and query."""
        folder, slash, name = self.path.partition("?")[0].rpartition("/")
        if len(name) > MAX_SHOWN_NAME:
            name = name[: MAX_SHOWN_NAME - 3] + "..."
        return f"{self.scheme}://{self.authority}/{'.../' if folder and slash else ''}{name}"

    def redirected(self, location: str) -> Target:
        """Returns the target of a redirect. Raises MediaError as `parse`, and for one from https
        to http."""
        target = parse(urljoin(f"{self.scheme}://{self.authority}{self.path}", location.strip()))
        if self.scheme == "https" and target.scheme == "http":
            raise MediaError(f"{self.authority} redirects from https to http, which is refused")
        return target


def parse(url: str) -> Target:
    """Parses a URL strictly. Raises MediaError for another scheme, user information, a host that is
    not plain ASCII, and all else that URL parsers are known to disagree about."""
    url = url.strip(" ")
    if len(url) > MAX_URL:
        raise MediaError(f"the URL has {len(url)} characters, {MAX_URL} are allowed")
    if FORBIDDEN.search(url):
        raise MediaError(
            "the URL holds control characters, backslashes or lone surrogates; percent-encode them"
        )
    try:
        parts = urlsplit(url)
    except ValueError:
        raise MediaError("the URL is malformed") from None
    scheme = parts.scheme.lower()
    if scheme not in PORTS:
        raise MediaError(f"URLs of scheme {scheme[:20]!r} are not fetched, only http and https")
    if "@" in parts.netloc:
        raise MediaError("the URL holds a user name or password; remove it")
    match = AUTHORITY.fullmatch(parts.netloc.lower())
    if match is None:
        raise MediaError("the URL's host is not valid; write it in ASCII (xn--... for other names)")
    port = int(match["port"] or PORTS[scheme])
    if not 0 < port < 65536:
        raise MediaError(f"the URL's port {port} is not in 1 to 65535")
    query = f"?{quote(parts.query, safe=IN_QUERY)}" if parts.query else ""
    return Target(
        scheme=scheme,
        host=(match["host"] or match["ipv6"]).rstrip("."),
        port=port,
        path=(quote(parts.path, safe=IN_PATH) or "/") + query,
    )


def is_listed(host: str, domains: tuple[str, ...]) -> bool:
    """Returns whether `domains` contains the host or a pattern for it: "*.example.com" covers
    a.example.com and b.a.example.com, not example.com."""
    return any(
        host.endswith(domain[1:]) and len(host) >= len(domain)
        if domain.startswith("*.")
        else host == domain
        for domain in domains
    )
