"""Muon for the matrices, AdamW for the rest; the rates of both follow one schedule.

Muon (K. Jordan, 2024) replaces the momentum of a matrix by the nearest orthogonal one. With the
factor of "Muon is Scalable for LLM Training" (arXiv:2502.16982) its steps are as long as AdamW's,
so that one learning rate fits both. torch.optim.Muon updates matrices one by one; here the experts
of a layer and all matrices of one shape are batched, and the processes of a run share the work.
"""

from __future__ import annotations

import math
from collections import defaultdict

import torch
from torch import Tensor, distributed, nn

BETAS = (0.9, 0.98)
DECAY = 0.05
MOMENTUM = 0.95
# Quintic iteration towards the orthogonal factor: five steps bring singular values close to 1.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


# By definition Muon does not update embeddings and heads.
NOT_MUON = ("embed", "gate.weight", "background", "where", "named")


def make_optimizers(model: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for hidden matrices, AdamW for norms, biases, embeddings and heads."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    matrices, others = [], []
    for name, parameter in trained.items():
        plain = parameter.ndim < 2 or any(part in name for part in NOT_MUON)
        (others if plain else matrices).append(parameter)
    adam = torch.optim.AdamW(others, lr=rate, betas=BETAS, weight_decay=0.0, foreach=True)
    return [Muon(matrices, rate), adam]


class Muon(torch.optim.Optimizer):
    """Orthogonalize the momentum of each matrix (the last two dimensions)."""

    def __init__(self, parameters: list[nn.Parameter], rate: float) -> None:
        super().__init__(parameters, {"lr": rate})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update the weights once; all processes end with the same weights."""
        [group] = self.param_groups
        trained = [p for p in group["params"] if p.grad is not None]
        if not trained:
            return
        updates = self._updates(trained)
        torch._foreach_mul_(trained, 1 - group["lr"] * DECAY)
        torch._foreach_add_(trained, updates, alpha=-group["lr"])

    def _updates(self, trained: list[nn.Parameter]) -> list[Tensor]:
        """Return the step of each parameter for a learning rate of 1."""
        by_shape: dict[tuple[int, int], list[int]] = defaultdict(list)
        momenta = []
        for index, parameter in enumerate(trained):
            state = self.state[parameter]
            if not state:
                state["momentum"] = torch.zeros_like(parameter)
            state["momentum"].lerp_(parameter.grad, 1 - MOMENTUM)
            momenta.append(parameter.grad.lerp(state["momentum"], MOMENTUM))
            by_shape[parameter.shape[-2:]].append(index)
        rank, size = 0, 1
        if distributed.is_initialized():
            rank, size = distributed.get_rank(), distributed.get_world_size()
        flat = torch.zeros(sum(p.numel() for p in trained))
        updates = [
            part.view_as(parameter)
            for part, parameter in zip(
                flat.split([p.numel() for p in trained]), trained, strict=True
            )
        ]
        for shape, indices in by_shape.items():
            stack = torch.cat([momenta[index].reshape(-1, *shape) for index in indices])
            share = slice(rank * len(stack) // size, (rank + 1) * len(stack) // size)
            done = torch.zeros_like(stack)
            done[share] = orthogonal(stack[share]) * (0.2 * math.sqrt(max(shape)))
            counts = [momenta[index].numel() // (shape[0] * shape[1]) for index in indices]
            for index, part in zip(indices, done.split(counts), strict=True):
                updates[index].copy_(part.view_as(updates[index]))
        if size > 1:
            distributed.all_reduce(flat)
        return updates


def orthogonal(matrices: Tensor) -> Tensor:
    """Return nearly orthogonal factors of [N, rows, columns], in bf16 precision."""
    if not len(matrices):
        return matrices
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = (matrices.mT if tall else matrices).bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(ITERATIONS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x.mT if tall else x).float()
