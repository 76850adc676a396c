"""Describes a small config that has the options of a checkpoint's, for tests with random
weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmdeploy_llm.layers.config_reader import WITHOUT_EFFECT, declared_keys

NUM_LAYERS, NUM_HEADS = 4, 4
HEAD_DIM = 24  # not hidden / heads, so that a mistake shows
WINDOW = 7  # shorter than the prompts of tests
SIZES = frozenset(
    {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}
    | {"num_key_value_heads", "head_dim", "tie_word_embeddings"}
)


def small_fields(config: Any, head_dim: int = HEAD_DIM) -> dict[str, Any]:
    """Returns the fields of a text config's class in which a small config differs from tiny's usual
    ones: the checkpoint's options at small sizes. Lists with an entry for each layer keep one of
    each value."""
    declared = declared_keys(config)
    fields: dict[str, Any] = {"num_hidden_layers": NUM_LAYERS}
    heads = getattr(config, "num_attention_heads", None)
    if getattr(config, "num_key_value_heads", None) in (None, heads):
        fields["num_key_value_heads"] = NUM_HEADS
    if "head_dim" in declared and config.head_dim is not None:
        fields["head_dim"] = head_dim
    usual = _usual(config)
    names = getattr(config, "attribute_map", None) or {}
    mapped = {names[size] for size in SIZES if size in names}
    for key in sorted(declared - SIZES - mapped):
        value = getattr(config, key, None)
        if not WITHOUT_EFFECT.search(key) and value != usual.get(key):
            fields[key] = _small(key, value, config, fields.get("head_dim", 16))
    fields["tie_word_embeddings"] = bool(getattr(config, "tie_word_embeddings", False))
    return fields


def _usual(config: Any) -> Mapping[str, Any]:
    """Returns the defaults of the config's class, as a config has them that nobody has changed."""
    try:
        new = type(config)()
    except Exception:  # transformers' code: a class may need arguments
        return {}
    return {key: getattr(new, key, None) for key in declared_keys(new)}


def _small(key: str, value: Any, config: Any, head_dim: int) -> Any:
    if key == "sliding_window":
        return value and WINDOW
    if key == "rope_parameters":
        return _small_rope(value, head_dim)
    num_layers = getattr(config, "num_hidden_layers", None)
    if isinstance(value, list | tuple) and len(value) == num_layers:
        return one_of_each(value)
    return value


def one_of_each(values: Sequence[Any]) -> list[Any]:
    """Returns NUM_LAYERS of these, in their order, among them each value that occurs, if there is
    space."""
    firsts = {values.index(value) for value in dict.fromkeys(values)}
    others = [index for index in range(len(values)) if index not in firsts]
    chosen = sorted([*sorted(firsts), *others][:NUM_LAYERS])
    return [values[index] for index in chosen]


def _small_rope(rope: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """Returns rope parameters, whose factors for each pair of channels fit the small heads."""
    if any(isinstance(value, Mapping) for value in rope.values()):
        return {kind: _small_rope(value, head_dim) for kind, value in rope.items()}
    pairs = int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
    factors = [1.0 + index / 4 for index in range(pairs)]
    return {
        key: factors if isinstance(value, list) and key.endswith("_factor") else value
        for key, value in rope.items()
    }
