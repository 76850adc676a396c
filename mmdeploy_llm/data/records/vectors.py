"""Vector: an item's vector, or one for each of its tokens, as a record and its JSON have it."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_NUMBERS = 2**28  # of one item: a gigabyte


@dataclass(frozen=True, slots=True, kw_only=True)
class Vector:
    """Numbers as text. shape: [size] or [tokens, size]. float32: little endian, in base64."""

    shape: tuple[int, ...]
    float32: str

    @classmethod
    def of(cls, numbers: NDArray[np.float32]) -> Vector:
        """Returns the vector of an array."""
        data = numbers.astype("<f4", copy=False).tobytes()
        return cls(shape=numbers.shape, float32=base64.b64encode(data).decode("ascii"))

    @classmethod
    def from_json(cls, value: Any) -> Vector | None:
        """Returns the vector of a record's JSON, None of null. Raises ValueError for anything else
        than {"shape": [...], "float32": text of the right length}."""
        if value is None:
            return None
        text = value.get("float32") if isinstance(value, Mapping) else None
        shape = value.get("shape") if isinstance(value, Mapping) else None
        if not isinstance(text, str) or not isinstance(shape, (list, tuple)):
            raise ValueError("its embedding is not an object with shape and float32")
        is_shape = len(shape) in (1, 2) and all(type(own) is int and own > 0 for own in shape)
        if not is_shape or math.prod(shape) > MAX_NUMBERS:
            raise ValueError("the shape of its embedding is neither [size] nor [tokens, size]")
        if len(text) != 4 * -(-4 * math.prod(shape) // 3):
            raise ValueError(f"its embedding has not the numbers of its shape {list(shape)}")
        return cls(shape=tuple(shape), float32=text)

    def array(self) -> NDArray[np.float32]:
        """Returns the numbers, in an array of this shape that must not be written to. Raises
        ValueError for a text that is not base64."""
        import numpy as np

        return np.frombuffer(base64.b64decode(self.float32, validate=True), "<f4").reshape(
            self.shape
        )
