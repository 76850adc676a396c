"""A row's result is the same bits whatever other rows are computed with it."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from mmdeploy_llm.forward import Alibi
from mmdeploy_llm.hooks import VisibleKeys
from mmdeploy_llm.kernels.plain import ACTIVATIONS

DTYPES = (torch.float32, torch.bfloat16)
BLOCK_SIZE = 16
SLOPES = 0.02 * 1.5 ** -torch.arange(1.0, 7)
ROUNDED = Alibi(slopes=SLOPES, factor=0.7, dtype=torch.bfloat16)


def values(*shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(*shape, generator=generator) * 3).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(kernels, dtype, name):
    x = torch.cat([values(33, 171, dtype=dtype), torch.zeros(1, 171, dtype=dtype)])
    found = kernels.activate(x.clone(), name)
    expected = ACTIVATIONS[name](x.double())  # torch's float32 is off by 1e-6 on some processors
    tolerance = 3e-6 if dtype is torch.float32 else 2**-7
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=tolerance)
    for row in range(34):
        assert torch.equal(kernels.activate(x[row : row + 1].clone(), name)[0], found[row])


@pytest.mark.parametrize("name", ["relu", "relu2"])
def test_activations_that_are_exact(kernels, name):
    x = values(33, 171, dtype=torch.bfloat16)
    assert torch.equal(kernels.activate(x.clone(), name), ACTIVATIONS[name](x))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_of_values_that_are_not_finite(kernels, name):
    x = torch.tensor([[float("inf"), float("nan"), 1e30, -1e30]])
    found = kernels.activate(x.clone(), name)
    assert torch.equal(found.isnan(), torch.tensor([[False, True, False, False]]))
    assert found[0, 0] == float("inf")
    assert found[0, 2] == ACTIVATIONS[name](x)[0, 2]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [96, 171, 896])
def test_norms_do_not_depend_on_where_a_row_lies(kernels, dtype, size):
    """Rows of an odd size begin at every address that their dtype allows."""
    x, weight = values(33, size, dtype=dtype), values(size, dtype=dtype)
    found = kernels.rms_norm(x, weight, 1e-6)
    for row in range(33):
        wide = torch.zeros(40 + size, dtype=dtype)
        own = wide[row : row + size].copy_(x[row])[None]
        assert torch.equal(kernels.rms_norm(own, weight, 1e-6)[0], found[row])


class Sequence:
    """Keys and values of one sequence in pages of a cache, at random places."""

    def __init__(self, length, dtype, *, kv_heads=2, group=3, head_dim=32):
        generator = torch.Generator().manual_seed(length)
        num_blocks = -(-length // BLOCK_SIZE)
        self.length = length
        self.q = values(length, kv_heads * group, head_dim, dtype=dtype)
        shape = (num_blocks + 5, BLOCK_SIZE, kv_heads, head_dim)
        self.keys, self.values = (values(*shape, dtype=dtype, seed=seed) for seed in (1, 2))
        table = torch.randperm(num_blocks + 5, generator=generator)[:num_blocks]
        self.table = table[None].to(torch.int32)

    def attend(self, kernels, begin, end, window, **options):
        """Returns attention of the tokens begin .. end, computed in one call."""
        tokens = torch.arange(begin, end)
        visible = VisibleKeys(
            query_starts=torch.tensor([0, end - begin]),
            first_visible=(tokens + 1 - window).clamp(min=0),
            end_visible=tokens + 1,
            block_tables=self.table,
        )
        scale = self.q.shape[-1] ** -0.5
        q = self.q[begin:end]
        return kernels.attend(q, self.keys, self.values, visible, scale=scale, **options)


@pytest.mark.one_is_quick
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [10_000, 1500, 100, 7])
@pytest.mark.parametrize(
    "options",
    [{}, {"sinks": torch.linspace(-6, 9, 6)}, {"alibi": Alibi(slopes=SLOPES)}, {"alibi": ROUNDED}],
)
def test_attention_of_a_token_does_not_depend_on_its_chunk(kernels, dtype, window, options):
    """Contexts of more than two chunks of keys, in calls of one token, of few and of many."""
    sequence = Sequence(2200, dtype)
    whole = sequence.attend(kernels, 0, 2200, window, **options)
    for begin, end in (
        (0, 1),
        (1023, 1030),
        (1100, 1101),
        (1500, 1700),
        (2040, 2060),
        (2199, 2200),
    ):
        found = sequence.attend(kernels, begin, end, window, **options)
        assert torch.equal(found, whole[begin:end])


@pytest.mark.one_is_quick
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [10_000, 1500, 100])
@pytest.mark.parametrize("alibi", [None, Alibi(slopes=SLOPES), ROUNDED])
def test_attention_over_several_chunks_of_keys(kernels, dtype, window, alibi):
    sequence = Sequence(2200, dtype)
    found = sequence.attend(kernels, 2000, 2200, window, alibi=alibi).float()
    keys, own = (
        x[sequence.table[0].long()].flatten(0, 1)[:2200].repeat_interleave(3, 1).float()
        for x in (sequence.keys, sequence.values)
    )
    tokens = torch.arange(2000, 2200)[:, None]
    mask = (torch.arange(2200) <= tokens) & (torch.arange(2200) > tokens - window)
    biases = torch.zeros(6, 2200) if alibi is None else alibi.biases(torch.arange(2200))
    biases = biases[:, None].masked_fill(~mask, -torch.inf)
    attend = partial(F.scaled_dot_product_attention, attn_mask=biases)
    q = sequence.q[2000:].float()
    expected = attend(q.transpose(0, 1), keys.transpose(0, 1), own.transpose(0, 1)).transpose(0, 1)
    tolerance = 1e-4 if dtype is torch.float32 else 0.05
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
