"""Writes checkpoints: of weights that are rounded on the way, and of what is loaded."""

from .loaded import built, is_quantized, save_loaded
from .merge import Merged, merge_adapter
from .rounders import GroupRounder, KernelRounder, Rounder
from .writer import Summary, Writer

__all__ = [
    "GroupRounder",
    "KernelRounder",
    "Merged",
    "Rounder",
    "Summary",
    "Writer",
    "built",
    "is_quantized",
    "merge_adapter",
    "save_loaded",
]
