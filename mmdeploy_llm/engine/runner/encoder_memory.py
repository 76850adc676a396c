"""Sizes the encoder cache for the loaded model."""

from __future__ import annotations

import torch

from mmdeploy_llm.hooks import Model
from mmdeploy_llm.hooks.objects.model import cross_of, media_size
from mmdeploy_llm.system.portable.machine import free_ram
from mmdeploy_llm.values.options.runtime_config import RuntimeConfig

SHARE = 4  # of the free memory a quarter, at most, for what an encoder has written


def encoder_tokens(runtime: RuntimeConfig, model: Model) -> int:
    """Returns how many tokens of media the encoder cache holds.

    The options are resolved for rows of hidden_size; some models keep wider ones. Where layers
    attend to an encoder, an item is needed as long as its request runs: unless the user has said
    otherwise, there is room for one of each request, within the free memory.
    """
    found = max(1, runtime.encoder_cache_tokens * model.hidden_size // media_size(model))
    cross = cross_of(model)
    if cross is None or cross.longest is None or runtime.options.encoder_cache_memory is not None:
        return found
    bytes_each: int = cross.token_size * getattr(torch, runtime.dtype).itemsize
    fitting = _free(runtime.device) // SHARE // bytes_each
    return max(found, cross.longest, min(fitting, runtime.max_num_seqs * cross.longest))


def _free(device: str) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.startswith("cuda") else free_ram()
