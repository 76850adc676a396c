"""Reads a quantised file as a model sees it."""

from contextlib import ExitStack

import torch

from mmdeploy_llm.weights.files import SafetensorsFile
from mmdeploy_llm.weights.quantized.reading import QuantizedFile, readable_files


def tensors_seen(path, config, plugins=None, *, files=None, coded=False):
    """Returns all tensors that a model with this config would read, by key. files: instead of that
    at `path`. coded: also reads what may stay in few bits so."""
    found = {}
    with ExitStack() as stack:
        files = [stack.enter_context(SafetensorsFile(path))] if files is None else files
        for source in readable_files(files, config, plugins):
            for key, entry in source.entries.items():
                if coded and isinstance(source, QuantizedFile):
                    source.read_coded(key)
                out = torch.empty(entry.shape, dtype=entry.dtype)
                source.read_into(key, out, first_value=0, transpose=False)
                assert key not in found
                found[key] = out
    return found
