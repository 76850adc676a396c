"""Adapters: reads the folders of LoRA adapters, and adds what they change to the products of a
model, for each request its own.

    folder --read_adapter--> Adapter, by the checkpoint's modules
    out, x of a layer --add_low_rank--> out, changed for the rows of each adapter
"""

from .adapter import Adapter, LowRank, TokenRows
from .folder import read_adapter
from .product import Change, Group, add_low_rank

__all__ = [
    "Adapter",
    "Change",
    "Group",
    "LowRank",
    "TokenRows",
    "add_low_rank",
    "read_adapter",
]
