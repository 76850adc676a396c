"""Describes the rotary embedding of a GGUF model as transformers' rope_parameters."""

from __future__ import annotations

import math
from typing import Any

import torch

from mmdeploy_llm.errors import CheckpointError

from .header import Header
from .metadata import MAX_HEAD_DIM, Metadata
from .rows import TensorRows

FREQUENCY_FACTORS = "rope_freqs.weight"
LONG_FACTORS = "rope_factors_long.weight"
# Of rope_type "llama3": the converter writes the factors that follow, and not these numbers.
LOW_FACTOR, HIGH_FACTOR, ORIGINAL_POSITIONS = 1.0, 4.0, 8192
MAX_FACTORS = 65_536


def rope_parameters(
    metadata: Metadata, head_dim: int, *, theta: float = 10_000.0
) -> dict[str, Any]:
    """Returns rope_parameters, without the factors of "longrope". theta: where the file states
    none.

    Raises CheckpointError for scaling of another kind than "linear", "yarn" and "llama3".
    """
    values: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": metadata.number("rope.freq_base", theta),
    }
    rotary_dim = metadata.whole("rope.dimension_count", head_dim, high=MAX_HEAD_DIM)
    if rotary_dim != head_dim:
        values["partial_rotary_factor"] = rotary_dim / head_dim
    kind = metadata.text("rope.scaling.type", "none")
    factor = metadata.number(
        "rope.scaling.factor", metadata.number("rope.scale_linear", 1.0, low=0), low=0
    )
    if kind in ("none", "linear") and factor not in (0.0, 1.0):
        values |= {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        original = metadata.whole(
            "rope.scaling.original_context_length", metadata.whole("context_length")
        )
        values |= {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
        }
    elif kind not in ("none", "linear", "longrope" if LONG_FACTORS in metadata.tensors else "none"):
        raise metadata.wrong("rope.scaling.type", "none, linear, yarn")
    if FREQUENCY_FACTORS in metadata.tensors:
        values |= _by_factors(metadata, values["rope_theta"], rotary_dim)
    return values


def _by_factors(metadata: Metadata, theta: float, rotary_dim: int) -> dict[str, Any]:
    """Returns the fields of rope_type "llama3", if they yield the factors that the file holds.

    Raises CheckpointError for others: then config.json is needed.
    """
    stored = factors_of(metadata.header, FREQUENCY_FACTORS)
    factor = round(max(stored), 3)
    wanted = [_factor(theta ** (-2 * i / rotary_dim), factor) for i in range(rotary_dim // 2)]
    is_same = len(stored) == len(wanted) and all(
        math.isclose(own, other, rel_tol=1e-3) for own, other in zip(stored, wanted, strict=True)
    )
    if not is_same:
        raise CheckpointError(
            f"{FREQUENCY_FACTORS} of {metadata.header.paths[0]} scales frequencies in a way that "
            'is not that of rope_type "llama3"; put the model\'s config.json into the folder, '
            "which says how"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LOW_FACTOR,
        "high_freq_factor": HIGH_FACTOR,
        "original_max_position_embeddings": ORIGINAL_POSITIONS,
    }


def _factor(frequency: float, factor: float) -> float:
    """Returns by what a frequency is divided: 1 for short waves, `factor` for long ones, and
    something between them in between."""
    length = 2 * math.pi / frequency
    if length < ORIGINAL_POSITIONS / HIGH_FACTOR:
        return 1.0
    if length > ORIGINAL_POSITIONS / LOW_FACTOR:
        return factor
    # 1 / factor is interpolated linearly, by how often the wave fits the original positions.
    share = (ORIGINAL_POSITIONS / length - LOW_FACTOR) / (HIGH_FACTOR - LOW_FACTOR)
    return 1 / ((1 - share) / factor + share)


def rope_sections(metadata: Metadata) -> dict[str, Any]:
    """Returns the channel pairs of time, height and width, where the file states them."""
    found = [each for each in metadata.values("rope.dimension_sections") or () if each]
    return {"mrope_section": found} if found else {}


def factors_of(header: Header, name: str) -> list[float]:
    """Reads a small float tensor. Raises CheckpointError unless it is one of positive numbers."""
    tensor = header.tensors.get(name)
    if tensor is None or tensor.type.dtype is None or math.prod(tensor.shape) > MAX_FACTORS:
        found = "missing" if tensor is None else f"{tensor.type.name} {list(tensor.shape)}"
        raise CheckpointError(
            f"the tensor {name} of {header.paths[0]} is {found}; it must hold up to {MAX_FACTORS} "
            "floats"
        )
    with TensorRows(header.paths) as rows:
        values = rows.read(tensor, 0, math.prod(tensor.shape[:-1])).flatten().to(torch.float64)
    if not bool(((values > 0) & values.isfinite()).all()):
        raise CheckpointError(f"the tensor {name} of {header.paths[0]} must hold positive numbers")
    found_values: list[float] = values.tolist()
    return found_values
