"""The messages of sounds that are too long, too short, or no sounds."""

from __future__ import annotations

import numpy as np

from mmdeploy_llm.errors import MediaError, MediaLimitError

MAX_CHANNELS = 64
LARGEST = 1000.0  # of a float sample; loud ones exceed 1, whole numbers that were cast go to 32768


def too_long(allowed: float, because: str) -> MediaLimitError:
    """Returns the error of a sound of more than `allowed` seconds; because: whose limit it is."""
    return MediaLimitError(
        f"the sound is longer than the {allowed:g} seconds that {because}; cut it, or give the "
        "part that counts by its options start and end"
    )


def no_samples() -> MediaError:
    """Returns the error of a sound without samples."""
    return MediaError("the sound has no samples; the file may be truncated, or was never filled")


def check_values(samples: np.ndarray) -> None:
    """Raises MediaError for float samples that are no sound."""
    largest = float(np.abs(samples).max(initial=0.0))  # NaN where one of them is
    if not np.isfinite(largest):
        raise MediaError("the sound has samples that are not finite numbers (NaN or infinite)")
    if largest > LARGEST:
        raise MediaError(
            f"the sound's float samples reach {largest:g}, but full volume is 1: divide them, or "
            "give them as int16"
        )
