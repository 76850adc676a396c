"""The low-rank changes of adapters equal plain torch."""

import torch

from mmdeploy_llm.layers.adapters import Change, PlainTable


def test_it_adds_what_plain_torch_adds(kernels, triton_device):
    torch.manual_seed(0)
    starts, k, n = (0, 40, 60, 70), 50, 70
    own, plain = kernels.low_rank_table(4, starts, k, torch.float32), PlainTable()
    for slot, rank in ((0, 3), (2, 8), (3, 2)):
        extra = {} if slot else {"factor": torch.rand(n) + 0.5, "shift": torch.randn(n)}
        change = Change(
            a=torch.randn(3 * rank, k),
            b=torch.randn(n, rank),
            starts=starts,
            scales=(0.5, 0.0, 2.0),
            **extra,
        )
        own.put(slot, change)
        plain.put(slot, change)
    for table in (own, plain):
        table.put(3, None)
    slots = torch.tensor([2, -1, 0, 3, 2, 9, 1], dtype=torch.int32)
    x, out = torch.randn(7, k + 5)[:, :k], torch.randn(7, n)
    found, expected = out.to(triton_device, copy=True), out.clone()
    own.add(found, x.to(triton_device), slots.to(triton_device))
    plain.add(expected, x, slots)
    torch.testing.assert_close(found.cpu(), expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(found[[1, 3, 5, 6]].cpu(), out[[1, 3, 5, 6]])
