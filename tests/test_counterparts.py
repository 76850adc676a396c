"""Options of other engines get an answer that is true: it names options that exist."""

import re

import pytest

from mmdeploy_llm.config import EngineConfig
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.params import GuidedDecodingParams, SamplingParams
from mmdeploy_llm.params.counterparts import COUNTERPARTS, SERVING_OPTIONS

CLASSES = {"EngineConfig": EngineConfig, "SamplingParams": SamplingParams}
OWN_NAMES = {*EngineConfig.model_fields, *SamplingParams.model_fields}
OWN_NAMES |= {*GuidedDecodingParams.model_fields}
NOT_OPTIONS = {"merge_and_unload", "generation_config", "chat_template_kwargs", "multimodal_data"}
NOT_OPTIONS |= {"enable_thinking"}
UNDERSCORED = re.compile(r"\b[a-z]+(?:_[a-z]+)+\b")

every = pytest.mark.parametrize(
    ("owner", "name"), [(owner, name) for owner, names in COUNTERPARTS.items() for name in names]
)


@every
def test_the_error_says_what_to_write_here(owner, name):
    required = {"model": "m"} if owner == "EngineConfig" else {}
    with pytest.raises(ConfigError) as refused:
        CLASSES[owner](**required, **{name: 1})
    assert f"has no option '{name}'; {COUNTERPARTS[owner][name]}" in str(refused.value)


@every
def test_it_names_options_that_exist(owner, name):
    named = set(UNDERSCORED.findall(COUNTERPARTS[owner][name])) - NOT_OPTIONS
    assert named <= OWN_NAMES


def test_no_option_is_both_ignored_and_answered():
    assert not SERVING_OPTIONS & COUNTERPARTS["EngineConfig"].keys()


@pytest.mark.parametrize("value", ["fp4", "fp8_e5m2", "uint4", 4])
def test_an_unknown_dtype_of_the_cache_lists_those_that_are_known(value):
    with pytest.raises(ConfigError) as refused:
        EngineConfig(model="m", kv_cache_dtype=value)
    assert str(refused.value).startswith("EngineConfig.kv_cache_dtype: Input should be 'auto', ")
    assert str(refused.value).endswith("'int8', 'int4' or 'fp8', got " + repr(value))
    assert "function-before" not in str(refused.value)
