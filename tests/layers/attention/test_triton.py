"""Our Triton kernels, compared with dense attention; in the interpreter if there is no GPU."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mmdeploy_llm.hooks import KVCache
from mmdeploy_llm.layers.attention import int4
from mmdeploy_llm.layers.attention.layouts import decode_layout

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INT4_SIZES = (32, 40, 64, 80, 96, 128, 192, 256)


def seeds(count, num_quick, num_full):
    """The first are quick, those up to num_full full, and the rest long."""
    tiers = {
        seed: pytest.mark.full if seed < num_full else pytest.mark.long for seed in range(count)
    }
    more = (pytest.param(seed, marks=tiers[seed]) for seed in range(num_quick, count))
    return [*range(num_quick), *more]


@pytest.mark.one_is_quick
@pytest.mark.parametrize("seed", seeds(30, num_quick=3, num_full=12))
def test_random_batches(cases, triton_attention, triton_device, seed):
    case, options = cases.random_case(
        seed, longest=50, dtype=DTYPES[seed % 3], device=triton_device
    )
    if seed % 2:
        case.layout = cases.with_lengths(case.layout, max_context=1500)  # decode in splits
    case.check(triton_attention, **options)


@pytest.mark.full
@pytest.mark.parametrize("batch", range(4))
@pytest.mark.parametrize("options", [{}, {"window": 1}, {"window": 6, "softcap": 0.8}])
def test_tokens_of_a_span_attend_to_each_other(
    cases, triton_attention, triton_device, batch, options
):
    query_lens, earlier, spans = cases.SPANS[batch]
    case = cases.Case(7, query_lens, earlier, head_dim=64, spans=spans, device=triton_device)
    case.check(triton_attention, **options)
    case.check(triton_attention, **options, sinks=cases.sinks_of(4, triton_device))


# Head size, heads, heads of keys and values, block size.
OF_8_BITS = [(64, 3, 3, 1), (80, 4, 2, 16), (96, 7, 1, 24), (128, 16, 2, 64), (256, 4, 1, 4)]


def tier_of_8_bits(shape, dtype):
    """All shapes in one dtype, and all dtypes in one shape, run in CI."""
    is_in_ci = dtype is torch.bfloat16 or shape == OF_8_BITS[0]
    return pytest.mark.full if is_in_ci else pytest.mark.long


@pytest.mark.few_in_ci(4)
@pytest.mark.full
@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("head_dim", "heads", "kv_heads", "block_size", "dtype"),
    [
        (*OF_8_BITS[0], torch.bfloat16),
        *(
            pytest.param(*shape, dtype, marks=tier_of_8_bits(shape, dtype))
            for dtype in (torch.bfloat16, torch.float32, torch.float16)
            for shape in OF_8_BITS
            if (shape, dtype) != (OF_8_BITS[0], torch.bfloat16)
        ),
    ],
)
def test_cache_in_8_bits(
    cases,
    triton_attention,
    triton_device,
    head_dim,
    heads,
    kv_heads,
    block_size,
    dtype,
    cache_dtype,
):
    """Attention equals that over the keys and values in the cache, which equal the written ones up
    to one rounding step. The cases are decode in splits, and a chunk after a prefix."""
    is_cuda, is_float = triton_device.type == "cuda", cache_dtype.is_floating_point
    if is_cuda and is_float and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no 8-bit floats")
    fixed = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "block_size": block_size}
    fixed |= {"dtype": dtype, "device": triton_device}
    empty = cases.Case(3, [40, 17], [0, 0], **fixed)
    shape = empty.cache.keys[0].shape
    rows = [torch.zeros(shape, dtype=cache_dtype, device=triton_device) for _ in range(2)]
    scales = [torch.zeros(shape[:3], device=triton_device) for _ in range(2)]
    cache = KVCache(
        keys=(rows[0],), values=(rows[1],), key_scales=(scales[0],), value_scales=(scales[1],)
    )
    empty.cache = cache
    context = triton_attention.begin(empty.layout, cache)
    context.attend(0, empty.q, empty.k, empty.v)

    case = cases.Case(3, [1, 5], [39, 12], **fixed)
    layout = cases.with_lengths(case.layout, max_context=1500)
    options = {"sinks": cases.sinks_of(heads, triton_device)} if is_float else {}
    out = triton_attention.begin(layout, cache).attend(0, case.q, case.k, case.v, **options)
    rounding = 1 / 16 if is_float else 0.5 / 127
    for row, (k, v) in enumerate(case.full):
        held = []
        for cached, scale, exact in zip(rows, scales, (k, v), strict=True):
            pages = case.layout.block_tables[row].long()
            held.append((cached[pages].float() * scale[pages][..., None]).flatten(0, 1)[: len(k)])
            largest = exact.abs().amax(-1, keepdim=True)
            bound = rounding * (exact.abs() if is_float else largest)
            assert ((held[-1] - exact).abs() <= bound + 0.002 * largest).all()
        case.full[row] = tuple(held)
    tolerance = cases.TOLERANCE[dtype]
    expected = case.expected(**options)
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.one_is_quick
@pytest.mark.parametrize("seed", seeds(24, num_quick=2, num_full=9))
def test_cache_in_4_bits(cases, triton_attention, triton_device, seed):
    """Each head size in each dtype: batches of all kinds, with windows, softcap and sinks, and
    decode in splits."""
    head_dim, dtype = INT4_SIZES[seed % 8], DTYPES[seed % 3]
    fixed = {"head_dim": head_dim, "dtype": dtype, "device": triton_device}
    case, options = cases.random_case(seed, longest=50, **fixed)
    case.layout = cases.with_lengths(case.layout, max_context=1500 if seed // 8 % 2 else None)
    case.check_int4(triton_attention, **options)


@pytest.mark.full
@pytest.mark.parametrize("head_dim", [80, 128])
def test_spans_over_a_cache_in_4_bits(cases, triton_attention, triton_device, head_dim):
    query_lens, earlier, spans = cases.SPANS[1]
    case = cases.Case(7, query_lens, earlier, head_dim=head_dim, spans=spans, device=triton_device)
    case.check_int4(triton_attention, window=6, softcap=0.8)


@pytest.mark.full
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_4_bits_show_what_is_not_finite(triton_attention, triton_device, value):
    """All values of its group, and those of no other, are NaN when they are read."""
    from mmdeploy_llm.kernels.cuda.int4 import write_int4

    rows = torch.randn(2, 1, 128, device=triton_device)
    rows[1, 0, 70] = value
    codes, scales = (x[:, None] for x in int4.encode(torch.zeros_like(rows)))
    slots = torch.arange(2, device=triton_device)
    write_int4(rows, rows, codes, codes.clone(), slots, scales, scales.clone())
    is_finite = int4.decode(codes, scales, torch.float32).isfinite().view(2, 128)
    assert is_finite.sum(-1).tolist() == [128, 96]


def test_strided_queries_and_keys(cases, triton_attention, triton_device):
    """q, k and v are slices of one tensor, as one matrix product returns them."""
    case = cases.Case(5, [1, 6], [9, 2], head_dim=64, device=triton_device)
    joined = torch.cat([case.q, case.k, case.v], dim=1)
    case.q, case.k, case.v = joined.split([4, 2, 2], dim=1)
    case.check(triton_attention)


@pytest.mark.full
@pytest.mark.parametrize("has_window", [False, True])
def test_splits_of_long_contexts(cases, triton_attention, triton_device, has_window):
    """With one sequence and two key heads on the GPU, the context is split."""
    from mmdeploy_llm.kernels.cuda import paged

    options = {"window": 300} if has_window else {}
    splits = paged.num_splits(2, 700, options.get("window"), triton_attention.gpu)
    case = cases.Case(6, [1], [699], heads=6, head_dim=64, block_size=16, device=triton_device)
    if triton_device.type == "cpu":
        assert splits == (2 if has_window else 4)
    case.check(triton_attention, **options)
    case.check(triton_attention, **options, sinks=cases.sinks_of(6, triton_device))


def test_number_of_splits():
    paged = pytest.importorskip("mmdeploy_llm.kernels.cuda.paged")
    gpu = paged.Gpu(num_processors=132, shared_memory=232_448)
    assert paged.num_splits(4, 32_768, None, gpu) == 64
    assert paged.num_splits(4, 1024, None, gpu) == 8  # splits of at least 128 keys
    assert paged.num_splits(4, 32_768, 512, gpu) == 4  # of the keys inside the window
    assert paged.num_splits(256, 32_768, None, gpu) == 2
    assert paged.num_splits(300, 32_768, None, gpu) == 1  # enough rows to fill it
    assert paged.num_splits(4, 1, None, gpu) == 1


class _Launcher:
    """A Triton kernel whose launches are recorded."""

    def __init__(self, kernel, recording):
        self._kernel = kernel
        self._recording = recording

    def __getitem__(self, grid):
        return self._recording.kernel(self._kernel[grid])


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, {"window": 9, "softcap": 2.0}])
def test_recorded_decode_serves_other_batches(
    cases, triton_attention, triton_device, recording, monkeypatch, options
):
    """The step is recorded once on padding only and replayed for batches of other sizes and
    lengths."""
    if triton_device.type == "cuda":
        pytest.skip("real graphs are tested in tests/gpu")
    from mmdeploy_llm.kernels.cuda import heads, paged_kernels

    for module, name in (
        (paged_kernels, "decode_kernel"),
        (paged_kernels, "combine_kernel"),
        (heads, "_heads"),
    ):
        launcher = _Launcher(getattr(module, name), recording)
        monkeypatch.setattr(module, name, launcher)
    options = options | {"sinks": cases.sinks_of(6)}
    cases.check_replays(triton_attention, recording, decode_layout, options, block_size=16)


@pytest.mark.parametrize(
    "capability",
    [
        pytest.param("90:1", marks=pytest.mark.full),
        *(pytest.param(name, marks=pytest.mark.long) for name in ("80", "86", "90", "100")),
    ],
)
def test_kernels_compile_for_gpus_that_this_machine_lacks(triton_device, capability):
    """The interpreter accepts more than the compiler and has unlimited shared memory."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).with_name("compile_kernels.py")), capability]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == f"compiled for {capability.partition(':')[0]}\n"


def test_padding_is_not_stored(cases, triton_attention, triton_device):
    case = cases.Case(8, [1, 1], [3, 5], head_dim=64, device=triton_device)
    before = [case.cache.keys[0].clone(), case.cache.values[0].clone()]
    slots = torch.full_like(case.layout.slots, -1)
    layout = dataclasses.replace(case.layout, slots=slots, is_padded=True)
    triton_attention.begin(layout, case.cache).attend(0, case.q, case.k, case.v)
    assert torch.equal(case.cache.keys[0], before[0])
    assert torch.equal(case.cache.values[0], before[1])
