"""Reads sounds that are given as arrays, in the forms of datasets, torchcodec and transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmdeploy_llm.errors import MediaError, MediaLimitError, UnsupportedMediaError

from .mixing import MAX_CHANNELS, Mixer
from .options import checked_rate

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


VALUES = ("array", "raw", "data")  # keys of a dict that holds samples
RATES = ("sampling_rate", "sample_rate", "rate")
SCALES = {"int16": 2.0**15, "int32": 2.0**31, "uint8": 2.0**7}
FORMS = (
    "give a file's bytes, a path or URL, an array with its option sampling_rate, (array, rate) or "
    "{'array': ..., 'sampling_rate': ...}"
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Array:
    """Samples of one channel, float32, and their rate; None: the sound's options must say it.
    notes: see OpenSound."""

    samples: np.ndarray
    rate: int | None
    notes: tuple[str, ...] = ()


def as_array(source: Any) -> Array:
    """Reads an array in any form. Raises MediaError, UnsupportedMediaError and MediaLimitError."""
    if callable(getattr(source, "get_all_samples", None)):  # torchcodec, and datasets' columns
        source = source.get_all_samples()
    if isinstance(source, Mapping):
        return _of_mapping(source)
    if isinstance(source, tuple) and len(source) == 2:
        return _with_rate(*source)
    data, rate = getattr(source, "data", None), getattr(source, "sample_rate", None)
    if rate is not None and not isinstance(source, np.ndarray) and _is_array(data):
        return _with_rate(data, rate)
    if not _is_array(source):
        raise UnsupportedMediaError(
            f"a sound cannot be read from an object of type {type(source).__name__}; {FORMS}"
        )
    return _with_rate(source, None)


def _of_mapping(source: Mapping[str, Any]) -> Array:
    name = next((name for name in VALUES if source.get(name) is not None), None)
    rate = next((source[name] for name in RATES if source.get(name) is not None), None)
    if name is None or rate is None:
        raise UnsupportedMediaError(
            f"a sound as a dict needs 'array' and 'sampling_rate', found "
            f"{', '.join(map(repr, source)) or 'nothing'}; {FORMS}"
        )
    return _with_rate(source[name], rate)


def _with_rate(values: Any, rate: Any) -> Array:
    """Takes (array, rate); some write (rate, array), as scipy reads them."""
    if _is_array(rate) and not _is_array(values):
        values, rate = rate, values
    mixer = Mixer()
    samples = _mono(values, mixer)
    own = None if rate is None else checked_rate(rate)
    return Array(samples=samples, rate=own, notes=tuple(mixer.notes()))


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype") and len(value.shape) > 0


def _mono(values: Any, mixer: Mixer) -> np.ndarray:
    """Returns one channel, float32: whole numbers divided by their largest, channels mixed.
    The shorter axis holds the channels."""
    array = _as_numpy(values)
    if array.ndim > 2 or array.ndim == 0:
        raise UnsupportedMediaError(
            f"a sound as an array has the shape [samples] or [channels, samples], got "
            f"{list(array.shape)}"
        )
    if not array.size:
        raise no_samples()
    floats = _as_floats(array)
    if floats.ndim == 1:
        return floats
    channels, samples = sorted(floats.shape)
    if channels > MAX_CHANNELS or (channels == samples and channels > 1):
        raise MediaLimitError(
            f"the sound's array has the shape {list(array.shape)}, of which neither axis can be "
            f"its channels, at most {MAX_CHANNELS}; give [samples], or [channels, samples]"
        )
    columns = floats.T if floats.shape[0] == samples else floats
    return columns[0].copy() if channels == 1 else mixer.mixed(columns)


def _as_numpy(values: Any) -> np.ndarray:
    if isinstance(values, (list, tuple)):  # transformers' pipelines and JSON have lists
        try:
            return np.asarray(values, dtype=np.float32)
        except (TypeError, ValueError) as error:
            raise UnsupportedMediaError(
                f"a sound as a list must hold numbers ({type(error).__name__}); {FORMS}"
            ) from None
    if not isinstance(values, np.ndarray) and hasattr(values, "detach"):
        values = values.detach().cpu()
        if values.dtype.is_floating_point:  # numpy has no bfloat16
            values = values.float()
        values = values.numpy()
    return np.asarray(values)


def _as_floats(array: np.ndarray) -> np.ndarray:
    if array.dtype.kind == "f":
        with np.errstate(over="ignore"):  # what float32 cannot hold is infinite, and refused
            floats = array.astype(np.float32)
        check_values(floats)
        return floats
    scale = SCALES.get(array.dtype.name)
    if scale is None:
        raise UnsupportedMediaError(
            f"a sound's array holds {array.dtype.name}; give float samples from -1 to 1, or "
            f"{', '.join(SCALES)}"
        )
    middle = np.float32(128.0 if array.dtype == np.uint8 else 0.0)
    return (array.astype(np.float32) - middle) / np.float32(scale)
