"""The cache by sequence returns the rows that were stored, in their order."""

import pytest
import torch

from mmdeploy_llm.forward import SequenceAttention
from mmdeploy_llm.hooks import BatchLayout, KVCache
from mmdeploy_llm.layers.attention.reference import ReferenceAttention

BLOCK = 4
TABLES = [[3, 0, 5, 7], [2, 6, 1, 4]]
STEPS = [(3, 6), (1, 5), (4, 1), (1, 1)]  # tokens of two sequences in each step


def layout_of(counts, ends):
    slots = [
        TABLES[row][token // BLOCK] * BLOCK + token % BLOCK
        for row, (count, end) in enumerate(zip(counts, ends, strict=True))
        for token in range(end - count, end)
    ]
    return BatchLayout(
        num_decode=0,
        query_lens=tuple(counts),
        context_lens=tuple(ends),
        block_tables=torch.tensor(TABLES, dtype=torch.int32),
        slots=torch.tensor(slots),
    )


@pytest.mark.parametrize("num_kept", [None, 0, 1, 5, 100])
def test_all_rows_of_a_sequence(num_kept):
    cache = KVCache(
        keys=tuple(torch.zeros(8, BLOCK, 1, 2) for _ in range(2)),
        values=tuple(torch.zeros(8, BLOCK, 1, 2) for _ in range(2)),
    )
    stored, ends = [torch.zeros(0, 1, 2)] * 2, [0, 0]
    for counts in STEPS:
        starts, ends = ends, [end + count for end, count in zip(ends, counts, strict=True)]
        attn = ReferenceAttention().begin(layout_of(counts, ends), cache)
        assert isinstance(attn, SequenceAttention)
        assert [rows.num_cached for rows in attn.sequences] == starts
        assert [rows.end - rows.start for rows in attn.sequences] == list(counts)
        for row, count in enumerate(counts):
            new = torch.randn(count, 1, 2)
            stored[row] = torch.cat([stored[row], new])
            first = 0 if num_kept is None else max(0, starts[row] - num_kept)
            keys, values = attn.extend(row, 1, new, -new, num_kept)
            torch.testing.assert_close(keys, stored[row][first:])
            torch.testing.assert_close(values, -stored[row][first:])
    assert not cache.keys[0].any()
