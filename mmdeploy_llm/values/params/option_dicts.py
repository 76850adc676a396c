"""Names and types of options, for editors and type checkers. Written from the fields of the
classes that check them, by tests/test_option_dicts.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from os import PathLike
    from pathlib import Path

    import torch
    from pydantic import BaseModel

    from .inner import EarlyStopParams, GuidedDecodingParams, NoRepeatNGramParams


class EngineOptions(TypedDict, total=False):
    """Options of EngineConfig."""

    adapter_memory: int | None
    adapters: str | Sequence[str] | Mapping[str, str | PathLike[str]] | None
    allow_media_urls: bool | None
    allow_private_media_addresses: bool | None
    allowed_media_domains: str | Sequence[str] | None
    allowed_media_root: str | PathLike[str] | None
    allowed_media_schemes: str | Sequence[str] | None
    attention_backend: str | None
    block_size: int | None
    blocked_plugins: str | Sequence[str] | None
    chat_template: str | None
    cpu_affinity: Literal["auto"] | Sequence[int] | None
    cpu_level: (
        Literal[
            "amx",
            "avx512_bf16",
            "avx512_vnni",
            "avx512",
            "avx2_vnni",
            "avx2",
            "neon_bf16",
            "neon_i8mm",
            "neon_dot",
            "portable",
        ]
        | None
    )
    data_parallel_size: int | None
    default_adapter: str | None
    deterministic: bool | None
    device: str | None
    dtype: (
        Literal["auto", "bfloat16", "float16", "float32", "bf16", "fp16", "half", "fp32", "float"]
        | torch.dtype
        | None
    )
    early_stop_config: EarlyStopParams | Mapping[str, Any] | None
    enable_chunked_prefill: bool | None
    enable_early_stop: bool | None
    enable_logprob: bool | None
    enable_prefix_caching: bool | None
    encoder_cache_memory: int | None
    enforce_eager: bool | None
    gpu_memory_utilization: float | None
    guided_decoding_backend: Literal["auto", "off", "guidance", "xgrammar"] | None
    guided_decoding_timeout: float | None
    image_tokens: int | Literal["auto", "full"] | None
    kv_cache_dtype: (
        Literal[
            "auto",
            "bfloat16",
            "float16",
            "float32",
            "int8",
            "int4",
            "fp8",
            "bf16",
            "fp16",
            "half",
            "fp32",
            "float",
        ]
        | torch.dtype
        | None
    )
    kv_cache_memory: int | None
    limit_mm_per_prompt: Mapping[str, int] | None
    load_format: Literal["auto", "safetensors", "dummy"] | None
    logits_processors: str | Sequence[str] | None
    max_adapter_rank: int | None
    max_adapters: int | None
    max_image_pixels: int | None
    max_logprobs: int | None
    max_media_bytes: int | None
    max_model_len: int | None
    max_num_batched_tokens: int | None
    max_num_seqs: int | None
    max_video_frames: int | None
    max_video_seconds: float | None
    media_fetch_timeout: float | None
    media_isolation: Literal["auto", "thread", "process"] | None
    media_process_memory: int | None
    media_timeout: float | None
    mm_processor_kwargs: Mapping[str, Any] | None
    native_kernels: bool | None
    num_gpu_blocks_override: int | None
    num_intake_threads: int | None
    num_threads: int | None
    numa_node: int | None
    pixels: Literal["square", "as-stored"] | None
    plugin_files: str | Sequence[str | Path] | None
    plugins: str | Sequence[str | Path] | None
    prefix_cache_memory: int | None
    quantization: str | None
    quantization_group_size: int | None
    quiet: bool | None
    reasoning_parser: str | None
    revision: str | None
    seed: int | None
    speculative: Literal["ngram", "mtp"] | None
    tensor_parallel_size: int | None
    tokenizer: str | None
    tool_call_parser: str | None
    trust_remote_code: bool | None
    use: str | Sequence[str] | Mapping[str, str] | None
    use_warmup: bool | None
    video_tokens: int | Literal["auto", "full"] | None
    weight_cache: str | bool | None
    weight_cache_size: int | None


class SamplingOptions(TypedDict, total=False):
    """Options of SamplingParams."""

    bad_words: str | Sequence[str] | None
    bad_words_token_ids: int | Sequence[int] | None
    do_sample: bool | None
    early_stop: EarlyStopParams | Mapping[str, Any] | bool | None
    frequency_penalty: float | None
    guided_decoding: GuidedDecodingParams | Mapping[str, Any] | None
    ignore_eos: bool | None
    include_stop_str_in_output: bool | None
    logit_bias: Mapping[int, float] | None
    logits_processors: str | Sequence[str] | None
    logits_processors_args: Mapping[str, Any] | None
    logprobs: int | None
    max_length: int | None
    max_tokens: int | None
    min_p: float | None
    min_tokens: int | None
    n: int | None
    no_repeat_ngram: NoRepeatNGramParams | Mapping[str, Any] | bool | None
    no_repeat_ngram_size: int | None
    output_kind: Literal["cumulative", "delta", "final_only"] | None
    presence_penalty: float | None
    prompt_logprobs: int | None
    reasoning_max_tokens: int | None
    repetition_penalty: float | None
    response_format: Mapping[str, Any] | type[BaseModel] | None
    seed: int | None
    skip_special_tokens: bool | None
    stop: str | Sequence[str] | None
    stop_token_ids: int | Sequence[int] | None
    stop_token_sequences: int | Sequence[int] | Sequence[Sequence[int]] | None
    stop_words_ids: int | Sequence[int] | Sequence[Sequence[int]] | None
    structured_outputs: GuidedDecodingParams | Mapping[str, Any] | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
