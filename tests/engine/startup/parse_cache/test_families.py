"""The stand-in of a config answers as transformers' config does, for every family: each attribute,
and the model that is built of it."""

from __future__ import annotations

import json

import pytest
import torch

from mmdeploy_llm.engine.startup.parse_cache.config import (
    WARNING,
    config_stand_in,
    describe_config,
    plain,
)
from mmdeploy_llm.engine.startup.parse_cache.stand_in import Source
from mmdeploy_llm.hooks import PluginManager
from mmdeploy_llm.layers.config_reader import declared_keys
from mmdeploy_llm.testing.tiny import families, family_of, write_without_weights
from mmdeploy_llm.weights.bounds import bounded_building
from mmdeploy_llm.weights.cache import NotKeptError
from mmdeploy_llm.weights.folder import read_checkpoint

QUICK = ("qwen2", "gemma3", "ernie4_5_vl_moe")


@pytest.fixture(scope="module")
def plugins():
    return PluginManager.load()


def stands_in(config):
    source = Source(lambda: config)
    values = json.loads(json.dumps(describe_config(config)))
    return config_stand_in(values, source), source


def check_level(found, config, source):
    assert declared_keys(found) == declared_keys(config)
    assert type(found).__name__ == type(config).__name__
    assert type(found).model_type == type(config).model_type
    assert not hasattr(found, "no_such_key")
    for name in sorted({*dir(config), *config.attribute_map}):
        if name.startswith("__") or name in WARNING:
            continue
        try:
            value = plain(getattr(config, name))
        except Exception:
            continue
        assert plain(getattr(found, name)) == value, name
        assert type(getattr(found, name)) is type(getattr(config, name)), name
    assert not source.is_loaded
    text = config.get_text_config()
    own = found.get_text_config()
    assert own.model_type == text.model_type
    assert getattr(own, "vocab_size", None) == getattr(text, "vocab_size", None)


def nested(config):
    return [key for key in describe_config(config)["nested"] if not key.startswith("_")]


@pytest.mark.few_in_ci(24)
@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in families()],
)
def test_a_stand_in_answers_as_the_config(family, tmp_path, plugins):
    spec = families()[family]
    write_without_weights(family_of(spec), tmp_path)
    config = read_checkpoint(tmp_path).config
    try:
        found, source = stands_in(config)
    except NotKeptError:
        pytest.fail("it is not kept")
    check_level(found, config, source)
    for key in nested(config):
        own, alone = stands_in(config)
        check_level(getattr(own, key), getattr(config, key), alone)
    found, source = stands_in(config)
    with torch.device("meta"), bounded_building():
        expected = plugins.build(plugins.model_for(config.architectures), config)
        built = plugins.build(plugins.model_for(config.architectures), found)
    shapes = {name: (own.shape, own.dtype) for name, own in expected.state_dict().items()}
    assert {name: (own.shape, own.dtype) for name, own in built.state_dict().items()} == shapes
    assert repr(built) == repr(expected)
