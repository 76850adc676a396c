"""A stand-in answers what is kept, and is the real object for everything else."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import sys

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, PreTrainedConfig
from transformers.models.auto import AutoModelForCausalLM

from mmdeploy_llm.engine.startup.parse_cache.config import (
    config_stand_in,
    describe_config,
    plain,
    unplain,
)
from mmdeploy_llm.engine.startup.parse_cache.stand_in import Source, real
from mmdeploy_llm.layers import layer_rotaries, rotary_config
from mmdeploy_llm.weights.cache import NotKeptError


class Plugins(LlamaConfig):
    """The config of a package of its own."""


@pytest.fixture
def config():
    return LlamaConfig(num_hidden_layers=2, id2label={0: "a", 1: "b"}, dtype="bfloat16")


@pytest.fixture
def stand_in(config):
    values = json.loads(json.dumps(describe_config(config)))
    return config_stand_in(values, Source(lambda: config))


@pytest.mark.parametrize(
    "value",
    [None, True, 1, 1.5, float("inf"), "\ud800", [1, (2, [3])], {1: {"tuple": (1,)}}, torch.int8],
)
def test_values_are_the_same_after_reading(value):
    found = unplain(json.loads(json.dumps(plain(value))))
    assert found == value
    assert repr(found) == repr(value)


class Text(str):
    pass


@pytest.mark.parametrize("value", [Text("a"), {1}, object(), len, [torch.ones(1)], b"a"])
def test_other_values_are_not_kept(value):
    with pytest.raises(NotKeptError):
        plain(value)


def test_nested_values_end():
    value: list[object] = []
    value.append(value)
    with pytest.raises(NotKeptError, match="deep"):
        plain(value)


def test_what_is_kept_loads_nothing(stand_in):
    assert stand_in.num_hidden_layers == 2
    assert stand_in.id2label == {0: "a", 1: "b"}
    assert stand_in.dtype is torch.bfloat16
    assert stand_in.get_text_config() is stand_in
    assert not hasattr(stand_in, "vision_config")
    assert not object.__getattribute__(stand_in, "_own").source.is_loaded


@pytest.mark.parametrize(
    "ask",
    [
        lambda own: own.to_dict(),
        lambda own: isinstance(own, PreTrainedConfig) and not isinstance(own, dict),
        lambda own: copy.deepcopy(own).to_dict(),
        lambda own: type(copy.copy(own)),
        lambda own: type(pickle.loads(pickle.dumps(own))),
        lambda own: own.get_text_config(decoder=True).to_dict(),
        lambda own: vars(own)["num_hidden_layers"],
        lambda own: "to_dict" in dir(own),
        lambda own: own == copy.copy(own),
        lambda own: repr(own),
        lambda own: list(own),
        lambda own: own.__class__,
        lambda own: bool(own),
        lambda own: own.use_return_dict,
        lambda own: dataclasses.is_dataclass(real(own)),
    ],
)
def test_everything_else_asks_the_real_object(stand_in, config, ask):
    assert ask(stand_in) == ask(config)


def test_changes_are_those_of_the_real_object(stand_in, config):
    stand_in.num_hidden_layers = 5
    assert (stand_in.num_hidden_layers, config.num_hidden_layers) == (5, 5)
    config.hidden_size = 7
    assert stand_in.hidden_size == 7
    stand_in.extra = 1
    del stand_in.extra
    assert not hasattr(config, "extra")


def test_without_transformers_a_check_loads_nothing(stand_in, monkeypatch):
    monkeypatch.delitem(sys.modules, "transformers")
    assert not isinstance(stand_in, dict)
    assert not object.__getattribute__(stand_in, "_own").source.is_loaded


def test_nested_configs_follow_the_whole():
    from transformers import Qwen2VLConfig

    config = Qwen2VLConfig()
    source = Source(lambda: config)
    found = config_stand_in(json.loads(json.dumps(describe_config(config))), source)
    text = found.get_text_config()
    assert text is found.text_config
    assert text.vocab_size == config.text_config.vocab_size
    assert not source.is_loaded
    found.text_config.vocab_size = 11
    assert (text.vocab_size, config.text_config.vocab_size) == (11, 11)
    assert real(text) is config.text_config


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("rope", [LLAMA3, LINEAR, {"rope_type": "yarn", "factor": 4.0}, LONG])
def test_scaled_frequencies_are_kept(rope):
    own = {"rope_theta": 1e4, **rope}
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, rope_parameters=own)
    source = Source(lambda: config)
    found = config_stand_in(json.loads(json.dumps(describe_config(config))), source)
    assert rotary_config(found) == rotary_config(config)
    assert rotary_config(found).frequencies
    assert not source.is_loaded
    assert layer_rotaries(found) == layer_rotaries(config)
    found.rope_parameters = {**own, "factor": 2.0, "long_factor": [3.0] * 8}
    assert rotary_config(found) == rotary_config(config)  # which has changed


def test_layers_have_frequencies_of_their_own():
    rope = {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default"}}
    rope["sliding_attention"]["rope_theta"] = 1e4
    config = Gemma3TextConfig(rope_parameters=rope)
    source = Source(lambda: config)
    found = config_stand_in(json.loads(json.dumps(describe_config(config))), source)
    assert layer_rotaries(found) == layer_rotaries(config)
    assert layer_rotaries(found)[0].frequencies
    assert not source.is_loaded


def test_frequencies_in_a_config_mean_nothing():
    config = LlamaConfig(rope_parameters={"rope_theta": 1e4, **LINEAR}, _rope_frequencies=["x"])
    expected = rotary_config(config)
    found = config_stand_in(json.loads(json.dumps(describe_config(config))), Source(lambda: config))
    assert rotary_config(found) == expected


def test_configs_of_other_packages_are_not_kept():
    with pytest.raises(NotKeptError):
        describe_config(Plugins())


def test_transformers_models_are_built_of_the_real_config(stand_in):
    with torch.device("meta"):
        assert AutoModelForCausalLM.from_config(real(stand_in)).config.num_hidden_layers == 2
