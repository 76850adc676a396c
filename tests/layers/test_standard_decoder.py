"""standard_decoder reads the configs of many families, and its decoder computes what their models
in transformers do."""

import re
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers

from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.layers import CausalLM, DecoderConfig, rotary_config, standard_decoder
from mmdeploy_llm.testing.models.dense import DenseRunner
from mmdeploy_llm.testing.tiny import randomize
from mmdeploy_llm.weights.map import WeightMap, fused_head_targets

ROOT = Path(__file__).parents[2]
SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 1,
    "attn_implementation": "eager",
}
TOKENS = [3, 17, 0, 39, 5, 5, 22, 8, 31]
FC = ((r"\.(c_fc|up_proj)\.", ".fc1."), (r"\.(c_proj|down_proj)\.", ".fc2."))
AFTER = (  # names of norms after attention and MLP -> ours, which are named by what they follow
    (r"\.post_attention_layernorm\.", ".post_self_attn_layernorm."),
    (r"\.post_feedforward_layernorm\.", ".post_mlp_layernorm."),
)
PHI = ((r"\.self_attn\.dense\.", ".self_attn.o_proj."), (r"\.final_layernorm\.", ".norm."))
POST_ONLY = {"pre_norms": False, "post_norms": True}


def global_layers(config):
    return frozenset(i for i, kind in enumerate(config.layer_types) if kind == "full_attention")


def cohere2(config):
    return {"has_norm_biases": False, "is_parallel": True, "nope_layers": global_layers(config)}


# name of the classes -> (config's options, fields that no config says, renamed keys)
FAMILIES = {
    "Arcee": ({"hidden_act": "relu2"}, {"has_gate": False}, FC),
    "Cohere": (
        {"logit_scale": 0.5, "attention_bias": True},
        {"has_norm_biases": False, "is_parallel": True},
        (),
    ),
    "Cohere2": ({"logit_scale": 0.5, "sliding_window": 4}, cohere2, ()),
    "Exaone4": (
        {"sliding_window": 4, "sliding_window_pattern": 2},
        lambda config: {**POST_ONLY, "qk_norm": True, "nope_layers": global_layers(config)},
        AFTER,
    ),
    "Granite": (
        {
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.3,
        },
        {},
        (),
    ),
    "Mistral": ({"sliding_window": 5}, {}, ()),
    "Nemotron": (
        {"hidden_act": "relu2", "partial_rotary_factor": 0.5},
        {"has_gate": False, "zero_centered_norms": True, "layer_norms": True}
        | {"has_norm_biases": True},
        FC,
    ),
    "Olmo": ({}, {"has_norm_weights": False, "has_norm_biases": False}, ()),
    "Olmo2": ({}, {**POST_ONLY, "has_full_qk_norm": True}, AFTER),
    "Phi": (
        {"hidden_act": "gelu_new"},
        {"is_parallel": True, "has_gate": False, "qkv_bias": True, "out_bias": True}
        | {"mlp_bias": True, "head_bias": True},
        PHI,
    ),
    "Phi3": ({"sliding_window": 5}, {}, ()),
    "SeedOss": ({"attention_bias": True, "attention_out_bias": False, "head_dim": 8}, {}, ()),
    "SmolLM3": ({"no_rope_layer_interval": 2}, {}, ()),
    "StableLm": ({"use_parallel_residual": True, "use_qkv_bias": True}, {}, ()),
    "Starcoder2": ({}, {"has_gate": False}, FC),
}


def config_of(kind, **options):
    return getattr(transformers, f"{kind}Config")(**{**SIZES, **options})


def decoder_of(config, options):
    rotary = None
    if config.model_type.startswith("cohere"):
        rotary = rotary_config(config, is_interleaved=True)
    options = options(config) if callable(options) else options
    return replace(standard_decoder(config, rotary, own=()), **options)


def ours(model, options, renames, targets=None):
    """Returns `model`, built of this package's layers with its weights. targets: finds those of a
    key before the names do."""
    built = CausalLM(decoder_of(model.config, options))
    names = WeightMap(built, renames=renames, ignored=("^lm_head",) if not built.lm_head else ())
    return with_weights(built, model, names, targets)


def with_weights(built, model, names, targets=None):
    """Gives `built` the weights of `model`."""
    parameters, filled = dict(built.named_parameters()), []
    for key, value in model.state_dict().items():
        for target in (targets and targets(key)) or names.targets(key):
            rows, source = (each or slice(None) for each in (target.rows, target.source))
            parameters[target.name].data[rows] = value[source]
            filled.append(target.name)
    assert set(filled) == set(parameters)
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
        torch.testing.assert_close(found, expected, atol=5e-5, rtol=1e-4)


@pytest.mark.one_is_quick
@pytest.mark.parametrize("kind", FAMILIES)
def test_logits_equal_transformers(kind):
    config_options, options, renames = FAMILIES[kind]
    torch.manual_seed(0)
    config = config_of(kind, **config_options)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    randomize(model)
    assert_equal(ours(model, options, renames), model)


def test_the_layer_of_the_guide_has_an_mlp_of_its_own():
    """The blocks of docs/decoder_options.md, beside transformers."""
    page, made = (ROOT / "docs/decoder_options.md").read_text(), {}
    for code in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        exec(code, made)
    for activation, name in (("tanh", "Tanh"), ("gelu", "Starcoder2")):
        config = config_of("Starcoder2", hidden_act=activation)
        model = transformers.Starcoder2ForCausalLM(config).eval()
        randomize(model)
        built = made[f"{name}ForCausalLM"](config)
        assert_equal(with_weights(built, model, built.weight_map), model)


@pytest.mark.parametrize("is_parallel", [True, False])
def test_heads_that_are_stored_in_turn_and_two_norms_in_parallel(is_parallel):
    """GPT-NeoX."""
    torch.manual_seed(0)
    options = {"use_parallel_residual": is_parallel, "rotary_pct": 0.5}
    config = config_of("GPTNeoX", num_key_value_heads=4, **options)
    model = transformers.GPTNeoXForCausalLM(config).eval()
    randomize(model)
    names = (
        (r"^gpt_neox\.", "model."),
        (r"\.attention\.", ".self_attn."),
        (r"\.dense_h_to_4h\.", ".fc1."),
        (r"\.dense_4h_to_h\.", ".fc2."),
        (r"\.dense\.", ".o_proj."),
        (r"\.final_layer_norm\.", ".norm."),
        (r"\.embed_in\.", ".embed_tokens."),
        (r"^embed_out\.", "lm_head."),
    )

    def targets(key):
        if "query_key_value" not in key:
            return None
        name = key.replace("gpt_neox", "model").replace(
            "attention.query_key_value", "self_attn.qkv_proj"
        )
        return fused_head_targets(name, 4, 8)

    options = {"has_gate": False, "mlp_bias": True, "has_mlp_norm": is_parallel}
    assert_equal(ours(model, options, names, targets), model)


def read(kind="Llama", own=(), **options):
    return standard_decoder(config_of(kind, **options), own=own)


class TestReading:
    @pytest.mark.parametrize(
        ("key", "is_layer_norm"),
        [
            ("rms_norm_eps", False),
            ("norm_eps", False),
            ("layer_norm_eps", True),
            ("layer_norm_epsilon", True),
            ("layernorm_epsilon", True),
            ("norm_epsilon", True),
        ],
    )
    def test_the_name_of_the_epsilon_tells_the_norm(self, key, is_layer_norm):
        values = {**vars(config_of("Llama")), "rms_norm_eps": None, key: 3e-4}
        found = standard_decoder(SimpleNamespace(**values), own=())
        assert (found.norm_eps, found.layer_norms) == (3e-4, is_layer_norm)

    @pytest.mark.parametrize(
        ("name", "expected"),
        [("gelu_new", "gelu_pytorch_tanh"), ("swish", "silu"), ("relu", "relu"), ("gelu", "gelu")],
    )
    def test_activations_by_their_names(self, name, expected):
        assert read(hidden_act=name).activation == expected
        with pytest.raises(ModelNotSupportedError, match=r"hidden_act 'xielu' of this .*`own`"):
            read(hidden_act="xielu")

    def test_an_activation_that_the_family_reads_is_its_own(self):
        assert read(own=("hidden_act",), hidden_act="xielu").hidden_size == 32
        with pytest.raises(ModelNotSupportedError, match=r"hidden_act 'xielu' of this llama"):
            read(own=("attention_bias",), hidden_act="xielu")

    def test_a_key_that_nobody_reads_is_refused_with_its_value(self):
        with pytest.raises(ModelNotSupportedError, match=r"clip_qkv = 8.0: .* own=\(\.\.\.\)"):
            read("Olmo", clip_qkv=8.0)
        assert read("Olmo", own=("clip_qkv",), clip_qkv=8.0).layer_norms
        assert read("Olmo").hidden_size == 32  # null switches nothing on
        with pytest.raises(ModelNotSupportedError, match=r"use_qk_norm = True"):
            read("Cohere", use_qk_norm=True)
        with pytest.raises(ModelNotSupportedError, match=r"num_experts = 60"):
            read("Qwen2Moe")

    def test_a_key_of_config_json_that_the_class_does_not_have_is_no_key_of_the_model(self):
        found = read("Llama", made_up=7, sliding_window=3, logit_scale=0.1)
        assert (found.windows, found.logit_scale) == (None, 1.0)
        values = {**vars(config_of("Llama")), "model_type": "new", "made_up": 7}
        own = SimpleNamespace(**values)  # a class of someone else
        with pytest.raises(ModelNotSupportedError, match="made_up = 7"):
            standard_decoder(own, own=())

    def test_without_own_the_family_looks_after_the_other_keys(self):
        found = read("Llama", own=None, attention_bias=True)
        assert not found.qkv_bias
        assert read("Llama", attention_bias=True).out_bias

    def test_positions_other_than_rotary_are_refused(self):
        config = transformers.GPT2Config(n_embd=32)
        with pytest.raises(ModelNotSupportedError, match="no rope_parameters"):
            standard_decoder(config, own=())

    def test_layers_without_rotary_embedding(self):
        assert read("SmolLM3", no_rope_layers=[1, 0, 0, 1]).nope_layers == {1, 2}
        assert read("SmolLM3", no_rope_layer_interval=4).nope_layers == {3}

    def test_a_rope_for_each_type_of_layer(self):
        rope = {
            "full_attention": {"rope_type": "default", "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
        config = transformers.Gemma3TextConfig(**SIZES, rope_parameters=rope)
        found = standard_decoder(config, own=())
        assert (found.rotary.theta, found.local_rotary.theta) == (5e5, 1e4)
        assert found.activation == "gelu_pytorch_tanh"
        assert found.score_scale == 256**-0.5


def test_every_field_says_what_it_means():
    for each in fields(DecoderConfig):
        assert each.metadata["meaning"], each.name
