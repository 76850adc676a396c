"""Says what is asked for a vector of each item of a batch."""

from __future__ import annotations

from dataclasses import replace
from typing import cast, get_args

from mmdeploy_llm.batch.questions.asks import Asks
from mmdeploy_llm.client.embedding import wanted_vector
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.values.pooling_request import Pooling, TooLong


def vector_asks(
    *,
    dimensions: int | None = None,
    normalize: bool | None = None,
    instruction: str | None = None,
    pooling: str | None = None,
    too_long: str = "error",
) -> Asks:
    """Returns what is asked for vectors. pooling: see PoolingRequest, or "tokens". Raises
    ConfigError."""
    known = (*get_args(Pooling), "tokens")
    if pooling not in (None, *known):
        raise ConfigError(f"pooling must be one of {', '.join(known)}, got {pooling!r:.40}")
    if dimensions is not None and dimensions < 1:
        raise ConfigError(f"dimensions must be at least 1, got {dimensions}")
    if too_long not in get_args(TooLong):
        names = ", ".join(get_args(TooLong))
        raise ConfigError(f"too_long must be one of {names}, got {too_long!r:.40}")
    wanted = wanted_vector(dimensions, normalize, instruction, pooling, cast(TooLong, too_long))
    return Asks(wanted=replace(wanted, is_document=True))
