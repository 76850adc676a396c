"""The memory that a model will take, counted before its weights are read, is what it then takes."""

import pytest

from mmdeploy_llm import LLM, ConfigError
from mmdeploy_llm.engine.startup.needs import count_needs
from mmdeploy_llm.testing.tiny import write_tiny
from mmdeploy_llm.values.options.config import EngineConfig

GIB = 2**30


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny("qwen2_5_vl", tmp_path_factory.mktemp("model"))


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    "options", [{"kv_cache_memory": 2**20}, {"num_gpu_blocks_override": 40}, {}]
)
def test_counted_is_what_is_taken(folder, options):
    options = {**options, "block_size": 16, "max_model_len": 256, "device": "cpu"}
    needs = count_needs(EngineConfig.from_options(str(folder), options), 4 * GIB)
    with LLM(str(folder), use_warmup=False, native_kernels=False, quiet=True, **options) as llm:
        weights = sum(each.numel() * each.element_size() for each in llm.model.parameters())
        assert needs.weights == weights
        shape = llm.model.num_layers * llm.model.num_kv_heads * llm.model.head_dim
        size = next(llm.model.parameters()).element_size()
        assert needs.kv_cache == llm.num_kv_blocks * 16 * 2 * shape * size
    assert needs.device == "cpu"
    assert needs.total == needs.weights + needs.kv_cache


def test_each_engine_has_its_own_weights(folder):
    options = {"kv_cache_memory": 2**20, "device": "cpu"}
    one = count_needs(EngineConfig.from_options(str(folder), options), GIB)
    options["data_parallel_size"] = 3
    three = count_needs(EngineConfig.from_options(str(folder), options), GIB)
    assert (three.weights, three.kv_cache) == (3 * one.weights, 3 * one.kv_cache)


def test_no_memory_for_a_cache_is_refused(folder):
    with pytest.raises(ConfigError, match="at least 2 are needed"):
        count_needs(EngineConfig.from_options(str(folder), {"device": "cpu"}), 0)
