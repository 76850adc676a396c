"""CUDA graphs of decode steps: one launch instead of hundreds, for steps in which every request
computes one token.

    sizes     1  2  4  8  16  24 .. max_num_seqs       recorded at start, largest first, one memory
    step      [a b c d e] --> frame of 8 [a b c d e - - -] --> replay --> rows a .. e

A frame holds the inputs of a graph at places that stay (staging.DecodeFrame). Prefill, media and
whatever does not fit a frame run without a graph, as does all of a model that cannot be recorded.
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

from .peers import NoPeers, Peers
from .staging import DecodeFrame, StepArrays, StepTensors

logger = logging.getLogger(__name__)

FIRST_SIZES = (1, 2, 4)
SIZE_STEP = 8
NUM_WARM_UPS = 2  # passes before a recording: libraries set themselves up in their first


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOutputs:
    """What a decode pass of B rows gives: hidden states [B, hidden], logits [B, V], and what
    first_argmax gives of the logits, [B] each. Those of a graph are valid until its next replay."""

    hidden: Tensor
    logits: Tensor
    token_ids: Tensor
    peaks: Tensor

    def first(self, num_rows: int) -> DecodeOutputs:
        """Without the rows behind, which are padding."""
        return DecodeOutputs(**{name: rows[:num_rows] for name, rows in self._rows()})

    def take(self, other: DecodeOutputs) -> DecodeOutputs:
        """Copies the values of `other`, of as many rows."""
        for (_, mine), (_, theirs) in zip(self._rows(), other._rows(), strict=True):
            mine.copy_(theirs)
        return self

    def _rows(self) -> Sequence[tuple[str, Tensor]]:
        return [(field.name, getattr(self, field.name)) for field in fields(self)]


Compute = Callable[[StepTensors], DecodeOutputs]


class Recorder(Protocol):
    """Records what is launched to launch it again."""

    def record(
        self, compute: Callable[[], DecodeOutputs]
    ) -> tuple[Callable[[], None], DecodeOutputs]:
        """Runs `compute`; gives what runs it again, on the same inputs' places into the same
        outputs."""
        ...

    def recover(self) -> None:
        """After a `record` that raised: the device works again."""
        ...


class CudaRecorder:
    """CUDA graphs that share their memory: only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        new_stream: Any = torch.cuda.Stream
        self._stream = new_stream(device)
        self._pool: Any = None

    def record(
        self, compute: Callable[[], DecodeOutputs]
    ) -> tuple[Callable[[], None], DecodeOutputs]:
        """See Recorder. Raises what torch raises for operations that cannot be recorded."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(NUM_WARM_UPS):
                compute()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        graph: Any = torch.cuda.CUDAGraph()
        # Other threads may ask for their events meanwhile, as the one that watches NCCL does.
        new_capture: Any = torch.cuda.graph
        with new_capture(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            outputs = compute()
        if self._pool is None:
            self._pool = graph.pool()
        return graph.replay, outputs

    def recover(self) -> None:
        """See Recorder."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recorded:
    frame: DecodeFrame
    replay: Callable[[], None]
    outputs: DecodeOutputs


class DecodeGraphs:
    """The recorded decode steps of one runner, its only user."""

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
        """A graph of `compute` for each size. Where one cannot be recorded, on any rank, there are
        none, and the log says why."""
        begin = time.perf_counter()
        found: list[_Recorded] = []
        for size in tqdm(sorted(sizes, reverse=True), desc="CUDA graphs", unit="graph"):
            reason = ""
            try:
                found.append(self._record(new_frame(size), compute, found[:1]))
            except FAULTS as error:
                reason = error_text(_first(error)).partition("\n")[0]
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
        """All sizes give their outputs in the place of the largest one's: logits of each would take
        a gigabyte."""
        if largest:
            place = largest[0].outputs.first(frame.num_seqs)
            replay, outputs = self._recorder.record(lambda: place.take(compute(frame.tensors)))
        else:
            replay, outputs = self._recorder.record(lambda: compute(frame.tensors))
        return _Recorded(frame=frame, replay=replay, outputs=outputs)

    def frame_for(self, arrays: StepArrays) -> DecodeFrame | None:
        """The smallest frame that the step fits; None for a step that must run without a graph:
        prompt tokens, which may be media, or more than the largest frame holds."""
        at = bisect_left(self.sizes, len(arrays.context_lens))
        if at == len(self._recorded) or arrays.in_prompt.any():
            return None
        frame = self._recorded[at].frame
        return frame if frame.fits(arrays) else None

    def replay(self, frame: DecodeFrame, num_rows: int) -> DecodeOutputs:
        """The step whose inputs are in the frame, of num_rows sequences."""
        recorded = self._recorded[bisect_left(self.sizes, frame.num_seqs)]
        assert recorded.frame is frame, "frame_for gave it"
        recorded.replay()
        return recorded.outputs.first(num_rows)


def _first(error: BaseException) -> BaseException:
    """What went wrong first: a recording that cannot be ended raises once more."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Rows of the graphs for up to so many sequences: steps of 8 waste little on padding."""
    steps = range(SIZE_STEP, max_num_seqs, SIZE_STEP)
    return tuple(
        sorted({*(size for size in FIRST_SIZES if size < max_num_seqs), *steps, max_num_seqs})
    )
