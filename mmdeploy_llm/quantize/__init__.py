"""Writes quantised copies of checkpoints: quantize_checkpoint."""

from mmdeploy_llm.saving import Summary

from .convert import quantize_checkpoint

__all__ = ["Summary", "quantize_checkpoint"]
