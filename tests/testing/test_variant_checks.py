"""Config variants: what the family cannot have is told, and what a model ignores is found."""

import re
from dataclasses import replace

import pytest

from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.hooks import PluginManager
from mmdeploy_llm.layers.decoder import CausalLM
from mmdeploy_llm.testing.models import variants
from mmdeploy_llm.testing.models.base import CheckFailed, CheckSkipped
from mmdeploy_llm.testing.models.models import ModelSubject
from mmdeploy_llm.testing.models.prompts import make_prompt
from mmdeploy_llm.testing.tiny import generating
from mmdeploy_llm.weights.folder import read_checkpoint

SPECS = {spec.name: spec for spec in PluginManager.load().models}
GENERATING = generating()
# Kinds of which the other tests of conformance run all checks.
IN_ALL = {"qwen2", "qwen3_5_text", "gemma4_text", "gpt_oss", "ernie4_5_vl_moe", "gemma4"}


@pytest.fixture(scope="module")
def subject_for(tiny_folder, transformers_of):
    def make(family, tolerance=1e-4, **options):
        folder = tiny_folder(family, **options)
        return ModelSubject(
            spec=SPECS[family],
            folder=folder,
            config=read_checkpoint(folder).config,
            cases={"text": ()},
            tolerance=tolerance,
            make_prompt=make_prompt,
            make_reference=transformers_of,
        )

    return make


@pytest.mark.full
def test_what_was_tried_and_why_the_rest_was_not_is_told(subject_for):
    told = variants.rope_scalings_equal_the_reference(subject_for("ernie4_5"))
    assert told.startswith("tried rope_theta; yarn: the model refuses it (rope_type 'yarn'")
    told = variants.key_heads_equal_the_reference(subject_for("ernie4_5_vl_moe"))
    assert told.endswith("one key head: it is the config's own")


def test_a_family_without_the_keys_is_skipped_with_a_reason(subject_for):
    with pytest.raises(CheckSkipped, match=r"the config has no sliding_window.: nothing to add"):
        variants.windows_equal_the_reference(subject_for("ernie4_5"))


def test_a_refusal_must_be_the_models(subject_for, monkeypatch):
    build = CausalLM.__init__

    def changed(self, config, *further, **named):
        if config.activation != "silu":
            raise fault(f"no {config.activation}")
        build(self, config, *further, **named)

    monkeypatch.setattr(CausalLM, "__init__", changed)
    subject, fault = subject_for("qwen2"), ModelNotSupportedError
    told = variants.constants_equal_the_reference(subject)
    assert told == "tried rms_norm_eps; hidden_act: the model refuses it (no gelu)"
    fault = KeyError
    with pytest.raises(
        CheckFailed, match=r"hidden_act = 'gelu'. raised KeyError.*, or raise Model"
    ):
        variants.constants_equal_the_reference(subject)


def test_a_change_without_an_effect_proves_nothing(subject_for):
    told = variants.constants_equal_the_reference(subject_for("gpt_oss"))
    assert told == "tried rms_norm_eps; hidden_act: it changes nothing in the reference"


def test_a_large_checkpoint_is_not_copied(subject_for, monkeypatch):
    monkeypatch.setattr(variants, "MAX_COPY_BYTES", 10)
    with pytest.raises(CheckSkipped, match="too large"):
        variants.key_heads_equal_the_reference(subject_for("qwen2"))


def test_a_model_that_transformers_does_not_have(subject_for):
    """Is compared with its author's reference where the weights are the same, and said to lack
    others."""
    subject = subject_for("qwen2")
    subject.config.architectures = ["AcmeForCausalLM"]
    with pytest.raises(CheckSkipped, match="no such model to write its weights with"):
        variants.key_heads_equal_the_reference(subject)
    subject.make_reference = lambda folder: theirs
    theirs = replace(subject_for("qwen2")).reference
    with pytest.raises(CheckSkipped, match=re.escape("it changes nothing in the reference")):
        variants.windows_equal_the_reference(subject)


def others(name):
    """Text models share their layers with those that see and hear, which are long."""
    tier = pytest.mark.long if GENERATING[name].media else pytest.mark.full
    return pytest.param(name, marks=[tier] * (name != "qwen2_moe"))


@pytest.mark.few_in_ci(12)
@pytest.mark.full
@pytest.mark.parametrize("name", [others(name) for name in sorted({*GENERATING} - IN_ALL)])
def test_no_family_ignores_an_activation_or_an_epsilon(subject_for, name):
    """Thirteen did, those with experts or states, until the check was written."""
    tolerance = 5e-4 if name.startswith(("qwen3_5", "qwen3_next")) else 1e-4
    assert variants.constants_equal_the_reference(subject_for(name, tolerance))


@pytest.mark.full
def test_a_head_of_ernie_with_experts_has_a_bias_where_its_layers_have(subject_for):
    """A tied one would have a bias beside the embedding: refused."""
    told = variants.heads_and_biases_equal_the_reference(subject_for("ernie4_5_moe"))
    assert told.startswith("tried tie_word_embeddings; use_bias: the model refuses it")
    subject = subject_for("ernie4_5_moe", tie_word_embeddings=False)
    told = variants.heads_and_biases_equal_the_reference(subject)
    assert told == "tried tie_word_embeddings, use_bias"
