"""The block-wise search for the largest logits, compared with torch's own, with ties and odd
widths."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmdeploy_llm.engine.runner.sampling.largest import first_argmax, largest

WIDTHS = (1, 7, 127, 128, 255, 256, 257, 1000, 40_000, 65_537)


def rows(vocab_size, seed, dtype=torch.float32, num_values=None):
    """Returns random rows; with few different values ties are frequent."""
    generator = torch.Generator().manual_seed(seed)
    if num_values is None:
        return torch.randn(3, vocab_size, generator=generator).to(dtype)
    return torch.randint(num_values, (3, vocab_size), generator=generator).to(dtype)


@pytest.mark.one_is_quick
@pytest.mark.parametrize("num_values", [None, 1, 3, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_argmax_is_torchs_argmax(num_values, dtype):
    for vocab_size in WIDTHS:
        logits = rows(vocab_size, 0, dtype, num_values)
        index, values = first_argmax(logits)
        assert index.tolist() == logits.argmax(dim=1).tolist(), vocab_size
        assert torch.equal(values, logits.amax(dim=1)), vocab_size
        for row, place in enumerate(index.tolist()):
            assert not (logits[row, :place] == values[row]).any(), vocab_size


@pytest.mark.parametrize("vocab_size", WIDTHS)
def test_argmax_finds_the_edges_and_nan(vocab_size):
    logits = torch.zeros(4, vocab_size)
    logits[0, 0] = logits[1, -1] = 1.0
    logits[2, vocab_size // 2] = torch.nan
    index, values = first_argmax(logits)
    assert index.tolist() == [0, vocab_size - 1, vocab_size // 2, 0]
    assert values[2].isnan()


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(WIDTHS), st.integers(1, 300), st.sampled_from([None, 1, 3, 50]), st.integers(0)
)
def test_largest_values_are_topks(vocab_size, size, num_values, seed):
    size = min(size, vocab_size)
    logits = rows(vocab_size, seed % 2**32, num_values=num_values)
    values, ids = largest(logits, size)
    assert torch.equal(values, logits.topk(size, dim=1).values)
    assert torch.equal(logits.gather(1, ids), values)
    assert all(len(set(row)) == size for row in ids.tolist())


def test_rows_of_a_wider_tensor_are_read_in_place():
    logits = rows(5000, 1)[:, 100:4900]
    assert not logits.is_contiguous()
    assert first_argmax(logits)[0].tolist() == logits.argmax(dim=1).tolist()
    assert torch.equal(largest(logits, 9)[0], logits.topk(9, dim=1).values)


@pytest.mark.parametrize("vocab_size", [40_000, 65_537, 65_600])
@pytest.mark.parametrize("size", [1, 64])
def test_the_edges_of_a_row_are_searched(vocab_size, size):
    logits = rows(vocab_size, 2)
    logits[:, [0, -1]] = torch.tensor([98.0, 99.0])
    values, ids = largest(logits, size)
    assert ids[:, :2].tolist() == [[vocab_size - 1, 0][:size]] * 3
    assert values[:, 0].tolist() == [99.0] * 3
