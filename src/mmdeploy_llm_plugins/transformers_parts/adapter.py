"""Merges the LoRA adapter that some checkpoints with sounds have beside their weights.

transformers applies such an adapter to prompts with sounds only; merged, it holds for all prompts,
which a warning says: rows of one step cannot have different weights.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.hooks import Checkpoint
from mmdeploy_llm.weights.map import Target

logger = logging.getLogger(__name__)

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
KEY = re.compile(r"^base_model\.model\.(.+)\.lora_([AB])\.(?:default\.)?weight$")
UNKNOWN = ("use_dora", "fan_in_fan_out", "modules_to_save", "rank_pattern", "alpha_pattern")


def merge_adapter(
    model: nn.Module, checkpoint: Checkpoint, targets: Callable[[str], Sequence[Target] | None]
) -> None:
    """Adds the adapter in the checkpoint's folder to the loaded weights of `model`; without one
    warns that the model was made for it. targets: see weights.map.

    Raises CheckpointError for an adapter that cannot be merged.
    """
    path = checkpoint.folder / WEIGHTS
    if not path.is_file():
        logger.warning(
            "config.json says that the model has an adapter for sounds, but the folder "
            "has no %s: answers about sounds will be worse",
            WEIGHTS,
        )
        return
    scale = _scale(checkpoint.read_json(CONFIG))
    halves: dict[str, dict[str, Tensor]] = {}
    with safe_open(path, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118 - not a mapping
            found = KEY.match(key)
            if found is None:
                raise CheckpointError(f"{WEIGHTS} has {key}, which is not known here")
            halves.setdefault(found[1], {})[found[2]] = file.get_tensor(key)
    params = dict(model.named_parameters())
    for name, half in halves.items():
        known = targets(f"{name}.weight") or ()
        param = params.get(known[0].name) if len(known) == 1 else None
        if param is None or set(half) != {"A", "B"} or known[0].rows is not None:
            raise CheckpointError(f"{WEIGHTS} changes {name}, which this model does not have")
        change = (half["B"].float() @ half["A"].float()) * scale
        if change.shape != param.shape or not param.is_floating_point():
            raise CheckpointError(
                f"{WEIGHTS} changes {name} of the shape {tuple(change.shape)}, which is loaded as "
                f"{tuple(param.shape)}, {param.dtype}; load the model whole and in floats, or "
                "merge the adapter first"
            )
        param.data += change.to(param.device, param.dtype)
    logger.warning(
        "%s is merged: prompts without sounds use it too, which transformers leaves out for them",
        WEIGHTS,
    )


def _scale(config: Mapping[str, Any]) -> float:
    """Returns the factor of the adapter. Raises CheckpointError for kinds that are not known."""
    wrong = [name for name in UNKNOWN if config.get(name)]
    if config.get("peft_type") != "LORA" or wrong or config.get("bias", "none") != "none":
        raise CheckpointError(
            f"{CONFIG}: only a plain LoRA can be merged, found "
            f"{', '.join(wrong) or config.get('peft_type')}; merge the adapter first"
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, (int, float)):
        raise CheckpointError(f"{CONFIG} needs r and lora_alpha, found {rank!r} and {alpha!r}")
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)
