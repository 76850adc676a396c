"""The launch that rotates heads and writes the cache, compared with plain torch and with two
separate launches."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from mmdeploy_llm.forward import ForwardInputs, RotaryAttention
from mmdeploy_llm.hooks import KVCache
from mmdeploy_llm.layers import CausalLM, DecoderConfig, RMSNorm, Rotary, RotaryConfig
from mmdeploy_llm.layers.attention import int4
from mmdeploy_llm.layers.attention.flash3 import FlashAttention3
from mmdeploy_llm.layers.attention.reference import ReferenceAttention
from mmdeploy_llm.layers.attention.writing import write_by_kernel, write_plain
from mmdeploy_llm.layers.install import install_kernels
from mmdeploy_llm.testing.tiny import randomize_empty

# Heads, key heads, head size, rotary channels.
FIRST = [(4, 2, 16, 16), (28, 4, 128, 128)]
OTHERS = [
    (7, 1, 64, 64),  # a share of 28 and 4 heads
    (9, 3, 80, 32),
    (3, 3, 96, 96),
    (6, 2, 72, 24),
    (2, 1, 256, 256),
    (5, 5, 20, 10),
]
ROUND = (OTHERS[0], OTHERS[2], OTHERS[4])  # sizes of which the others have more to mask
EXACT = {torch.float32: 2e-6, torch.float16: 2**-9, torch.bfloat16: 2**-6}
NUM_BLOCKS, PAGE = 5, 4


@pytest.fixture(scope="module")
def device(triton_attention, triton_device):
    """Returns the device, with the corrections of triton_attention to the interpreter."""
    return triton_device


@pytest.fixture(scope="module")
def kernels(device):
    from mmdeploy_llm.kernels.cuda.cuda_kernels import CudaKernels

    return CudaKernels(device)


class Heads:
    """q, k and v of 7 tokens in one tensor, their rotary embedding, and an empty cache. Two tokens
    of the seven are padding."""

    def __init__(self, device, dtype, shape, *, is_interleaved, has_norms, axes=None, few=None):
        torch.manual_seed(0)
        self.num_heads, self.num_kv, head_dim, rotary_dim = shape
        config = RotaryConfig(
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            is_interleaved=is_interleaved,
            axes=None if axes is None else tuple(i % axes for i in range(rotary_dim // 2)),
            scale=1.2,
        )
        self.rotaries = Rotary(config), Rotary(config)
        for rotary in self.rotaries:
            rotary.init_buffers(device)
        self.positions = torch.randint(0, 60, (7,) if axes is None else (axes, 7), device=device)
        wide = torch.randn(7, self.num_heads + 2 * self.num_kv + 1, head_dim)
        self.qkv = wide.to(device, dtype)[:, :-1]
        self.norms = None
        if has_norms:
            self.norms = RMSNorm(head_dim, 1e-6), RMSNorm(head_dim, 1e-6)
            for norm in self.norms:
                norm.weight.data = torch.randn(head_dim).to(device, dtype)
        self.layout = SimpleNamespace(
            slots=torch.tensor([3, 17, -1, 0, 8, -1, 9], device=device), is_padded=True
        )
        self.shape = NUM_BLOCKS, PAGE, self.num_kv, head_dim
        self.few = few  # dtype of a cache of few bits

    def new_cache(self):
        """Returns keys, values and, in few bits, their scales, all filled with values so that a
        missing write shows."""
        device, scales = self.qkv.device, (None, None)
        rows = [torch.full(self.shape, 7.0, device=device) for _ in range(2)]
        if self.few is int4.INT4:
            rows, scales = zip(*(int4.encode(x) for x in rows), strict=True)
            return [x.contiguous() for x in (*rows, *scales)]
        if self.few is not None:
            scales = [torch.full(self.shape[:3], 7.0, device=device) for _ in range(2)]
        return [*(x.to(self.few or self.qkv.dtype) for x in rows), *scales]

    def split(self, qkv):
        return qkv.split((self.num_heads, self.num_kv, self.num_kv), 1)

    def rotated(self, rope):
        """Returns copies of q and k after norms and rotation, and v."""
        qkv = self.qkv.clone()
        qk, v = qkv[:, : -self.num_kv], qkv[:, -self.num_kv :]
        if self.norms is None:
            qk = rope.rotate(qk)
        else:
            qk = rope.norm_and_rotate(qk, self.num_heads, *self.norms)
        return qk[:, : self.num_heads], qk[:, self.num_heads :], v

    def at_once(self, kernels):
        """Returns q and the cache after the one launch."""
        install_kernels(self.rotaries[1], kernels)
        rope, cache = self.rotaries[1](self.positions), self.new_cache()
        qkv = self.qkv.clone()
        wide = torch.full((7, qkv.shape[1] + 2, qkv.shape[2]), 5.0).to(qkv)
        wide[:, :-2] = qkv
        q, k, v = self.split(wide[:, :-2])
        rotary = rope.qk_rotary(q, self.norms)
        write_by_kernel(k, v, *cache[:2], self.layout, *cache[2:], q=q, rotary=rotary)
        kept = self.num_heads + (self.few is int4.INT4) * self.num_kv  # k is rotated in place
        others = wide[:, kept:-2], qkv[:, kept:]
        torch.testing.assert_close(*others, atol=0, rtol=0, equal_nan=True)
        assert (wide[:, -2:] == 5).all()
        return q, cache

    def one_by_one(self, kernels):
        """Returns q and the cache after the two launches."""
        q, k, v = self.rotated(self.rotaries[1](self.positions))
        cache = self.new_cache()
        write_by_kernel(k, v, *cache[:2], self.layout, *cache[2:])
        return q, cache


@pytest.mark.few_in_ci(5)
@pytest.mark.full
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("has_norms", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "shape",
    [
        FIRST[0],
        *(
            pytest.param(s, marks=pytest.mark.long if s in ROUND else pytest.mark.full)
            for s in (FIRST[1], *OTHERS)
        ),
    ],
)
def test_equals_plain_torch(device, kernels, shape, has_norms, is_interleaved):
    """Every second case has M-RoPE."""
    for place, dtype in enumerate(EXACT):
        axes = 3 if (place + has_norms) % 2 else None
        options = {"is_interleaved": is_interleaved, "has_norms": has_norms, "axes": axes}
        heads = Heads(device, dtype, shape, **options)
        q, k, v = heads.rotated(heads.rotaries[0](heads.positions))
        keys, values, *_ = heads.new_cache()
        write_plain(k, v, keys, values, heads.layout)
        found_q, (found_keys, found_values, *_) = heads.at_once(kernels)
        limits = {"atol": EXACT[dtype], "rtol": EXACT[dtype]}
        torch.testing.assert_close(found_q.float(), q.float(), **limits)
        torch.testing.assert_close(found_keys.float(), keys.float(), **limits)
        assert torch.equal(found_values, values)
        _assert_same(heads.one_by_one(kernels), (found_q, [found_keys, found_values]))


def _assert_same(one, other):
    """Compares bit for bit."""
    for mine, theirs in zip((one[0], *one[1]), (other[0], *other[1]), strict=False):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert torch.equal(mine.view(torch.uint8), theirs.contiguous().view(torch.uint8))


@pytest.mark.one_is_quick
@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    "shape", [FIRST[0], OTHERS[4], pytest.param(OTHERS[3], marks=pytest.mark.full)]
)
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_cache_in_8_bits(device, kernels, cache_dtype, shape, is_interleaved):
    """Equal to the two launches, and to plain torch up to one rounding step."""
    is_float = cache_dtype.is_floating_point
    if device.type == "cuda" and is_float and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no 8-bit floats")
    options = {"is_interleaved": is_interleaved, "has_norms": True, "few": cache_dtype}
    heads = Heads(device, torch.float16, shape, **options)
    found = heads.at_once(kernels)
    _assert_same(heads.one_by_one(kernels), found)
    _, k, v = heads.rotated(heads.rotaries[0](heads.positions))
    slots = heads.layout.slots
    for exact, cached, scales in ((k, *found[1][::2]), (v, *found[1][1::2])):
        held = (cached.float() * scales[..., None]).flatten(0, 1)
        largest = exact.abs().amax(-1, keepdim=True).float()
        bound = (exact.abs().float() / 16 if is_float else largest / 254) + 0.002 * largest
        assert ((held[slots] - exact).abs() <= bound)[slots >= 0].all()
        untouched = torch.ones(len(held), dtype=torch.bool)
        untouched[slots[slots >= 0].cpu()] = False
        assert (held[untouched] == 49).all()


@pytest.mark.full
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_8_bits_show_what_is_not_finite(device, kernels, value):
    heads = Heads(
        device, torch.float32, FIRST[0], is_interleaved=False, has_norms=False, few=torch.int8
    )
    heads.qkv[1, heads.num_heads, 5] = heads.qkv[4, -1, 15] = value
    scales = heads.at_once(kernels)[1][2:]
    for places, page, head in zip(scales, (17, 8), (0, 1), strict=True):
        expected = torch.zeros_like(places, dtype=torch.bool)
        expected[page // PAGE, page % PAGE, head] = True
        assert torch.equal(places.isnan(), expected)


@pytest.mark.full
@pytest.mark.parametrize(
    "shape",
    [
        FIRST[0],
        *(
            pytest.param(s, marks=pytest.mark.full)
            for s in (FIRST[1], OTHERS[1], OTHERS[4], OTHERS[5])
        ),
    ],
)
def test_cache_in_4_bits(device, kernels, shape):
    """The codes and scales of plain torch for the rotated keys, bit for bit; padding is not
    stored."""
    for dtype in EXACT:
        heads = Heads(device, dtype, shape, is_interleaved=True, has_norms=True, few=int4.INT4)
        found = heads.at_once(kernels)
        _assert_same(heads.one_by_one(kernels), found)
        _, k, v = heads.rotated(heads.rotaries[1](heads.positions))
        expected, slots = heads.new_cache(), heads.layout.slots
        for number, rows in enumerate((k, v)):
            for target, new in zip(expected[number::2], int4.encode(rows), strict=True):
                target.flatten(0, 1)[slots[slots >= 0]] = new[slots >= 0]
        for mine, theirs in zip(found[1], expected, strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.full
def test_many_tokens_share_programs(device, kernels, monkeypatch):
    """With many tokens a program computes several groups of the heads of its token."""
    from mmdeploy_llm.kernels.cuda import heads as module

    heads = Heads(device, torch.float32, (28, 4, 128, 128), is_interleaved=False, has_norms=True)
    expected = heads.at_once(kernels)
    for programs in (1, 14):
        monkeypatch.setattr(module, "PROGRAMS", programs)
        _assert_same(heads.at_once(kernels), expected)


def test_no_tokens(device, kernels):
    heads = Heads(device, torch.float32, FIRST[0], is_interleaved=True, has_norms=False)
    heads.qkv, heads.positions = heads.qkv[:0], heads.positions[:0]
    install_kernels(heads.rotaries[1], kernels)
    cache = heads.new_cache()
    q, k, v = heads.split(heads.qkv)
    rotary = heads.rotaries[1](heads.positions).qk_rotary(q, None)
    layout = SimpleNamespace(slots=heads.layout.slots[:0])
    write_by_kernel(k, v, *cache[:2], layout, q=q, rotary=rotary)
    assert (cache[0] == 7).all()


CONFIG = DecoderConfig(
    vocab_size=32,
    hidden_size=32,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    rotary=RotaryConfig(head_dim=16),
    norm_eps=1e-6,
)


class Launches:
    """Wraps the kernel of heads and records its launches."""

    def __init__(self, kernel):
        self.calls = []
        self._kernel = kernel

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.calls.append((options["ROTATES"], options["KIND"]))
            return self._kernel[grid](*args, **options)

        return launch


@pytest.fixture
def launches(device, monkeypatch):
    from mmdeploy_llm.kernels.cuda import heads

    found = Launches(heads._heads)
    monkeypatch.setattr(heads, "_heads", found)
    return found


def model_of(config, device, kernels=None):
    model = CausalLM(config)
    torch.manual_seed(0)
    randomize_empty(model)
    for module in model.modules():
        if hasattr(module, "init_buffers"):
            module.init_buffers(device)
    if kernels is not None:
        install_kernels(model, kernels)
    return model.to(device)


def decode(model, context, num_tokens, device):
    with torch.inference_mode():
        return model.forward(
            ForwardInputs(
                token_ids=torch.arange(num_tokens, device=device),
                positions=torch.full((num_tokens,), 3, device=device),
                in_prompt=torch.zeros(num_tokens, dtype=torch.bool, device=device),
                attn=context,
            )
        )


def layer_caches(case, device):
    pages = [torch.zeros_like(case.cache.keys[0]) for _ in range(4)]
    return KVCache(keys=tuple(pages[:2]), values=tuple(pages[2:]))


ROTATE_AND_WRITE, ROTATE, WRITE = (True, 1), (True, 0), (False, 1)


@pytest.mark.full
@pytest.mark.parametrize("qk_norm", [True, pytest.param(False, marks=pytest.mark.full)])
def test_the_decoder_rotates_and_writes_at_once(
    cases, fakes, kernels, triton_attention, device, launches, monkeypatch, qk_norm
):
    """One launch where kernels can do both, else two."""
    from mmdeploy_llm.layers.attention import libraries

    fakes.Fakes(cases.dense).install(monkeypatch, libraries, "flash-attn-3")
    case = cases.Case(0, [1, 1, 1], [3, 3, 3], heads=4, kv_heads=2, device=device)
    config = dataclasses.replace(CONFIG, qk_norm=qk_norm)
    plain = model_of(config, device)
    caches = [layer_caches(case, device) for _ in range(6)]
    expected = decode(plain, ReferenceAttention().begin(case.layout, caches[0]), 3, device)
    decode(plain, triton_attention.begin(case.layout, caches[1]), 3, device)
    assert launches.calls == [WRITE] * 2
    fast = model_of(config, device, kernels)
    for cache, backend, expected_calls in (
        (caches[2], triton_attention, [ROTATE_AND_WRITE]),
        (caches[3], FlashAttention3(write_by_kernel), [ROTATE_AND_WRITE]),
        (caches[4], FlashAttention3(write_plain), [ROTATE]),
        (caches[5], ReferenceAttention(), [ROTATE]),
    ):
        launches.calls.clear()
        found = decode(fast, backend.begin(case.layout, cache), 3, device)
        assert launches.calls == expected_calls * 2
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        for mine, theirs in zip(
            (*cache.keys, *cache.values), (*caches[0].keys, *caches[0].values), strict=True
        ):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


def test_tensors_that_the_kernels_do_not_take(triton_attention, cases, kernels, device, launches):
    """Norms of another dtype are computed by plain torch; then one kernel rotates and one
    writes."""
    shape = {"heads": 4, "kv_heads": 2, "dtype": torch.float16, "device": device}
    case = cases.Case(0, [1, 1], [3, 3], **shape)
    model = model_of(dataclasses.replace(CONFIG, qk_norm=True), device, kernels).half()
    for layer in model.model.layers:
        layer.self_attn.q_norm.weight.data = layer.self_attn.q_norm.weight.float()
    model.model.rotary.init_buffers(device)
    context = triton_attention.begin(case.layout, layer_caches(case, device))
    assert isinstance(context, RotaryAttention)
    decode(model, context, 2, device)
    assert launches.calls == [ROTATE, WRITE] * 2


def test_recorded_launch_serves_other_tokens(kernels, device, recording, monkeypatch):
    """The launch is recorded on padding only."""
    if device.type == "cuda":
        pytest.skip("real graphs are tested in tests/gpu")
    from mmdeploy_llm.kernels.cuda import heads as module

    heads = Heads(device, torch.float32, FIRST[0], is_interleaved=True, has_norms=True)
    expected, kernel = heads.at_once(kernels), module._heads
    monkeypatch.setattr(module, "_heads", _Recorded(kernel, recording))
    rotary = heads.rotaries[1](heads.positions).qk_rotary(heads.qkv, heads.norms)
    qkv, cache = torch.zeros_like(heads.qkv), heads.new_cache()
    layout = SimpleNamespace(slots=torch.full_like(heads.layout.slots, -1))
    q, k, v = heads.split(qkv)
    with recording:
        write_by_kernel(k, v, *cache[:2], layout, *cache[2:], q=q, rotary=rotary)
    assert (torch.cat(cache[:2]) == 7).all()
    qkv.copy_(heads.qkv)
    layout.slots.copy_(heads.layout.slots)
    recording.replay()
    _assert_same((q, cache), expected)


class _Recorded:
    """A Triton kernel whose launches are recorded."""

    def __init__(self, kernel, recording):
        self._kernel = kernel
        self._recording = recording

    def __getitem__(self, grid):
        return self._recording.kernel(self._kernel[grid])
