"""The worker process: python -m mmdeploy_llm.isolation.worker FD

Reads calls from the socket FD, answers them one by one, and exits when the parent is gone.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from mmdeploy_llm.errors import MediaLimitError, PluginLoadError, RequestError
from mmdeploy_llm.plugin_files import load_named

from .wire import PeerGoneError, receive, send

PARENT_CHECK_SECONDS = 1.0


def main() -> None:
    """Serves calls until the parent is gone."""
    # Also when a process that was forked from the parent keeps the other end of the socket open.
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    with socket.socket(fileno=int(sys.argv[1])) as peer, contextlib.suppress(PeerGoneError):
        while True:
            call, blob = receive(peer, max_payload=2**62)
            _answer(peer, call, bytes(blob))


def _end_with(parent: int) -> None:
    """Ends this process when its parent has ended."""
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_SECONDS)
    os._exit(1)


def _answer(peer: socket.socket, call: dict[str, Any], blob: bytes) -> None:
    """Runs one call; sends any error to the parent instead of raising it."""
    try:
        _limit_memory(call["max_memory"])
        module, _, name = call["function"].partition(":")
        if call.get("file") is not None:  # of a plugin that is a single file
            load_named(Path(call["file"]), module)
        function = getattr(importlib.import_module(module), name)
        for fields, array in function(blob, **call["args"]):
            shape = list(array.shape) if array is not None else None
            send(peer, {"fields": fields, "shape": shape}, array if array is not None else b"")
        send(peer, {"done": True})
    except PeerGoneError:
        raise
    except RequestError as error:
        send(peer, {"error": type(error).__name__, "message": str(error)})
    except PluginLoadError as error:
        send(peer, {"error": "MediaError", "message": str(error)})
    except MemoryError:
        limit = call["max_memory"] // 2**20
        message = f"decoding it needs more than the {limit} MiB that a worker may use; shrink it"
        send(peer, {"error": MediaLimitError.__name__, "message": message})
    except Exception as error:  # codecs raise anything; their messages can hold paths and addresses
        message = f"it cannot be decoded ({type(error).__name__} while reading it)"
        send(peer, {"error": "MediaError", "message": message})


def _limit_memory(max_memory: int) -> None:
    """Limits the address space of this process; allocations beyond it fail."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = max_memory if hard == resource.RLIM_INFINITY else min(max_memory, hard)
    # Some systems do not have this limit; only the deadline protects them.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


if __name__ == "__main__":
    main()
