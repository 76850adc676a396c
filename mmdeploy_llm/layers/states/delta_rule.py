"""The gated delta rule (Gated Delta Networks, arXiv 2412.06464) in plain torch, in float32.

    S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - k_t^T exp(g_t) S_{t-1}))^T        o_t = q_t^T S_t

Shapes: B sequences or chunks, H heads, n tokens, K key channels, V value channels; S is [K, V].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64  # tokens that are computed as products of matrices


def normalized(x: Tensor) -> Tensor:
    """Returns x / sqrt(sum(x ** 2) + 1e-6) over the last axis, in float32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)


def delta_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """Computes one token of each sequence. q, k: [B, H, K]. v: [B, H, V]. g, beta: [B, H]. state:
    [B, H, K, V], which becomes the new state. Returns [B, H, V]."""
    state.mul_(g.exp()[..., None, None])
    known = torch.matmul(k[..., None, :], state).squeeze(-2)
    change = (v - known) * beta[..., None]
    state.addcmul_(k[..., None], change[..., None, :])
    return torch.matmul(q[..., None, :], state).squeeze(-2)


def delta_sequence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes the n tokens of one sequence in chunks. q, k: [n, H, K]. v: [n, H, V]. g, beta:
    [n, H]. state: [H, K, V]. Returns ([n, H, V], the new state).

    In a chunk the changes of all tokens solve a triangular system (section 3.2 of the paper). Rows
    of padding have k = 0, beta = 0 and g = 0, which change nothing.
    """
    count, chunk = q.shape[0], min(CHUNK, q.shape[0])
    q, k, v = (chunks_of(x, chunk) for x in (q, k, v))  # [H, chunks, chunk, ..]
    g, beta = (chunks_of(x[..., None], chunk) for x in (g, beta))  # [H, chunks, chunk, 1]
    total = g.cumsum(2)
    decay = (total - total.mT).tril().exp().tril()
    k_beta = k * beta
    system = (k_beta @ k.mT * decay).tril(-1) + torch.eye(chunk, device=q.device)
    sides = torch.cat([v * beta, k_beta * total.exp()], -1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    own, seen = solved.split([v.shape[-1], k.shape[-1]], -1)
    scores = (q @ k.mT) * decay
    q, last = q * total.exp(), total[:, :, -1:]
    k = k * (last - total).exp()
    out = torch.empty_like(own)
    for index in range(out.shape[1]):
        change = own[:, index] - seen[:, index] @ state
        out[:, index] = q[:, index] @ state + scores[:, index] @ change
        state = state * last[:, index].exp() + k[:, index].mT @ change
    return out.flatten(1, 2)[:, :count].transpose(0, 1), state


def chunks_of(x: Tensor, chunk: int) -> Tensor:
    """Pads x [n, H, D] with zeros and returns it as [H, chunks, chunk, D]."""
    padded = F.pad(x, (0, 0, 0, 0, 0, -x.shape[0] % chunk))
    return padded.transpose(0, 1).reshape(x.shape[1], -1, chunk, x.shape[2])
