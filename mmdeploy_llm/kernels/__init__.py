"""Kernels: the one interface to compiled kernels, which kernels.cpu.CpuKernels (C++) and
kernels.cuda.CudaKernels (Triton) implement. Where there are no kernels (None), plain torch computes
the same, more slowly.

Methods of Kernels exist on every device. A capability that only one device has is an attribute,
None on the other:

                  CPU   CUDA
    memory         x           allocates the weights
    inputs         x           embeddings and angles of a step's tokens
    attention      x           over the paged cache and over segments of a vision tower
    draws          x           random draws from logits on the host
    pixels         x           patch rows of images and videos
    threads        x           places compute threads on cores
    experts              x     routing and mixture of experts in few launches
    activations    x           functions of single values
    norms          x           norms with weights centred on zero
    states         x           layers with a state of each sequence
    adapters       x     x     low-rank changes of products, for each row its own
    mixtures       x           routers, and experts whose matrices are packed one by one

Shapes: T tokens, H query heads, K key/value heads, D head size, B sequences, N blocks, P tokens in
a block, E experts, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from mmdeploy_llm.values.options.weight_formats import QuantizationName

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from mmdeploy_llm.hooks import AttentionKernels, PixelKernels

    from .coded import CodedWeight, CodeLayout
    from .low_rank import LowRankKernels
    from .mixtures import MixtureKernels
    from .states import NormKernels, StateKernels

Quantization = QuantizationName  # how weights are rounded when they are packed
# transformers' names
ActivationName = Literal["gelu", "gelu_pytorch_tanh", "quick_gelu", "silu", "relu", "relu2"]


class PackedWeight(Protocol):
    """A weight [n, k] in the layout that the kernels read."""

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiplies x [T, k] -> [T, n]."""

    def rows(self, indices: Tensor, dtype: torch.dtype) -> Tensor:
        """Looks up rows by indices [T] int64, contiguous: [T, k] in `dtype`, which is that of the
        weight unless it is in few bits."""


class Recording(Protocol):
    """The kernel calls of one function of tensors, which `run` repeats for other inputs."""

    def run(self, *inputs: Tensor) -> Tensor:
        """Returns function(*inputs), in memory that the next run of any recording overwrites."""


class WeightMemory(Protocol):
    """Allocates the memory of weights while a checkpoint is loaded."""

    def empty(self, shape: tuple[int, ...], *, dtype: torch.dtype) -> Tensor:
        """Allocates as torch.empty does."""

    has_files: bool  # whether it can allocate pages of files

    def in_files(self, folder: Path) -> AbstractContextManager[None]:
        """Allocates pages of files in `folder` meanwhile, for weights that the memory does not
        hold."""

    def release(self, tensor: Tensor) -> bool:
        """Gives the memory of `tensor`, contiguous, back where it was allocated here: its values,
        which nobody needs any more, become undefined. Returns whether it was. Before `settle`."""

    def settle(self) -> object:
        """Optimises the memory in the background. Called once, when the weights have their
        values."""


class InputKernels(Protocol):
    """Computes what the first layer reads, on the host, so that a decode step is recorded whole."""

    def look_up(self, weight: Tensor, indices: Tensor) -> Tensor:
        """Returns rows of `weight` [n, k], contiguous, by indices [T] int64, contiguous: [T, k]. A
        row that `weight` does not have is NaN."""

    def replace_id(self, indices: Tensor, old: int, new: int) -> Tensor:
        """Returns `indices` [T] int64, contiguous, with `new` in the place of `old`."""

    def angles(
        self,
        positions: Tensor,
        frequencies: Tensor,
        axes: Tensor | None,
        scale: float,
        is_long: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns cos and sin of position * frequency in float32, times `scale`, [T, R] each.
        positions: [T] int64, or [axes, T] with the axis of each of the R pairs in `axes`;
        contiguous. frequencies: [1, R] float32, or [2, R], whose second row holds for the tokens in
        is_long [T] bool and whose first for all others."""


class ExpertKernels(Protocol):
    """Mixture of experts on a device: the host need not know how many tokens each expert has."""

    def route(
        self,
        logits: Tensor,
        bias: Tensor | None,
        top_k: int,
        dtype: torch.dtype,
        norm_min: float | None,
    ) -> tuple[Tensor, Tensor]:
        """Chooses experts by logits [T, E]: their weights [T, k], softmax over all experts, and ids
        [T, k] of the k largest of softmax + bias [E] float32. norm_min: divide the weights by their
        sum, or by this where the sum is smaller; None: leave them."""

    def run_experts(
        self, x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        """Computes the weighted sum of experts: x [T, S], weights [T, k], ids [T, k], gate_up
        [E, 2 I, S], down [E, S, I] -> [T, S]. An id of E or more adds nothing."""


class ActivationKernels(Protocol):
    """Computes activations, each value by the same code wherever it lies in the tensor."""

    def activate(self, x: Tensor, name: ActivationName) -> Tensor:
        """Returns x [T, size], contiguous, with each value replaced by its activation."""

    def gated_mul(self, gate: Tensor, up: Tensor, name: ActivationName | None) -> Tensor:
        """Returns activation(gate) * up, both [T, size], the activation rounded to their dtype;
        without a name gate * up."""

    def clamped_mul(self, both: Tensor, alpha: float, limit: float) -> Tensor:
        """Returns (up + 1) * gate * sigmoid(alpha * gate), [T, size], of gate and up in turn,
        both [T, 2 size], contiguous; gate is at most `limit` and up within it. Rounds after each
        operation."""

    def map_values(self, x: Tensor, table: Tensor) -> Tensor:
        """Returns table[bits of x] in the memory of `x`, contiguous: a function of bf16 by its
        values [65536] for all of them, by their bits."""

    def scale(self, x: Tensor, factor: float, *, rounds: bool = False) -> Tensor:
        """Returns x * factor in the memory of `x`, contiguous. rounds: whether the factor is
        rounded to x's dtype first."""

    def add_rows(self, to: Tensor, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """Returns to + x, both [T, size], in the memory of `to`, contiguous; with a gate [T, 1]
        to + x * sigmoid(gate)."""

    def gate_heads(self, x: Tensor, gate: Tensor) -> Tensor:
        """Returns x * sigmoid(gate), both [T, heads, D], in the memory of `x`, contiguous."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawRules:
    """The rules of random draws, one value for each row: [R]; see engine/runner/sampling/draw.py.

    temperature: float32. least: float32, the smallest z that min_p keeps; -inf is off. top_k:
    int64, 0 is off. top_p: float64, 1 is off. uniforms: float64 in [0, 1).
    """

    temperature: Tensor
    least: Tensor
    top_k: Tensor
    top_p: Tensor
    uniforms: Tensor


class DrawKernels(Protocol):
    """Random draws, and the largest logits, on the host. R rows, V tokens."""

    def takes(self, *tensors: Tensor) -> bool:
        """Whether the kernels compute on tensors like these."""

    def first_largest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the lowest index of the largest value of each row of [R, V], [R] int64, and that
        value, [R]. NaN counts as largest."""

    def draw(self, logits: Tensor, rules: DrawRules) -> Tensor:
        """Draws a token of each row of [R, V] as engine/runner/sampling/draw.py defines it, [R]
        int64; any where a row has NaN, or infinity."""


class ThreadKernels(Protocol):
    """Chooses the CPUs on which the kernels and torch compute."""

    def place_threads(
        self, cpus: Sequence[int], pinned: Sequence[int], num_threads: int, *, node: int | None
    ) -> None:
        """Restricts the calling thread, and the threads that it computes with, to `cpus` from now
        on, and the i-th of them to pinned[i] unless `pinned` is empty. node: NUMA node whose memory
        is used first. Raises OSError when the system refuses."""


class Kernels(Protocol):
    """Compiled kernels for one device.

    Layer operations do not check their tensors: call `takes` first.
    """

    samples_on_device: bool  # the sampler's rules and draws are kernels too: kernels/cuda/choose.py

    # The capabilities, as in the table above; None: the device lacks this one, and torch computes.
    @property
    def memory(self) -> WeightMemory | None: ...

    @property
    def inputs(self) -> InputKernels | None: ...

    @property
    def attention(self) -> AttentionKernels | None: ...

    @property
    def experts(self) -> ExpertKernels | None: ...

    @property
    def activations(self) -> ActivationKernels | None: ...

    @property
    def norms(self) -> NormKernels | None: ...

    @property
    def states(self) -> StateKernels | None: ...

    @property
    def adapters(self) -> LowRankKernels | None: ...

    @property
    def draws(self) -> DrawKernels | None: ...

    @property
    def pixels(self) -> PixelKernels | None: ...

    @property
    def threads(self) -> ThreadKernels | None: ...

    @property
    def mixtures(self) -> MixtureKernels | None: ...

    def takes(self, *tensors: Tensor) -> bool:
        """Whether the kernels compute on tensors like these: on their device, of one supported
        dtype, the last axis contiguous."""

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> Tensor:
        """Returns norm(x) * weight for rows [T, size]. With a residual [T, size], adds x to it in
        place and norms the sum."""

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """Returns silu(gate) * up, both [T, size]."""

    def rotate(self, x: Tensor, cosines: Tensor, sines: Tensor, *, is_interleaved: bool) -> None:
        """Rotates the first 2 R channels of every head of `x` [T, heads, D] in place. cosines,
        sines: [T, R] float32, contiguous."""

    def norm_and_rotate(
        self,
        x: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        num_q_heads: int,
        eps: float,
        cosines: Tensor,
        sines: Tensor,
        *,
        is_interleaved: bool,
    ) -> None:
        """RMS-norms every head, the first num_q_heads with `q_weight` [D] and the others with
        `k_weight`, then rotates as `rotate`; in place."""

    def can_pack(self, weight: Tensor, quantization: Quantization | None) -> bool:
        """Whether `pack` lays out a weight [..., n, k] like this."""

    def pack(self, weight: Tensor, quantization: Quantization | None) -> PackedWeight | None:
        """Lays `weight` [n, k] out for products, rounded if requested; None where `can_pack` is
        False. The memory of `weight` is reused or given back: its values are
        lost."""

    def can_pack_coded(self, layout: CodeLayout, shape: Sequence[int]) -> bool:
        """Whether `pack_coded` lays out a weight [n, k] like this, or each of a stack [E, n, k] for
        the experts of a layer."""

    def pack_coded(self, weight: CodedWeight, *, rounds: bool) -> PackedWeight:
        """Lays out a weight of few bits for products; `can_pack_coded` must be True. Its memory is
        reused: its values are lost. rounds: whether rows of x are rounded to int8, with a scale for
        every 128 values; never for 8-bit floats. On CUDA see CudaKernels."""

    def record(
        self, function: Callable[..., Tensor], *inputs: Tensor
    ) -> tuple[Tensor, Recording | None]:
        """Returns function(*inputs), and a recording of its kernel calls; None where it cannot be
        recorded."""
