"""EngineConfig as given, and RuntimeConfig as resolved."""

from dataclasses import FrozenInstanceError

import pytest
import torch

from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.values.options.runtime_config import (
    AttentionChoice,
    MachineLimits,
    ModelLimits,
    resolve,
)

MODEL = ModelLimits(dtype="bfloat16", max_position_embeddings=4096, hidden_size=64)
CPU = MachineLimits(has_cuda=False, num_cpus=2, num_threads=2)
CUDA = MachineLimits(has_cuda=True, num_cpus=16, num_threads=8)


def run(host=CPU, model=MODEL, **options):
    return resolve(EngineConfig(model="m", **options), model, host, choose)


def choose(needs):
    return AttentionChoice(
        name=f"{needs.name} on {needs.device}", block_size=needs.block_size or 64
    )


def test_cpu_defaults():
    runtime = run()
    assert (runtime.device, runtime.dtype) == ("cpu", "bfloat16")
    assert runtime.kv_cache_dtype == "bfloat16"
    assert (runtime.max_model_len, runtime.block_size, runtime.max_num_seqs) == (4096, 64, 32)
    assert (runtime.num_intake_threads, runtime.num_threads) == (2, 2)
    assert runtime.limit_mm_per_prompt == {"image": 1, "video": 1}
    assert runtime.max_logprobs == 20


def test_cuda_is_taken_where_it_is():
    runtime = run(CUDA)
    assert (runtime.device, runtime.max_num_seqs, runtime.max_num_batched_tokens) == (
        "cuda",
        256,
        8192,
    )
    assert run(CUDA, device="cpu").device == "cpu"


@pytest.mark.parametrize(
    ("given", "runs"),
    [("auto", "float16"), ("fp8", "float8_e4m3fn"), ("int8", "int8"), ("bf16", "bfloat16")],
)
def test_kv_cache_dtype_is_torchs_name(given, runs):
    assert run(CUDA, dtype="float16", kv_cache_dtype=given).kv_cache_dtype == runs


def test_kv_cache_dtype_that_is_none():
    with pytest.raises(ConfigError, match="kv_cache_dtype"):
        run(CUDA, kv_cache_dtype="fp4")


def test_cuda_without_cuda():
    with pytest.raises(ConfigError, match="torch finds no CUDA device"):
        run(device="cuda:1")


@pytest.mark.parametrize("device", ["tpu", "cuda:x", "cuda:", "cuda:-1", "cpu:0"])
def test_unknown_device(device):
    with pytest.raises(ConfigError, match="use cpu, cuda or cuda:N"):
        run(CUDA, device=device)


@pytest.mark.parametrize("spelling", ["bf16", "bfloat16", torch.bfloat16])
def test_dtypes_in_all_spellings(spelling):
    assert EngineConfig(model="m", dtype=spelling).dtype == "bfloat16"


def test_float16_checkpoints_run_in_bfloat16_on_cpu():
    half = ModelLimits(dtype="float16", max_position_embeddings=64, hidden_size=8)
    assert run(model=half).dtype == "bfloat16"
    assert run(model=half, dtype="float16").dtype == "float16"
    assert run(CUDA, model=half).dtype == "float16"


@pytest.mark.parametrize(
    ("stored", "level", "has_bf16", "line"),
    [
        ("bfloat16", "avx2", False, "bfloat16, as in the checkpoint; computed by the kernels for"),
        ("bfloat16", "portable", False, "kernels for portable"),
        ("bfloat16", None, True, "as in the checkpoint; computed by plain torch"),
        ("bfloat16", None, False, "computed by plain torch, in float32 inside products"),
        ("float32", None, False, "float32, as in the checkpoint; computed by plain torch"),
        ("float32", "avx512", True, "float32, as in the checkpoint; computed by the kernels for"),
        ("float16", "avx2", False, "bfloat16 for a checkpoint in float16, which it rounds; "),
    ],
)
def test_dtype_auto_says_what_it_chose(stored, level, has_bf16, line):
    """It never computes a checkpoint in float32 or bfloat16 in another dtype."""
    host = MachineLimits(
        has_cuda=False, num_cpus=2, num_threads=2, cpu_level=level, has_bf16=has_bf16
    )
    model = ModelLimits(dtype=stored, max_position_embeddings=64, hidden_size=8)
    runtime = run(host, model)
    assert runtime.dtype == ("bfloat16" if stored == "float16" else stored)
    assert f"dtype 'auto' is {runtime.dtype}" in runtime.dtype_choice
    assert line in runtime.dtype_choice
    assert runtime.dtype_choice.endswith(("plain torch", "products", str(level)))
    assert "\n" not in runtime.dtype_choice
    assert run(host, model, dtype=runtime.dtype).dtype_choice is None


def test_dtype_auto_on_cuda():
    assert run(CUDA).dtype_choice == "dtype 'auto' is bfloat16, as in the checkpoint"


def test_a_context_over_the_models_own():
    with pytest.raises(ConfigError, match="8192 is over the 4096 positions"):
        run(max_model_len=8192)


def test_a_step_must_have_a_token_for_everybody():
    with pytest.raises(ConfigError, match="max_num_batched_tokens = 16 is below max_num_seqs = 32"):
        run(max_num_batched_tokens=16)


def test_without_chunks_a_step_holds_a_whole_prompt():
    assert run(enable_chunked_prefill=False).max_num_batched_tokens == 4096


def test_media_limits_keep_the_other_kinds_default():
    assert run(limit_mm_per_prompt={"image": 5}).limit_mm_per_prompt == {"image": 5, "video": 1}
    with pytest.raises(ConfigError, match="'image' must be 0 or more"):
        run(limit_mm_per_prompt={"image": -1})


def test_encoder_cache_is_bounded_in_bytes():
    assert run(encoder_cache_memory=64 * 2 * 10).encoder_cache_tokens == 10
    assert run(encoder_cache_memory=64 * 4 * 10, dtype="float32").encoder_cache_tokens == 10


def test_logprobs_can_be_switched_off():
    assert run(enable_logprob=False).max_logprobs == 0


def test_numbers_of_devices_and_engines_are_checked():
    config = EngineConfig(model="m", tensor_parallel_size=2, data_parallel_size=4)
    assert (config.tensor_parallel_size, config.data_parallel_size) == (2, 4)
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        EngineConfig(model="m", tensor_parallel_size=0)


def test_remote_code_cannot_be_switched_on():
    with pytest.warns(UserWarning, match="trust_remote_code"):
        assert EngineConfig(model="m", trust_remote_code=True).trust_remote_code is False


def test_media_domains_and_schemes_are_names():
    config = EngineConfig(
        model="m",
        allowed_media_domains="Example.COM., *.img.org, [::1]",
        allowed_media_schemes=["S3", "gs://"],
    )
    assert config.allowed_media_domains == ("example.com", "*.img.org", "::1")
    assert config.allowed_media_schemes == ("s3", "gs")
    for wrong in ("https://a.org", "a.org/x", "a.org:80", "*", "*.*.org", "a*.org", "hößt", ""):
        with pytest.raises(ConfigError, match="is no host name"):
            EngineConfig(model="m", allowed_media_domains=(wrong,))
    for wrong in ("https", "file", "data", "local", "s3://bucket", ""):
        with pytest.raises(ConfigError, match="cannot be listed"):
            EngineConfig(model="m", allowed_media_schemes=(wrong,))


def test_private_media_addresses_need_named_hosts():
    with pytest.raises(ConfigError, match="needs allowed_media_domains"):
        EngineConfig(model="m", allow_media_urls=True, allow_private_media_addresses=True)


def test_plugins_from_a_comma_separated_text():
    config = EngineConfig(model="m", plugins="ernie, image", blocked_plugins=["qwen"])
    assert (config.plugins, config.blocked_plugins) == (("ernie", "image"), ("qwen",))


def test_unknown_options_are_refused():
    with pytest.raises(ConfigError, match="did you mean 'block_size'"):
        EngineConfig.from_options("m", {"blok_size": 3})


def test_serving_options_warn():
    with pytest.warns(UserWarning, match="without a meaning offline: engine_worker_queue_port"):
        config = EngineConfig.from_options("m", {"engine_worker_queue_port": 8, "seed": 3})
    assert config.seed == 3


def test_neither_config_can_be_changed():
    config = EngineConfig(model="m")
    with pytest.raises(ConfigError, match=r"EngineConfig cannot be changed.* replace\(seed=3\)"):
        config.seed = 3
    assert config.replace(seed=3) == EngineConfig(model="m", seed=3)
    with pytest.raises(FrozenInstanceError):
        run().seed = 3


@pytest.mark.parametrize("name", ["guidance", "xgrammar"])
def test_libraries_of_constraints_are_ignored_with_a_warning(name):
    with pytest.warns(UserWarning, match=f"'{name}' is ignored: llguidance"):
        config = EngineConfig(model="m", guided_decoding_backend=name)
    assert config.guided_decoding_backend == "auto"
