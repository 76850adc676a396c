"""Reads vision towers: the second GGUF file of an image-text model, which is called mmproj.

config: for transformers. reading: entries of floats.
"""

from .config import MediaConfig, media_config
from .reading import TowerFile

__all__ = ["MediaConfig", "TowerFile", "media_config"]
