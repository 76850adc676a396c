"""The worker process: python -m mmdeploy_llm.media.isolation.worker WORD

WORD leads to a socket. Reads calls from it, answers them one by one, and exits when the parent is
gone.
"""

from __future__ import annotations

import contextlib
import importlib
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from mmdeploy_llm.errors import MediaLimitError, PluginLoadError, RequestError
from mmdeploy_llm.hooks.files import load_named
from mmdeploy_llm.system.portable.children import Parent, end_with
from mmdeploy_llm.system.portable.limits import set_limit

from .wire import PeerGoneError, receive, send


def main() -> None:
    """Serves calls until the parent is gone."""
    parent = Parent.found(sys.argv[1])
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    with parent.peer as peer, contextlib.suppress(PeerGoneError):
        while True:
            call, blob = receive(peer, max_payload=2**62)
            _answer(peer, call, bytes(blob))


def _answer(peer: socket.socket, call: dict[str, Any], blob: bytes) -> None:
    """Runs one call; sends any error to the parent instead of raising it."""
    try:
        set_limit("memory", call["max_memory"])  # where there is none, the deadline protects
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


if __name__ == "__main__":
    main()
