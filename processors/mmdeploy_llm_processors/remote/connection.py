"""Opens connections to checked addresses only, with one deadline for all their operations.

httpcore requests a connection by host name; here the name is resolved once, every address is
checked, and the connection goes to one of these addresses. There is no second lookup that could
return another one (DNS rebinding). TLS still verifies the certificate for the name.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from typing import Any

import httpcore2

from .addresses import Resolve, check_addresses
from .deadline import Deadline


class CheckedBackend(httpcore2.NetworkBackend):
    """Opens connections for httpcore. Raises MediaError for refused addresses."""

    def __init__(self, resolve: Resolve, deadline: Deadline, *, allow_private: bool) -> None:
        self._resolve = resolve
        self._deadline = deadline
        self._allow_private = allow_private
        self._sockets = httpcore2.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.NetworkStream:
        """Connects to the first checked address that answers; each gets a share of the time left.

        Raises MediaError for a refused address.
        """
        addresses = self._addresses(host, port)
        check_addresses(host, addresses, allow_private=self._allow_private)
        error: Exception = httpcore2.ConnectError("the name has no address")
        for index, address in enumerate(addresses):
            share = self._deadline.left() / (len(addresses) - index)
            try:
                stream = self._sockets.connect_tcp(address, port, timeout=share)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as failure:
                error = failure
            else:
                return _TimedStream(stream, self._deadline)
        raise error

    def _addresses(self, host: str, port: int) -> list[str]:
        try:
            return self._resolve(host, port)
        except (OSError, UnicodeError) as error:
            raise httpcore2.ConnectError("the name cannot be resolved") from error


class _TimedStream(httpcore2.NetworkStream):
    """A connection whose operations time out at the deadline."""

    def __init__(self, stream: httpcore2.NetworkStream, deadline: Deadline) -> None:
        self._stream = stream
        self._deadline = deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, self._deadline.left())

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, self._deadline.left())

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore2.NetworkStream:
        stream = self._stream.start_tls(ssl_context, server_hostname, self._deadline.left())
        return _TimedStream(stream, self._deadline)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)
