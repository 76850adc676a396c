"""Tensor parallelism: shards a model over ranks, and provides their collectives.

plan of styles --divide--> one rank's shard, on the meta device --weights.load--> its values
Ranks                      the collectives between ranks: all-reduce and all-gather
"""

from .ranks import FirstRank, Meeting, Ranks
from .shards import Share, divide, shares_of

__all__ = ["FirstRank", "Meeting", "Ranks", "Share", "divide", "shares_of"]
