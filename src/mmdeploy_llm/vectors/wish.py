"""Says what is asked for a vector of each item of a batch, and which outputs hold vectors."""

from __future__ import annotations

import os
from typing import get_args

from mmdeploy_llm.datasets.names import BUILT_IN_KINDS
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.hooks import KindTable
from mmdeploy_llm.opening.choose import format_of, stored_format
from mmdeploy_llm.questions.asks import Asks
from mmdeploy_llm.wanted import Pooling, Wanted

WITHOUT = ("csv", "openai")  # formats that hold no vectors


def vector_asks(
    *,
    dimensions: int | None = None,
    normalize: bool | None = None,
    instruction: str | None = None,
    pooling: str | None = None,
) -> Asks:
    """Returns what is asked for vectors. pooling: see Wanted, or "tokens". Raises ConfigError."""
    known = (*get_args(Pooling), "tokens")
    if pooling not in (None, *known):
        raise ConfigError(f"pooling must be one of {', '.join(known)}, got {pooling!r:.40}")
    if dimensions is not None and dimensions < 1:
        raise ConfigError(f"dimensions must be at least 1, got {dimensions}")
    is_many = pooling == "tokens"
    found = next((own for own in get_args(Pooling) if own == pooling), None)
    return Asks(
        wanted=Wanted(
            what="token_vectors" if is_many else None if pooling is None else "vector",
            pooling=found,
            normalize=normalize,
            dimensions=dimensions,
            instruction=instruction,
        )
    )


def check_output(
    output: str | os.PathLike[str], form: str | None, kinds: KindTable = BUILT_IN_KINDS
) -> None:
    """Raises ConfigError for an output that would hold no vectors."""
    name = os.fspath(output)
    if stored_format(name, form, kinds) is not None:
        return  # its plugin keeps whole records
    found = format_of(name, form, kinds)
    if found in WITHOUT:
        raise ConfigError(
            f"the format {found} holds no vectors; write NAME.parquet, NAME.npy (arrays that numpy "
            "maps) or NAME.jsonl"
        )
