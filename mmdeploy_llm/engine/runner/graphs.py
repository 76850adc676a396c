"""CUDA graphs of decode steps: one launch instead of hundreds, for steps in which every request
computes one token.

    sizes     1  2  4  8  16  24 .. max_num_seqs       recorded at start, largest first, one pool
    step      [a b c d e] --> frame of 8 [a b c d e - - -] --> replay --> rows a .. e

A frame holds the inputs of a graph at fixed addresses (step_inputs.DecodeFrame). Prefill, media and
whatever does not fit a frame run without a graph, as do all steps of a model that cannot be
recorded.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from mmdeploy_llm.hooks.names import error_text
from mmdeploy_llm.hooks.records import FAULTS
from mmdeploy_llm.system.sharding.peers import NoPeers, Peers

from .step_inputs import DecodeFrame, StepArrays, StepTensors

logger = logging.getLogger(__name__)

FIRST_SIZES = (1, 2, 4)
SIZE_STEP = 8
NUM_WARM_UPS = 2  # passes before a recording: libraries initialise themselves in the first


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOutputs:
    """The outputs of a decode pass of B rows: hidden states [B, hidden], logits [B, V], and the
    first_argmax of the logits, [B] each. A graph's outputs are valid until the next replay of any
    graph."""

    hidden: Tensor
    logits: Tensor
    token_ids: Tensor
    peaks: Tensor

    def first(self, num_rows: int) -> DecodeOutputs:
        """Returns the first rows, without the padding after them."""
        return DecodeOutputs(**{name: rows[:num_rows] for name, rows in self._rows()})

    def take(self, other: DecodeOutputs) -> DecodeOutputs:
        """Overwrites these tensors with those of `other`, which has as many rows."""
        for (_, mine), (_, theirs) in zip(self._rows(), other._rows(), strict=True):
            mine.copy_(theirs)
        return self

    def _rows(self) -> Sequence[tuple[str, Tensor]]:
        return [(field.name, getattr(self, field.name)) for field in fields(self)]


Compute = Callable[[StepTensors], DecodeOutputs]


class Recorder(Protocol):
    """Records kernel launches, so that they can be repeated."""

    def record(
        self, compute: Callable[[], DecodeOutputs]
    ) -> tuple[Callable[[], None], DecodeOutputs]:
        """Runs `compute`; returns a function that repeats it, from the same input tensors into the
        same outputs, and these outputs."""

    def recover(self) -> None:
        """Makes the device usable again after a `record` that raised."""


class CudaRecorder:
    """Records CUDA graphs that share one memory pool: only one of them runs at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        new_stream: Any = torch.cuda.Stream
        self._stream = new_stream(device)
        self._pool: Any = None

    def record(
        self, compute: Callable[[], DecodeOutputs]
    ) -> tuple[Callable[[], None], DecodeOutputs]:
        """Captures `compute` in a CUDA graph, after running it to warm up; see Recorder. Raises
        torch's error for operations that cannot be captured."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(NUM_WARM_UPS):
                compute()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        graph: Any = torch.cuda.CUDAGraph()
        # thread_local: other threads may query events meanwhile, as NCCL's watchdog does.
        new_capture: Any = torch.cuda.graph
        with new_capture(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            outputs = compute()
        if self._pool is None:
            self._pool = graph.pool()
        return graph.replay, outputs

    def recover(self) -> None:
        """Waits for the device and releases the memory of the failed capture."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recorded:
    frame: DecodeFrame
    replay: Callable[[], None]
    outputs: DecodeOutputs


class DecodeGraphs:
    """The recorded decode steps of one runner, which is their only user."""

    def __init__(self, recorder: Recorder, peers: Peers | None = None) -> None:
        self._recorder = recorder
        self._peers = peers or NoPeers()
        self._recorded: list[_Recorded] = []  # by size

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each graph, ascending."""
        return tuple(recorded.frame.num_seqs for recorded in self._recorded)

    def record(
        self, sizes: Sequence[int], new_frame: Callable[[int], DecodeFrame], compute: Compute
    ) -> None:
        """Records `compute` for each size. Where one cannot be recorded on any rank, keeps none and
        logs why."""
        begin = time.perf_counter()
        found: list[_Recorded] = []
        for size in tqdm(sorted(sizes, reverse=True), desc="CUDA graphs", unit="graph"):
            reason = ""
            try:
                found.append(self._record(new_frame(size), compute, found[:1]))
            except FAULTS as error:
                reason = error_text(_root_cause(error)).partition("\n")[0]
            if not self._peers.agree(not reason):
                reason = reason or "another rank could not record them"
                logger.warning("no CUDA graphs, decoding is slower without: %s", reason)
                found.clear()
                self._recorder.recover()
                return
        self._recorded = found[::-1]
        seconds = time.perf_counter() - begin
        logger.info("%d CUDA graphs for decode steps, recorded in %.1f s", len(found), seconds)

    def _record(
        self, frame: DecodeFrame, compute: Compute, largest: Sequence[_Recorded]
    ) -> _Recorded:
        """Records one size. All sizes write their outputs into those of the largest: logits for
        each would take a gigabyte."""
        if largest:
            shared = largest[0].outputs.first(frame.num_seqs)
            replay, outputs = self._recorder.record(lambda: shared.take(compute(frame.tensors)))
        else:
            replay, outputs = self._recorder.record(lambda: compute(frame.tensors))
        return _Recorded(frame=frame, replay=replay, outputs=outputs)

    def frame_for(self, arrays: StepArrays) -> DecodeFrame | None:
        """Returns the smallest frame that the step fits; None for a step that must run without a
        graph: one with prompt tokens, which may be media, or larger than the largest frame."""
        at = bisect_left(self.sizes, len(arrays.context_lens))
        if at == len(self._recorded) or arrays.in_prompt.any():
            return None
        frame = self._recorded[at].frame
        return frame if frame.fits(arrays) else None

    def replay(self, frame: DecodeFrame, num_rows: int) -> DecodeOutputs:
        """Replays the step whose inputs are in the frame; returns the outputs of its num_rows
        sequences."""
        recorded = self._recorded[bisect_left(self.sizes, frame.num_seqs)]
        assert recorded.frame is frame, "returned by frame_for"
        recorded.replay()
        return recorded.outputs.first(num_rows)


def _root_cause(error: BaseException) -> BaseException:
    """Returns the error that was raised first: ending a failed recording raises another one."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Returns the numbers of rows to record for up to max_num_seqs sequences. Multiples of 8 waste
    little on padding."""
    steps = range(SIZE_STEP, max_num_seqs, SIZE_STEP)
    return tuple(
        sorted({*(size for size in FIRST_SIZES if size < max_num_seqs), *steps, max_num_seqs})
    )
