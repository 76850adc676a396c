"""GatedDeltaNet: linear attention with a state instead of keys and values.

qkv = silu(conv(in_proj_qkv(x)))        z = in_proj_z(x)
beta = sigmoid(in_proj_b(x))            g = -exp(A_log) softplus(in_proj_a(x) + dt_bias)
out = out_proj(norm(delta rule(q, k, v, g, beta)) * silu(z))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmdeploy_llm.caches import State
from mmdeploy_llm.forward import StateContext
from mmdeploy_llm.kernels.states import DeltaInputs
from mmdeploy_llm.layers.basic.kernel_layer import KernelLayer
from mmdeploy_llm.layers.basic.linear import Linear, MergedLinear, empty_parameter

from .delta_rule import delta_sequence, delta_step, normalized
from .short_conv import ShortConv


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaConfig:
    """Sizes of a GatedDeltaNet. Each key head serves num_value_heads / num_key_heads value
    heads."""

    hidden_size: int
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    kernel_size: int
    norm_eps: float

    @property
    def key_size(self) -> int:
        """Channels of all key heads."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        """Channels of all value heads."""
        return self.num_value_heads * self.value_head_dim

    @property
    def state(self) -> State:
        """The state of a sequence: the last inputs of the convolution, the rule's matrices, and
        what kernels keep of the last token, which a matrix may lack."""
        channels = 2 * self.key_size + self.value_size
        matrices = (self.num_value_heads, self.key_head_dim, self.value_head_dim)
        last = (self.num_value_heads, self.key_head_dim + self.value_head_dim + 3)
        shapes = ((channels, self.kernel_size - 1), matrices, last)
        return State(shapes=shapes, dtypes=("model", "float32", "float32"))


class GatedRMSNorm(nn.Module):
    """Computes norm(x) * silu(gate) over the last axis; the norm is cast to x's dtype before it is
    multiplied by the weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = empty_parameter(size)
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Returns the shape and dtype of `gate`; x may be in float32."""
        wide = x.to(gate.dtype).float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        normed = self.weight * wide.to(gate.dtype)
        return (normed * F.silu(gate.float())).to(gate.dtype)


class GatedDeltaNet(KernelLayer):
    """Mixes the tokens of each sequence by the gated delta rule."""

    divided_counts = ("num_key_heads", "num_value_heads")
    # Decays are computed in float32.
    fp32_parameters = ("A_log", "dt_bias")

    def __init__(
        self, config: GatedDeltaConfig, layer: int, parts: Mapping[str, int] | None = None
    ) -> None:
        """layer: its index in the model. parts: rows of the fused input projection, by the name in
        the checkpoint; None: in_proj_qkv, in_proj_z, in_proj_b, in_proj_a."""
        super().__init__()
        self.layer = layer
        self.config = config
        self.num_key_heads = config.num_key_heads  # of this rank
        self.num_value_heads = config.num_value_heads
        heads = config.num_value_heads
        channels = 2 * config.key_size + config.value_size
        self.in_proj = MergedLinear(
            config.hidden_size,
            parts
            or {
                "in_proj_qkv": channels,
                "in_proj_z": config.value_size,
                "in_proj_b": heads,
                "in_proj_a": heads,
            },
        )
        self.conv1d = ShortConv(channels, config.kernel_size, has_silu=True)
        self.A_log = empty_parameter(heads)
        self.dt_bias = empty_parameter(heads)
        self.norm = GatedRMSNorm(config.value_head_dim, config.norm_eps)
        self.out_proj = Linear(config.value_size, config.hidden_size)

    def forward(self, x: Tensor, states: StateContext) -> Tensor:
        """Computes the layer, [T, hidden] -> [T, hidden], and writes the states."""
        config = self.config
        conv_state, matrices, last = states.tensors(self.layer)
        key_size = self.num_key_heads * config.key_head_dim
        value_size = self.num_value_heads * config.value_head_dim
        heads = [self.num_value_heads] * 2
        fused = torch.split(self.in_proj(x), [2 * key_size + value_size, value_size, *heads], 1)
        qkv, z, b, a = fused
        qkv = self.conv1d(qkv, conv_state, states)
        inputs = self._inputs(qkv, z, a, b)
        if self.kernels.can_delta(inputs, matrices):
            out = self.kernels.gated_delta(inputs, matrices, last, states)
        else:
            out = self._in_torch(inputs, matrices, states)
        result: Tensor = self.out_proj(out)
        return result

    def _inputs(self, qkv: Tensor, z: Tensor, a: Tensor, b: Tensor) -> DeltaInputs:
        return DeltaInputs(
            qkv=qkv,
            z=z,
            a=a,
            b=b,
            a_log=self.A_log,
            dt_bias=self.dt_bias,
            norm_weight=self.norm.weight,
            eps=self.norm.eps,
        )

    def _in_torch(self, inputs: DeltaInputs, matrices: Tensor, states: StateContext) -> Tensor:
        """Computes what Kernels.gated_delta does."""
        config, qkv, z = self.config, inputs.qkv, inputs.z
        value_size = z.shape[1]
        key_size = (qkv.shape[1] - value_size) // 2
        q, k, v = torch.split(qkv, [key_size, key_size, value_size], 1)
        g = -self.A_log.exp() * F.softplus(inputs.a.float() + self.dt_bias)
        q, k = (normalized(_heads(y, config.key_head_dim)) for y in (q, k))
        repeats = self.num_value_heads // self.num_key_heads
        q, k = (y.repeat_interleave(repeats, 1) for y in (q * config.key_head_dim**-0.5, k))
        v = _heads(v.float(), config.value_head_dim)
        out = _delta(q, k, v, g, inputs.b.float().sigmoid(), matrices, states)
        normed: Tensor = self.norm(out, _heads(z, config.value_head_dim))
        return normed.flatten(1)

    @property
    def head_rows(self) -> Mapping[str, tuple[slice, ...]]:
        """The rows of each parameter that belong to heads, by parts; read by tensor
        parallelism."""
        keys, values = self.config.key_size, self.config.value_size
        heads = self.config.num_value_heads
        conv = _slices(keys, keys, values)
        return {
            "in_proj.weight": _slices(keys, keys, values, values, heads, heads),
            "conv1d.weight": conv,
            "A_log": _slices(heads),
            "dt_bias": _slices(heads),
        }


def _slices(*sizes: int) -> tuple[slice, ...]:
    """Returns consecutive slices of these sizes."""
    ends = accumulate(sizes)
    return tuple(slice(end - size, end) for size, end in zip(sizes, ends, strict=True))


def _heads(x: Tensor, head_dim: int) -> Tensor:
    """[T, heads * head_dim] -> [T, heads, head_dim]."""
    return x.reshape(x.shape[0], -1, head_dim)


def _delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    matrices: Tensor,
    states: StateContext,
) -> Tensor:
    """Runs the rule over the rows [T, H, ..] of all sequences; writes `matrices` [rows, H, K,
    V]."""
    count, out = states.num_decode, torch.empty_like(v)
    if count:
        rows = slice(count)
        state = matrices[states.read[rows]]
        out[rows] = delta_step(q[rows], k[rows], v[rows], g[rows], beta[rows], state)
        matrices.index_copy_(0, states.write[rows], state)
    start = count
    for index, length in enumerate(states.query_lens[count:], count):
        rows = slice(start, start + length)
        before = matrices[states.read[index]]
        out[rows], after = delta_sequence(q[rows], k[rows], v[rows], g[rows], beta[rows], before)
        matrices[states.write[index]] = after
        start += length
    return out
