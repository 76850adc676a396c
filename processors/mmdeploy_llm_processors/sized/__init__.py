"""Bases of processors whose items have a text in the prompt that follows from their size alone: a
plugin says how an item becomes tensors and text; keys, counts, options, limits and budgets follow.
"""

from .pictures import PictureProcessor
from .processor import Prepared, SizedProcessor
from .sounds import SoundProcessor

__all__ = ["PictureProcessor", "Prepared", "SizedProcessor", "SoundProcessor"]
