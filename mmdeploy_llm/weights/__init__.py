"""From a folder of safetensors files to the parameters of a model: find, map, load."""

from .find import find_weights
from .load import build_model
from .map import Target, WeightMap

__all__ = ["Target", "WeightMap", "build_model", "find_weights"]
