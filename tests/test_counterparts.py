"""Options of other engines get an answer that is true: it names options that exist. What asks for
nothing is accepted."""

import re

import pytest

from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.values.params import GuidedDecodingParams, SamplingParams
from mmdeploy_llm.values.params.foreign import advice, foreign_options
from mmdeploy_llm.values.text.spelling import meant

CLASSES = {
    "EngineConfig": EngineConfig,
    "GuidedDecodingParams": GuidedDecodingParams,
    "SamplingParams": SamplingParams,
}
REQUIRED = {"EngineConfig": {"model": "m"}, "GuidedDecodingParams": {"regex": "a"}}
OWN_NAMES = {name for own in CLASSES.values() for name in own.model_fields}
NOT_OPTIONS = {"load_adapter", "generation_config", "chat_template_kwargs", "multimodal_data"}
NOT_OPTIONS |= {"enable_thinking", "early_stopping", "prompt_token_ids", "sampling_params"}
UNDERSCORED = re.compile(r"\b[a-z]+(?:_[a-z]+)+\b")
# Options of FastDeploy's EngineArgs, versions 2.2 to 2.5.
FASTDEPLOY = """
model served_model_name revision model_config_name tokenizer tokenizer_base_url max_model_len task
runner convert override_pooler_config model_impl load_choices quantization dynamic_load_weight
load_strategy rsync_config lm_head_fp32 seed limit_mm_per_prompt mm_processor_kwargs
max_encoder_cache max_processor_cache enable_mm disable_chunked_mm_input reasoning_parser
chat_template tool_call_parser tool_parser_plugin max_num_seqs max_num_batched_tokens block_size
gpu_memory_utilization num_gpu_blocks_override kv_cache_ratio prealloc_dec_block_slot_num_threshold
static_decode_blocks swap_space enable_prefix_caching enable_output_caching kvcache_storage_backend
write_policy enable_chunked_prefill max_num_partial_prefills max_long_partial_prefills
long_prefill_token_threshold use_warmup tensor_parallel_size data_parallel_size
local_data_parallel_id enable_expert_parallel enable_eplb eplb_config disable_custom_all_reduce
use_internode_ll_two_stage disable_sequence_parallel_moe ips enable_flashinfer_allreduce_fusion
enable_chunked_moe chunked_moe_size shutdown_comm_group_if_worker_idle splitwise_role
cache_transfer_protocol pd_comm_port rdma_comm_ports router engine_worker_queue_port
cache_queue_port port metrics_port skip_port_check scheduler_name max_size ttl host db password
topic min_load_score load_shards_num sync_period expire_period release_load_expire_period
reader_parallel writer_parallel reader_batch_size writer_batch_size enable_overlap_schedule
enable_logprob max_logprobs logprobs_mode logits_processors guided_decoding_backend
guided_decoding_disable_any_whitespace enable_early_stop early_stop_config speculative_config
graph_optimization_config plas_attention_config enable_keep_sampling_mask routing_replay_config
enable_entropy use_cudagraph
"""
# Names elsewhere that are none of ours, not even misspelled. Some look alike.
OF_OTHERS = """
aggregate_engine_logging all2all_backend base_gpu_id calculate_kv_scales collect_detailed_traces
disable_cascade_attn dist_init_addr enable_dbo enable_elastic_ep enable_multimodal
enable_torch_compile expert_parallel_size fully_sharded_loras ignore_patterns
kv_sharing_fast_prefill lora_dtype mamba_block_size mamba_cache_dtype master_port
mm_attention_backend mm_encoder_tp_mode model_loader_extra_config model_weights nnodes node_rank
nprobe num_lookahead_slots optimization_level otlp_traces_endpoint prefill_context_parallel_size
profiler_config pt_load_map_location ray_workers_use_nsight sampling_backend scheduler_cls
schedule_policy sampling_defaults stream_interval top_n_sigma ubatch_size use_v2_block_manager
watchdog_timeout weight_transfer_config worker_cls
"""
OF_OTHER_REQUESTS = """
assistant_early_exit cache_implementation constraints decoder_start_token_id dola_layers
encoder_repetition_penalty epsilon_cutoff exponential_decay_length_penalty force_words_ids
guidance_scale low_memory max_matching_ngram_size max_ngram_size mirostat no_stop_trim num_ctx
output_attentions output_logits prompt_adapter remove_invalid_values renormalize_logits
return_legacy_cache stop_criteria tfs_z token_healing trace_headers use_model_defaults watermark
"""

EVERY = [
    (owner, name, row)
    for owner in CLASSES
    for name, row in foreign_options(owner).items()
    if not row.ignored
]
IGNORED = {name: row for name, row in foreign_options("EngineConfig").items() if row.ignored}


def made(owner, **options):
    return CLASSES[owner](**REQUIRED.get(owner, {}), **options)


def test_the_error_says_what_to_write_here():
    for owner, name, row in EVERY:
        with pytest.raises(ConfigError) as refused:
            made(owner, **{name: 77})
        assert f"has no option '{name}'; {row.say}" in str(refused.value)


def test_it_names_options_that_exist():
    named = {name for *_, row in EVERY for name in UNDERSCORED.findall(row.say)}
    assert named - NOT_OPTIONS <= OWN_NAMES


def test_what_is_off_elsewhere_is_accepted_without_a_warning():
    for owner, name, row in EVERY:
        for value in (None, False, *row.off):
            if value is None or not (value is False and row.false_asks):
                assert made(owner, **{name: value}) == made(owner), name


def test_what_false_asks_for_is_refused():
    for owner, name, row in EVERY:
        if row.false_asks:
            with pytest.raises(ConfigError, match=name):
                made(owner, **{name: False})


def test_a_row_is_ignored_or_says_what_to_write():
    rows = [
        (owner, *row) for owner in (*CLASSES, "calls") for row in foreign_options(owner).items()
    ]
    for owner, name, row in rows:
        assert bool(row.say) != bool(row.ignored), name
        assert not row.ignored or owner == "EngineConfig", name
    assert not IGNORED.keys() & OWN_NAMES


def test_each_option_of_fastdeploy_has_an_effect_a_warning_or_a_reason():
    accepted = {*EngineConfig.model_fields, "enable_early_stop"}
    for name in FASTDEPLOY.split():
        assert (name in accepted) + (name in foreign_options("EngineConfig")) == 1, name


def test_options_that_are_ignored_warn_at_the_line_of_the_caller():
    given = {"port": 8188, "enable_eplb": True, "ttl": None, "splitwise_role": "mixed"}
    with pytest.warns(UserWarning, match="ignored, ") as found:
        config = EngineConfig.from_options("m", {**given, "seed": 3})
    assert config == EngineConfig(model="m", seed=3)
    assert [str(one.message) for one in found] == [
        "ignored, without a meaning offline: port",
        "ignored, as this engine decides it by itself: enable_eplb",
    ]
    assert {one.filename for one in found} == {__file__}


def test_a_server_is_nothing_of_one_request():
    with pytest.raises(ConfigError, match="SamplingParams has no option 'port'"):
        SamplingParams(port=80)


@pytest.mark.parametrize(
    ("options", "is_accepted"),
    [
        ({"best_of": 1}, True),
        ({"best_of": 4, "n": 4}, True),
        ({"best_of": 4, "n": 2}, False),
        ({"best_of": True}, False),
        ({"num_beams": 1, "length_penalty": 1.0, "early_stopping": True}, True),
        ({"length_penalty": 1.5}, False),
        ({"num_beams": True}, False),
        ({"stop_words_ids": [[1]], "num_beams": 1}, True),
    ],
    ids=str,
)
def test_what_agrees_with_the_other_options_is_accepted(options, is_accepted):
    known = {name: own for name, own in options.items() if name not in advice("SamplingParams")}
    if is_accepted:
        assert SamplingParams(**options) == SamplingParams(**known)
    else:
        with pytest.raises(ConfigError, match="has no option"):
            SamplingParams(**options)


def test_sizes_of_what_is_off_are_accepted():
    sizes = {"max_loras": 4, "max_lora_rank": 64}
    assert EngineConfig(model="m", enable_lora=False, **sizes) == EngineConfig(model="m")
    with pytest.raises(ConfigError, match="'max_loras'; use max_adapters"):
        EngineConfig(model="m", enable_lora=True, **sizes)
    few = {"max_loras": 1, "max_lora_rank": 16}
    assert EngineConfig(model="m", enable_lora=True, **few) == EngineConfig(model="m")


def test_a_wrong_value_beside_one_that_is_off_is_still_told():
    with pytest.raises(ConfigError, match=r"temperature.*greater than or equal to 0, got -1"):
        SamplingParams(best_of=None, temperature=-1)
    with pytest.raises(ConfigError, match="'frobnicate'"):
        EngineConfig(model="m", enable_lora=False, frobnicate=1)


@pytest.mark.parametrize(
    ("owner", "name", "hint"),
    [
        ("EngineConfig", "max_tokens", "it is an option of SamplingParams"),
        ("EngineConfig", "json", "it is an option of GuidedDecodingParams"),
        ("SamplingParams", "max_model_len", "it is an option of LLM"),
        ("SamplingParams", "regex", "it is an option of GuidedDecodingParams"),
    ],
)
def test_options_of_another_class_are_told(owner, name, hint):
    with pytest.raises(ConfigError, match=hint):
        made(owner, **{name: 5})


ENGINE_GUESSES = [
    *((name, None) for name in OF_OTHERS.split()),
    ("blok_size", "block_size"),
    ("gpu_mem_utilisation", "gpu_memory_utilization"),
    ("max_model_length", "max_model_len"),
    ("max_num_tokens", "max_num_batched_tokens"),
    ("max_seqs", "max_num_seqs"),
    ("MaxModelLen", "max_model_len"),
    ("tensor_parallel", "tensor_parallel_size"),
    ("cache_dtype", "kv_cache_dtype"),
    ("max-num-seqs", "max_num_seqs"),
    ("sede", "seed"),
    ("max", None),
    ("", None),
    ("_", None),
]


REQUEST_GUESSES = [
    *((name, None) for name in OF_OTHER_REQUESTS.split()),
    ("temprature", "temperature"),
    ("topp", "top_p"),
    ("structured_output", None),
    ("stopping_strings", None),
    ("top_n", None),
    ("max_token", "max_tokens"),
    ("min_k", None),
    ("repetition_penality", "repetition_penalty"),
    ("prompt_logprob", "prompt_logprobs"),
]


def test_only_a_misspelled_option_is_guessed():
    for owner, guesses in ((EngineConfig, ENGINE_GUESSES), (SamplingParams, REQUEST_GUESSES)):
        for name, expected in guesses:
            assert meant(name, owner.model_fields) == expected, name


@pytest.mark.parametrize("value", ["fp4", "fp8_e5m2", "uint4", 4])
def test_an_unknown_dtype_of_the_cache_lists_those_that_are_known(value):
    with pytest.raises(ConfigError) as refused:
        EngineConfig(model="m", kv_cache_dtype=value)
    assert str(refused.value).startswith("EngineConfig.kv_cache_dtype: Input should be 'auto', ")
    assert str(refused.value).endswith("'int8', 'int4' or 'fp8', got " + repr(value))
    assert "function-before" not in str(refused.value)


def test_a_schema_given_as_the_constraint_is_told_where_it_belongs():
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    with pytest.raises(ConfigError, match=r"no option 'type'; it belongs to a JSON schema"):
        SamplingParams(guided_decoding=schema)
    with pytest.raises(ConfigError, match=r"no option 'schema'; use json"):
        SamplingParams(guided_decoding={"schema": schema})
    assert SamplingParams(guided_decoding={"json": schema}).guided_decoding.json_schema == schema
