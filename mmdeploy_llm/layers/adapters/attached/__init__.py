"""Puts adapters at a model: knows them by name, finds the matrices that they change, and holds
those in memory there.

folder --AdapterTable.load--> AdapterRef, checked, by name
Adapter --Blueprint.attach--> Attached, by the model's matrices --ServedAdapters--> their tables
"""

from .attach import Blueprint
from .places import Attached
from .served import ServedAdapters

__all__ = ["Attached", "Blueprint", "ServedAdapters"]
