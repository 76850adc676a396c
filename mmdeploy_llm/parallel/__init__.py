"""Several processes that compute together: ranks that share a model, and how it is divided.

plan of styles --divide--> the part of one rank, on meta --weights.load--> its values
Ranks                      what the parts exchange: sums and gathers
Worker                     a process of ours, and the channel to it
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
