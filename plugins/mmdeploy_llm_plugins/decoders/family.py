"""Family: the row of a family in families.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mmdeploy_llm.layers import RotaryConfig

Rename = tuple[str, str]
Options = Mapping[str, Any]


def _nothing(config: Any) -> Options:
    del config
    return {}


def _no_value(config: Any) -> None:
    del config


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family.

    options: fields of DecoderConfig that differ from what standard_decoder reads.
    more: those that depend on the config.
    own: keys of the config that `more` reads, or that its model never reads.
    rotary: of a config that says it otherwise than most, or has none; None: as it says.
    intermediate_size: of a config that does not say it, and None where it does.
    is_interleaved: whether rotary pairs are neighbours.
    has_fused_heads: whether the queries, the key and the value of each key head lie in turn in one
        matrix.
    renames, ignored: of weights; see WeightMap.
    """

    options: Options = field(default_factory=dict)
    more: Callable[[Any], Options] = _nothing
    own: Sequence[str] = ()
    rotary: Callable[[Any], RotaryConfig | None] = _no_value
    intermediate_size: Callable[[Any], int | None] = _no_value
    is_interleaved: bool = False
    has_fused_heads: bool = False
    renames: Sequence[Rename] = ()
    ignored: Sequence[str] = ()
