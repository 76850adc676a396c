"""Our kernels at the sizes of real models on a GPU: against plain torch, without waits for the
device, and inside CUDA graphs. tests/kernels/cuda compares them in more shapes, on a GPU too."""

import numpy as np
import pytest
import torch

from mmdeploy_llm.engine.runner.sampling.sampler import Sampler
from mmdeploy_llm.engine.runner.sampling.state import SlotRequest
from mmdeploy_llm.forward import QKRotary
from mmdeploy_llm.layers import GatedMLP, RMSNorm, Rotary, RotaryConfig, Segments
from mmdeploy_llm.layers.attention.int4 import INT4, encode
from mmdeploy_llm.layers.install import install_kernels
from mmdeploy_llm.layers.moe import Modality, ModalityMLP, MoEConfig
from mmdeploy_llm.testing.tiny import randomize_empty
from mmdeploy_llm.values.params import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
VOCAB_SIZE = 152_064
TOLERANCE = 2**-5


@pytest.fixture(scope="module")
def kernels():
    pytest.importorskip("triton", reason="triton is not installed")
    from mmdeploy_llm.kernels.cuda.cuda_kernels import CudaKernels

    return CudaKernels(torch.device("cuda"))


@pytest.fixture
def no_waiting():
    """Raises if the host waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def filled(module):
    torch.manual_seed(0)
    randomize_empty(module)
    return module.to("cuda", torch.bfloat16)


def both(module, kernels, call):
    """Returns the results without and with kernels."""
    with torch.inference_mode():
        before = call(module)
        install_kernels(module, kernels)
        return call(module), before


def assert_near(found, expected):
    torch.testing.assert_close(
        found.float(), expected.float(), atol=TOLERANCE * expected.abs().max().item(), rtol=0.05
    )


@pytest.mark.parametrize("num_tokens", [1, 33, 4096])
def test_dense_layers(kernels, num_tokens):
    x = torch.randn(num_tokens, 3584, device="cuda", dtype=torch.bfloat16)
    assert_near(*both(filled(RMSNorm(3584, 1e-6)), kernels, lambda norm: norm(x)))
    assert_near(*both(filled(GatedMLP(3584, 18944)), kernels, lambda mlp: mlp(x)))


@pytest.mark.parametrize("num_tokens", [1, 33, 4096])
def test_rotary_with_norms(kernels, num_tokens):
    rotary = Rotary(RotaryConfig(head_dim=128, axes=tuple(i % 3 for i in range(64))))
    rotary.init_buffers(torch.device("cuda"))
    norms = [filled(RMSNorm(128, 1e-6)) for _ in range(2)]
    positions = torch.randint(0, 30_000, (3, num_tokens), device="cuda")
    x = torch.randn(num_tokens, 36, 128, device="cuda", dtype=torch.bfloat16)
    call = lambda rotary: rotary(positions).norm_and_rotate(x.clone(), 28, *norms)  # noqa: E731
    assert_near(*both(rotary, kernels, call))


def heads_at_once(num_tokens, cache_dtype, *, at_once):
    """Returns q and the cache after norms, rotation and the write, in one launch or in two. M-RoPE;
    every fifth token is padding."""
    from mmdeploy_llm.kernels.cuda import heads

    torch.manual_seed(0)
    angles = torch.rand(2, num_tokens, 64, device="cuda") * 2 - 1
    qkv = torch.randn(num_tokens, 36, 128, device="cuda", dtype=torch.bfloat16)
    norms = (torch.rand(128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    rotary = QKRotary(
        **dict(zip(("cosines", "sines", "q_weight", "k_weight"), (*angles, *norms), strict=True)),
        is_interleaved=num_tokens % 2 == 1,
        eps=1e-6,
    )
    slots = torch.randperm(num_tokens + 50, device="cuda")[:num_tokens]
    slots[1::5] = -1
    pages = (num_tokens + 50) // 64 + 1
    cache = [torch.zeros(pages, 64, 4, 128, device="cuda") for _ in range(2)]
    scales = [None, None]
    if cache_dtype is INT4:
        cache, scales = zip(*(encode(x) for x in cache), strict=True)
    else:
        cache = [x.to(cache_dtype) for x in cache]
    if cache_dtype in (torch.int8, torch.float8_e4m3fn):
        scales = [torch.zeros(pages, 64, 4, device="cuda") for _ in range(2)]
    q, k, v = qkv.split((28, 4, 4), 1)
    if at_once:
        first = 32 if cache_dtype is INT4 else 28  # 4 bits rotate k in place
        before = qkv[:, first:].clone()
        heads.write_cache(k, v, *cache, slots, *scales, q=q, rotary=rotary)
        assert torch.equal(qkv[:, first:], before)
    else:
        heads.rotate(qkv[:, :32], rotary, 28)
        heads.write_cache(k, v, *cache, slots, *scales)
    return [q.contiguous(), *cache, *(x for x in scales if x is not None)]


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.int8, INT4, torch.float8_e4m3fn])
@pytest.mark.parametrize("num_tokens", [1, 33, 4096])
def test_heads_rotated_into_the_cache(kernels, num_tokens, cache_dtype):
    """Equal, bit for bit, to the two launches, whose rotations are compared with plain torch
    above."""
    if cache_dtype is torch.float8_e4m3fn and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no 8-bit floats")
    one, two = (heads_at_once(num_tokens, cache_dtype, at_once=flag) for flag in (True, False))
    for found, expected in zip(one, two, strict=True):
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def test_heads_in_a_graph(kernels):
    """Recorded on padding only, replayed with tokens."""
    from mmdeploy_llm.kernels.cuda import heads

    qkv = torch.randn(8, 36, 128, device="cuda", dtype=torch.bfloat16)
    angles = torch.rand(2, 8, 64, device="cuda")
    rotary = QKRotary(cosines=angles[0], sines=angles[1], is_interleaved=False)
    slots = torch.full((8,), -1, device="cuda")
    cache = [torch.zeros(2, 64, 4, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    q, k, v = qkv.split((28, 4, 4), 1)
    heads.write_cache(k, v, *cache, slots, q=q, rotary=rotary)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        heads.write_cache(k, v, *cache, slots, q=q, rotary=rotary)
    assert not torch.cat(cache).any()
    qkv.normal_()
    slots.copy_(torch.tensor([5, 90, 3, -1, 0, 64, 127, -1]))
    keys, values = k.clone(), v.clone()
    graph.replay()
    rows = slots >= 0
    assert torch.equal(cache[1].flatten(0, 1)[slots[rows]], values[rows])
    kernels.rotate(keys, *angles, is_interleaved=False)
    assert torch.equal(cache[0].flatten(0, 1)[slots[rows]], keys[rows])
    assert torch.cat(cache).any(-1).sum() == 2 * 4 * 6


def moe():
    """Sizes of ERNIE-4.5-VL-28B-A3B."""
    config = MoEConfig(
        num_experts=64,
        top_k=6,
        intermediate_size=1536,
        vision_intermediate_size=512,
        shared_size=3072,
    )
    return filled(ModalityMLP(2560, config))


@pytest.mark.parametrize("num_tokens", [1, 32, 500, 3000])
def test_experts_by_modality(kernels, num_tokens):
    """A few tokens use our products, many use torch's."""
    x = torch.randn(num_tokens, 2560, device="cuda", dtype=torch.bfloat16)
    is_vision = torch.arange(num_tokens, device="cuda") % 3 == 1
    assert_near(*both(moe(), kernels, lambda mlp: mlp(x, Modality(is_vision))))


@pytest.mark.parametrize("num_tokens", [1, 32, 3000])
def test_experts_do_not_wait(kernels, num_tokens, request):
    mlp = moe()
    install_kernels(mlp, kernels)
    x = torch.randn(num_tokens, 2560, device="cuda", dtype=torch.bfloat16)
    modality = Modality(torch.arange(num_tokens, device="cuda") % 3 == 1)
    with torch.inference_mode():
        mlp(x, modality)  # compiles
        request.getfixturevalue("no_waiting")
        mlp(x, modality)


def test_experts_in_a_graph(kernels):
    """Recorded with some tokens, replayed with others, which go to other experts."""
    mlp = moe()
    install_kernels(mlp, kernels)
    x = torch.randn(16, 2560, device="cuda", dtype=torch.bfloat16)
    with torch.inference_mode():
        mlp(x, None)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = mlp(x, None)
        for _ in range(3):
            x.copy_(torch.randn_like(x))
            graph.replay()
            torch.testing.assert_close(out, mlp(x, None))


def random_requests(count):
    rng = np.random.default_rng(0)
    own = [
        {},
        {"top_k": 20, "top_p": 0.8},
        {"top_p": 0.95},
        {"min_p": 0.05},
        {"top_p": 0.9, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
        {"top_k": 1000, "top_p": 0.999},
        {"temperature": 0.0, "repetition_penalty": 1.1},
    ]
    common = {
        "temperature": 0.8,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
    for row in range(count):
        params = SamplingParams(**{**common, **own[row % len(own)], "seed": row})
        prompt = tuple(rng.integers(0, VOCAB_SIZE, 500).tolist())
        yield SlotRequest(params=params, prompt_token_ids=prompt)


def samplers(count):
    from mmdeploy_llm.engine.runner.sampling.cuda_sampler import CudaSampler

    common = {"max_num_slots": count, "vocab_size": VOCAB_SIZE}
    host = Sampler(**common, device=torch.device("cpu"))
    device = CudaSampler(**common, device=torch.device("cuda"))
    for slot, request in enumerate(random_requests(count)):
        host.add(slot, request)
        device.add(slot, request)
    return host, device


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_tokens_are_those_of_the_host(kernels, scale):
    """At most one token in a hundred differs, where a rounding of exp decides."""
    count, num_steps = 42, 3
    host, device = samplers(count)
    for step in range(num_steps):
        generator = torch.Generator().manual_seed(step)
        logits = (torch.randn(count, VOCAB_SIZE, generator=generator) * scale).bfloat16()
        expected = host.sample(logits, range(count)).token_ids
        found = device.sample(logits.cuda(), range(count)).token_ids
        same = sum(mine == theirs for mine, theirs in zip(found, expected, strict=True))
        assert same >= count - 1


def test_tokens_do_not_depend_on_the_batch(kernels):
    count = 14
    logits = torch.randn(count, VOCAB_SIZE, device="cuda", dtype=torch.bfloat16) * 3
    together = samplers(count)[1].sample(logits, range(count)).token_ids
    device = samplers(count)[1]
    alone = [device.sample(logits[row : row + 1], [row]).token_ids[0] for row in range(count)]
    assert alone == together


def test_launches_do_not_wait(kernels, request):
    device = samplers(14)[1]
    logits = torch.randn(14, VOCAB_SIZE, device="cuda", dtype=torch.bfloat16)
    device.sample(logits, range(14))  # compiles
    torch.cuda.synchronize()
    request.getfixturevalue("no_waiting")
    pending = [device.launch(logits, range(14)) for _ in range(3)]
    torch.cuda.set_sync_debug_mode("default")
    assert [one.token_ids.tolist() for one in pending] == [
        one.finish().token_ids for one in pending
    ]


@pytest.mark.parametrize("head_dim", [64, 72, 80, 128])
@pytest.mark.parametrize("lengths", [[1024] * 4, [1024, 17, 300, 1024, 64]])
def test_segments_of_a_vision_tower(head_dim, lengths):
    segments = Segments(lengths, torch.device("cuda"))
    qkv = torch.randn(sum(lengths), 48, head_dim, device="cuda", dtype=torch.bfloat16)
    parts = qkv.split(16, 1)
    expected = segments.attend(*(part.float() for part in parts))  # in plain torch
    assert_near(segments.attend(*parts), expected)
