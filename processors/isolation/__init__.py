"""Decoding in processes that can be killed, with a memory limit and a deadline.

Media are untrusted, and the codecs that read them are large C libraries: a file may hang one, crash
it, or make it ask for all the memory there is. In a process of its own that costs one item.

    intake thread                                worker process (no torch, no model)
    Workers.stream("module:function", blob) ---> function(blob, **args) yields (facts, array)
                       <--- JSON and raw bytes over a socket; nothing is ever unpickled

A worker is used again while it behaves, and ends by itself when its parent does. It loads no
plugins: all it imports is the module whose function it was asked for, so that no other package can
break it. A processor of another package may name a function of its own there; the package must be
installed where the worker's Python finds it.
"""

from .pool import Workers

__all__ = ["Workers"]
