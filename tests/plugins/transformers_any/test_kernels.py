"""CPU kernels run most layers of transformers' modules, as closely as bf16 allows."""

import pytest
import torch
import transformers

from mmdeploy_llm import SamplingParams
from mmdeploy_llm.layers import Linear
from mmdeploy_llm_plugins.transformers_parts.linear import AnyLinear, use_engine_layers

PARAMS = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
LIMITS = {None: 0.15, "int8": 0.3}  # mean difference of log-probabilities


def logprobs(llm, prompt):
    (output,) = llm.generate(prompt, PARAMS, use_tqdm=False)
    assert output.error_msg is None
    entries = output.prompt_logprobs[1:]
    return torch.tensor([next(iter(entry.values())).logprob for entry in entries])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_near_plain_torch(one_reference, make_llm, picture, quantization, monkeypatch):
    packed = []
    plain_pack = Linear.pack

    def pack(self, *args):
        plain_pack(self, *args)
        packed.append(self.packed is not None)

    monkeypatch.setattr(Linear, "pack", pack)
    marker = one_reference.family.marker
    prompt = {"prompt": f"User: {marker}what is it? Assistant: The quick brown fox jumps"}
    if marker:
        prompt["multimodal_data"] = {"image": [picture(1, 56, 42)]}
    options = {"dtype": "bfloat16", "enable_logprob": True}
    plain, _ = make_llm(one_reference.folder, native_kernels=False, **options)
    assert not packed
    fast, _ = make_llm(one_reference.folder, quantization=quantization, **options)
    assert sum(packed) > len(packed) / 2 > 6
    difference = (logprobs(fast, prompt) - logprobs(plain, prompt)).abs().mean()
    assert difference < LIMITS[quantization]


@pytest.mark.full
def test_transposed_inputs(kernels):
    """Some layers pass rows whose values do not follow one another in memory (Jamba)."""
    plain = torch.nn.Linear(16, 32)
    fast = AnyLinear(torch.nn.Linear(16, 32))
    fast.load_state_dict(plain.state_dict())
    fast.requires_grad_(False).pack(kernels, None)
    assert fast.packed is not None
    x = torch.randn(1, 16, 5).transpose(1, 2)
    torch.testing.assert_close(fast(x), plain(x))


@pytest.mark.full
def test_a_head_is_replaced_unless_it_is_tied():
    """A class that lists tied weights by name does not read them."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
    for is_tied in (False, True):
        config = transformers.LlamaConfig(**sizes, tie_word_embeddings=is_tied)
        model = transformers.LlamaForCausalLM(config)
        use_engine_layers(model)
        assert isinstance(model.lm_head, AnyLinear) != is_tied
        assert isinstance(model.model.layers[0].mlp.up_proj, AnyLinear)
