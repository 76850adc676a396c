"""Which matrices have the fewest bits: those of the layers that compute text, in every plugin's
models. Heads, encoders and what joins them have 8 bits."""

import re

import pytest
import torch
import transformers
from mmdeploy_llm_plugins.transformers_any.model import AnyModel

from mmdeploy_llm.hooks import PluginManager
from mmdeploy_llm.layers.basic.experts import Experts
from mmdeploy_llm.layers.basic.linear import Linear
from mmdeploy_llm.layers.install import decoder_modules, install_kernels
from mmdeploy_llm.testing.tiny import families, family_of, tokenizer_of
from mmdeploy_llm.values.options.weight_formats import FORMATS, LOOKED_UP
from mmdeploy_llm.weights.bounds import bounded_building

QUICK = ("qwen2_5_vl", "florence2")
LAYERS = re.compile(r"((model|decoder|text)\.)?layers\.\d+\.")
VECTOR_LAYERS = re.compile(
    r"((model|text|text\.inner|encoder)\.)?layers\.\d+\."
)  # encoders of text alone
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 96}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def plugins():
    return PluginManager.load()


def matrices(model):
    """Returns the paths of all matrices, and of those in layers of text."""
    found = {path: own for path, own in model.named_modules() if isinstance(own, Linear | Experts)}
    inside = decoder_modules(model)
    return {*found}, {path for path, own in found.items() if own in inside}


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=[pytest.mark.full] * (name not in QUICK))
        for name in sorted(families())
    ],
)
def test_layers_of_text_and_nothing_else(plugins, family):
    described = family_of(families()[family])
    config = described.make_config(tokenizer_of(described), {})
    with torch.device("meta"), bounded_building():
        model = plugins.build(plugins.model_for([described.architecture]), config)
    every, inside = matrices(model)
    own = VECTOR_LAYERS if getattr(model, "is_embedder", False) else LAYERS
    assert inside == {path for path in every if own.match(path)}
    assert inside


def of_text():
    return transformers.Olmo2Config(**SMALL, architectures=["Olmo2ForCausalLM"])


def of_images():
    tower = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    tower |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    return transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**tower),
        text_config=transformers.LlamaConfig(**SMALL),
        image_token_index=7,
        architectures=["LlavaForConditionalGeneration"],
    )


@pytest.mark.one_is_quick
@pytest.mark.parametrize("config", [of_text, of_images])
def test_layers_of_transformers_models(config):
    with torch.device("meta"), bounded_building():
        every, inside = matrices(AnyModel(config()))
    assert inside == {path for path in every if re.search(r"(?<!encoder)\.layers\.\d+\.", path)}
    assert any("lm_head" in path for path in every - inside)


class Noted:
    """Stands for kernels: notes what each matrix would be rounded to."""

    def __init__(self):
        self.names = {}

    def pack(self, weight, quantization):
        self.names.setdefault(quantization, []).append(tuple(weight.shape))

    def can_pack(self, weight, quantization):
        return False


@pytest.mark.full
@pytest.mark.one_is_quick
@pytest.mark.parametrize("quantization", ["int4", "int4wo"])
def test_a_tied_head_is_rounded_as_a_head(plugins, quantization):
    """It is rounded in a model with an encoder, too."""
    described = family_of(families()["florence2"])
    config = described.make_config(tokenizer_of(described), {})
    with torch.device("meta"), bounded_building():
        model = plugins.build(plugins.model_for([described.architecture]), config)
    kernels, own = Noted(), FORMATS[quantization]
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.zero_()
    install_kernels(model, kernels, quantization)
    assert kernels.names.keys() - {None} == {own.name, own.elsewhere, own.tied_head, LOOKED_UP}
    assert tuple(model.decoder.embed_tokens.weight.shape) in kernels.names[own.tied_head]
