"""Reads adapter_config.json of a PEFT folder: what of it is served, has no effect on answers, or is
refused by its name."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.system.guarding.expressions import PLAIN, matches
from mmdeploy_llm.system.guarding.folder_files import (
    ADAPTER_CONFIG,
    fault,
    read_object,
    shown,
    validated,
)

ALL_LINEAR = "all-linear"

Rank = Annotated[int, Field(ge=1, strict=True)]
MAX_ALPHA = 2**30  # what is larger makes every answer infinite
Alpha = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=-MAX_ALPHA, le=MAX_ALPHA)]
Names = list[StrictStr]
Tokens = list[Annotated[int, Field(ge=0, strict=True)]]

# Settings of training, and of where the adapter comes from.
WITHOUT_EFFECT = {
    *("auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "inference_mode"),
    *("lora_dropout", "loftq_config", "lora_ga_config", "megatron_core", "merge_weights"),
    *("peft_version", "qalora_group_size", "revision", "runtime_config", "task_type"),
    *("velora_config", "lora_dtype", "lorap_emb_lr", "lorap_lr_ratio"),  # the last are ms-swift's
}
# Where these are set: what they are, and advice.
REFUSED = {
    "alora_invocation_tokens": "an activated LoRA, which changes a prompt from a text on",
    "alora_invocation_string": "an activated LoRA, which changes a prompt from a text on",
    "arrow_config": "routing between adapters",
    "enable_lora": "a fused LoRA of PEFT's first versions; save it with a newer one",
    "kasa_config": "KaSA, which changes the weights of the model",
    "layer_replication": "a model with repeated layers; merge it with PEFT",
    "megatron_config": "an adapter of Megatron's layers",
    "monteclora_config": "MonteCLoRA, which draws its weights",
    "use_bdlora": "BD-LoRA, whose matrices are block-diagonal",
    "use_qalora": "QA-LoRA, which pools its inputs; merge it with PEFT",
}
# Ways to begin the training that change the weights of the model too.
CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")
PLAIN_INITS = ("gaussian", "orthogonal", "eva", "mica")


class LoraConfig(BaseModel):
    """The settings of a LoRA that its answers depend on, named as PEFT's LoraConfig has them."""

    model_config = ConfigDict(extra="allow", frozen=True)

    peft_type: StrictStr
    r: Rank
    lora_alpha: Alpha
    use_rslora: StrictBool = False
    rank_pattern: dict[StrictStr, Rank] | None = None
    alpha_pattern: dict[StrictStr, Alpha] | None = None
    target_modules: Names | StrictStr | None = None
    exclude_modules: Names | StrictStr | None = None
    layers_to_transform: Tokens | Annotated[int, Field(strict=True)] | None = None
    layers_pattern: Names | StrictStr | None = None
    target_parameters: Names | None = None
    modules_to_save: Names | None = None
    bias: Literal["none", "all", "lora_only"] = "none"
    lora_bias: StrictBool = False
    use_dora: StrictBool = False
    fan_in_fan_out: StrictBool = False
    trainable_token_indices: Tokens | dict[StrictStr, Tokens] | None = None
    ensure_weight_tying: StrictBool = False
    init_lora_weights: StrictBool | StrictStr = True

    def scales(self, paths: Sequence[str]) -> Mapping[str, tuple[int, float]]:
        """Returns rank and scale of the changes of `paths`."""
        ranks = _by_pattern(self.rank_pattern or {}, paths, self.r)
        alphas = _by_pattern(self.alpha_pattern or {}, paths, self.lora_alpha)
        return {
            path: (rank, alpha / (math.sqrt(rank) if self.use_rslora else rank))
            for path, rank, alpha in zip(paths, map(int, ranks), alphas, strict=True)
        }

    def targeted(self, paths: Sequence[str]) -> Sequence[bool]:
        """Returns which of the modules the adapter changes, as PEFT decides it."""
        excluded = _chosen(self.exclude_modules, paths)
        is_any = self.target_modules is None and not self.target_parameters  # PEFT knows by family
        if is_any or self.target_modules == ALL_LINEAR:
            return [not own for own in excluded]
        chosen = _chosen(self.target_modules, paths)
        inside = [True] * len(paths)
        if isinstance(self.target_modules, list) and self.layers_to_transform not in (None, []):
            inside = self._in_layers(paths)
        return [
            is_in and own and not out
            for is_in, own, out in zip(inside, chosen, excluded, strict=True)
        ]

    def _in_layers(self, paths: Sequence[str]) -> list[bool]:
        layers = self.layers_to_transform
        allowed = layers if isinstance(layers, list) else [layers]
        names = (
            [self.layers_pattern]
            if isinstance(self.layers_pattern, str)
            else (self.layers_pattern or [])
        )
        for name in names:
            if not PLAIN.fullmatch(name):
                raise fault(
                    ADAPTER_CONFIG, "layers_pattern", f"is {shown(name)}", "names such as layers"
                )
        # The first number is the layer's, a later one perhaps an expert's.
        number = r"\.(\d{1,9})\."  # Python reads no number of thousands of digits
        forms = [rf"(?:^|.*?\.){name}{number}" for name in names] or [rf".*?\.[^.]*{number}"]
        found = [[re.match(form, path) for form in forms] for path in paths]
        firsts = [next((int(own[1]) for own in row if own), None) for row in found]
        return [first in allowed for first in firsts]


def read_config(folder: Path) -> LoraConfig:
    """Returns the config of the adapter in `folder`. Raises CheckpointError for one that cannot be
    served."""
    values: dict[str, Any] = read_object(folder / ADAPTER_CONFIG)
    if not values:
        raise CheckpointError(
            f"{folder} has no {ADAPTER_CONFIG}: it is not the folder of a PEFT adapter"
        )
    kind = values.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(
            f"peft_type in {ADAPTER_CONFIG} is {shown(kind)}; only LORA is served. Merge the "
            "adapter into its model with PEFT"
        )
    for key, meaning in REFUSED.items():
        if values.get(key) not in (None, False, [], {}):
            raise CheckpointError(
                f"{key} in {ADAPTER_CONFIG} says that this is {meaning}: not served"
            )
    unknown = [
        key
        for key, value in values.items()
        if key not in LoraConfig.model_fields
        and key not in WITHOUT_EFFECT | REFUSED.keys()
        and value not in (None, False, [], {})
    ]
    if unknown:
        raise fault(
            ADAPTER_CONFIG, unknown[0], f"is {shown(values[unknown[0]])}", "keys of PEFT 0.21"
        )
    given = {key: value for key, value in values.items() if value is not None}
    config = validated(LoraConfig, ADAPTER_CONFIG, given)
    _check_init(config.init_lora_weights)
    return config


def _check_init(init: bool | str) -> None:
    name = str(init).lower()
    if name.startswith(CHANGING_INITS):
        raise CheckpointError(
            f"init_lora_weights in {ADAPTER_CONFIG} is {shown(init)}, which changed the weights of "
            "the model too. Save the adapter with path_initial_model_for_weight_conversion, which "
            "makes a plain LoRA of it"
        )
    if not isinstance(init, bool) and name not in PLAIN_INITS:
        raise fault(
            ADAPTER_CONFIG, "init_lora_weights", f"is {shown(init)}", ", ".join(PLAIN_INITS)
        )


def _by_pattern(
    values: Mapping[str, float], paths: Sequence[str], default: float
) -> Sequence[float]:
    """Returns the value of the first pattern that matches the end of each path, else `default`."""
    found = matches(list(values), paths, at_end=True) if values else []
    return [
        next((value for value, own in zip(values.values(), column, strict=True) if own), default)
        for column in (zip(*found, strict=True) if found else [()] * len(paths))
    ]


def _chosen(names: Sequence[str] | str | None, paths: Sequence[str]) -> Sequence[bool]:
    """Returns which paths an expression matches, or end in a name of a list."""
    if isinstance(names, str):
        return matches([names], paths)[0]
    return [
        any(path == name or path.endswith(f".{name}") for name in names or ()) for path in paths
    ]


def is_saved(name: str, path: str) -> bool:
    """Whether the parameter `path` lies in the module `name` of modules_to_save."""
    return re.search(rf"(?:^|\.){re.escape(name)}\.", path) is not None
