"""The kinds of packed weights, by the names of their classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .coded import CodedPanels
from .products import FloatWeight, S8Weight

PACKED: Mapping[str, Any] = {kind.__name__: kind for kind in (CodedPanels, FloatWeight, S8Weight)}
