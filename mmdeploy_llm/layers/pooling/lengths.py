"""Gives vectors their length: normalised, cut to their first dimensions, and the mean of those of
several windows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mmdeploy_llm.values.pooling_request import PoolingRequest

MIN_NORM = 1e-12
Floats = NDArray[np.float32]


def normalized(value: Floats) -> Floats:
    """Returns a vector [size], or one for each token [tokens, size], of length 1."""
    norms = np.linalg.norm(value, axis=-1, keepdims=True)
    found: Floats = value / np.maximum(norms, MIN_NORM).astype(np.float32)
    return found


def shaped(value: Floats, wanted: PoolingRequest) -> Floats:
    """Returns a vector, or one for each token, cut and normalised as wanted."""
    if wanted.normalize and wanted.is_cut_last:
        value = normalized(value)
    cut = np.ascontiguousarray(value[..., : wanted.dimensions])
    return normalized(cut) if wanted.normalize and not wanted.is_cut_last else cut


def of_windows(values: Sequence[Floats], counts: Sequence[int], wanted: PoolingRequest) -> Floats:
    """Returns the vector of a text that was read in windows: the mean of theirs, each as important
    as it has tokens; of vectors for each token all of them. counts: tokens of each window."""
    if wanted.what == "token_vectors":
        return shaped(np.concatenate(values), wanted)
    mean = np.average(np.stack(values).astype(np.float64), axis=0, weights=counts)
    return shaped(mean.astype(np.float32), wanted)
