"""Mamba2: the state space layer of several families (arXiv 2405.21060).

    z, xBC, dt = in_proj(input)        x, B, C = silu(conv(xBC))        dt = softplus(dt + bias)
    S_t = exp(-exp(A_log) dt_t) S_{t-1} + B_t (dt_t x_t)^T              y_t = C_t^T S_t + D x_t
    output = out_proj(norm(y * silu(z)))

Shapes: T tokens, H heads of P channels, N state channels; S is [H, N, P] in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmdeploy_llm.caches import State
from mmdeploy_llm.forward import StateContext
from mmdeploy_llm.kernels.states import Mamba2Inputs
from mmdeploy_llm.layers.basic.kernel_layer import KernelLayer
from mmdeploy_llm.layers.basic.linear import Linear, empty_parameter

from .delta_rule import chunks_of
from .short_conv import ShortConv

CHUNK = 128  # tokens that are computed as products of matrices


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Config:
    """Sizes of a Mamba2. Each group of heads shares B and C."""

    hidden_size: int
    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    kernel_size: int
    norm_eps: float
    conv_bias: bool = True
    bias: bool = False
    has_norm: bool = True
    time_step_limit: tuple[float, float] = (0.0, float("inf"))

    @property
    def inner_size(self) -> int:
        """Channels of all heads."""
        return self.num_heads * self.head_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.inner_size + 2 * self.num_groups * self.state_size

    @property
    def state(self) -> State:
        """The state of a sequence; the norm over all heads keeps it on every rank."""
        matrices = (self.num_heads, self.state_size, self.head_dim)
        last = (self.num_heads, self.state_size + self.head_dim + 3)
        return State(
            shapes=((self.conv_size, self.kernel_size - 1), matrices, last),
            dtypes=("model", "float32", "float32"),
            is_replicated=True,
        )


class GroupedGatedNorm(nn.Module):
    """Computes weight * rms_norm(x * silu(gate)), the norm over each group of channels; without a
    weight x * silu(gate)."""

    weight: nn.Parameter | None

    def __init__(self, size: int, num_groups: int, eps: float, *, has_norm: bool = True) -> None:
        super().__init__()
        self.weight = empty_parameter(size) if has_norm else None
        self.num_groups = num_groups
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """[T, size], x in float32 -> [T, size] in gate's dtype."""
        wide = x.to(gate.dtype).float() * F.silu(gate.float())
        if self.weight is None:
            return wide.to(gate.dtype)
        groups = wide.view(x.shape[0], self.num_groups, -1)
        groups = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * groups.view(x.shape).to(gate.dtype)


class Mamba2(KernelLayer):
    """Mixes the tokens of each sequence by a state space model."""

    fp32_parameters = ("A_log", "D", "dt_bias")

    def __init__(self, config: Mamba2Config, layer: int) -> None:
        """layer: its index in the model."""
        super().__init__()
        self.config, self.layer = config, layer
        rows = config.inner_size + config.conv_size + config.num_heads
        self.in_proj = Linear(config.hidden_size, rows, bias=config.bias)
        self.conv1d = ShortConv(
            config.conv_size, config.kernel_size, has_silu=True, has_bias=config.conv_bias
        )
        self.A_log = empty_parameter(config.num_heads)
        self.D = empty_parameter(config.num_heads)
        self.dt_bias = empty_parameter(config.num_heads)
        self.norm = GroupedGatedNorm(
            config.inner_size, config.num_groups, config.norm_eps, has_norm=config.has_norm
        )
        self.out_proj = Linear(config.inner_size, config.hidden_size, bias=config.bias)

    def forward(self, x: Tensor, states: StateContext) -> Tensor:
        """Computes the layer, [T, hidden] -> [T, hidden], and writes the states."""
        config = self.config
        conv_state, matrices, *last = states.tensors(self.layer)
        sizes = [config.inner_size, config.conv_size, config.num_heads]
        z, rows, dt = torch.split(self.projected(x), sizes, 1)
        inputs = self._inputs(self.conv1d(rows, conv_state, states), z, dt)
        if self.kernels.can_mamba2(inputs, matrices):
            y = self.kernels.mamba2(inputs, matrices, last[0] if last else None, states)
        else:
            y = self._in_torch(inputs, matrices, states)
        out: Tensor = self.out_proj(y)
        return out

    def projected(self, x: Tensor) -> Tensor:
        """Returns z, the rows of the convolution, and dt, before they are divided."""
        out: Tensor = self.in_proj(x)
        return out

    def _inputs(self, rows: Tensor, z: Tensor, dt: Tensor) -> Mamba2Inputs:
        return Mamba2Inputs(
            rows=rows,
            z=z,
            dt=dt,
            a_log=self.A_log,
            dt_bias=self.dt_bias,
            skip=self.D,
            norm_weight=self.norm.weight,
            eps=self.norm.eps,
            num_groups=self.config.num_groups,
            limits=self.config.time_step_limit,
        )

    def _in_torch(self, inputs: Mamba2Inputs, matrices: Tensor, states: StateContext) -> Tensor:
        """Computes what Kernels.mamba2 does."""
        config, rows = self.config, inputs.rows.float()
        shared = config.num_groups * config.state_size
        values, b, c = torch.split(rows, [config.inner_size, shared, shared], 1)
        dt = F.softplus(inputs.dt.float() + self.dt_bias).clamp(*config.time_step_limit)
        values = values.view(-1, config.num_heads, config.head_dim)
        b, c = (self._per_head(y) for y in (b, c))
        decays = -self.A_log.exp() * dt
        y = _scan(c, b, values * dt[..., None], decays, matrices, states)
        y = (y + self.D[:, None] * values).flatten(1)
        normed: Tensor = self.norm(y, inputs.z)
        return normed

    def _per_head(self, x: Tensor) -> Tensor:
        """Repeats B or C of each group for its heads: [T, groups * N] -> [T, H, N]."""
        config = self.config
        grouped = x.view(-1, config.num_groups, config.state_size)
        return grouped.repeat_interleave(config.num_heads // config.num_groups, 1)


def _scan(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, matrices: Tensor, states: StateContext
) -> Tensor:
    """Runs the recurrence over the rows of all sequences; writes `matrices` [rows, H, N, P]. q, k:
    [T, H, N]. v: [T, H, P]. g: [T, H], logarithms of the decays."""
    count, out = states.num_decode, torch.empty_like(v)
    if count:
        rows = slice(count)
        state = matrices[states.read[rows]].mul_(g[rows].exp()[..., None, None])
        state.addcmul_(k[rows, :, :, None], v[rows, :, None])
        out[rows] = torch.matmul(q[rows, :, None], state).squeeze(-2)
        matrices.index_copy_(0, states.write[rows], state)
    start = count
    for index, length in enumerate(states.query_lens[count:], count):
        rows = slice(start, start + length)
        before = matrices[states.read[index]]
        out[rows], after = scan_sequence(q[rows], k[rows], v[rows], g[rows], before)
        matrices[states.write[index]] = after
        start += length
    return out


def scan_sequence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes the n tokens of one sequence in chunks. q, k: [n, H, N]. v: [n, H, P]. g: [n, H].
    state: [H, N, P]. Returns ([n, H, P], the new state)."""
    count, chunk = q.shape[0], min(CHUNK, q.shape[0])
    q, k, v = (chunks_of(x, chunk) for x in (q, k, v))  # [H, chunks, chunk, ..]
    total = chunks_of(g[..., None], chunk).cumsum(2)
    scores = (q @ k.mT) * (total - total.mT).tril().exp().tril()
    out, last = scores @ v, total[:, :, -1:]
    q, k = q * total.exp(), k * (last - total).exp()
    for index in range(out.shape[1]):
        out[:, index] += q[:, index] @ state
        state = state * last[:, index].exp() + k[:, index].mT @ v[:, index]
    return out.flatten(1, 2)[:, :count].transpose(0, 1), state
