"""Runs decoders in processes that can be killed, with a memory limit and a deadline.

Media are untrusted, and the codecs that read them are large C libraries: a file may hang one, crash
it, or make it allocate all memory. In a separate process that costs one item.

    intake thread                                worker process (no torch, no model)
    Workers.stream(function, blob, ...) -------> function(blob, **args) yields (fields, array)
                       <--- JSON and raw bytes over a socket; nothing is ever unpickled

A worker is reused unless it crashes or misses its deadline, and exits when its parent does. It
loads no plugins: it imports only the module of the requested function, so that no other package can
break it. A function of a single file, which the worker's Python cannot import by name, is loaded
from that file.
"""

from .pool import Workers

__all__ = ["Workers"]
