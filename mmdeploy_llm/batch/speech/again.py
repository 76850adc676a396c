"""Which answers are poor, and at which temperatures they are asked for again.

A model of speech may fall into a loop, above all in music and noise. A text that can be compressed
too well is asked for again at a higher temperature (Radford et al., "Robust Speech Recognition via
Large-Scale Weak Supervision", 2022, section 4.5); so is one that was cut off.
"""

from __future__ import annotations

import zlib

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
MOST_COMPRESSED = 2.4  # bytes of a text that become one


def is_poor(text: str, finish_reason: str | None) -> bool:
    """Whether an answer was cut off or repeats itself."""
    data = text.encode()
    return finish_reason == "length" or len(data) > MOST_COMPRESSED * len(zlib.compress(data))
