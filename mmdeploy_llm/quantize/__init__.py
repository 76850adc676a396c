"""Writes quantised copies of checkpoints: quantize_checkpoint."""

from .convert import Summary, quantize_checkpoint

__all__ = ["Summary", "quantize_checkpoint"]
