"""Fast paths equal the portable ones."""

from __future__ import annotations

import pytest
import torch

from mmdeploy_llm.kernels import plain
from mmdeploy_llm.layers import RMSNorm
from mmdeploy_llm.layers.basic.experts import Experts

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def experts():
    """Returns 6 experts with sizes in multiples of 16 bytes."""
    module = Experts(6, 32, 24)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape) * 0.2
    return module


def routed(num_tokens):
    """Returns hidden states, and weights and ids of two of six experts per token; expert 5 gets
    none."""
    ids = torch.stack([torch.randperm(5)[:2] for _ in range(num_tokens)])
    return torch.randn(num_tokens, 32), torch.rand(num_tokens, 2), ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 7, 40])
def test_grouped_experts_equal_the_loop(experts, dtype, num_tokens):
    experts = experts.to(dtype)
    x, _, ids = routed(num_tokens)
    sorted_x = x.to(dtype).repeat_interleave(2, 0)[ids.flatten().argsort(stable=True)]
    counts = torch.bincount(ids.flatten(), minlength=6)
    expected = experts._run_loop(sorted_x, counts)
    torch.testing.assert_close(experts._run_grouped(sorted_x, counts), expected)


def test_grouping_needs_cuda_and_bf16(experts):
    assert not experts._can_group(torch.zeros(1, 32, dtype=torch.bfloat16))


@pytest.mark.gpu
@needs_cuda
def test_experts_on_cuda_equal_the_cpu(experts):
    x, weights, ids = routed(40)
    expected = experts(x, weights, ids)
    on_device = experts.to("cuda", torch.bfloat16)
    found = on_device(x.cuda().bfloat16(), weights.cuda().bfloat16(), ids.cuda())
    torch.testing.assert_close(found.float().cpu(), expected, atol=0.05, rtol=0.05)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_norm_on_cuda_equals_the_formula(dtype):
    """Values may differ by one rounding of bf16."""
    module = RMSNorm(896, 1e-6)
    module.weight.data = torch.randn(896)
    module = module.to("cuda", dtype)
    x = torch.randn(33, 896, device="cuda", dtype=dtype)
    expected = plain._rms_norm(x, module.weight, 1e-6)
    tolerance = 1e-5 if dtype is torch.float32 else 2**-7
    torch.testing.assert_close(module(x), expected, atol=tolerance, rtol=tolerance)
