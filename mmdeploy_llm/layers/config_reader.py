"""ConfigReader: reads transformers' config by the names that families give to one value, and
refuses what nobody has read."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from mmdeploy_llm.errors import ModelNotSupportedError

# Keys that change nothing of what a model computes when it generates.
WITHOUT_EFFECT = re.compile(
    r"dropout|_pdrop$|dropout_p$|layerdrop|initializer|^init_std$|_token_id$|^use_cache$|loss|"
    r"^output_router_logits$|^pretraining_tp$|^summary_|^max_position_embeddings$|classifier|jitter|"
    r"^num_logits_to_keep$|^original_max_position_embeddings$"
)
# What other keys are made of when a config is built: these are then without effect.
MADE_OF = {
    "layer_types": (
        "use_sliding_window",
        "max_window_layers",
        "sliding_window_pattern",
        "_sliding_window_pattern",
        "global_attn_every_n_layers",
    ),
    "sliding_window": ("use_sliding_window",),
    "rope_parameters": ("rope_theta", "rope_scaling", "partial_rotary_factor", "default_theta"),
    "no_rope_layers": ("no_rope_layer_interval",),
}


DECLARED = "_declared_keys"  # of the class of what stands in for a config


class ConfigReader:
    """Reads a config and remembers which keys were read. It is the only writer of that set."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self._declared = declared_keys(config)
        self._names = getattr(config, "attribute_map", None) or {}
        self._read: set[str] = set()

    def first(self, *keys: str, default: Any = None) -> Any:
        """Returns the value of the first of these keys that the config has and that is not None.
        All of them count as read."""
        for key in keys:
            self._read |= {key, self._names.get(key, key), *MADE_OF.get(key, ())}
        values = (getattr(self.config, key, None) for key in keys)
        return next((value for value in values if value is not None), default)

    def option(self, *keys: str, default: Any = None) -> Any:
        """Returns the same, of those keys only that the config's class declares: what else a
        config.json says, transformers' model does not read."""
        found = [key for key in keys if self.declares(key)]
        return self.first(*found, default=default) if found else default

    def declares(self, key: str) -> bool:
        """Whether the config's class has this key."""
        return self._names.get(key, key) in self._declared

    def name(self, keys: Sequence[str]) -> str | None:
        """Returns the first of these keys whose value is not None."""
        return next((key for key in keys if getattr(self.config, key, None) is not None), None)

    def unread(self, own: Collection[str]) -> dict[str, Any]:
        """Returns the keys that the config's class declares, whose values switch something on, and
        that neither this reader nor the family (`own`) has read."""
        values = {key: getattr(self.config, key, None) for key in self._declared}
        return {
            key: value
            for key, value in sorted(values.items())
            if key not in self._read and key not in own and _is_on(value)
            if not WITHOUT_EFFECT.search(key)
        }

    def refuse_unread(self, own: Collection[str]) -> None:
        """Raises ModelNotSupportedError that names the unread keys."""
        unread = self.unread(own)
        if unread:
            shown = ", ".join(f"{key} = {value!r}" for key, value in unread.items())
            raise ModelNotSupportedError(
                f"the config of this {self.config.model_type} model has {shown}: the standard "
                "decoder does not read it. A family that implements it names the key in own=(...) "
                "of standard_decoder"
            )


def declared_keys(config: Any) -> set[str]:
    """Returns the keys that transformers' model can read: those that the class of the config
    declares. A class that declares none, or is not transformers', has those of the object."""
    known = getattr(type(config), DECLARED, None)
    if known is not None:
        return {*known}
    from transformers import PreTrainedConfig

    keys = {each.name for each in fields(config)} if is_dataclass(config) else set()
    if not type(config).__module__.startswith("transformers."):
        keys |= {key for key in vars(config) if not key.startswith("_")}
    shared = {each.name for each in fields(PreTrainedConfig)} | {*vars(PreTrainedConfig())}
    return keys - shared - {"model_type", "architectures", "attribute_map", "torch_dtype"}


def _is_on(value: Any) -> bool:
    """Whether a value is other than none, false, zero or empty."""
    return value is not None and value is not False and value not in (0, "", [], {}, ())
