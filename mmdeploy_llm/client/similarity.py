"""Compares vectors: of one query with those of a document."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mmdeploy_llm.layers.pooling.rules import Similarity

Floats = NDArray[np.float32]
MIN_NORM = 1e-12


def similarity(query: Floats, document: Floats, kind: Similarity) -> float:
    """Returns how alike two vectors are, larger for more alike; MaxSim of [tokens, size] each: for
    each token of the query the best one of the document, summed up. kind: of one vector each."""
    if query.ndim == 2:
        return float((query @ document.T).max(axis=1).sum())
    if kind == "euclidean":
        return -float(np.linalg.norm(query - document))
    if kind == "manhattan":
        return -float(np.abs(query - document).sum())
    product = float(query @ document)
    if kind == "dot":
        return product
    norms = float(np.linalg.norm(query)) * float(np.linalg.norm(document))
    return product / max(norms, MIN_NORM)
