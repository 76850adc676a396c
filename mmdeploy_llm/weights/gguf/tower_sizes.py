"""Reads what the metadata of an mmproj file state for vision towers of many kinds."""

from __future__ import annotations

from typing import Any

from mmdeploy_llm.errors import CheckpointError

from .metadata import MAX_LAYERS, Metadata

MAX_SIDE = 2**16  # pixels or patches
MAX_MERGE = 64


def side(metadata: Metadata, key: str) -> int:
    """Returns a number of pixels or of patches along a side."""
    return metadata.whole(f"vision.{key}", high=MAX_SIDE)


def tower_sizes(metadata: Metadata) -> tuple[int, int, int]:
    """Returns channels, layers and heads of a tower."""
    size = metadata.whole("vision.embedding_length")
    num_heads = metadata.whole("vision.attention.head_count", high=MAX_SIDE)
    if size % num_heads:
        raise metadata.wrong("vision.attention.head_count", f"a divisor of {size} channels")
    return size, metadata.whole("vision.block_count", high=MAX_LAYERS), num_heads


def merge_size(metadata: Metadata, key: str = "spatial_merge_size", default: int = 2) -> int:
    """Returns how many patches along a side become one token."""
    return metadata.whole(f"vision.{key}", default, high=MAX_MERGE)


def grid_image(metadata: Metadata) -> dict[str, Any]:
    """Returns the options of processors whose patches hold two frames."""
    return {
        "patch_size": side(metadata, "patch_size"),
        "merge_size": merge_size(metadata),
        "temporal_patch_size": 2,
    }


def mlp_size(metadata: Metadata, size: int) -> int:
    """Returns the channels within an MLP. Raises CheckpointError for a file whose names of its two
    matrices are swapped, as converters before 2025 wrote them."""
    inner, outer = metadata.shape("v.blk.0.ffn_up.weight", 2)
    if outer != size:
        raise CheckpointError(
            f"v.blk.0.ffn_up.weight of {metadata.header.paths[0]} reads {outer} channels, not "
            f"{size}: an old converter wrote the file; convert the model again with a current "
            "llama.cpp"
        )
    return inner


def check_activation(metadata: Metadata, wanted: str) -> str:
    """Returns the activation that the file states. Raises CheckpointError for another one."""
    names = {"use_gelu": "gelu", "use_silu": "silu"}
    stated = [
        name for key, name in names.items() if metadata.header.values.get(f"clip.{key}") is True
    ]
    found = stated[0] if len(stated) == 1 else "quick_gelu"
    if found != wanted or len(stated) > 1:
        raise CheckpointError(
            f"the vision tower in {metadata.header.paths[0]} has the activation "
            f"{' and '.join(stated) or found}; models of its kind have {wanted}. Convert the model "
            "again with a current llama.cpp"
        )
    return found
