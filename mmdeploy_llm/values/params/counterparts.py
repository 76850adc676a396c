"""Names of options in other engines (FastDeploy, vLLM, SGLang, DashInfer, OpenVINO GenAI) and in
transformers that this project lacks or spells otherwise, with what to write here instead: for error
messages and for the guide."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_ADAPTERS = 'use adapters={"name": folder}, or llm.load_adapter(name, folder)'
_ADAPTER = (
    'name it with the prompt: {"prompt": ..., "adapter": "name"}, or generate(adapter="name")'
)
_NO_BEAMS = "beam search is not supported; draw n samples and keep the one you like best"
_OF_BEAMS = "it is a rule of beam search, which is not supported; leave it out"
_NO_PIPELINE = "layers are not spread over devices; tensor_parallel_size shards each layer"
_ENCODER_CACHE = "use encoder_cache_memory, in bytes; one item costs nothing twice while it is kept"
_SPECULATION = (
    'use speculative="ngram", which looks tokens up, or "mtp", a checkpoint\'s own draft layer; '
    "there are no draft models"
)
_ONE_STEP_CHUNKS = (
    "leave it out: an image or video is encoded whole, and its tokens may be split over chunks"
)
_NO_DRAW_FROM_ALL = "use dtype, native_kernels or attention_backend to choose how it computes"
_LOGPROBS = "log-probabilities are those of the model, before temperature and penalties"
_EACH_CALL = (
    "leave it out: the call decides: generate, embed, score, rerank or classify, as far as the "
    "model can"
)
_POOLING = (
    "the model's folder says how its vectors are pooled; embed(pooling=..., normalize=..., "
    "dimensions=...) says otherwise"
)
_HOST_MEMORY = "the KV cache stays on the device; kv_cache_memory sets its bytes"
_EXPERTS = "experts are sharded with tensor_parallel_size"
_CONFIG = "edit a copy of the folder's config.json"
_GUIDED = "use guided_decoding=GuidedDecodingParams({}=...)"

# Options of LLM and EngineArgs -> what to write here.
OF_THE_ENGINE: Mapping[str, str] = MappingProxyType(
    {
        # vLLM and FastDeploy
        "allowed_local_media_path": "use allowed_media_root",
        "code_revision": "code that comes with a checkpoint is never run; leave it out",
        "compilation_config": "use enforce_eager=True to run without CUDA graphs",
        "config_format": "the checkpoint must have transformers' config.json; leave it out",
        "convert": _EACH_CALL,
        "cpu_offload_gb": "weights are not moved to the host; use a smaller dtype or quantization",
        "data_parallel_size_local": "use data_parallel_size, the engines of this machine; Ray "
        "runs engines on several",
        "decode_context_parallel_size": "one sequence is computed where its shard of the model is; "
        "tensor_parallel_size shards each layer",
        "disable_chunked_mm_input": _ONE_STEP_CHUNKS,
        "disable_mm_preprocessor_cache": "use encoder_cache_memory=1 to keep nothing",
        "disable_sliding_window": "a layer with a window always keeps to it; max_model_len bounds "
        "a request",
        "distributed_executor_backend": "use tensor_parallel_size; processes start by themselves",
        "download_dir": "set the environment variable HF_HOME",
        "enable_chunked_mm_input": _ONE_STEP_CHUNKS,
        "enable_expert_parallel": _EXPERTS,
        "enable_lora": _ADAPTERS,
        "enable_mm_embeds": "leave it out: multimodal_data takes embeddings of images and videos",
        "enable_prompt_embeds": "embeddings are not accepted as prompts; give text or token ids",
        "enable_sleep_mode": "use llm.close() and make a new LLM to give the memory back",
        "generation_config": "values of generation_config.json are the defaults of SamplingParams",
        "guided_decoding_disable_any_whitespace": "use GuidedDecodingParams("
        "disable_any_whitespace=...), which is True by default",
        "hf_config_path": _CONFIG,
        "hf_overrides": _CONFIG,
        "hf_token": "set the environment variable HF_TOKEN",
        "kv_cache_memory_bytes": "use kv_cache_memory",
        "kv_offloading_size": _HOST_MEMORY,
        "kv_transfer_config": "prompts and answers are computed by the same engine; leave it out",
        "language_model_only": 'use limit_mm_per_prompt={"image": 0, "video": 0}',
        "lora_modules": _ADAPTERS,
        "max_cpu_loras": "leave it out: adapters that are not among the max_adapters in memory are "
        "read again from their folders",
        "max_encoder_cache": _ENCODER_CACHE,
        "max_lora_rank": "use max_adapter_rank",
        "max_loras": "use max_adapters",
        "max_processor_cache": _ENCODER_CACHE,
        "media_io_kwargs": "use mm_processor_kwargs",
        "mm_processor_cache_gb": _ENCODER_CACHE,
        "override_generation_config": "set these values in SamplingParams",
        "override_pooler_config": _POOLING,
        "pipeline_parallel_size": _NO_PIPELINE,
        "pooler_config": _POOLING,
        "reasoning_parser_plugin": "install the parser as a plugin package; "
        "`mmdeploy-llm plugins new` writes one",
        "rope_scaling": _CONFIG,
        "rope_theta": _CONFIG,
        "scheduling_policy": 'leave it out: a prompt with "priority" is served by it',
        "skip_tokenizer_init": "a tokenizer is always loaded; token ids are prompts too",
        "speculative_config": _SPECULATION,
        "structured_outputs_config": "use guided_decoding_backend and GuidedDecodingParams",
        "tool_parser_plugin": "install the parser as a plugin package; "
        "`mmdeploy-llm plugins new` writes one",
        "tokenizer_mode": "the fast tokenizer is always used",
        "tokenizer_revision": "give a local folder as tokenizer",
        "video_pruning_rate": "use mm_processor_kwargs to bound frames and pixels",
        # FastDeploy
        "dynamic_load_weight": "weights are loaded once; make a new LLM for other weights",
        "enable_entropy": "use SamplingParams(logprobs=...) and compute it of them",
        "enable_keep_sampling_mask": "which tokens could be drawn is not kept; SamplingParams("
        "logprobs=...) has the most probable ones",
        "kvcache_storage_backend": _HOST_MEMORY,
        "lm_head_fp32": 'use dtype="float32"',
        "logprobs_mode": _LOGPROBS,
        "model_config_name": "the file is config.json",
        "model_impl": "the architecture in config.json decides which plugin serves the model",
        "plas_attention_config": _NO_DRAW_FROM_ALL,
        "routing_replay_config": "which experts a token has used is not kept; leave it out",
        "rsync_config": "weights are loaded once; make a new LLM for other weights",
        "runner": _EACH_CALL,
        "task": _EACH_CALL,
        "use_cudagraph": "CUDA graphs are used unless enforce_eager=True",
        # DashInfer: the runtime config
        "compute_unit": 'use device, such as "cuda:0", and num_threads',
        "enable_prefix_cache": "use enable_prefix_caching",
        "engine_max_batch": "use max_num_seqs",
        "engine_max_length": "use max_model_len",
        "kv_cache_mode": 'use kv_cache_dtype: "auto" is AsCacheDefault, "int8" AsCacheQuantI8, '
        '"int4" AsCacheQuantU4',
        "kv_cache_span_size": "use block_size",
        "lora_max_num": "use max_adapters",
        "lora_max_rank": "use max_adapter_rank",
        "max_batch": "use max_num_seqs",
        "max_length": "use max_model_len",
        "prefill_cache": "use enable_prefix_caching",
        "prefix_cache_ttl": "prefixes are kept until prefix_cache_memory is needed for others",
        "user_set_data_type": "use dtype",
        # SGLang
        "chunked_prefill_size": "use max_num_batched_tokens",
        "context_length": "use max_model_len",
        "cuda_graph_max_bs": "CUDA graphs are used unless enforce_eager=True",
        "disable_cuda_graph": "use enforce_eager",
        "disable_radix_cache": "use enable_prefix_caching=False",
        "dp_size": "use data_parallel_size",
        "ep_size": _EXPERTS,
        "grammar_backend": "use guided_decoding_backend",
        "limit_mm_data_per_request": "use limit_mm_per_prompt",
        "lora_paths": _ADAPTERS,
        "max_prefill_tokens": "use max_num_batched_tokens",
        "max_running_requests": "use max_num_seqs",
        "max_total_tokens": "use kv_cache_memory, in bytes, or num_gpu_blocks_override",
        "mem_fraction_static": "use gpu_memory_utilization",
        "mm_process_config": "use mm_processor_kwargs",
        "model_path": "use model",
        "page_size": "use block_size",
        "pp_size": _NO_PIPELINE,
        "random_seed": "use seed",
        "speculative_algorithm": _SPECULATION,
        "tokenizer_path": "use tokenizer",
        "tp_size": "use tensor_parallel_size",
        # OpenVINO GenAI
        "ATTENTION_BACKEND": "use attention_backend",
        "CACHE_DIR": "leave it out: kernels are kept after their first build",
        "draft_model": _SPECULATION,
        "models_path": "use model",
        "prompt_lookup": 'use speculative="ngram"',
        "scheduler_config": "use max_num_seqs, max_num_batched_tokens, kv_cache_memory and "
        "enable_prefix_caching",
        # transformers
        "attn_implementation": "use attention_backend",
        "device_map": "use device and tensor_parallel_size",
        "load_in_4bit": 'use quantization="int4"',
        "load_in_8bit": 'use quantization="int8"',
        "low_cpu_mem_usage": "leave it out: weights are read one by one",
        "max_memory": "use kv_cache_memory, in bytes",
        "pretrained_model_name_or_path": "use model",
        "quantization_config": "use quantization",
        "torch_dtype": "use dtype",
        "use_fast": "the fast tokenizer is always used",
    }
)

# Options of one request -> what to write here.
OF_A_REQUEST: Mapping[str, str] = MappingProxyType(
    {
        "adapters": _ADAPTER,
        "allowed_token_ids": _GUIDED.format("choice") + " or logit_bias",
        "apply_chat_template": "use chat for messages, and generate for prompts as they are",
        "assistant_model": _SPECULATION,
        "bad_words_ids": "use bad_words, or bad_words_token_ids for single tokens",
        "best_of": _NO_BEAMS,
        "custom_params": "use logits_processors_args for arguments of logits processors",
        "detokenize": "text is always made; it costs little",
        "diversity_penalty": _OF_BEAMS,
        "do_sample": "leave it out: temperature=0 takes the most probable token, a temperature "
        "above 0 samples",
        "early_stopping": "leave it out: there is no beam search; DashInfer's early_stopping="
        "False is ignore_eos=True",
        "ebnf": _GUIDED.format("grammar"),
        "echo": "the output's prompt_token_ids and prompt hold the prompt",
        "enable_thinking": 'use chat(chat_template_kwargs={"enable_thinking": ...})',
        "eos_token_id": "use stop_token_ids",
        "extra_args": "use logits_processors_args for arguments of logits processors",
        "forced_eos_token_id": "a text that reaches max_tokens ends there",
        "json_schema": _GUIDED.format("json"),
        "length_penalty": _OF_BEAMS,
        "lora_name": _ADAPTER,
        "max_completion_tokens": "use max_tokens",
        "max_length": "use max_tokens, which does not count the prompt",
        "max_new_tokens": "use max_tokens",
        "max_output_tokens": "use max_tokens",
        "max_time": "use submit(prompt, timeout=seconds) of AsyncLLM",
        "min_length": "use min_tokens, which does not count the prompt",
        "min_new_tokens": "use min_tokens",
        "mm_info": 'give the media with the prompt: {"prompt": ..., "multimodal_data": {...}}',
        "num_assistant_tokens": "LLM(speculative=...) decides how many tokens it tries",
        "num_beam_groups": _OF_BEAMS,
        "num_beams": _NO_BEAMS,
        "num_predict": "use max_tokens",
        "num_return_sequences": "use n",
        "pad_token_id": "leave it out: nothing is padded",
        "penalty_alpha": "contrastive search is not supported; use repetition_penalty",
        "prompt_lookup_num_tokens": 'use LLM(speculative="ngram")',
        "repeat_penalty": "use repetition_penalty",
        "return_dict_in_generate": "outputs are always objects; leave it out",
        "rng_seed": "use seed",
        "sampling_seed": "use seed",
        "spaces_between_special_tokens": "leave it out: the tokenizer decides",
        "stop_regex": "use stop, which takes texts",
        "stop_sequences": "use stop",
        "stop_strings": "use stop",
        "streamer": "use llm.stream(prompts, sampling_params), which yields deltas",
        "structured_output_config": "use guided_decoding=GuidedDecodingParams(...)",
        "suppress_repetition_in_generation": "use presence_penalty or frequency_penalty, which "
        "count generated tokens only",
        "suppress_tokens": "use bad_words_token_ids",
        "temp_scaled_logprobs": _LOGPROBS,
        "thinking_budget": "use reasoning_max_tokens",
        "top_logprobs": "use logprobs",
        "top_p_normalized_logprobs": _LOGPROBS,
        "truncate_prompt_tokens": "cut the prompt before the call; a prompt that is too long is "
        "an error of that prompt alone",
        "typical_p": "use top_p or min_p",
        "use_beam_search": _NO_BEAMS,
        "use_cache": "leave it out: keys and values are always kept",
    }
)

_IS_A_SCHEMA = (
    "it belongs to a JSON schema: write guided_decoding=GuidedDecodingParams(json=schema)"
)
_NO_OTHER_BACKEND = "leave it out: llguidance compiles every constraint"

# Fields of GuidedDecodingParams and StructuredOutputsParams, and keys of a schema that is given in
# their place -> what to write here.
OF_A_CONSTRAINT: Mapping[str, str] = MappingProxyType(
    {
        "$defs": _IS_A_SCHEMA,
        "backend": _NO_OTHER_BACKEND,
        "disable_additional_properties": 'write "additionalProperties": false into the schema',
        "disable_fallback": _NO_OTHER_BACKEND,
        "json_schema": "use json",
        "properties": _IS_A_SCHEMA,
        "required": _IS_A_SCHEMA,
        "schema": "use json",
        "type": _IS_A_SCHEMA,
        "whitespace_pattern": "use disable_any_whitespace",
    }
)

COUNTERPARTS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "EngineConfig": OF_THE_ENGINE,
        "GuidedDecodingParams": OF_A_CONSTRAINT,
        "SamplingParams": OF_A_REQUEST,
    }
)
