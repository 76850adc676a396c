"""Handles rotary embeddings whose frequencies depend on the length of the sequence.

A step holds tokens of many sequences, and the length of one must not set another's frequencies.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .interface import Step, refused

LONG, DYNAMIC = "longrope", "dynamic"


def check(name: str, decoder: nn.Module) -> int | None:
    """Returns the first position of a sequence that switches frequencies, None without one.

    Raises ModelNotSupportedError for frequencies that change with every length.
    """
    for path, module in decoder.named_modules():
        kinds = _kinds(module)
        if DYNAMIC in kinds and isinstance(module.rope_type, str):
            return int(module.config.max_position_embeddings)  # constant up to there
        if any(DYNAMIC in kind for kind in kinds):
            what = f"{path} ({type(module).__name__})"
            raise refused(name, what, "changes all frequencies with the length of the sequence")
        if LONG in kinds:
            config: Any = module.config
            return int(config.rope_parameters["original_max_position_embeddings"])
    return None


def follow(name: str, decoder: nn.Module, step: Step) -> int | None:
    """Makes each token of a step use the frequencies for the length of its own sequence. Returns
    the position from which they change, as `check` does; None where they never change, or where a
    module would not compute what transformers does: then its sequences must stay short."""
    last = check(name, decoder)
    modules: list[Any] = [module for module in decoder.modules() if LONG in _kinds(module)]
    if last is None or not modules or not all(_reads_buffer(module, last) for module in modules):
        return None
    for module in modules:
        module.forward = partial(_forward_by_length, module, _long_frequencies(module, last), step)
    return last


def _forward_by_length(
    module: Any, long: Tensor, step: Step, x: Tensor, position_ids: Tensor
) -> tuple[Tensor, ...]:
    """Returns the cosines and sines [1, T, channels] of each token's own frequencies."""
    forward = type(module).forward
    short: tuple[Tensor, ...] = forward(module, x, position_ids)
    if step.is_long is None:
        return short
    is_long = step.is_long.unsqueeze(-1)
    with _frequencies(module, long):
        pairs = zip(forward(module, x, position_ids), short, strict=True)
        return tuple(torch.where(is_long, of_long, of_short) for of_long, of_short in pairs)


def _reads_buffer(module: Any, last: int) -> bool:
    """Whether a module that is given its frequencies as a buffer computes what it computes by
    itself, for short sequences and for long ones, whatever other positions are in the step."""
    short = getattr(module, "inv_freq", None)
    if not isinstance(short, Tensor) or module.rope_type != LONG:
        return False
    short, x = short.clone(), torch.zeros(1, 1, 1, device=short.device)
    positions = torch.tensor([[0, 1, last - 1, last, last + 1]], device=short.device)
    with torch.inference_mode():
        of_short, of_long = module(x, positions[:, :3]), module(x, positions)
        module.inv_freq.copy_(short)
        with fixed(module):
            ours = module(x, positions)
            with _frequencies(module, _long_frequencies(module, last)):
                ours_of_long = module(x, positions)
    pairs = [*zip(of_long, ours_of_long, strict=True), *zip(of_short, ours, strict=True)]
    return all(torch.equal(own, found[:, : own.shape[1]]) for own, found in pairs)


def _long_frequencies(module: Any, last: int) -> Tensor:
    """Returns the frequencies of sequences of more than `last` tokens, [channels / 2] float32."""
    device = module.inv_freq.device
    found: Tensor = ROPE_INIT_FUNCTIONS[LONG](module.config, device, seq_len=last + 1)[0]
    return found


@contextmanager
def _frequencies(module: Any, values: Tensor) -> Iterator[None]:
    """Gives a module other frequencies while the block runs."""
    before, module.inv_freq = module.inv_freq, values
    try:
        yield
    finally:
        module.inv_freq = before


def fix(decoder: nn.Module) -> None:
    """Fixes the frequencies of short sequences for good: positions no longer change them."""
    for module in decoder.modules():
        if LONG in _kinds(module):
            module.rope_type = "fixed"  # type: ignore[assignment]


@contextmanager
def fixed(decoder: nn.Module) -> Iterator[None]:
    """Fixes the frequencies as `fix` does, while the block runs."""
    changed = [module for module in decoder.modules() if LONG in _kinds(module)]
    for module in changed:
        module.rope_type = "fixed"  # type: ignore[assignment]
    try:
        yield
    finally:
        for module in changed:
            module.rope_type = LONG  # type: ignore[assignment]


def _kinds(module: nn.Module) -> list[str]:
    kind = getattr(module, "rope_type", None)
    if isinstance(kind, dict):
        return [str(value) for value in kind.values()]
    return [kind] if isinstance(kind, str) else []
