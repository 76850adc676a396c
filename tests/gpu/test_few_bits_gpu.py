"""Weights in few bits on a card: at the sizes of real models, in CUDA graphs, without waits, and
in a whole LLM. tests/kernels/cuda compares the kernels in more shapes and runs on a GPU too."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mmdeploy_llm import SamplingParams
from mmdeploy_llm.kernels import cpu as native
from mmdeploy_llm.values.options.weight_formats import FORMATS

SCORED = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=0)
N, K = 4096, 3584
# Of log-probabilities: activations are rounded in the same products on both devices, or in others.
SCHEMES = {
    **{"int4": 0.1, "int8": 0.1, "int4a8": 0.1},
    **{"int4wo": 1e-3, "int8wo": 1e-3, "int8a8": 1e-3},
}


@pytest.fixture(scope="module")
def kernels(device):
    pytest.importorskip("triton", reason="triton is not installed")
    if device != "cuda":
        pytest.skip("needs a CUDA device")
    from mmdeploy_llm.kernels.cuda.cuda_kernels import CudaKernels

    try:
        return CudaKernels(torch.device("cuda"), native.load())
    except native.BuildError as error:
        pytest.skip(f"no kernels on this machine: {error}")


@pytest.fixture(scope="module")
def packed_of(kernels):
    """packed_of(quantization) -> the packed weight [N, K], and the same weight in floats."""

    def make(quantization):
        torch.manual_seed(0)
        weight = torch.randn(N, K, device="cuda", dtype=torch.bfloat16) / K**0.5
        packed = kernels.pack(weight, quantization)
        return packed, packed._codes.dequantized(torch.float32)

    return make


@pytest.mark.parametrize("num_rows", [1, 32, 33, 4096])
@pytest.mark.parametrize("quantization", FORMATS)
def test_products(packed_of, quantization, num_rows):
    packed, plain = packed_of(quantization)
    x = torch.randn(num_rows, K, device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(N, device="cuda", dtype=torch.bfloat16)
    found = packed.product(x, bias).float()
    expected = F.linear(x.float(), plain, bias.float())
    error = (found - expected).norm() / expected.norm()
    assert error < (0.02 if quantization == "int8" else 0.01)


@pytest.mark.parametrize("num_rows", [8, 64])
@pytest.mark.parametrize("quantization", ["int4", "int8"])
def test_in_a_graph(packed_of, quantization, num_rows):
    """Recorded with some rows, replayed with others."""
    packed, _ = packed_of(quantization)
    x = torch.randn(num_rows, K, device="cuda", dtype=torch.bfloat16)
    with torch.inference_mode():
        packed.product(x, None)  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = packed.product(x, None)
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.testing.assert_close(out, packed.product(x, None))


@pytest.mark.parametrize("num_rows", [8, 64])
@pytest.mark.parametrize("quantization", ["int4", "int8"])
def test_products_do_not_wait(packed_of, quantization, num_rows):
    packed, _ = packed_of(quantization)
    x = torch.randn(num_rows, K, device="cuda", dtype=torch.bfloat16)
    packed.product(x, None)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        packed.product(x, None)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def scores(llm, prompts):
    """Returns the log-probability of each prompt token but the first."""
    outputs = llm.generate(prompts, SCORED, use_tqdm=False)
    assert [output.error_msg for output in outputs if not output.is_ok] == []
    entries = [entry for output in outputs for entry in output.prompt_logprobs if entry]
    return np.array([next(iter(entry.values())).logprob for entry in entries])


@pytest.mark.parametrize("quantization", SCHEMES)
def test_rounded_while_loading(quantization, device, make_llm, prompts_of):
    prompts = prompts_of("qwen2")
    rounds = {"quantization": quantization, "native_kernels": None, "attention_backend": "auto"}
    expected = scores(make_llm("qwen2", "cpu", **rounds), prompts)
    found = scores(make_llm("qwen2", device, **rounds), prompts)
    assert np.abs(found - expected).mean() < SCHEMES[quantization]
