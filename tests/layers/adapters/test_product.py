"""The low-rank products of adapters, in plain torch and in kernels."""

from dataclasses import replace

import torch

from mmdeploy_llm.kernels import TORCH
from mmdeploy_llm.layers.adapters import Change, Group, add_low_rank


def change(num_parts=2, n=24, k=40, rank=4, **extra):
    """Returns a random change of a matrix of equal parts."""
    size = n // num_parts
    return Change(
        a=torch.randn(num_parts * rank, k),
        b=torch.randn(n, rank),
        starts=tuple(range(0, n + 1, size)),
        scales=tuple(0.5 + part for part in range(num_parts)),
        **extra,
    )


def test_rows_of_a_group_get_the_change_of_their_adapter():
    torch.manual_seed(0)
    x, out, own = torch.randn(6, 40), torch.randn(6, 24), change()
    changed = out.clone()
    groups = [Group(rows=slice(1, 3), slot=5), Group(rows=slice(4, 6), slot=7)]
    add_low_rank(changed, x, groups, {5: own})
    assert torch.equal(changed[[0, 3, 4, 5]], out[[0, 3, 4, 5]])
    weights = [
        s * own.b[p * 12 : p * 12 + 12] @ own.a[p * 4 : p * 4 + 4] for p, s in enumerate(own.scales)
    ]
    torch.testing.assert_close(
        changed[1:3], out[1:3] + x[1:3] @ torch.cat(weights).T, atol=1e-4, rtol=1e-4
    )


def test_a_factor_and_a_shift_come_last():
    torch.manual_seed(0)
    x, out = torch.randn(2, 40), torch.randn(2, 24)
    own = change(factor=torch.full((24,), 2.0), shift=torch.ones(24))
    plain, changed = out.clone(), out.clone()
    groups = [Group(rows=slice(0, 2), slot=0)]
    add_low_rank(plain, x, groups, {0: replace(own, factor=None, shift=None)})
    add_low_rank(changed, x, groups, {0: own})
    torch.testing.assert_close(changed, plain * 2 + 1)


def test_a_table_holds_the_changes_of_a_matrix():
    torch.manual_seed(0)
    x, out, own = torch.randn(6, 40), torch.randn(6, 24), change()
    table = TORCH.low_rank_table(8, own.starts, 40, torch.float32)
    table.put(5, own)
    changed, expected = out.clone(), out.clone()
    table.add(changed, x, torch.tensor([-1, 5, 5, 3, 5, -1], dtype=torch.int32))
    groups = [Group(rows=slice(1, 3), slot=5), Group(rows=slice(4, 5), slot=5)]
    add_low_rank(expected, x, groups, {5: own})
    assert torch.equal(changed, expected)
    table.put(5, None)
    table.add(changed, x, torch.full((6,), 5, dtype=torch.int32))
    assert torch.equal(changed, expected)
