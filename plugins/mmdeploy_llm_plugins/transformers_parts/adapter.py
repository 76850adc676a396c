"""Merges the LoRA adapter that some checkpoints with sounds have beside their weights.

transformers applies such an adapter to prompts with sounds only; merged, it holds for all prompts,
which a warning says: rows of one step cannot have different weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from torch import nn

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.hooks import Checkpoint
from mmdeploy_llm.layers.adapters import read_adapter
from mmdeploy_llm.weights.map import Target

logger = logging.getLogger(__name__)

WEIGHTS = "adapter_model.safetensors"


def merge_adapter(
    model: nn.Module, checkpoint: Checkpoint, targets: Callable[[str], Sequence[Target] | None]
) -> None:
    """Adds the adapter in the checkpoint's folder to the loaded weights of `model`; without one
    warns that the model was made for it. targets: see weights.map.

    Raises CheckpointError for an adapter that cannot be merged.
    """
    if not (checkpoint.folder / WEIGHTS).is_file():
        logger.warning(
            "config.json says that the model has an adapter for sounds, but the folder "
            "has no %s: answers about sounds will be worse",
            WEIGHTS,
        )
        return
    adapter = read_adapter(checkpoint.folder, is_of_model=True)
    if adapter.saved or adapter.embeddings or adapter.tokens:
        raise CheckpointError(f"{WEIGHTS} changes more than matrices; merge the adapter first")
    params = dict(model.named_parameters())
    for name, own in adapter.modules.items():
        known = targets(f"{name}.weight") or ()
        param = params.get(known[0].name) if len(known) == 1 else None
        if param is None or known[0].rows is not None or own.bias is not None:
            raise CheckpointError(f"{WEIGHTS} changes {name}, which this model does not have")
        if (len(own.b), own.a.shape[1]) != param.shape or not param.is_floating_point():
            raise CheckpointError(
                f"{WEIGHTS} changes {name} of the shape {(len(own.b), own.a.shape[1])}, which is "
                f"loaded as {tuple(param.shape)}, {param.dtype}; load the model whole and in "
                "floats, or merge the adapter first"
            )
        if own.magnitude is not None:
            raise CheckpointError(f"{WEIGHTS} is a DoRA; merge the adapter first")
        change = (own.b.float() @ own.a.float()) * own.scale
        param.data += change.to(param.device, param.dtype)
    logger.warning(
        "%s is merged: prompts without sounds use it too, which transformers leaves out for them",
        WEIGHTS,
    )
