"""Writes quantised copies of checkpoints: quantize_checkpoint."""

from .convert import Quantized, quantize_checkpoint

__all__ = ["Quantized", "quantize_checkpoint"]
