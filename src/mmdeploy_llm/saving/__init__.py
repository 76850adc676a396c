"""Writes checkpoints: of weights that are rounded on the way, and of what is loaded."""

from .loaded import built, is_quantized, save_loaded
from .rounders import GroupRounder, KernelRounder, Rounder
from .writer import Summary, Writer

__all__ = [
    "GroupRounder",
    "KernelRounder",
    "Rounder",
    "Summary",
    "Writer",
    "built",
    "is_quantized",
    "save_loaded",
]
