"""Media processors on image processors and feature extractors of transformers: a family says which
tensors its encoder reads and what text an item has. torchvision is not needed."""

from .images import TransformersImages
from .one_size import OneSizeImages
from .sounds import TransformersSounds

__all__ = ["OneSizeImages", "TransformersImages", "TransformersSounds"]
