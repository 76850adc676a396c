"""Tensor parallelism: how a model is sharded over ranks, and the processes that compute together.

plan of styles --divide--> one rank's shard, on the meta device --weights.load--> its values
Ranks                      the collectives between ranks: all-reduce and all-gather
Worker                     a child process and the channel to it

Names are imported when first used: a child process that needs no torch imports none.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .forks import Home, finalize_here
    from .interrupts import interrupt_thread, interrupted_later
    from .process import Channel, Worker, close_all
    from .ranks import FirstRank, Meeting, Ranks
    from .shards import Share, divide, shares_of
    from .wire import Message

__all__ = [
    "Channel",
    "FirstRank",
    "Home",
    "Meeting",
    "Message",
    "Ranks",
    "Share",
    "Worker",
    "close_all",
    "divide",
    "finalize_here",
    "interrupt_thread",
    "interrupted_later",
    "shares_of",
]

_HOMES = {
    "Channel": "process",
    "FirstRank": "ranks",
    "Home": "forks",
    "Meeting": "ranks",
    "Message": "wire",
    "Ranks": "ranks",
    "Share": "shards",
    "Worker": "process",
    "close_all": "process",
    "divide": "shards",
    "finalize_here": "forks",
    "interrupt_thread": "interrupts",
    "interrupted_later": "interrupts",
    "shares_of": "shards",
}


def __getattr__(name: str) -> Any:
    """Imports a public name from the module that defines it (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
