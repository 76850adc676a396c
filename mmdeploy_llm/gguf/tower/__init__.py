"""Reads vision towers: the second GGUF file of an image-text model, which is called mmproj.

names: how GGUF names their tensors. config: for transformers. reading: entries of floats.
"""

from .config import MediaConfig, media_config
from .names import TOWERS
from .reading import TowerFile

__all__ = ["TOWERS", "MediaConfig", "TowerFile", "media_config"]
