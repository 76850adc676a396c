"""Names of options in FastDeploy, vLLM and DashInfer that this project lacks or spells otherwise,
with what to write here instead: for error messages and for the guide."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_NO_LORA = (
    "LoRA adapters are not supported; merge the adapter into the weights (merge_and_unload of "
    "peft) and load the result"
)
_NO_BEAMS = "beam search is not supported; draw n samples and keep the one you like best"
_NO_PIPELINE = "layers are not spread over devices; tensor_parallel_size shards each layer"
_ENCODER_CACHE = "use encoder_cache_memory, in bytes; one item costs nothing twice while it is kept"
_SPECULATION = 'use speculative="ngram", which looks tokens up; there are no draft models'
_ONE_STEP_CHUNKS = (
    "leave it out: an image or video is encoded whole, and its tokens may be split over chunks"
)
_NO_DRAW_FROM_ALL = "use dtype, native_kernels or attention_backend to choose how it computes"
_LOGPROBS = "log-probabilities are those of the model, before temperature and penalties"

# Options of LLM and EngineArgs -> what to write here.
OF_THE_ENGINE: Mapping[str, str] = MappingProxyType(
    {
        # vLLM and FastDeploy
        "allowed_local_media_path": "use allowed_media_root",
        "cpu_offload_gb": "weights are not moved to the host; use a smaller dtype or quantization",
        "disable_chunked_mm_input": _ONE_STEP_CHUNKS,
        "disable_mm_preprocessor_cache": "use encoder_cache_memory=1 to keep nothing",
        "distributed_executor_backend": "use tensor_parallel_size; processes start by themselves",
        "download_dir": "set the environment variable HF_HOME",
        "enable_chunked_mm_input": _ONE_STEP_CHUNKS,
        "enable_expert_parallel": "experts are sharded with tensor_parallel_size",
        "enable_lora": _NO_LORA,
        "enable_mm_embeds": "leave it out: multimodal_data takes embeddings of images and videos",
        "enable_prompt_embeds": "embeddings are not accepted as prompts; give text or token ids",
        "enable_sleep_mode": "use llm.close() and make a new LLM to give the memory back",
        "generation_config": "values of generation_config.json are the defaults of SamplingParams",
        "guided_decoding_disable_any_whitespace": "use GuidedDecodingParams("
        "disable_any_whitespace=...), which is True by default",
        "hf_overrides": "edit a copy of the folder's config.json",
        "kv_cache_memory_bytes": "use kv_cache_memory",
        "language_model_only": 'use limit_mm_per_prompt={"image": 0, "video": 0}',
        "lora_modules": _NO_LORA,
        "max_encoder_cache": _ENCODER_CACHE,
        "max_lora_rank": _NO_LORA,
        "max_loras": _NO_LORA,
        "max_processor_cache": _ENCODER_CACHE,
        "media_io_kwargs": "use mm_processor_kwargs",
        "mm_processor_cache_gb": _ENCODER_CACHE,
        "override_generation_config": "set these values in SamplingParams",
        "pipeline_parallel_size": _NO_PIPELINE,
        "speculative_config": _SPECULATION,
        "structured_outputs_config": "use guided_decoding_backend and GuidedDecodingParams",
        "tool_parser_plugin": "install the parser as a plugin package; "
        "`mmdeploy-llm plugins new` writes one",
        "tokenizer_mode": "the fast tokenizer is always used",
        "tokenizer_revision": "give a local folder as tokenizer",
        "video_pruning_rate": "use mm_processor_kwargs to bound frames and pixels",
        # FastDeploy
        "dynamic_load_weight": "weights are loaded once; make a new LLM for other weights",
        "lm_head_fp32": 'use dtype="float32"',
        "logprobs_mode": _LOGPROBS,
        "model_impl": "the architecture in config.json decides which plugin serves the model",
        "plas_attention_config": _NO_DRAW_FROM_ALL,
        "task": "only generation is supported; leave it out",
        "runner": "only generation is supported; leave it out",
        # DashInfer: the runtime config
        "compute_unit": 'use device, such as "cuda:0", and num_threads',
        "enable_prefix_cache": "use enable_prefix_caching",
        "engine_max_batch": "use max_num_seqs",
        "engine_max_length": "use max_model_len",
        "kv_cache_mode": 'use kv_cache_dtype: "auto" is AsCacheDefault, "int8" AsCacheQuantI8, '
        '"int4" AsCacheQuantU4',
        "kv_cache_span_size": "use block_size",
        "max_batch": "use max_num_seqs",
        "max_length": "use max_model_len",
        "prefill_cache": "use enable_prefix_caching",
        "prefix_cache_ttl": "prefixes are kept until prefix_cache_memory is needed for others",
        "user_set_data_type": "use dtype",
        # transformers
        "torch_dtype": "use dtype",
        "device_map": "use device and tensor_parallel_size",
        "attn_implementation": "use attention_backend",
    }
)

# Options of one request -> what to write here.
OF_A_REQUEST: Mapping[str, str] = MappingProxyType(
    {
        "allowed_token_ids": 'use guided_decoding=GuidedDecodingParams(choice=["yes", "no"]) or '
        "logit_bias",
        "best_of": _NO_BEAMS,
        "detokenize": "text is always made; it costs little",
        "do_sample": "use temperature=0 for greedy decoding",
        "early_stopping": "use ignore_eos=True to go on after the end of sequence",
        "enable_thinking": 'use chat(chat_template_kwargs={"enable_thinking": ...})',
        "eos_token_id": "use stop_token_ids",
        "extra_args": "use logits_processors_args for arguments of logits processors",
        "length_penalty": _NO_BEAMS,
        "lora_name": _NO_LORA,
        "max_completion_tokens": "use max_tokens",
        "max_length": "use max_tokens, which does not count the prompt",
        "max_new_tokens": "use max_tokens",
        "min_length": "use min_tokens, which does not count the prompt",
        "min_new_tokens": "use min_tokens",
        "mm_info": 'give the media with the prompt: {"prompt": ..., "multimodal_data": {...}}',
        "num_beams": _NO_BEAMS,
        "num_return_sequences": "use n",
        "spaces_between_special_tokens": "leave it out: the tokenizer decides",
        "structured_outputs": "use guided_decoding=GuidedDecodingParams(...)",
        "suppress_repetition_in_generation": "use presence_penalty or frequency_penalty, which "
        "count generated tokens only",
        "temp_scaled_logprobs": _LOGPROBS,
        "thinking_budget": "use reasoning_max_tokens",
        "top_logprobs": "use logprobs",
        "top_p_normalized_logprobs": _LOGPROBS,
        "truncate_prompt_tokens": "cut the prompt before the call; a prompt that is too long is "
        "an error of that prompt alone",
        "use_beam_search": _NO_BEAMS,
    }
)

COUNTERPARTS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {"EngineConfig": OF_THE_ENGINE, "SamplingParams": OF_A_REQUEST}
)

# Options of FastDeploy about serving, ports and processes: accepted with a warning, since they have
# no meaning offline.
SERVING_OPTIONS = frozenset(
    {
        "cache_queue_port",
        "cache_transfer_protocol",
        "disable_custom_all_reduce",
        "enable_mm",
        "engine_worker_queue_port",
        "graph_optimization_config",
        "ips",
        "kv_cache_ratio",
        "load_choices",
        "load_strategy",
        "local_data_parallel_id",
        "long_prefill_token_threshold",
        "max_long_partial_prefills",
        "max_num_partial_prefills",
        "metrics_port",
        "pd_comm_port",
        "port",
        "prealloc_dec_block_slot_num_threshold",
        "rdma_comm_ports",
        "router",
        "scheduler_host",
        "scheduler_name",
        "scheduler_port",
        "served_model_name",
        "splitwise_role",
        "static_decode_blocks",
        "swap_space",
    }
)


def without_serving(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the options of `LLM(model, **options)` but for those that only a server has, of which
    it warns."""
    serving = sorted(set(options) & SERVING_OPTIONS)
    if serving:
        warnings.warn(
            f"ignored, without a meaning offline: {', '.join(serving)}", UserWarning, stacklevel=4
        )
    return {name: value for name, value in options.items() if name not in serving}
