"""Recordings: of the kernel calls of small decode steps, by the attention that they have and the
adapters of their rows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from mmdeploy_llm.forward import AttentionContext, ForwardInputs
from mmdeploy_llm.kernels import Kernels
from mmdeploy_llm.kernels.cpu import Recording

MAX_RECORDED_ROWS = 64  # larger steps spend little time between kernels


def frame_of(attn: AttentionContext) -> object | None:
    """Returns the `frame` of a FixedAttention, and None for another context. Each step asks, where
    `isinstance` with a protocol takes longer (30 microseconds) than a layer of a small model."""
    return getattr(attn, "frame", None)


def can_record(inputs: ForwardInputs) -> bool:
    """Whether the step is small and its inputs, all but token ids, positions and the adapters of
    its rows, keep their addresses: states do in steps of one token per sequence."""
    is_fixed = frame_of(inputs.attn) is not None
    states, adapters = inputs.states, inputs.adapters
    has_states = states is None or states.num_decode == len(states.query_lens)
    has_rows = adapters is None or adapters.frame is not None
    has_rows = has_rows and (inputs.cross is None or not inputs.cross.has_items)
    is_small = inputs.token_ids.shape[0] <= MAX_RECORDED_ROWS
    return is_fixed and has_states and has_rows and inputs.media_rows is None and is_small


class Recordings:
    """Recorded steps of one decoder, by the frame of their attention and that of their adapters.
    None stands for a step that could not be recorded."""

    def __init__(self) -> None:
        self._by_frame: WeakKeyDictionary[Any, dict[object, Recording | None]]
        self._by_frame = WeakKeyDictionary()

    def values(self) -> list[Recording | None]:
        """Returns all recordings."""
        return [own for known in self._by_frame.values() for own in known.values()]

    def run(
        self, inputs: ForwardInputs, kernels: Kernels, compute: Callable[[ForwardInputs], Tensor]
    ) -> Tensor:
        """Computes as `compute` does, by replaying the recording of an earlier step alike, if that
        could be recorded. can_record(inputs) must be True."""
        adapters = inputs.adapters
        changing = [inputs.token_ids, inputs.positions]  # memory differs between steps
        if inputs.is_long is not None:
            changing.append(inputs.is_long)
        if adapters is not None and adapters.slots is not None:
            changing.append(adapters.slots)
        key = None if adapters is None else adapters.frame
        known = self._by_frame.setdefault(frame_of(inputs.attn), {})
        if key not in known:

            def record(token_ids: Tensor, positions: Tensor, *rest: Tensor) -> Tensor:
                is_long = None if inputs.is_long is None else rest[0]
                own = replace(inputs, token_ids=token_ids, positions=positions, is_long=is_long)
                with nullcontext() if adapters is None else adapters.using(rest[-1]):
                    return compute(own)

            for other in [other for other in known if None not in (key, other)]:
                del known[other]  # of adapters at fewer matrices
            out, known[key] = kernels.record(record, *changing)
            return out
        recording = known[key]
        return compute(inputs) if recording is None else recording.run(*changing)
