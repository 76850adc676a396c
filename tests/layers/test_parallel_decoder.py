"""The standard decoder with attention and MLP in parallel and with LayerNorms, against the models
of transformers that have them."""

import pytest
import torch
import transformers

from mmdeploy_llm.layers import CausalLM, DecoderConfig, rotary_config
from mmdeploy_llm.model_checks.dense import DenseRunner
from mmdeploy_llm.weights.map import WeightMap

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TOKENS = [3, 17, 0, 39, 5, 5, 22, 8, 31]


def reference(kind, **options):
    """Returns a model of transformers with random weights, also in its norms."""
    config = getattr(transformers, f"{kind}Config")(
        **SIZES, **options, pad_token_id=0, attn_implementation="eager"
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3)
    return model


def ours(model, **options):
    """Returns the blocks of `model` built of this package's layers, with its weights."""
    config = model.config
    built = CausalLM(
        DecoderConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            norm_eps=config.layer_norm_eps,
            is_tied=config.tie_word_embeddings,
            rotary=rotary_config(config, is_interleaved=config.model_type == "cohere"),
            **options,
        )
    )
    names = WeightMap(built, ignored=["^lm_head"] if config.tie_word_embeddings else [])
    parameters = dict(built.named_parameters())
    for key, value in model.state_dict().items():
        for target in names.targets(key):
            rows = slice(None) if target.rows is None else target.rows
            parameters[target.name].data[rows] = value
    for module in built.modules():
        if hasattr(module, "init_buffers"):
            module.init_buffers(torch.device("cpu"))
    return built


@torch.inference_mode()
def assert_equal(own, model):
    """The logits of a prompt in one piece, in two, and token by token."""
    expected = model(torch.tensor([TOKENS])).logits[0]
    runner = DenseRunner(own)
    for sizes in ([9], [5, 4], [1] * 9):
        sequence = runner.add(TOKENS)
        found = torch.cat([runner.step([(sequence, size)]) for size in sizes])
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)


def test_cohere():
    """Attention and MLP read one LayerNorm, which has no bias."""
    model = reference("Cohere", logit_scale=0.5)
    own = ours(model, is_parallel=True, layer_norms=True, logit_scale=0.5)
    assert own.model.layers[0].post_attention_layernorm is None
    assert own.model.norm.bias is None
    assert_equal(own, model)


@pytest.mark.parametrize("is_parallel", [True, False])
def test_stablelm(is_parallel):
    """LayerNorms with biases, for attention and MLP in parallel and one after the other."""
    model = reference("StableLm", use_parallel_residual=is_parallel)
    own = ours(model, is_parallel=is_parallel, layer_norms=True, has_norm_biases=True)
    assert_equal(own, model)
