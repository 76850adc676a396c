"""The low-rank changes of adapters: kernels equal plain torch."""

import pytest
import torch

from mmdeploy_llm.layers.adapters import Change, PlainTable

FLOATS = (torch.float32, torch.bfloat16)
NUM_SLOTS = 5
SLOTS = (3, -1, 0, 0, 3, 1, 0, 0, 0, 0, 0, 0, 4, -1, 3, 9)  # 1 changes nothing, 9 is none


def change(sizes, k, rank, dtype, *, is_dora=False):
    """Returns a random change of parts of these sizes."""
    n = sum(sizes)
    starts = tuple(sum(sizes[:i]) for i in range(len(sizes) + 1))
    extra = {"factor": torch.rand(n) + 0.5, "shift": torch.randn(n)} if is_dora else {}
    return Change(
        a=(torch.randn(len(sizes) * rank, k) / k**0.5).to(dtype),
        b=torch.randn(n, rank).to(dtype),
        starts=starts,
        scales=tuple(0.5 + part for part in range(len(sizes))),
        **extra,
    )


def tables(kernels, sizes, k, dtype):
    """Returns the table of the kernels and the plain one, with the same changes."""
    changes = {0: change(sizes, k, 16, dtype), 3: change(sizes, k, 5, dtype)}
    changes[4] = change(sizes, k, 8, dtype, is_dora=True)
    own, plain = kernels.low_rank_table(NUM_SLOTS, changes[0].starts, k, dtype), PlainTable()
    for table in (own, plain):
        for slot, each in changes.items():
            table.put(slot, each)
    return own, plain


def check(kernels, sizes, k, slots, dtype):
    torch.manual_seed(0)
    own, plain = tables(kernels, sizes, k, dtype)
    slots = torch.tensor(slots, dtype=torch.int32)
    x = torch.randn(len(slots), k + 4).to(dtype)[:, :k]
    begun = torch.randn(len(slots), sum(sizes)).to(dtype)
    found, expected = begun.clone(), begun.clone()
    own.add(found, x, slots)
    plain.add(expected, x, slots)
    assert not torch.equal(expected, begun)
    tolerance = 1e-5 if dtype is torch.float32 else 0.06  # bf16 rounds the inner values
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    return found, x, begun, own, slots


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("sizes", "k"), [((40,), 34), ((600, 64, 70), 128), ((16, 300), 64)])
def test_it_adds_what_plain_torch_adds(kernels, sizes, k, dtype):
    found, x, begun, own, slots = check(kernels, sizes, k, SLOTS, dtype)
    assert torch.equal(found[[1, 5, 13, 15]], begun[[1, 5, 13, 15]])
    for row in (0, 3, 12):
        alone = begun[row : row + 1].clone()
        own.add(alone, x[row : row + 1], slots[row : row + 1])
        assert torch.equal(alone[0], found[row]), "a row depends on the others"


@pytest.mark.parametrize("num_threads", [1, 2])
def test_many_rows_are_the_same_with_any_number_of_threads(kernels, num_threads):
    torch.set_num_threads(num_threads)
    check(kernels, (300, 80), 64, SLOTS * 10, torch.bfloat16)
    check(kernels, (1500,), 64, [3, 3], torch.bfloat16)


def test_other_levels_add_the_same(kernels_of_level):
    for dtype in FLOATS:
        check(kernels_of_level, (600, 70), 128, SLOTS, dtype)


def test_a_recording_sees_what_is_put_into_the_table_later(kernels):
    torch.manual_seed(0)
    own, plain = tables(kernels, (48,), 32, torch.float32)
    x, out = torch.randn(3, 32), torch.randn(3, 48)

    def function(x, out, slots):
        own.add(out, x, slots)
        return out

    slots = torch.tensor([0, 3, -1], dtype=torch.int32)
    _, recording = kernels.record(function, x, out, slots)
    new = change((48,), 32, 24, torch.float32)
    for table in (own, plain):
        table.put(3, new)
        table.put(0, None)
    slots = torch.tensor([0, -1, 3], dtype=torch.int32)
    expected = out.clone()
    plain.add(expected, x, slots)
    found = recording.run(x, out, slots)
    assert torch.equal(found[:2], out[:2])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_odd_widths_are_left_to_plain_torch(kernels):
    assert isinstance(kernels.low_rank_table(1, (0, 4), 33, torch.bfloat16), PlainTable)
    assert isinstance(kernels.low_rank_table(1, (0, 4), 32, torch.float16), PlainTable)
