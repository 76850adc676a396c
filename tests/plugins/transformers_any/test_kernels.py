"""CPU kernels run most layers of transformers' modules, as closely as bf16 allows."""

import copy
import importlib

import pytest
import torch
import transformers
from mmdeploy_llm_plugins.transformers_parts.experts import AnyExperts
from mmdeploy_llm_plugins.transformers_parts.linear import AnyLinear, TiedLinear, use_engine_layers

from mmdeploy_llm import SamplingParams
from mmdeploy_llm.layers import Linear
from mmdeploy_llm.layers.install import install_kernels

PARAMS = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
LIMITS = {None: 0.15, "int8": 0.3}  # mean difference of log-probabilities


def logprobs(llm, prompt):
    (output,) = llm.generate(prompt, PARAMS, use_tqdm=False)
    assert output.error_msg is None
    entries = output.prompt_logprobs[1:]
    return torch.tensor([next(iter(entry.values())).logprob for entry in entries])


@pytest.mark.full
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
def test_a_head_is_replaced():
    """A class that lists tied weights by name does not read them."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
    for is_tied in (False, True):
        config = transformers.LlamaConfig(**sizes, tie_word_embeddings=is_tied)
        model = transformers.LlamaForCausalLM(config)
        use_engine_layers(model)
        assert type(model.lm_head) is (TiedLinear if is_tied else AnyLinear)
        assert isinstance(model.model.layers[0].mlp.up_proj, AnyLinear)


@pytest.mark.one_is_quick
@pytest.mark.parametrize("is_slow", [False, True])
def test_layers_whose_weights_are_read_in_another_branch(is_slow):
    """Bloom reads those of its outputs where a switch of its config is on."""
    sizes = {"hidden_size": 32, "n_layer": 1, "n_head": 2, "vocab_size": 64}
    config = transformers.BloomConfig(**sizes, slow_but_exact=is_slow)
    model = transformers.BloomForCausalLM(config).eval()
    use_engine_layers(model)
    block = model.transformer.h[0]
    outputs = block.self_attention.dense, block.mlp.dense_4h_to_h
    assert [isinstance(each, AnyLinear) for each in outputs] == [not is_slow] * 2
    assert isinstance(block.mlp.dense_h_to_4h, AnyLinear)


@pytest.mark.parametrize("is_packed", [False, True])
def test_layers_that_are_asked_for_the_dtype_of_their_weight(kernels, is_packed):
    """T5's MLPs ask for it, and compute the same once the weight is packed and empty."""
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "num_layers": 2}
    config = transformers.T5Config(**sizes, vocab_size=64, feed_forward_proj="gated-gelu")
    torch.manual_seed(0)
    plain = transformers.T5EncoderModel(config).eval().requires_grad_(False)
    fast = copy.deepcopy(plain)
    use_engine_layers(fast)
    outputs = [module for name, module in fast.named_modules() if name.endswith(".wo")]
    assert [type(module) for module in outputs] == [AnyLinear] * 2
    if is_packed:
        install_kernels(fast, kernels)
        assert all(module.packed is not None and not len(module.weight) for module in outputs)
    ids = torch.arange(20)[None]
    torch.testing.assert_close(fast(ids)[0], plain(ids)[0], atol=1e-4, rtol=1e-4)


def experts_of(name, **options):
    """Returns a block of experts of a class of transformers, with random weights."""
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "vocab_size": 64,
        "moe_intermediate_size": 24,
    }
    config = transformers.AutoConfig.for_model(name, **sizes, **options)
    config._experts_implementation = "eager"
    (kind,) = [each for each in vars(module) if each.endswith("Experts")]
    experts = getattr(module, kind)(config)
    torch.manual_seed(0)
    for param in experts.parameters():
        torch.nn.init.normal_(param, std=0.2)
    return experts.requires_grad_(False)


class Block(torch.nn.Module):
    """A parent that leaves the weights of its experts alone."""

    def __init__(self, experts):
        super().__init__()
        self.experts = experts


@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_packed", [False, True])
def test_experts_compute_as_those_of_transformers(kernels, is_packed, weights_dtype):
    plain = experts_of("qwen3_moe", num_experts=6, hidden_act="gelu_pytorch_tanh").bfloat16()
    block = Block(copy.deepcopy(plain))
    use_engine_layers(block)
    assert isinstance(block.experts, AnyExperts)
    if is_packed:
        install_kernels(block, kernels)
        assert block.experts.is_packed
    x = torch.randn(9, 32).bfloat16()
    ids = torch.rand(9, 6).topk(2).indices
    weights = torch.rand(9, 2).to(weights_dtype)
    expected = plain(x, ids, weights)
    found = block.experts(x, ids, weights)
    assert found.dtype == x.dtype
    torch.testing.assert_close(found, expected, atol=0.05, rtol=0.02)
    assert block.experts(x.to("meta"), ids.to("meta"), weights.to("meta")).shape == x.shape


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("nemotron_h", {"n_routed_experts": 4}),  # without gates
        ("gpt_oss", {"num_local_experts": 4, "intermediate_size": 24}),  # with biases, transposed
        ("qwen3_moe", {"num_experts": 4, "hidden_act": "relu"}),
    ],
)
def test_other_experts_stay(name, options):
    block = Block(experts_of(name, **options))
    use_engine_layers(block)
    assert not isinstance(block.experts, AnyExperts)


def test_a_tied_head_is_packed_with_its_embedding(kernels):
    """Both read one packed weight, and neither keeps another copy."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, tie_word_embeddings=True)
    plain = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    fast = copy.deepcopy(plain)
    use_engine_layers(fast)
    install_kernels(fast, kernels)
    assert fast.lm_head.packed is fast.model.embed_tokens.packed is not None
    assert not len(fast.lm_head.weight)
    assert fast.lm_head.weight is fast.model.embed_tokens.weight
    ids = torch.tensor([[1, 5, 63, 0]])
    assert torch.equal(fast.model.embed_tokens(ids), plain.model.embed_tokens(ids))
    torch.testing.assert_close(fast(ids).logits, plain(ids).logits, atol=1e-4, rtol=1e-4)
