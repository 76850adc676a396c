"""Says what is asked for a vector of each item of a batch."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from mmdeploy_llm.batch.questions.asks import Asks
from mmdeploy_llm.client.embedding import wanted_vector
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.values.pooling_request import Pooling


def vector_asks(
    *,
    dimensions: int | None = None,
    normalize: bool | None = None,
    instruction: str | None = None,
    pooling: str | None = None,
) -> Asks:
    """Returns what is asked for vectors. pooling: see PoolingRequest, or "tokens". Raises
    ConfigError."""
    known = (*get_args(Pooling), "tokens")
    if pooling not in (None, *known):
        raise ConfigError(f"pooling must be one of {', '.join(known)}, got {pooling!r:.40}")
    if dimensions is not None and dimensions < 1:
        raise ConfigError(f"dimensions must be at least 1, got {dimensions}")
    wanted = wanted_vector(dimensions, normalize, instruction, pooling)
    return Asks(wanted=replace(wanted, is_document=True))
