"""Layers with the CPU kernels, compared with the same layers without."""

import pytest
import torch

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.layers import (
    DecoderConfig,
    DecoderStep,
    GatedAttention,
    GatedMLP,
    RMSNorm,
    Rotary,
    RotaryConfig,
    Segments,
    VisionBlock,
)
from mmdeploy_llm.layers.basic.experts import Experts
from mmdeploy_llm.layers.basic.linear import Embedding, Linear
from mmdeploy_llm.layers.basic.norm import ZeroCenteredRMSNorm
from mmdeploy_llm.layers.install import install_kernels
from mmdeploy_llm.layers.vision import axial_rotary
from mmdeploy_llm.testing.models.dense import DenseContext, DenseSequence
from mmdeploy_llm.testing.tiny import randomize_empty
from mmdeploy_llm.values.options.weight_formats import FORMATS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # the kernels leave the last one to torch


def filled(module, dtype):
    torch.manual_seed(1)
    randomize_empty(module)
    for child in module.modules():
        if isinstance(child, Rotary):
            child.init_buffers(torch.device("cpu"))
    return module.to(dtype)


def assert_near(found, expected):
    limit = 1e-5 if expected.dtype is torch.float32 else 0.05
    torch.testing.assert_close(found.float(), expected.float(), atol=limit, rtol=limit)


def both(module, kernels, call):
    """Returns `call(module)` without and with kernels."""
    with torch.inference_mode():
        before = call(module)
        install_kernels(module, kernels)
        return before, call(module)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 24), (5, 3, 24)])
def test_norm(kernels, dtype, shape):
    x = torch.randn(shape).to(dtype)
    expected, found = both(filled(RMSNorm(24, 1e-6), dtype), kernels, lambda norm: norm(x))
    assert_near(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_with_residual(kernels, dtype):
    x, residual = torch.randn(2, 5, 24).to(dtype)
    norm = filled(RMSNorm(24, 1e-6), dtype)
    expected, found = both(norm, kernels, lambda norm: norm.add(x, residual.clone()))
    for ours, theirs in zip(found, expected, strict=True):
        assert_near(ours, theirs)
    first = norm.add(x, None)
    assert first[1] is x
    assert_near(first[0], norm(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 300])
def test_gated_mlp(kernels, dtype, rows):
    x = torch.randn(rows, 16).to(dtype)
    mlp = filled(GatedMLP(16, 40, bias=True), dtype)
    assert_near(*both(mlp, kernels, lambda mlp: mlp(x))[::-1])


@pytest.mark.one_is_quick
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantization", [None, *FORMATS])
def test_experts(kernels, dtype, quantization):
    x, weights = torch.randn(40, 16).to(dtype), torch.rand(40, 2).to(dtype)
    chosen = torch.stack([torch.randperm(5)[:2] for _ in range(40)])
    experts = filled(Experts(5, 16, 24), dtype)
    expected = experts(x, weights, chosen)
    install_kernels(experts, kernels, quantization)
    found = experts(x, weights, chosen)
    if quantization is None or dtype is torch.float16:
        assert_near(found, expected)
    else:
        limit = 0.3 if FORMATS[quantization].bits == 4 else 0.03
        assert (found - expected).float().std() < limit * expected.float().std()
        assert experts.down_proj.shape == (5, 0, 24)


@pytest.mark.one_is_quick
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("quantization", [None, "int8", "int8wo"])
@pytest.mark.parametrize(("n", "k"), [(64, 10), (70, 16), (20, 7)])
def test_packed_embedding_as_head(kernels, dtype, quantization, n, k):
    """Embedding rows are those of the weight, or of what it is rounded to; products are close."""
    table = filled(Embedding(n, k), dtype)
    ids, x = torch.randint(0, n, (9,)), torch.randn(5, k).to(dtype)
    rows, product = table(ids), table.product(x)
    if quantization == "int8":
        codes, (scales, shifts) = kernels.quantize_rows(table.weight)
        rows = (codes * scales[:, None] + shifts[:, None])[ids].to(dtype)
    elif quantization == "int8wo":
        rows = kernels.round_codes(table.weight, 8, k).dequantize()[ids].to(dtype)
    table.pack(kernels, quantization)
    # With a shift a level may round the product and the sum together.
    limits = {"rtol": 2**-7, "atol": 1e-6} if quantization == "int8" else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(table(ids), rows, **limits)
    error = (table.product(x) - product).float().std() / product.float().std()
    assert error < (0.03 if quantization else 1e-2)
    is_packed = kernels.can_pack(torch.zeros(n, k, dtype=dtype), quantization)
    assert (table.packed is not None) == is_packed
    assert (table.weight.shape[0] == 0) == is_packed


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [None, 8])
@pytest.mark.parametrize("axes", [None, 3])
def test_rotary(kernels, dtype, is_interleaved, rotary_dim, axes):
    num_pairs = (rotary_dim or 16) // 2
    config = RotaryConfig(
        head_dim=16,
        is_interleaved=is_interleaved,
        rotary_dim=rotary_dim,
        axes=None if axes is None else tuple(i % axes for i in range(num_pairs)),
    )
    positions = torch.randint(0, 50, (7,) if axes is None else (axes, 7))
    x = torch.randn(7, 5, 16).to(dtype)
    rotary = filled(Rotary(config), torch.float32)
    expected, found = both(rotary, kernels, lambda rotary: rotary(positions).rotate(x.clone()))
    assert_near(found, expected)


@pytest.mark.one_is_quick
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [RMSNorm, ZeroCenteredRMSNorm])
@pytest.mark.parametrize("is_apart", [False, True])
@pytest.mark.parametrize("rotary_dim", [None, 8])
def test_norm_and_rotation_of_heads(kernels, dtype, norm, is_apart, rotary_dim):
    """Queries and keys lie side by side, or the queries between other heads, which stay."""
    positions = torch.randint(0, 50, (7,))
    rotary = filled(Rotary(RotaryConfig(head_dim=16, rotary_dim=rotary_dim)), torch.float32)
    norms = [filled(norm(16, 1e-6), dtype) for _ in range(2)]
    norms[1].weight.data += 0.5
    x = torch.randn(7, 8, 16).to(dtype)
    rows = []

    def run(rotary):
        own, rope = x.clone(), rotary(positions)
        rows.append(own)
        if not is_apart:
            return rope.norm_and_rotate(own[:, :8], 6, *norms)
        return torch.cat(rope.norm_and_rotate_apart(own[:, :6:2], own[:, 6:], *norms), 1)

    expected, found = both(rotary, kernels, run)
    assert_near(found, expected)
    if is_apart:
        assert all(torch.equal(own[:, 1:6:2], x[:, 1:6:2]) for own in rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("qk_norm", [False, True])
def test_gated_attention(kernels, dtype, qk_norm):
    config = DecoderConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        rotary=RotaryConfig(head_dim=16, rotary_dim=8),
        norm_eps=1e-6,
        qk_norm=qk_norm,
        zero_centered_norms=True,
    )
    layer = filled(GatedAttention(config, 0), dtype)
    rotary = filled(Rotary(config.rotary), torch.float32)
    positions = torch.arange(9)
    x = torch.randn(9, 32).to(dtype)

    def run(layer):
        rotary.kernels = layer.kernels
        attn = DenseContext([(DenseSequence(range(9), (), positions), 9)], (0,))
        return layer(x.clone(), DecoderStep(rope=rotary(positions), attn=attn, modality=None))

    expected, found = both(layer, kernels, run)
    assert_near(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 80])
def test_vision_block(kernels, dtype, head_dim):
    size, lengths = 2 * head_dim, [4, 9, 4, 70]
    block = VisionBlock(size, 2, norm=lambda: RMSNorm(size, 1e-6), mlp=GatedMLP(size, 24))
    rotary = filled(Rotary(axial_rotary(head_dim, 1e4)), torch.float32)
    rope_positions = torch.randint(0, 9, (2, sum(lengths)))
    x = torch.randn(sum(lengths), size).to(dtype)
    segments = Segments(lengths, torch.device("cpu"))
    block = filled(block, dtype)
    expected, found = both(
        block, kernels, lambda block: block(x.clone(), segments, rotary(rope_positions))
    )
    assert_near(found, expected)


def test_only_what_is_rounded_must_be_finite(kernels):
    linear = filled(Linear(64, 64, bias=True), torch.float32)
    linear.bias[3] = torch.inf
    install_kernels(linear, kernels, "int8")
    assert linear.packed is not None
    linear = filled(Linear(64, 64), torch.float32)
    linear.weight[3, 5] = torch.inf
    with pytest.raises(CheckpointError, match=r"weight has values that are not finite"):
        install_kernels(linear, kernels, "int8")
