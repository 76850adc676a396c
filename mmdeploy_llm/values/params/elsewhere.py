"""Options that a script of another engine gives and that ask for nothing here: values that mean
"off" are left out, options of servers with a warning."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from .counterparts import COUNTERPARTS

PACKAGE = __name__.partition(".")[0]
_SERVING = """
cache_queue_port cache_transfer_protocol db engine_worker_queue_port expire_period host ips
load_choices load_shards_num load_strategy local_data_parallel_id max_size metrics_port
min_load_score password pd_comm_port port rdma_comm_ports reader_batch_size reader_parallel
release_load_expire_period router scheduler_db scheduler_expire_period scheduler_host
scheduler_load_shards_num scheduler_max_size scheduler_min_load_score scheduler_name
scheduler_password scheduler_port scheduler_reader_batch_size scheduler_reader_parallel
scheduler_release_load_expire_period scheduler_sync_period scheduler_topic scheduler_ttl
scheduler_writer_batch_size scheduler_writer_parallel served_model_name
shutdown_comm_group_if_worker_idle skip_port_check splitwise_role sync_period tokenizer_base_url
topic ttl writer_batch_size writer_parallel
"""
_TUNING = """
async_scheduling chunked_moe_size disable_custom_all_reduce disable_log_stats
disable_sequence_parallel_moe enable_chunked_moe enable_eplb enable_flashinfer_allreduce_fusion
enable_mm enable_output_caching enable_overlap_schedule eplb_config graph_optimization_config
kv_cache_ratio log_level long_prefill_token_threshold max_long_partial_prefills
max_num_partial_prefills max_seq_len_to_capture moe_backend prealloc_dec_block_slot_num_threshold
safetensors_load_strategy static_decode_blocks swap_space use_internode_ll_two_stage
use_tqdm_on_load write_policy
"""
_FALSE = """
detokenize do_sample early_stopping enable_chunked_mm_input enable_prefix_cache enable_thinking
guided_decoding_disable_any_whitespace prefill_cache spaces_between_special_tokens use_cache
use_cudagraph use_fast
"""
# Options of servers, their ports and processes, and of how another engine computes the same.
SERVING_OPTIONS, TUNING_OPTIONS = frozenset(_SERVING.split()), frozenset(_TUNING.split())
# Where False asks for something, as it is not what happens without the option.
FALSE_ASKS = frozenset(_FALSE.split())
# Other values that are what happens here anyway, by the name of the option.
OFF: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        # of the engine
        "cache_transfer_protocol": ("ipc", "ipc,rdma"),
        "config_format": ("auto", "hf"),
        "convert": ("auto", "none", "embed"),
        "cpu_offload_gb": (0, 0.0),
        "decode_context_parallel_size": (1,),
        "disable_chunked_mm_input": (True,),
        "distributed_executor_backend": ("mp", "uni"),
        "enable_chunked_mm_input": (True,),
        "enable_mm": (True,),
        "enable_mm_embeds": (True,),
        "enable_lora": (True,),
        "ep_size": (1,),
        "generation_config": ("auto",),
        "load_choices": ("default", "default_v1"),
        "load_strategy": ("normal",),
        "local_data_parallel_id": (0,),
        "logprobs_mode": ("raw_logprobs",),
        "low_cpu_mem_usage": (True,),
        "max_cpu_loras": (0, 1),
        "max_encoder_cache": (-1,),
        "max_lora_rank": (0, 16),
        "max_loras": (0, 1),
        "max_processor_cache": (-1,),
        "model_config_name": ("config.json",),
        "model_impl": ("auto",),
        "pipeline_parallel_size": (1,),
        "pp_size": (1,),
        "runner": ("auto", "generate", "pooling"),
        "scheduler_name": ("local",),
        "scheduling_policy": ("fcfs",),
        "splitwise_role": ("mixed",),
        "swap_space": (0, 0.0),
        "task": ("auto", "generate", "embed", "embedding", "score"),
        "tokenizer_mode": ("auto", "fast", "hf"),
        "use_cudagraph": (True,),
        "use_fast": (True,),
        # of one request
        "best_of": (1,),
        "detokenize": (True,),
        "diversity_penalty": (0, 0.0),
        "early_stopping": (True,),
        "length_penalty": (1, 1.0),
        "min_length": (0,),
        "min_new_tokens": (0,),
        "num_beam_groups": (1,),
        "num_beams": (1,),
        "num_return_sequences": (1,),
        "return_dict_in_generate": (True,),
        "spaces_between_special_tokens": (True,),
        "typical_p": (1, 1.0),
        "use_cache": (True,),
    }
)
OF_LORA = ("max_cpu_loras", "max_lora_rank", "max_loras")  # nothing where enable_lora is off
# Options of these two meanings are ignored: name of the meaning -> names of the options.
IGNORED: Mapping[str, Collection[str]] = MappingProxyType(
    {
        "without a meaning offline": SERVING_OPTIONS,
        "as this engine decides it by itself": TUNING_OPTIONS,
    }
)


def that_ask(kind: str, known: Collection[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that ask for something. kind: the class of options, whose names are
    `known`. Warns of options of an engine that are ignored."""
    foreign = {name: value for name, value in given.items() if name not in known}
    rows = COUNTERPARTS.get(kind, {})
    ignored = {
        name: why
        for why, names in IGNORED.items()
        for name in sorted(set(foreign) & set(names))
        if kind == "EngineConfig"
    }
    named = [name for name in ignored if not _is_off(name, foreign[name], given)]
    for why in dict.fromkeys(ignored[name] for name in named):
        _warn(f"ignored, {why}: {', '.join(name for name in named if ignored[name] == why)}")
    off = {name for name, value in foreign.items() if name in rows and _is_off(name, value, given)}
    return {name: value for name, value in given.items() if name not in {*off, *ignored}}


def _is_off(name: str, value: Any, given: Mapping[str, Any]) -> bool:
    """Whether the option asks for nothing but what happens here without it."""
    if name == "do_sample" and isinstance(value, bool):
        return _agrees(value, given)
    if name in OF_LORA and not given.get("enable_lora", True):
        return True
    if name == "best_of" and type(value) is int:
        return value == (given.get("n") or 1)
    return is_off(value, OFF.get(name, ()), false_asks=name in FALSE_ASKS)


def is_off(value: Any, others: Collection[Any] = (), *, false_asks: bool = False) -> bool:
    """Whether a value asks for nothing: None, something empty, False unless it asks, or one of
    `others`, of the same type."""
    if value is None or (isinstance(value, (str, Mapping, list, tuple)) and not value):
        return True
    if value is False:
        return not false_asks
    return any(type(own) is type(value) and own == value for own in others)


def _agrees(samples: Any, given: Mapping[str, Any]) -> bool:
    """Whether a do_sample says what the other options do: temperature, top_k or top_p decide."""
    temperature, top_k, top_p = (given.get(name) for name in ("temperature", "top_k", "top_p"))
    is_greedy = temperature == 0 or top_k == 1 or top_p == 0
    is_drawn = not is_greedy and (temperature, top_k, top_p) != (None, None, None)
    return (samples is False and is_greedy) or (samples is True and is_drawn)


def _warn(text: str) -> None:
    """Warns at the line outside of this package that has called it."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, UserWarning, stacklevel=level)
