"""Every kernel, compared with plain torch over random shapes."""

import itertools
import random

import pytest
import torch
import torch.nn.functional as F

from mmdeploy_llm.forward import Alibi, QKRotary
from mmdeploy_llm.hooks import VisibleKeys
from mmdeploy_llm.kernels import TORCH
from mmdeploy_llm.kernels.cpu import products
from mmdeploy_llm.kernels.plain import hadamard
from mmdeploy_llm.layers.attention import int4
from mmdeploy_llm.layers.basic.softcap import Softcap

DTYPES = (torch.float32, torch.bfloat16)
SHAPES = [(1, 1), (1, 64), (3, 17), (64, 96), (65, 100), (200, 896)]


def tolerance(dtype):
    """bf16 has 8 bits; another order of a sum may change the last one."""
    return {"atol": 2e-6, "rtol": 2e-6} if dtype is torch.float32 else {"atol": 0, "rtol": 2**-7}


def values(*shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(*shape, generator=generator) * 3).to(dtype)


def test_softcap(kernels):
    """Every value of bf16 has the bits that torch computes for it."""
    softcap = Softcap(30.0)
    x = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).view(4, -1)
    expected = softcap(x.clone())
    softcap.kernels = kernels
    found = softcap(x)
    assert found.data_ptr() == x.data_ptr()
    torch.testing.assert_close(found, expected, atol=0, rtol=0, equal_nan=True)
    wide = values(3, 8, dtype=torch.float32)
    assert torch.equal(softcap(wide), torch.tanh(wide / 30.0) * 30.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), SHAPES)
def test_rms_norm(kernels, dtype, rows, size):
    x, residual = (values(rows, size, dtype=dtype, seed=seed) for seed in (1, 2))
    weight = values(size, dtype=dtype)
    found = kernels.rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(found, TORCH.rms_norm(x, weight, 1e-6), **tolerance(dtype))
    total = residual + x
    found = kernels.rms_norm(x, weight, 1e-6, residual)
    assert torch.equal(residual, total)
    torch.testing.assert_close(found, TORCH.rms_norm(total, weight, 1e-6), **tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_rows_of_a_wider_tensor(kernels, dtype):
    wide = values(7, 40, dtype=dtype)
    weight = values(24, dtype=dtype)
    found = kernels.rms_norm(wide[:, 8:32], weight, 1e-5)
    expected = TORCH.rms_norm(wide[:, 8:32].clone(), weight, 1e-5)
    torch.testing.assert_close(found, expected, **tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), SHAPES)
def test_silu_mul(kernels, dtype, rows, size):
    gate, up = values(rows, 2 * size, dtype=dtype).mul(4).chunk(2, -1)
    found = kernels.silu_mul(gate, up)
    torch.testing.assert_close(found, F.silu(gate) * up, **tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["gelu", "gelu_pytorch_tanh", "quick_gelu", "silu", "relu2", None])
def test_gated_mul_has_the_bits_of_its_two_steps(kernels, dtype, name):
    gate, up = values(5, 66, dtype=dtype).mul(4).chunk(2, -1)
    expected = up * (gate if name is None else kernels.activate(gate.clone(), name))
    assert torch.equal(kernels.gated_mul(gate, up, name), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [0.22, 12.0, 3072**0.5, -1e-3])
def test_scale_has_the_bits_of_torch(kernels, dtype, factor):
    x = values(7, 33, dtype=dtype)
    x[0, :3] = torch.tensor([float("inf"), float("nan"), 0.0])
    assert_equal_bits = {"atol": 0, "rtol": 0, "equal_nan": True}
    for rounds in (False, True):
        own = torch.tensor(factor, dtype=dtype) if rounds else factor
        found = kernels.scale(x.clone(), factor, rounds=rounds)
        torch.testing.assert_close(found, x * own, **assert_equal_bits)


def test_silu_of_the_largest_values(kernels):
    gate = torch.tensor([[-1e30, -200.0, -88.0, 0.0, 88.0, 1e30, float("inf"), float("nan")]])
    found = kernels.silu_mul(gate, torch.ones_like(gate))
    torch.testing.assert_close(found, F.silu(gate), atol=1e-30, rtol=1e-6, equal_nan=True)


@pytest.mark.one_is_quick
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 2), (3, 10), (5, 64), (2, 80), (16, 128)])
def test_rotate(kernels, dtype, is_interleaved, heads, head_dim):
    x = values(33, heads + 2, head_dim, dtype=dtype)
    angles = values(33, head_dim // 2, dtype=torch.float32)
    tables, option = (angles.cos(), angles.sin()), {"is_interleaved": is_interleaved}
    rotated = TORCH.rotate(x[:, :heads].clone(), *tables, **option)
    kept = x[:, heads:].clone()
    kernels.rotate(x[:, :heads], *tables, **option)
    torch.testing.assert_close(x[:, :heads], rotated, **tolerance(dtype) | {"atol": 1e-5})
    assert torch.equal(x[:, heads:], kept)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotate_some_channels(kernels, dtype):
    x = values(9, 3, 32, dtype=dtype)
    angles = values(9, 6, dtype=torch.float32)
    tables, kept = (angles.cos(), angles.sin()), x[..., 12:].clone()
    expected = TORCH.rotate(x.clone(), *tables, is_interleaved=False)[..., :12]
    kernels.rotate(x, *tables, is_interleaved=False)
    torch.testing.assert_close(x[..., :12], expected, **tolerance(dtype) | {"atol": 1e-5})
    assert torch.equal(x[..., 12:], kept)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(1, 1, 2), (3, 2, 10), (5, 1, 64)])
def test_norm_and_rotate(kernels, dtype, heads, kv_heads, head_dim):
    """The kernel computes the norms of q and k and then the rotation; the values stored after them
    stay unchanged."""
    x = values(21, heads + 2 * kv_heads, head_dim, dtype=dtype)
    kept = x[:, heads + kv_heads :].clone()
    weights = values(2, head_dim, dtype=dtype)
    angles = values(21, head_dim // 2, dtype=torch.float32)
    tables = angles.cos(), angles.sin()
    normed = [
        kernels.rms_norm(part.reshape(-1, head_dim), weight, 1e-6).view(part.shape)
        for part, weight in zip(
            (x[:, :heads], x[:, heads : heads + kv_heads]), weights, strict=True
        )
    ]
    expected = torch.cat(normed, 1)
    kernels.rotate(expected, *tables, is_interleaved=False)
    rotated = x[:, : heads + kv_heads]
    rotary = QKRotary(
        cosines=tables[0],
        sines=tables[1],
        is_interleaved=False,
        q_weight=weights[0],
        k_weight=weights[1],
        eps=1e-6,
    )
    found = kernels.norm_and_rotate(rotated, heads, rotary)
    assert found.data_ptr() == rotated.data_ptr()
    assert torch.equal(rotated, expected)
    assert torch.equal(x[:, heads + kv_heads :], kept)


def ranges(lengths, seen):
    """Returns sequences of `lengths` tokens, in which token i attends to keys seen[i]."""
    starts = torch.tensor([0, *lengths]).cumsum(0)
    first, ends = torch.tensor(seen).T.contiguous()
    return starts, first, ends


def dense(q, k, v, first, ends, scale):
    """Returns full attention of each token over its range, in float64."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    places = torch.arange(len(k))
    is_seen = (places >= first[:, None]) & (places < ends[:, None])
    weights = scores.masked_fill(~is_seen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


@pytest.mark.one_is_quick
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 64, 72, 80, 96, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (16, 1)])
def test_attention_over_one_piece(kernels, dtype, head_dim, heads, kv_heads):
    lengths = [1, 5, 64, 130]
    q = values(sum(lengths), heads, head_dim, dtype=dtype, seed=1)
    k, v = (values(sum(lengths), kv_heads, head_dim, dtype=dtype, seed=seed) for seed in (2, 3))
    generator = random.Random(head_dim)
    seen = []
    for length in lengths:
        begins = [generator.randrange(length) for _ in range(length)]
        seen += [(begin, generator.randint(begin + 1, length)) for begin in begins]
    starts, first, ends = ranges(lengths, seen)
    sequences = VisibleKeys(query_starts=starts, first_visible=first, end_visible=ends)
    found = kernels.attend(q, k, v, sequences, scale=0.05)
    apart = torch.stack([q, -q], 2).flatten(1, 2)[:, ::2]  # heads of queries among others
    assert torch.equal(kernels.attend(apart, k, v, sequences, scale=0.05), found)
    for begin, end in itertools.pairwise(starts):
        own = slice(begin, end)
        expected = dense(q[own], k[own], v[own], first[own], ends[own], 0.05)
        atol = 1e-4 if dtype is torch.float32 else 0.06
        torch.testing.assert_close(found[own].double(), expected, atol=atol, rtol=atol)


@pytest.mark.one_is_quick
@pytest.mark.parametrize("dtype", [*DTYPES, torch.int8])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (7, 1), (14, 2)])
def test_long_contexts_are_split(kernels, dtype, heads, kv_heads):
    """Few tokens over keys of several splits, some of which a token does not attend to at all."""
    contexts, counts, head_dim, block_size = [1, 511, 513, 2100, 1700], [1, 1, 1, 2, 3], 40, 48
    of_rows = torch.float32 if dtype is torch.int8 else dtype
    most = -(-max(contexts) // block_size)
    tables = torch.randperm(len(contexts) * most, generator=torch.Generator().manual_seed(1))
    tables = tables.int().view(len(contexts), most)
    shape = (tables.numel(), block_size, kv_heads, head_dim)
    k, v = (values(*shape, dtype=of_rows, seed=seed) for seed in (1, 2))
    caches, scales = [k, v], {}
    if dtype is torch.int8:
        slots = torch.arange(tables.numel() * block_size)
        caches = [torch.zeros(shape, dtype=dtype) for _ in range(2)]
        key_scales, value_scales = (torch.zeros(shape[:3]) for _ in range(2))
        kernels.write_cache(k.flatten(0, 1), caches[0], slots, key_scales)
        kernels.write_cache(v.flatten(0, 1), caches[1], slots, value_scales)
        scales = {"key_scales": key_scales, "value_scales": value_scales}
        k, v = caches[0] * key_scales[..., None], caches[1] * value_scales[..., None]
    seen = [(0, 1), (3, 511), (0, 513), (0, 2100), (1030, 2090), (0, 1698), (1, 2), (600, 1699)]
    starts, first, ends = ranges(counts, seen)
    q = values(sum(counts), heads, head_dim, dtype=of_rows)
    sequences = VisibleKeys(
        query_starts=starts, first_visible=first, end_visible=ends, block_tables=tables
    )
    found = kernels.attend(q, *caches, sequences, scale=0.1, **scales)
    for number, (begin, end) in enumerate(itertools.pairwise(starts)):
        own = slice(begin, end)
        pages = [x[tables[number].long()].flatten(0, 1) for x in (k, v)]
        expected = dense(q[own], *pages, first[own], ends[own], 0.1)
        atol = 0.06 if dtype is torch.bfloat16 else 2e-4
        torch.testing.assert_close(found[own].double(), expected, atol=atol, rtol=atol)


@pytest.mark.one_is_quick
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 3])
def test_attention_depends_on_its_own_sequence_only(kernels, dtype, threads):
    """A sequence has the same bits alone and among others, in prefill and in decode over a long
    context."""
    contexts, counts = [1500, 300, 700, *[20] * 12], [1, 300, 90, *[1] * 12]
    all_ends = [context - count + i + 1 for context, count in zip(contexts, counts, strict=True)
              for i in range(count)]  # fmt: skip
    starts = torch.tensor([0, *counts]).cumsum(0)
    tables = torch.arange(len(contexts) * 24).int().view(-1, 24)
    k, v = (values(tables.numel(), 64, 2, 64, dtype=dtype, seed=seed) for seed in (1, 2))
    q = values(sum(counts), 8, 64, dtype=dtype)
    sinks = torch.linspace(-6, 9, 8)

    def attend(begin, end):
        first, last = int(starts[begin]), int(starts[end])
        ends = torch.tensor(all_ends[first:last])
        sequences = VisibleKeys(
            query_starts=starts[begin : end + 1] - first,
            first_visible=torch.zeros_like(ends),
            end_visible=ends,
            block_tables=tables[begin:end],
        )
        return kernels.attend(q[first:last], k, v, sequences, scale=0.1, sinks=sinks)

    alone = torch.cat([attend(i, i + 1) for i in range(len(counts))])
    torch.set_num_threads(threads)
    assert torch.equal(attend(0, len(counts)), alone)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 16, 48, 64, 256])
def test_int8_cache(kernels, dtype, block_size):
    """Values are within a half step of their scale; attention is close to that of the exact
    cache."""
    tokens, heads, kv_heads, head_dim = 70, 4, 2, 32
    num_blocks = -(-tokens // block_size) + 2
    k, v = (values(tokens, kv_heads, head_dim, dtype=dtype, seed=seed) for seed in (4, 5))
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1)).int()
    places = torch.arange(tokens)
    slots = order[places // block_size].long() * block_size + places % block_size
    caches, scales = [], []
    for rows in (k, v):
        caches.append(torch.zeros(num_blocks, block_size, kv_heads, head_dim, dtype=torch.int8))
        scales.append(torch.zeros(num_blocks, block_size, kv_heads))
        kernels.write_cache(rows, caches[-1], slots, scales[-1])
        stored = caches[-1].flatten(0, 1)[slots].float()
        steps = scales[-1].flatten(0, 1)[slots][..., None]
        assert ((stored * steps - rows.float()).abs() <= steps * 0.501).all()
    q = values(tokens, heads, head_dim, dtype=dtype)
    ends = places + 1
    sequences = VisibleKeys(
        query_starts=torch.tensor([0, tokens]),
        first_visible=torch.zeros_like(ends),
        end_visible=ends,
        block_tables=order[None],
    )
    found = kernels.attend(
        q, *caches, sequences, scale=0.05, key_scales=scales[0], value_scales=scales[1]
    )
    expected = dense(q, k, v, torch.zeros_like(ends), ends, 0.05)
    assert (found.double() - expected).std() / expected.std() < 0.02


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_shows_what_is_not_finite(kernels, dtype, value):
    rows = values(3, 2, 128, dtype=dtype)
    rows[1, 0, 70], rows[2] = value, 1e-38
    cache, scales = torch.zeros(3, 1, 2, 128, dtype=torch.int8), torch.zeros(3, 1, 2)
    kernels.write_cache(rows, cache, torch.arange(3), scales)
    is_finite = (cache * scales[..., None]).isfinite().flatten(0, 1).sum(-1)
    assert is_finite.tolist() == [[128, 128], [0, 128], [128, 128]]


@pytest.mark.one_is_quick
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [2, 40, 64, 72, 256])
def test_int4_cache(kernels, dtype, head_dim):
    """Cache and attention have the bits of plain torch: few rows over several chunks of keys, and
    many rows with ranges of keys."""
    shape, heads = (25, 48), 2
    slots = torch.randperm(25 * 48, generator=torch.Generator().manual_seed(1))
    caches, scales, decoded = [], [], []
    for seed in (4, 5):
        rows = values(25 * 48, heads, head_dim, dtype=dtype, seed=seed)
        rows[3], rows[4], rows[5, 0] = 0, 2.5, 1e30
        codes, bounds = int4.encode(rows)
        caches.append(torch.zeros(*shape, *codes.shape[1:], dtype=torch.uint8))
        scales.append(torch.zeros(*shape, *bounds.shape[1:], dtype=torch.bfloat16))
        kernels.write_cache(rows, caches[-1], slots, scales[-1])
        assert torch.equal(caches[-1].flatten(0, 1)[slots], codes)
        assert torch.equal(scales[-1].flatten(0, 1)[slots], bounds)
        decoded.append(int4.decode(caches[-1], scales[-1], dtype))
        errors = (decoded[-1].flatten(0, 1)[slots] - rows).float().abs()[6:]
        steps = bounds[6:, ..., :1].float().repeat_interleave(head_dim // bounds.shape[-2], -1)
        assert (errors <= steps.flatten(2) * 0.53 + 2**-5).all()
    counts, seen = [2, 70], [(0, 1100), (3, 1000), *((i // 2, 1130 + i) for i in range(70))]
    starts, first, ends = ranges(counts, seen)
    q = values(sum(counts), 3 * heads, head_dim, dtype=dtype)
    tables = torch.arange(25, dtype=torch.int32).flip(0).expand(2, -1).contiguous()
    sequences = VisibleKeys(
        query_starts=starts, first_visible=first, end_visible=ends, block_tables=tables
    )
    options = {"scale": 0.05, "softcap": 3.0, "sinks": torch.linspace(-6, 9, 3 * heads)}
    options["alibi"] = Alibi(slopes=torch.linspace(0.001, 0.1, 3 * heads))
    found = kernels.attend(
        q, *caches, sequences, key_scales=scales[0], value_scales=scales[1], **options
    )
    assert torch.equal(found, kernels.attend(q, *decoded, sequences, **options))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_int4_shows_what_is_not_finite(kernels, value):
    rows = values(2, 1, 128, dtype=torch.float32)
    rows[1, 0, 70] = value
    cache = torch.zeros(2, 1, 1, 64, dtype=torch.uint8)
    scales = torch.zeros(2, 1, 1, 4, 2, dtype=torch.bfloat16)
    kernels.write_cache(rows, cache, torch.arange(2), scales)
    for codes, bounds in ((cache, scales), int4.encode(rows)):
        is_finite = int4.decode(codes, bounds, torch.float32).isfinite().view(2, 128)
        assert is_finite.sum(-1).tolist() == [128, 96]


@pytest.mark.one_is_quick
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "n", "k"),
    [
        (1, 1, 1),
        (1, 64, 4),
        (5, 130, 50),
        (7, 63, 257),
        (97, 200, 64),
        (32, 128, 896),
        (401, 330, 1090),
    ],
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_s8(kernels, dtype, rows, n, k, has_bias):
    """The integers equal those of quantizing and multiplying step by step."""
    x = values(rows, k + 3, dtype=dtype)[:, 1 : k + 1]
    generator = torch.Generator().manual_seed(n)
    weight = torch.randint(-128, 128, (n, k), generator=generator, dtype=torch.int8)
    row_scales = torch.rand(2, n, generator=generator)
    bias = values(n, dtype=dtype) if has_bias else None
    found = kernels.linear_s8(x, kernels.pack_s8(weight), row_scales, bias)
    scales, shifts = row_scales.double()
    expected = torch.zeros(rows, n, dtype=torch.float64)
    slack = 0.0  # a value that lies between two integers may be rounded to the other one
    rotated = kernels.rotated(x.float().contiguous())
    for part, own in zip(rotated.split(64, 1), weight.split(64, 1), strict=True):
        step = part.float().abs().amax(1, keepdim=True) / 127
        wide = own.double() * scales[:, None] + shifts[:, None]
        expected += ((part.float() / step).round().double() @ wide.T) * step
        slack = max(slack, float(step.max() * wide.abs().max()) * 1.01)
    if bias is not None:
        expected += bias.double()
    atol, rtol = (slack, 1e-5) if dtype is torch.float32 else (slack, 2**-7)
    torch.testing.assert_close(found.double(), expected, atol=atol, rtol=rtol)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 33])
def test_integers_of_int8_are_exact(kernels, rows):
    """Largest products of one sign: a sum in 16 bits would saturate."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randint(-127, 128, (rows, 520), generator=generator)
    x[:, ::64] = 127  # every scale is 1
    weight = torch.randint(-128, 128, (70, 520), generator=generator)
    row_scales = torch.stack([torch.ones(70), torch.zeros(70)])
    for signs in ((1, 1), (1, -1), (-1, -1), (None, None)):
        if signs[0] is not None:
            x, weight = torch.full_like(x, 127 * signs[0]), torch.full_like(weight, 127 * signs[1])
        packed = kernels.pack_s8(weight.to(torch.int8))
        turned = kernels.rotated(x.float(), is_back=True)  # which is rotated to integers
        found = kernels.linear_s8(turned, packed, row_scales, None)
        assert torch.equal(found.long(), x @ weight.T)


@pytest.mark.one_is_quick
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "n", "k"),
    [
        (1, 1, 2),
        (1, 64, 4),
        (5, 130, 50),
        (7, 63, 1030),
        (200, 200, 64),
        (32, 128, 896),
        (401, 330, 1090),
    ],
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_float(kernels, dtype, rows, n, k, has_bias):
    x = values(rows, k + 3, dtype=dtype)[:, 1 : k + 1]
    weight = values(n, k, dtype=dtype)
    bias = values(n, dtype=dtype) if has_bias else None
    found = kernels.linear_float(x, kernels.pack_float(weight.clone()), n, bias)
    expected = x.double() @ weight.double().T
    if bias is not None:
        expected += bias.double()
    atol, rtol = (1e-4, 1e-6) if dtype is torch.float32 else (1e-3, 2**-8)
    torch.testing.assert_close(found.double(), expected, atol=atol * k**0.5, rtol=rtol)


@pytest.mark.one_is_quick
@pytest.mark.parametrize("rows", [16, 40])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("n", "k"), [(63, 50), (1100, 36), (640, 2500)])
def test_linear_wide(kernels, rows, has_bias, n, k):
    """Many rows at the portable level of x86; wide copies of one and of several parts."""
    x, weight = values(rows, k, dtype=torch.bfloat16), values(n, k, dtype=torch.bfloat16)
    bias = values(n, dtype=torch.bfloat16) if has_bias else None
    expected = x.double() @ weight.double().T
    if bias is not None:
        expected += bias.double()
    found = kernels.linear_wide(x, kernels.pack_float(weight.clone()), n, bias)
    torch.testing.assert_close(found.double(), expected, atol=1e-3 * k**0.5, rtol=2**-8)
    packed = kernels.pack(weight.clone(), None)
    is_wide = torch.equal(packed.product(x, bias), found)
    assert is_wide or not kernels.leaves_many_rows_to_torch


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("n", "k", "has_bias"), [(63, 50, True), (1100, 36, False), (70, 900, True)]
)
def test_linear_wide_of_int8(kernels, dtype, n, k, has_bias):
    """Many rows in int8 at the portable level of x86: the same rounding, so the same values but for
    the order of float32 sums."""
    x, weight = values(130, k + 3, dtype=dtype)[:, 1 : k + 1], values(n, k, dtype=dtype)
    bias = values(n, dtype=dtype) if has_bias else None
    rounded, row_scales = kernels.quantize_rows(kernels.rotated(weight))
    packed = kernels.pack_s8(rounded)
    expected = kernels.linear_s8(x, packed, row_scales, bias)
    found = kernels.linear_wide(x, packed, n, bias, row_scales)
    torch.testing.assert_close(found, expected, **tolerance(dtype) | {"atol": 1e-4 * k**0.5})
    is_wide = torch.equal(kernels.pack(weight, "int8").product(x, bias), found)
    assert is_wide or not kernels.leaves_many_rows_to_torch


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(70, 36), (64, 64), (130, 200)])
def test_int8_is_rotated(kernels, dtype, n, k):
    """A product of rotated rows and columns is that of the rows and columns, and a row that is
    looked up is the weight's; a value of a block that is far from the others costs these little."""
    x, weight = values(5, k, dtype=dtype), values(n, k, dtype=dtype)
    x[:, 3] *= 50
    weight[:, 7] *= 50
    whole = k // 64 * 64
    turned = kernels.rotated(x)
    for first in range(0, whole, 64):
        block = slice(first, first + 64)
        signs = kernels.rotated(torch.eye(64))[:, 0].sign()
        expected = (x[:, block].float() * signs) @ hadamard(64)
        torch.testing.assert_close(turned[:, block], expected, rtol=1e-5, atol=1e-4)
        assert 16 < (signs > 0).sum() < 48
    assert torch.equal(turned[:, whole:], x[:, whole:].float())
    back = kernels.rotated(turned, is_back=True)
    torch.testing.assert_close(back, x.float(), rtol=1e-5, atol=1e-4)
    packed = kernels.pack(weight.clone(), "int8")
    exact = x.double() @ weight.double().T
    error = (packed.product(x, None, torch.float32).double() - exact).norm() / exact.norm()
    assert error < (0.03 if whole else 0.1)
    rows = packed.rows(torch.arange(n), dtype)
    step = kernels.rotated(weight.float()).abs().amax(1) / 127 + weight.float().abs().amax(1) / 128
    assert ((rows - weight).float().norm(dim=1) <= step * k**0.5).all()


@pytest.mark.parametrize("make", [torch.relu, lambda x: x + 1, lambda x: 3 + x / 100])
def test_rotated_values_with_a_common_mean_lose_little(kernels, make):
    x, weight = make(torch.randn(64, 256)), torch.eye(256)
    found = kernels.pack(weight, "int8").product(x, None)
    assert (found - x).norm() / x.norm() < 0.009


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("rows", [2, 200])
@pytest.mark.parametrize("at", [3, 69])
def test_a_row_that_is_no_number_stays_so(kernels, value, rows, at):
    """In a whole group and in the rest; the other rows are as they were."""
    x, packed = torch.randn(rows, 70), kernels.pack(torch.randn(40, 70), "int8")
    expected = packed.product(x, None)
    x[1, at] = value
    found = packed.product(x, None)
    assert not found[1].isfinite().any()
    others = [row for row in range(rows) if row != 1]
    assert torch.equal(found[others], expected[others])


def a_product(kernels, kind, n, k):
    """Returns a function of x [T, k] that multiplies by a weight [n, k]."""
    if kind == "int8":
        weight = torch.randint(-127, 128, (n, k), dtype=torch.int8)
        packed, row_scales = kernels.pack_s8(weight), torch.rand(2, n)
        return lambda x: kernels.linear_s8(x, packed, row_scales, None)
    packed = kernels.pack_float(values(n, k, dtype=getattr(torch, kind)))
    return lambda x: kernels.linear_float(x, packed, n, None)


@pytest.mark.one_is_quick
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("k", [64, 1090])
def test_a_row_has_the_same_bits_in_every_batch(kernels, kind, k):
    """Alone, and among 2 to 33 rows and a block of rows and more."""
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    product, x = a_product(kernels, kind, 330, k), values(400, k, dtype=dtype)
    alone = torch.cat([product(row) for row in x.split(1)])
    for num in (*range(2, 34), 191, 192, 193, 385, 400):
        assert torch.equal(product(x[:num]), alone[:num]), num


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(70, 36), (64, 9), (5, 1)])
def test_packed_weights(kernels, dtype, shape):
    """A packed weight multiplies, and looks up its rows, whether or not k fills its units."""
    weight, x = values(*shape, dtype=dtype), values(3, shape[1], dtype=dtype)
    packed = kernels.pack(weight.clone(), None)
    if packed is None:  # torch's own product is as fast
        assert dtype is torch.float32
        assert not kernels.has_wide_registers
        return
    atol = 1e-5 if dtype is torch.float32 else 0.1
    torch.testing.assert_close(packed.product(x, None), x @ weight.T, atol=atol, rtol=2**-7)
    indices = torch.arange(shape[0]).flip(0)
    assert torch.equal(packed.rows(indices, weight.dtype), weight.flip(0))


def test_a_product_of_two_dtypes_is_refused(kernels):
    packed = kernels.pack_float(torch.zeros(4, 4))
    with pytest.raises(AssertionError, match=r"torch.bfloat16 times packed torch.float32"):
        kernels.linear_float(torch.zeros(1, 4).bfloat16(), packed, 4, None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_quantize_rows(kernels, dtype):
    weight = values(9, 70, dtype=dtype)
    weight[3], weight[4, ::2], weight[5] = 0, 0, weight[5].abs()
    rounded, (scales, shifts) = kernels.quantize_rows(weight)
    span = weight.float().amax(1) - weight.float().amin(1).clamp(max=0)
    torch.testing.assert_close(scales, span / 255)
    found = rounded.float() * scales[:, None] + shifts[:, None]
    assert (found[weight == 0].abs() <= 1e-7).all()
    # The ends of a range may lie half a step outside of the codes, since 0 has one of its own.
    is_end = (weight == weight.amax(1, keepdim=True)) | (weight == weight.amin(1, keepdim=True))
    limit = torch.where(is_end, 1.001, 0.501) * scales[:, None]
    assert ((found - weight.float()).abs() <= limit).all()


@pytest.mark.parametrize(("n", "k"), [(9, 70), (200, 64)])
def test_int8_is_rounded_by_parts(kernels, n, k, monkeypatch):
    monkeypatch.setattr(products, "ROUNDED_VALUES", 64 * k)
    weight = values(n, k, dtype=torch.bfloat16)
    rounded, expected = kernels.quantize_rows(kernels.rotated(weight))
    panels, row_scales = kernels.rounded_panels(weight)
    assert torch.equal(row_scales, expected)
    assert torch.equal(panels, kernels.pack_s8(rounded))


def test_packing_needs_no_memory_of_its_own(kernels):
    for dtype in DTYPES:
        weight = values(128, 6, dtype=dtype)
        assert kernels.pack_float(weight).data_ptr() == weight.data_ptr()


def test_linear_s8_of_zeros(kernels):
    weight = torch.ones(3, 5, dtype=torch.int8)
    found = kernels.linear_s8(torch.zeros(2, 5), kernels.pack_s8(weight), torch.ones(2, 3), None)
    assert torch.equal(found, torch.zeros(2, 3))


def test_takes(kernels):
    x = torch.zeros(4, 6)
    assert kernels.takes(x)
    assert kernels.takes(x[:, 1:3], x[2:])
    assert not kernels.takes(x.T)
    assert not kernels.takes(x.half())
    assert not kernels.takes(x, x.bfloat16())
    assert not kernels.takes(torch.zeros(2, 2, device="meta"))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_number_of_threads_changes_nothing(kernels, threads):
    before = torch.get_num_threads()
    x, weight = values(100, 64, dtype=torch.bfloat16), values(64, dtype=torch.bfloat16)
    torch.set_num_threads(1)
    expected = kernels.rms_norm(x, weight, 1e-6)
    torch.set_num_threads(threads)
    assert torch.equal(kernels.rms_norm(x, weight, 1e-6), expected)
    torch.set_num_threads(before)


def test_every_level(kernels_of_level):
    """Runs one case of each kernel with every instruction set but the best one."""
    for dtype in DTYPES:
        test_rms_norm(kernels_of_level, dtype, 65, 100)
        test_silu_mul(kernels_of_level, dtype, 65, 100)
        test_gated_mul_has_the_bits_of_its_two_steps(kernels_of_level, dtype, "gelu_pytorch_tanh")
        test_scale_has_the_bits_of_torch(kernels_of_level, dtype, 0.22)
        test_rotate(kernels_of_level, dtype, False, 5, 64)
        test_norm_and_rotate(kernels_of_level, dtype, 3, 2, 10)
        test_attention_over_one_piece(kernels_of_level, dtype, 72, 6, 2)
        test_int8_cache(kernels_of_level, dtype, 16)
        test_linear_s8(kernels_of_level, dtype, 5, 130, 50, True)
        test_linear_float(kernels_of_level, dtype, 7, 63, 1030, True)
        test_quantize_rows(kernels_of_level, dtype)
    for dtype in (*DTYPES, torch.int8):
        test_long_contexts_are_split(kernels_of_level, dtype, 7, 1)
    for kind in ("float32", "bfloat16", "int8"):
        test_a_row_has_the_same_bits_in_every_batch(kernels_of_level, kind, 64)
    test_linear_wide(kernels_of_level, 16, True, 1100, 36)
    test_linear_wide_of_int8(kernels_of_level, torch.bfloat16, 1100, 36, True)
    test_integers_of_int8_are_exact(kernels_of_level, 6)
    test_silu_of_the_largest_values(kernels_of_level)


@pytest.mark.parametrize("rows", [1, 7, 40, 200])
@pytest.mark.parametrize("quantization", [None, "int8", "int8wo", "int4", "int4wo"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_sums_in_float32(kernels, has_bias, quantization, rows):
    """A product in float32 is what the product in bfloat16 is rounded from."""
    x, weight = (values(each, 256, dtype=torch.bfloat16) for each in (rows, 150))
    bias = values(150, dtype=torch.bfloat16) if has_bias else None
    packed = kernels.pack(weight, quantization)
    found = packed.product(x, bias, torch.float32)
    assert found.dtype is torch.float32
    rounded = found.bfloat16()
    assert torch.equal(rounded, packed.product(x, bias))
    assert (rounded != found).float().mean() > 0.9
    if quantization is None:
        expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        torch.testing.assert_close(found.double(), expected, atol=2e-4, rtol=1e-5)
