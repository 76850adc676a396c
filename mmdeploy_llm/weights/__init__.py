"""Loads safetensors files into the parameters of a model: finds files, maps keys, reads values."""

from .find import find_weights
from .load import build_model
from .map import Target, WeightMap

__all__ = ["Target", "WeightMap", "build_model", "find_weights"]
