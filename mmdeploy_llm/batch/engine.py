"""Describes an engine for the configuration of a run, from its options and the model's files."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

from mmdeploy_llm.data.records.configuration import Configuration
from mmdeploy_llm.data.records.identity import model_digest
from mmdeploy_llm.hooks.discovery import discover, select
from mmdeploy_llm.hooks.files import check_file
from mmdeploy_llm.system.guarding.given_template import load_template
from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.weights.folder import TOKENIZER_FILES, resolve_adapter, resolve_model

# Options that decide how fast an answer comes, or whether there is one, and not what it says. The
# model and its tokenizer are compared by their files.
NOT_COMPARED = frozenset(
    (
        *("model", "tokenizer", "revision", "device", "num_threads", "cpu_affinity", "numa_node"),
        *("tensor_parallel_size", "data_parallel_size", "block_size", "max_num_seqs"),
        *("max_num_batched_tokens", "gpu_memory_utilization", "kv_cache_memory"),
        *("num_gpu_blocks_override", "enable_prefix_caching", "prefix_cache_memory"),
        *("enable_chunked_prefill", "encoder_cache_memory", "num_intake_threads"),
        *("limit_mm_per_prompt", "allowed_media_root", "max_media_bytes", "max_image_pixels"),
        *("allow_media_urls", "allowed_media_domains", "allow_private_media_addresses"),
        *("allowed_media_schemes", "media_fetch_timeout", "media_isolation", "media_timeout"),
        *("media_process_memory", "max_video_seconds", "max_video_frames", "enable_logprob"),
        *("max_logprobs", "guided_decoding_backend", "native_kernels", "use_warmup"),
        *("enforce_eager", "trust_remote_code", "attention_backend", "guided_decoding_timeout"),
        *("quiet", "plugin_files", "weight_cache", "weight_cache_size", "adapters"),
        *("max_adapters", "adapter_memory", "max_adapter_rank"),
    )
)


def describe_engine(config: EngineConfig) -> Configuration:
    """Returns what decides the answers of an engine: options that differ from their defaults,
    digests of the model's files, versions of plugins from other packages. Raises CheckpointError
    when there is no such model."""
    given = config.model_dump(exclude_defaults=True)
    values = {name: value for name, value in given.items() if name not in NOT_COMPARED}
    values["model"] = model_digest(resolve_model(config.model, config.revision))
    if config.tokenizer is not None:
        folder = resolve_model(config.tokenizer, config.revision, TOKENIZER_FILES)
        values["tokenizer"] = model_digest(folder)
    if config.chat_template is not None:
        values["chat_template"] = load_template(config.chat_template)
    for name, source in config.adapters.items():
        values[f"adapters.{name}"] = model_digest(resolve_adapter(source))
    if plugins := dict(_other_plugins(config)):
        values["plugins"] = plugins
    files = {path: sha256(check_file(Path(path))).hexdigest() for path in config.plugin_files}
    return Configuration(model=config.model, values=values, plugin_files=files)


def _other_plugins(config: EngineConfig) -> Iterator[tuple[str, str]]:
    """Yields name and version of the selected plugins that other packages provide."""
    for plugin in select(discover().plugins, config.plugins, config.blocked_plugins):
        if not plugin.origin.is_builtin:
            yield plugin.origin.name, plugin.origin.version or ""
