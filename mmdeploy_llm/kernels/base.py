"""Kernels: the operations of layers, each in plain torch, which compiled kernels override.

Shapes: T tokens, H query heads, K key/value heads, D head size, N blocks, P tokens in a block,
R channels of a head that are rotated, E experts, k experts of a token, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from mmdeploy_llm.values.options.weight_formats import QuantizationName

from . import mixtures, plain
from .coded import CodedWeight, CodeLayout
from .low_rank import LowRankTable, PlainTable
from .mixtures import Mixture, RouteRule
from .plain import ActivationName
from .states import DeltaInputs, Mamba2Inputs

if TYPE_CHECKING:
    from mmdeploy_llm.forward import QKRotary, StateContext
    from mmdeploy_llm.hooks import AttentionKernels, PixelKernels

    from .cpu.memory import LargePages
    from .cpu.recording import Recording

Quantization = QuantizationName  # how weights are rounded when they are packed


class PackedWeight(Protocol):
    """A weight [n, k] in the layout that the kernels read."""

    def product(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        """Multiplies x [T, k] -> [T, n]. dtype: of the result, float32 or, for None, that of x;
        sums are in float32 and are rounded to it."""

    def rows(self, indices: Tensor, dtype: torch.dtype) -> Tensor:
        """Looks up rows by indices [T] int64, contiguous: [T, k] in `dtype`, which is that of the
        weight unless it is in few bits."""


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


class Kernels:
    """Computes in plain torch, which is the reference. A subclass overrides what its device has
    compiled; where its kernel does not take the tensors, the override hands them on to this class.

    A result may lie in the memory of the first tensor, whose values are lost then. What callers
    compute otherwise without kernels has a question (`can_...`) to ask first, and no default.

    is_compiled: whether anything is.
    cpu_level: instruction sets of the kernels for the CPU; None without them.
    samples_on_device: the sampler's rules and draws are kernels too: kernels/cuda/choose.py.
    can_place_threads: whether `place_threads` does.
    memory: allocates the weights; None: torch does.
    """

    is_compiled = False
    cpu_level: str | None = None
    samples_on_device = False
    can_place_threads = False
    memory: LargePages | None = None

    @property
    def attention(self) -> AttentionKernels | None:
        """Attention over the paged cache and over segments of a vision tower; None where layers
        and backends have their own."""
        return None

    @property
    def pixels(self) -> PixelKernels | None:
        """Patch rows and sizes of images, for media processors; None where they compute them."""
        return None

    def takes(self, *tensors: Tensor | None) -> bool:
        """Whether there are compiled kernels for tensors like these: on their device, of one
        supported dtype, the last axis contiguous. None, but for the first, is left out."""
        return False

    def takes_whole(self, x: Tensor, *others: Tensor | None) -> bool:
        """Whether there are compiled kernels for tensors like these, `x` being contiguous."""
        return self.takes(x, *others) and x.is_contiguous()

    def takes_rows(self, x: Tensor, residual: Tensor | None, *others: Tensor | None) -> bool:
        """Whether there are compiled kernels for the rows of `x` and a residual to add them to."""
        is_flat = x.dim() == 2 or (residual is None and x.is_contiguous())
        has_room = residual is None or residual.is_contiguous()
        return is_flat and has_room and self.takes(x, residual, *others)

    # The inputs of a step.

    def look_up(self, weight: Tensor, indices: Tensor) -> Tensor:
        """Returns rows of `weight` [n, k] by indices [T] int64: [T, k]. A row that `weight` does
        not have is NaN, or raises."""
        return F.embedding(indices, weight)

    def replace_id(self, indices: Tensor, old: int, new: int) -> Tensor:
        """Returns `indices` [T] int64 with `new` in the place of `old`."""
        return indices.masked_fill(indices == old, new)

    def angles(
        self,
        positions: Tensor,
        frequencies: Tensor,
        axes: Tensor | None,
        scale: float,
        is_long: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns cos and sin of position * frequency in float32, times `scale`, [T, R / 2] each.
        positions: [T] int64, or [axes, T] with the axis of each of the R / 2 pairs in `axes`.
        frequencies: [1, R / 2] float32, or [2, R / 2], whose second row holds for the tokens in
        is_long [T] bool and whose first for all others."""
        return plain.angles(positions, frequencies, axes, scale, is_long)

    # Functions of single values.

    def activate(self, x: Tensor, name: ActivationName) -> Tensor:
        """Returns x [T, size] with each value replaced by its activation."""
        return plain.ACTIVATIONS[name](x)

    def gated_mul(self, gate: Tensor, up: Tensor, name: ActivationName | None) -> Tensor:
        """Returns activation(gate) * up, both [T, size], the activation rounded to their dtype;
        without a name gate * up."""
        return gate * up if name is None else self.activate(gate.contiguous(), name) * up

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """Returns silu(gate) * up, both [T, size]."""
        return F.silu(gate).mul_(up)

    def clamped_mul(self, both: Tensor, alpha: float, limit: float) -> Tensor:
        """Returns (up + 1) * gate * sigmoid(alpha * gate), [T, size], of gate and up in turn,
        both [T, 2 size]; gate is at most `limit` and up within it. Rounds after each operation."""
        gate = both[..., ::2].clamp(max=limit)
        up = both[..., 1::2].clamp(-limit, limit)
        return (up + 1) * (gate * torch.sigmoid(gate * alpha))

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """Returns cap * tanh(x / cap)."""
        return torch.tanh(x / cap).mul_(cap)

    def scale(self, x: Tensor, factor: float, *, rounds: bool = False) -> Tensor:
        """Returns x * factor. rounds: whether the factor is rounded to x's dtype first."""
        return x * (torch.tensor(factor, dtype=x.dtype) if rounds else factor)

    def add_rows(self, to: Tensor, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """Returns to + x, both [T, size], in the memory of `to`; with a gate [T, 1]
        to + x * sigmoid(gate), which may overwrite the gate."""
        return to.add_(x if gate is None else gate.sigmoid_() * x)

    def gate_heads(self, x: Tensor, gate: Tensor) -> Tensor:
        """Returns x * sigmoid(gate), both [T, heads, D]."""
        return x * gate.sigmoid()

    def widen(self, x: Tensor) -> Tensor:
        """Returns `x` in float32."""
        return x.float()

    # Norms. centre: what is added to the weight, with one rounding after the product; None:
    # nothing, and the normed values are rounded before the weight multiplies.

    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        residual: Tensor | None = None,
        centre: float | None = None,
    ) -> Tensor:
        """Returns norm(x) * (centre + weight) over the last axis, of the shape of x. With a
        residual [T, size], contiguous, adds x to it in place and norms the sum."""
        if residual is not None:
            return self.rms_norm(residual.add_(x), weight, eps, None, centre)
        return plain.rms_norm(x, weight, eps, centre)

    def layer_norm(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        residual: Tensor | None = None,
        *,
        is_centred: bool = False,
    ) -> Tensor:
        """Returns torch's layer_norm over the last axis, rounded once. is_centred: whether
        1 + weight, rounded, multiplies. residual: as in rms_norm."""
        if residual is not None:
            total = residual.add_(x)
            return self.layer_norm(total, weight, bias, eps, None, is_centred=is_centred)
        if is_centred and weight is not None:
            weight = weight + 1
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)

    def norm_heads(
        self, x: Tensor, weight: Tensor, eps: float, centre: float | None = None
    ) -> Tensor:
        """Returns every head of x [T, heads, D] normed as `rms_norm` norms a row. Only the channels
        of a head need be contiguous."""
        return self.rms_norm(x.contiguous(), weight, eps, None, centre)

    def normed_heads(self, x: Tensor, eps: float) -> Tensor:
        """Returns x, normed over the last axis without a weight, in memory of its own."""
        return plain.normed_heads(x, eps)

    def add_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        to: Tensor,
        factor: Tensor | None = None,
        centre: float | None = None,
    ) -> Tensor:
        """Returns (to + norm(x)) * factor, all [T, size], in the memory of `to`, with the norm of
        `rms_norm`; factor: [1]. Rounds after each operation."""
        to.add_(self.rms_norm(x, weight, eps, None, centre))
        return to if factor is None else to.mul_(factor)

    # Heads. cosines, sines: [T, R / 2] float32, contiguous. is_interleaved: whether channels 2 i
    # and 2 i + 1 are a pair, else i and R / 2 + i.

    def rotate(self, x: Tensor, cosines: Tensor, sines: Tensor, *, is_interleaved: bool) -> Tensor:
        """Returns x [T, heads, D] with the first R channels of every head rotated."""
        return plain.rotate(x, cosines, sines, is_interleaved=is_interleaved)

    def mix_heads(
        self,
        x: Tensor,
        matrix: Tensor,
        centres: Tensor | None = None,
        factors: Tensor | None = None,
    ) -> Tensor:
        """Returns (x - centres) * factors of every head of x [T, heads, D], each block of b
        channels multiplied by `matrix` [b, b] float32, which is plain.hadamard(D). centres,
        factors: [K, D] float32 of K groups of as many heads; None: 0 and 1. Only the channels of a
        head need be contiguous."""
        return plain.mix_heads(x, matrix, centres, factors)

    def norm_and_rotate(
        self, x: Tensor, num_q_heads: int, rotary: QKRotary, centre: float | None = None
    ) -> Tensor:
        """Returns every head of x [T, H + K, D] normed, the first num_q_heads with `q_weight` and
        the others with `k_weight` of `rotary`, then rotated."""
        assert rotary.q_weight is not None
        assert rotary.k_weight is not None
        q = self.rms_norm(x[:, :num_q_heads], rotary.q_weight, rotary.eps, None, centre)
        k = self.rms_norm(x[:, num_q_heads:], rotary.k_weight, rotary.eps, None, centre)
        tables, both = (rotary.cosines, rotary.sines), torch.cat([q, k], 1)
        return self.rotate(both, *tables, is_interleaved=rotary.is_interleaved)

    def norm_and_rotate_apart(
        self, q: Tensor, k: Tensor, rotary: QKRotary, centre: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns `q` [T, H, D] and `k` [T, K, D], which need not be adjacent in memory, normed and
        rotated as norm_and_rotate does."""
        heads = q.shape[1]
        both = self.norm_and_rotate(torch.cat([q, k], 1), heads, rotary, centre)
        return both[:, :heads], both[:, heads:]

    # Mixtures of experts.

    def choose(
        self,
        logits: Tensor,
        bias: Tensor | None,
        rule: RouteRule,
        dtype: torch.dtype,
        factors: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Chooses experts by logits [T, E]: their weights [T, k] in `dtype` and ids [T, k], best
        first. bias: [E] float32, added to the scores that choose. factors: [E] in `dtype`, which
        multiply the weights."""
        weights, experts = mixtures.choose(logits, bias, rule, dtype)
        return weights if factors is None else weights * factors[experts], experts

    def can_run_experts(self, x: Tensor, down: Tensor) -> bool:
        """Whether `run_experts` takes tensors like these: the host need not know then how many
        tokens each expert has."""
        return False

    def run_experts(
        self, x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        """Computes the weighted sum of experts: x [T, S], weights [T, k], ids [T, k], gate_up
        [E, 2 I, S], down [E, S, I] -> [T, S]. An id of E or more adds nothing."""
        raise NotImplementedError

    def mixture(
        self,
        pairs: Sequence[tuple[PackedWeight, PackedWeight]],
        sizes: tuple[int, int],
        dtype: torch.dtype,
        biases: Sequence[tuple[Tensor | None, Tensor | None]],
        *,
        is_in_file: bool = False,
    ) -> Mixture | None:
        """Returns the experts with these matrices and biases, gate and up together and down, as one
        call for few tokens; None where there is none. sizes: S and I. dtype: of x and biases.
        is_in_file: whether the matrices are pages of a file, those of an expert one after the
        other, that memory does not hold: each step has those read that it needs."""
        return None

    # Layers with a state of each sequence. They read and write the rows of the states that
    # `states` names.

    def can_convolve(self, x: Tensor, weight: Tensor, state: Tensor) -> bool:
        """Whether `short_conv` takes tensors like these."""
        return False

    def short_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: Tensor,
        states: StateContext,
        *,
        has_silu: bool,
    ) -> Tensor:
        """Convolves each channel of x [T, C] with its weights [C, 1, k] over the last k tokens,
        adds `bias` [C], and applies silu: [T, C]. state: [rows, C, k - 1], the last inputs."""
        raise NotImplementedError

    def can_delta(self, inputs: DeltaInputs, matrices: Tensor) -> bool:
        """Whether `gated_delta` takes tensors like these."""
        return False

    def gated_delta(
        self, inputs: DeltaInputs, matrices: Tensor, last: Tensor, states: StateContext
    ) -> Tensor:
        """Runs the gated delta rule and its gated norm, [T, H V]. matrices: [rows, H, D, V]
        float32, the rows `source` and `target` of the states. last: [rows, H, D + V + 3] float32,
        zero at first: the last token of each row where its matrix is that before the token."""
        raise NotImplementedError

    def can_mamba2(self, inputs: Mamba2Inputs, matrices: Tensor) -> bool:
        """Whether `mamba2` takes tensors like these."""
        return False

    def mamba2(
        self, inputs: Mamba2Inputs, matrices: Tensor, last: Tensor | None, states: StateContext
    ) -> Tensor:
        """Runs the state space and its gated norm, [T, H P]. matrices: [rows, H, N, P] float32,
        last: [rows, H, N + P + 3], as gated_delta has them; without `last`, none change in place,
        and a sequence may have one row before and after the step."""
        raise NotImplementedError

    # Adapters.

    def low_rank_table(
        self, num_slots: int, starts: Sequence[int], k: int, dtype: torch.dtype
    ) -> LowRankTable:
        """Returns a table for a matrix [n, k] of the parts `starts`, as low_rank.Change has them,
        and for x and out of `dtype`."""
        return PlainTable()

    # The sampler.

    def can_draw(self, logits: Tensor) -> bool:
        """Whether `draw` and `first_largest` take logits like these."""
        return False

    def first_largest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the lowest index of the largest value of each row of [R, V], [R] int64, and that
        value, [R]. NaN counts as largest."""
        raise NotImplementedError

    def draw(self, logits: Tensor, rules: DrawRules) -> Tensor:
        """Draws a token of each row of [R, V] as engine/runner/sampling/draw.py defines it, [R]
        int64; any where a row has NaN, or infinity."""
        raise NotImplementedError

    # The engine.

    def place_threads(
        self, cpus: Sequence[int], pinned: Sequence[int], num_threads: int, *, node: int | None
    ) -> None:
        """Restricts the calling thread, and the threads that it computes with, to `cpus` from now
        on, and the i-th of them to pinned[i] unless `pinned` is empty. node: NUMA node whose memory
        is used first. Raises OSError when the system refuses."""
        raise NotImplementedError

    def can_pack(self, weight: Tensor, quantization: Quantization | None) -> bool:
        """Whether `pack` lays out a weight [..., n, k] like this."""
        return False

    def pack(self, weight: Tensor, quantization: Quantization | None) -> PackedWeight | None:
        """Lays `weight` [n, k] out for products, rounded if requested; None where `can_pack` is
        False. The memory of `weight` is reused or given back: its values are lost."""
        return None

    def can_pack_coded(self, layout: CodeLayout, shape: Sequence[int]) -> bool:
        """Whether `pack_coded` lays out a weight [n, k] like this, or each of a stack [E, n, k] for
        the experts of a layer."""
        return False

    def pack_coded(self, weight: CodedWeight, *, rounds: bool) -> PackedWeight:
        """Lays out a weight of few bits for products. Its memory is reused: its values are lost.
        rounds: whether rows of x are rounded to int8, with a scale for every 64 values; never for
        8-bit floats. On CUDA see cuda.CudaKernels."""
        raise NotImplementedError

    def record(
        self, function: Callable[..., Tensor], *inputs: Tensor
    ) -> tuple[Tensor, Recording | None]:
        """Returns function(*inputs), and a recording of its kernel calls, whose `run` repeats them
        for other inputs; None where it cannot be recorded."""
        return function(*inputs), None


TORCH = Kernels()  # what computes before kernels are installed
