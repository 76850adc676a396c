"""Shows the tensors of whisper.cpp's files as the entries of transformers' checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.weights.other_files import (
    BlockFile,
    Header,
    StoredTensor,
    TensorSource,
    TensorType,
    readable_types,
)

# Read without the package gguf, which knows the others.
FLOATS: Mapping[int, TensorType] = {
    number: TensorType(name=name, number=number, block_size=1, block_bytes=size, dtype=dtype)
    for number, name, size, dtype in (
        (0, "F32", 4, torch.float32),
        (1, "F16", 2, torch.float16),
    )
}
# Whisper's names, as its authors gave them -> transformers', in this order.
RENAMES = (
    (r"\.blocks\.", ".layers."),
    (r"\.attn_ln\.", ".self_attn_layer_norm."),
    (r"\.cross_attn_ln\.", ".encoder_attn_layer_norm."),
    (r"\.mlp_ln\.", ".final_layer_norm."),
    (r"\.attn\.", ".self_attn."),
    (r"\.cross_attn\.", ".encoder_attn."),
    (r"\.query\.", ".q_proj."),
    (r"\.key\.", ".k_proj."),
    (r"\.value\.", ".v_proj."),
    (r"_attn\.out\.", "_attn.out_proj."),
    (r"\.mlp\.0\.", ".fc1."),
    (r"\.mlp\.2\.", ".fc2."),
    (r"\.ln_post\.", ".layer_norm."),
    (r"^decoder\.ln\.", "decoder.layer_norm."),
    (r"\.token_embedding\.", ".embed_tokens."),
    (r"\.positional_embedding$", ".embed_positions.weight"),
)


def wrong(path: Path, what: str) -> CheckpointError:
    """Returns the error for a file that is not as it must be."""
    return CheckpointError(f"{path} is no valid file of whisper.cpp: it {what}. Download it again")


def type_of(number: int, path: Path, name: str) -> TensorType:
    """Returns a type of ggml. Raises CheckpointError for one that cannot be read."""
    found = FLOATS.get(number) or readable_types().get(number)
    if found is None:
        raise CheckpointError(f"{name!a} in {path} is of type {number} of ggml, which is not read")
    return found


def open_weights(path: Path, tensors: Sequence[StoredTensor]) -> BlockFile:
    """Returns the weights of a file. Raises CheckpointError for names that become the same."""
    found: dict[str, TensorSource] = {}
    for one in tensors:
        key = one.name
        for pattern, new in RENAMES:
            key = re.sub(pattern, new, key)
        is_column = len(one.shape) == 2 and one.shape[1] == 1  # how biases of convolutions lie
        shape = one.shape[:1] if is_column else one.shape
        if f"model.{key}" in found:
            raise wrong(path, f"holds {key!a} twice")
        found[f"model.{key}"] = TensorSource(tensor=one, shape=shape)
    return BlockFile(Header(paths=(path,), values={}, tensors={}), found)
