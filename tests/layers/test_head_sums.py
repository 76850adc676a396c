"""Output heads keep their sums in float32: the values decide between logits that are equal in
bfloat16, not the order of the vocabulary."""

import pytest
import torch
from transformers import LlamaConfig

from mmdeploy_llm.kernels import TORCH
from mmdeploy_llm.kernels.cpu import CpuKernels, cpu_levels
from mmdeploy_llm.layers import CausalLM, standard_decoder
from mmdeploy_llm.testing.tiny import randomize

SIZES = {"vocab_size": 90, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture(params=["torch", "compiled"])
def kernels(request, build_kernels):
    return TORCH if request.param == "torch" else CpuKernels(build_kernels(cpu_levels()[0]))


@pytest.mark.parametrize("quantization", [None, "int8", "int4wo"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_the_larger_of_two_logits_that_bfloat16_rounds_to_one(kernels, is_tied, quantization):
    config = LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=is_tied)
    model = CausalLM(standard_decoder(config)).bfloat16()
    randomize(model)
    head = model.model.embed_tokens if is_tied else model.lm_head
    hidden = torch.ones(1, 64, dtype=torch.bfloat16)
    head.weight.data[30] = head.weight.data[60] = 1.0
    head.weight.data[60, :8] = 1 + 2**-7  # 64.0625 is 64 in bfloat16
    head.pack(kernels, quantization)
    logits = model.logits(hidden)
    assert logits.dtype is torch.float32
    rounded = logits.bfloat16()
    if quantization is None:
        assert logits[0, [30, 60]].tolist() == [64, 64.0625]
        assert rounded[0, 30] == rounded[0, 60] == rounded.max()
        assert rounded.argmax() == 30
        assert logits.argmax() == 60
    head.out_dtype = None
    assert torch.equal(model.logits(hidden), rounded)
