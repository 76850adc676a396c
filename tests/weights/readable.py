"""Reads a quantised file as a model sees it."""

import torch

from mmdeploy_llm.weights.files import SafetensorsFile
from mmdeploy_llm.weights.quantized import readable_files


def tensors_seen(path, config):
    """Returns all tensors that a model with this config would read, by key."""
    found = {}
    with SafetensorsFile(path) as file:
        for source in readable_files([file], config):
            for key, entry in source.entries.items():
                out = torch.empty(entry.shape, dtype=entry.dtype)
                source.read_into(key, out, first_value=0, transpose=False)
                assert key not in found
                found[key] = out
    return found
