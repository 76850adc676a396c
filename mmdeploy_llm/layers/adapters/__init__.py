"""Adapters: reads the folders of LoRA adapters, and adds what they change to the products of a
model, for each request its own.

    folder --read_adapter--> Adapter, by the checkpoint's modules
    out, x of a layer --LowRankTable.add--> out, changed for the rows of each adapter
"""

from mmdeploy_llm.kernels.low_rank import Change, Group, LowRankTable, PlainTable, add_low_rank

from .adapter import Adapter, LowRank, TokenRows
from .folder import read_adapter
from .key_names import names_of

__all__ = [
    "Adapter",
    "Change",
    "Group",
    "LowRank",
    "LowRankTable",
    "PlainTable",
    "TokenRows",
    "add_low_rank",
    "names_of",
    "read_adapter",
]
