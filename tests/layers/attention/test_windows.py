"""Two block tables in one step: each layer on its own, frames that stay, windows that must fit."""

from dataclasses import replace

import pytest
import torch

from mmdeploy_llm.errors import PluginError
from mmdeploy_llm.hooks import BatchLayout, KVCache
from mmdeploy_llm.layers.attention.native import NativeAttention
from mmdeploy_llm.layers.attention.reference import ReferenceAttention
from mmdeploy_llm.layers.attention.windows import WindowAttention

SIZE, WINDOW = 4, 6


def layout(lengths):
    """A decode step; the tables for windows name blocks of their own, and nonsense before."""
    tables = torch.arange(len(lengths) * 8).view(-1, 8).int()
    own = tables.flip(0).clone()
    for row, length in enumerate(lengths):
        own[row, : max(0, length - WINDOW) // SIZE] = 0
    last = torch.tensor(lengths)[:, None] - 1

    def slots(table):
        return table.gather(1, last // SIZE)[:, 0].long() * SIZE + last[:, 0] % SIZE

    return BatchLayout(
        num_decode=len(lengths),
        query_lens=(1,) * len(lengths),
        context_lens=tuple(lengths),
        block_tables=tables,
        slots=slots(tables),
        windows=(own, slots(own)),
    )


def cache():
    torch.manual_seed(0)
    keys, values = (tuple(torch.randn(16, SIZE, 2, 8) for _ in range(2)) for _ in range(2))
    return KVCache(keys=keys, values=values)


@pytest.fixture(params=["reference", "native"])
def new_backend(request):
    if request.param == "reference":
        return ReferenceAttention
    kernels = request.getfixturevalue("kernels")
    return lambda: NativeAttention(kernels)


def test_each_layer_reads_its_own_table(new_backend):
    step, q = layout([7, 30]), torch.randn(2, 4, 8)
    k, v = torch.randn(2, 2, 2, 8)
    context = WindowAttention(new_backend, {1: WINDOW}).begin(step, cache())
    tables, slots = step.windows
    plain = replace(step, windows=None)
    own = replace(plain, block_tables=tables, slots=slots)
    for layer, expected, window in ((0, plain, None), (1, own, WINDOW)):
        found = context.attend(layer, q, k, v, window=window)
        wanted = ReferenceAttention().begin(expected, cache()).attend(layer, q, k, v, window=window)
        torch.testing.assert_close(found, wanted)


def test_the_frame_stays_while_both_frames_do(kernels):
    backend, pages = WindowAttention(lambda: NativeAttention(kernels), {1: WINDOW}), cache()
    frames = [backend.begin(layout(lengths), pages).frame for lengths in ([7, 30], [8, 31], [3])]
    assert frames[0] is frames[1]
    assert frames[2] is not frames[0]
    assert backend.begin(layout([9, 32]), pages).frame is frames[0]


def test_backends_without_frames_have_none():
    backend = WindowAttention(ReferenceAttention, {1: WINDOW})
    assert backend.begin(layout([7]), cache()).frame is None


@pytest.mark.parametrize("window", [None, WINDOW + 1])
def test_a_longer_window_than_that_of_the_cache_is_the_fault_of_the_model(window):
    context = WindowAttention(ReferenceAttention, {1: WINDOW}).begin(layout([7]), cache())
    q, (k, v) = torch.randn(1, 4, 8), torch.randn(2, 1, 2, 8)
    with pytest.raises(PluginError, match="layer 1 keeps the keys of a window of 6 tokens"):
        context.attend(1, q, k, v, window=window)


def test_by_sequence():
    step = layout([7, 30])
    context = WindowAttention(ReferenceAttention, {1: WINDOW}).begin(step, cache())
    assert [rows.num_cached for rows in context.sequences] == [6, 29]
    k, v = torch.randn(2, 1, 2, 8)
    keys, _ = context.extend(1, 1, k, v, WINDOW - 1)
    assert keys.shape == (WINDOW, 2, 8)
    with pytest.raises(PluginError, match="attends over all"):
        context.extend(1, 1, k, v)
