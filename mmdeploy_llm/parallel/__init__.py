"""Tensor parallelism: how a model is sharded over ranks, and the processes that compute together.

plan of styles --divide--> one rank's shard, on the meta device --weights.load--> its values
Ranks                      the collectives between ranks: all-reduce and all-gather
Worker                     a child process and the channel to it
"""

from .divide import Share, divide, shares_of
from .interrupts import interrupted_later
from .process import Channel, Worker, close_all
from .ranks import FirstRank, Meeting, Ranks
from .wire import Message

__all__ = [
    "Channel",
    "FirstRank",
    "Meeting",
    "Message",
    "Ranks",
    "Share",
    "Worker",
    "close_all",
    "divide",
    "interrupted_later",
    "shares_of",
]
