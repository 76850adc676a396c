"""Draft heads: the layers with which some checkpoints guess tokens."""

from .head import DraftHead, add_draft_head

__all__ = ["DraftHead", "add_draft_head"]
