"""A web server on this machine with everything that a fetcher must survive."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

BODY = bytes(range(256)) * 40
MOST_SENT = 64 * 2**20  # bytes of an answer without end
PIECE = bytes(2**16)
UNPACKED = 8 * 2**20  # bytes of zeros of an answer that has a thousandth of them
SECONDS = 20.0  # of an answer that comes slowly


class Web:
    """The server. asked: the paths that were asked for. num_sent: bytes of the endless answer."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.num_sent = 0
        self.is_over = threading.Event()
        web = self

        class Handler(BaseHTTPRequestHandler):
            """Answers by the path."""

            def do_GET(self) -> None:
                """Answers one request."""
                path = self.path.partition("?")[0]
                web.asked.append(path)
                with suppress(OSError):
                    getattr(web, f"_{path.strip('/').partition('/')[0]}", web._missing)(self)

            def log_message(self, *_: Any) -> None:
                """Says nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True

    def url(self, path: str, *, host: str = "127.0.0.1", user: str = "") -> str:
        """Returns the URL of a path."""
        at = f"{user}@" if user else ""
        return f"http://{at}{host}:{self._server.server_address[1]}/{path}"

    @contextmanager
    def running(self) -> Iterator[Web]:
        """Serves inside the block."""
        thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.is_over.set()
            self._server.shutdown()
            self._server.server_close()

    def _missing(self, handler: BaseHTTPRequestHandler) -> None:
        handler.send_error(404)

    def _ok(self, handler: BaseHTTPRequestHandler) -> None:
        _head(handler, 200, {"Content-Length": len(BODY)})
        handler.wfile.write(BODY)

    def _packed(self, handler: BaseHTTPRequestHandler) -> None:
        packed = gzip.compress(bytes(UNPACKED))
        _head(handler, 200, {"Content-Length": len(packed), "Content-Encoding": "gzip"})
        handler.wfile.write(packed)

    def _torn(self, handler: BaseHTTPRequestHandler) -> None:
        _head(handler, 200, {"Content-Length": len(BODY) + 100})
        handler.wfile.write(BODY)

    def _endless(self, handler: BaseHTTPRequestHandler) -> None:
        _head(handler, 200, {})
        while self.num_sent < MOST_SENT and not self.is_over.is_set():
            handler.wfile.write(PIECE)
            self.num_sent += len(PIECE)

    def _claims(self, handler: BaseHTTPRequestHandler) -> None:
        _head(handler, 200, {"Content-Length": 1 << 40})
        handler.wfile.write(BODY)

    def _slow(self, handler: BaseHTTPRequestHandler) -> None:
        _head(handler, 200, {"Content-Length": 1000})
        for _ in range(int(SECONDS * 10)):
            if self.is_over.wait(0.1):
                return
            handler.wfile.write(b".")
            handler.wfile.flush()

    def _silent(self, handler: BaseHTTPRequestHandler) -> None:
        self.is_over.wait(SECONDS)

    def _again(self, handler: BaseHTTPRequestHandler) -> None:
        _head(handler, 302, {"Location": "/again", "Content-Length": 0})

    def _elsewhere(self, handler: BaseHTTPRequestHandler) -> None:
        url = self.url("ok/elsewhere", host="localhost")
        _head(handler, 302, {"Location": url, "Content-Length": 0})

    def _file(self, handler: BaseHTTPRequestHandler) -> None:
        path = handler.path.partition("/file")[2]
        _head(handler, 302, {"Location": f"file://{path}", "Content-Length": 0})


def _head(handler: BaseHTTPRequestHandler, status: int, fields: dict[str, Any]) -> None:
    handler.send_response(status)
    for name, value in fields.items():
        handler.send_header(name, str(value))
    handler.send_header("Connection", "close")
    handler.end_headers()
