"""LiveReport: serves the report of a run to browsers of this machine while the run goes on.

It listens on 127.0.0.1, answers GET only, and serves the page, the files beside it that a report
writes, and state.json. A request whose Host header names another host is refused: a page of a
stranger could have its own name resolved to this machine (DNS rebinding).
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from mmdeploy_llm.data.records.files import Folder
from mmdeploy_llm.errors import ConfigError

HOST = "127.0.0.1"
SECONDS = 10.0  # for a request to arrive
MAX_REQUESTS = 32  # at the same time
_FILE = re.compile(r"(cards-\d{3,}\.js)|pictures/([0-9a-f]{2})/([0-9a-f]{24}-\d{3,}\.(?:jpg|mp3))")
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript",
    ".jpg": "image/jpeg",
    ".mp3": "audio/mpeg",
}
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class LiveReport:
    """Serves until it is closed. port: 0 takes a free one. state: what state.json says.

    Raises ConfigError when the port cannot be had.
    """

    def __init__(self, page: Path, state: Callable[[], Mapping[str, Any]], port: int = 0) -> None:
        handler = type("Handler", (_Handler,), {"page": page, "state": staticmethod(state)})
        try:
            self._server = _Server((HOST, port), handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"port {port} of {HOST} cannot be used: {error}") from error
        self.url = f"http://{HOST}:{self._server.server_address[1]}/"
        threading.Thread(target=self._server.serve_forever, name="live report", daemon=True).start()

    def close(self) -> None:
        """Stops serving."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    """A server that answers a bounded number of requests at once, and waits for none at its end."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(address, handler)
        self._slots = threading.BoundedSemaphore(MAX_REQUESTS)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answers in a thread of its own; closes a connection that is one too many."""
        if self._slots.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answers, and makes room for another one."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing: a browser has gone away."""


class _Handler(BaseHTTPRequestHandler):
    """Answers one request. page, state: see LiveReport."""

    page: Path
    state: Callable[[], Mapping[str, Any]]
    timeout = SECONDS
    server_version, sys_version = "mmdeploy-llm", ""

    def do_GET(self) -> None:
        """Sends the page, one of its files, or the state."""
        name = unquote(self.path.partition("?")[0].partition("#")[0]).removeprefix("/")
        if self.headers.get("Host", "").lower() not in self._own_hosts():
            return self.send_error(HTTPStatus.MISDIRECTED_REQUEST)
        if name == "state.json":
            return self._send(json.dumps(self.state()).encode(), "application/json")
        data = self._page() if name in ("", self.page.name) else self._file(name)
        if data is None:
            return self.send_error(HTTPStatus.NOT_FOUND)
        suffix = os.path.splitext(name or self.page.name)[1]
        return self._send(data, TYPES.get(suffix, TYPES[".html"]))

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: the terminal is for the run."""

    def _own_hosts(self) -> tuple[str, ...]:
        port = self.server.server_port  # type: ignore[attr-defined]
        return (f"{HOST}:{port}", f"localhost:{port}")

    def _page(self) -> bytes | None:
        with Folder.open(self.page.parent) as parent:
            return _read(parent, self.page.name) or WAITING

    def _file(self, name: str) -> bytes | None:
        """Returns a file of the folder beside the page; None for anything else."""
        folder, _, inner = name.partition("/")
        found = _FILE.fullmatch(inner)
        if folder != f"{self.page.stem}_files" or found is None:
            return None
        names = (found[1],) if found[1] else ("pictures", found[2], found[3])
        return _beneath(self.page.parent, (folder, *names))

    def _send(self, data: bytes, kind: str) -> None:
        self.send_response(HTTPStatus.OK)
        for header, value in ({**HEADERS, "Content-Type": kind}).items():
            self.send_header(header, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


WAITING = (
    b"<!doctype html><meta charset=utf-8><meta http-equiv=refresh content=2>"
    b"<title>Report</title><p>The first items are being answered; this page loads again."
)


def _beneath(folder: Path, names: tuple[str, ...]) -> bytes | None:
    """Returns a file below a folder; follows no link."""
    opened = [Folder.open(folder)]
    try:
        for name in names[:-1]:
            inner = opened[-1].existing(name)
            if inner is None:
                return None
            opened.append(inner)
        return _read(opened[-1], names[-1])
    finally:
        for each in opened:
            each.close()


def _read(folder: Folder, name: str) -> bytes | None:
    try:
        with folder.open_file(name, os.O_RDONLY) as file:
            return file.readall()
    except (OSError, ConfigError):
        return None
