"""Builds the rooms around a runner (intake, scheduler, delivery) and the engine that steps them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mmdeploy_llm.engine.delivery.delivery import Delivery
from mmdeploy_llm.engine.engine import Engine
from mmdeploy_llm.engine.intake.intake import Intake
from mmdeploy_llm.engine.intake.rules import MediaRules, ParamRules, TextRules
from mmdeploy_llm.engine.intake.tokenizer import check_eos
from mmdeploy_llm.engine.runner.executor import ExecutorInfo
from mmdeploy_llm.engine.schedule.scheduler import Scheduler, SchedulerConfig
from mmdeploy_llm.engine.schedule.windows import blocks_of_window
from mmdeploy_llm.hooks import (
    EngineInfo,
    Model,
    PluginManager,
    ReasoningParser,
    ReasoningParserSpec,
    ToolParser,
    ToolParserSpec,
)
from mmdeploy_llm.kernels import TORCH
from mmdeploy_llm.layers.adapters.attached.table import AdapterTable
from mmdeploy_llm.layers.pooling.abilities import GENERATES, Abilities
from mmdeploy_llm.media.loading.added_tokens import with_placeholders
from mmdeploy_llm.media.loading.kinds import ModelMedia
from mmdeploy_llm.media.loading.reader import media_limits
from mmdeploy_llm.values.closing import closed_on_error
from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.values.options.runtime_config import RuntimeConfig
from mmdeploy_llm.values.plan import NUM_FIXED
from mmdeploy_llm.weights.folder import PROMPT_FILES

from .cards import CudaSetup
from .computer import Computer
from .machine import Machine
from .media import box_rule_of, build_media, expander_of
from .model_files import ModelFiles, read_model_files
from .options import final_options

CPU_IDLE_SHARE = 8  # at most 1/8 of the blocks keep content that no running request uses


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """A running engine, the intake that feeds it, and the objects that callers may inspect. model:
    None where other processes hold it. abilities: of it."""

    engine: Engine
    intake: Intake
    plugins: PluginManager
    model: Model | None
    runtime: RuntimeConfig
    adapters: AdapterTable
    abilities: Abilities


def build_rooms(
    files: ModelFiles,
    machine: Machine,
    computer: Computer,
    media: ModelMedia,
    adapters: AdapterTable,
) -> Assembly:
    """Builds intake, scheduler and delivery, and starts the engine that steps them."""
    executor, plugins = computer.info, files.plugins
    if executor.abilities.can_generate:
        check_eos(files.checkpoint, files.tokenizer)
    scheduling = _scheduler_config(files, executor)
    if machine.kernels.pixels is not None:
        for processor in media.processors.values():
            processor.use_kernels(machine.kernels.pixels)
    delivery = _delivery(files)
    intake = build_intake(files, executor.runtime, media, executor.media_size, executor.abilities)
    engine = Engine(
        scheduler=Scheduler(scheduling),
        runner=computer.runner,
        delivery=delivery,
        plugins=plugins,
        info=_engine_info(files, executor),
        host=computer.host,
    )
    return Assembly(
        engine=engine,
        intake=intake,
        plugins=plugins,
        model=computer.model,
        runtime=executor.runtime,
        adapters=adapters,
        abilities=executor.abilities,
    )


def _scheduler_config(files: ModelFiles, executor: ExecutorInfo) -> SchedulerConfig:
    runtime = executor.runtime
    window = max(executor.shape.windows.values(), default=None)
    return SchedulerConfig(
        max_num_seqs=runtime.max_num_seqs,
        max_num_batched_tokens=runtime.max_num_batched_tokens,
        max_model_len=runtime.max_model_len,
        num_blocks=executor.num_blocks,
        block_size=runtime.block_size,
        enable_prefix_caching=runtime.enable_prefix_caching,
        max_idle_blocks=_max_idle_blocks(executor),
        enable_chunked_prefill=runtime.enable_chunked_prefill,
        encoder_cache_tokens=runtime.encoder_cache_tokens,
        atomic_media=files.spec.atomic_media,
        num_state_rows=executor.num_state_rows,
        window=window,
        num_window_blocks=executor.num_window_blocks,
        max_idle_window_blocks=_max_idle_window_blocks(executor, window),
        speculates=runtime.speculates,
        has_draft_head=runtime.options.speculative == "mtp",
        long_after=executor.long_after,
        max_adapters=runtime.options.max_adapters,
        adapter_bytes=runtime.options.adapter_memory,
        max_idle_states=max(0, executor.num_state_rows - NUM_FIXED - 2 * runtime.max_num_seqs),
    )


def _max_idle_blocks(executor: ExecutorInfo) -> int | None:
    """Returns how many blocks may keep prefixes that no running request uses; None for all.

    On CUDA the whole KV cache is allocated anyway. On a CPU untouched memory costs nothing, and a
    long batch of different prompts would fill it all with prefixes that never come again.
    """
    runtime = executor.runtime
    if runtime.prefix_cache_memory_bytes is not None:
        each = executor.shape.bytes_per_block + executor.shape.bytes_per_window_block
        return max(1, runtime.prefix_cache_memory_bytes // max(1, each))
    if runtime.device != "cpu":
        return None
    longest = -(-runtime.max_model_len // runtime.block_size)
    return max(1, min(executor.num_blocks // CPU_IDLE_SHARE, longest))


def _max_idle_window_blocks(executor: ExecutorInfo, window: int | None) -> int | None:
    """Returns the same for layers with a window, whose pool is small: all, or what the options
    allow, but at least one window, without which no prefix can be used again."""
    if window is None or executor.runtime.prefix_cache_memory_bytes is None:
        return None
    least = blocks_of_window(window, executor.runtime.block_size)
    return max(least, _max_idle_blocks(executor) or 0)


def _delivery(files: ModelFiles) -> Delivery:
    plugins, reasoning, tools = files.plugins, files.reasoning_parser, files.tool_parser
    new_parser: Callable[[], ReasoningParser] | None = None
    new_tool_parser: Callable[[], ToolParser] | None = None
    if reasoning is not None:
        new_parser = lambda: plugins.build(reasoning)  # noqa: E731 - mypy cannot type a partial
    if tools is not None:
        new_tool_parser = lambda: plugins.build(tools)  # noqa: E731
    return Delivery(
        files.tokenizer.raw,
        new_parser,
        _full_name(plugins, reasoning),
        new_tool_parser,
        _full_name(plugins, tools),
        matches=None if files.grammars is None else files.grammars.matches,
    )


def build_intake(
    files: ModelFiles,
    runtime: RuntimeConfig,
    media: ModelMedia,
    media_size: int | None = None,
    abilities: Abilities = GENERATES,
) -> Intake:
    """Builds the intake, which needs no runner. media_size: see ExecutorInfo; None without
    one. abilities: of the model."""
    tokenizer, vocab_size = with_placeholders(files.tokenizer, media, files.text.vocab_size)
    text = TextRules(
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        eos_token_ids=files.eos_token_ids,
        chat_template=files.chat_template or media.template,
        reasoning_start_marker=files.reasoning_start_marker,
        reasoning_end_marker=files.reasoning_end_marker,
    )
    reading = MediaRules(
        media=media,
        fetch=files.plugins.fetch_media,
        limits=media_limits(runtime.options),
        guard=files.plugins.guard,
        media_size=media_size,
        box_rule=box_rule_of(files),
        expander=expander_of(files, media, runtime.options),
    )
    params = ParamRules(grammars=files.grammars, check_processors=files.logits_processors.check)
    return Intake(config=runtime, text=text, media=reading, params=params, abilities=abilities)


def _full_name(plugins: PluginManager, spec: ReasoningParserSpec | ToolParserSpec | None) -> str:
    return "" if spec is None else f"{spec.name!r} of plugin {plugins.owner(spec)!r}"


def _engine_info(files: ModelFiles, executor: ExecutorInfo) -> EngineInfo:
    runtime = executor.runtime
    return EngineInfo(
        model=runtime.options.model,
        architecture=files.checkpoint.architecture,
        device=runtime.device,
        dtype=runtime.dtype,
        num_blocks=executor.num_blocks,
        block_size=runtime.block_size,
        max_num_seqs=runtime.max_num_seqs,
        max_model_len=runtime.max_model_len,
    )


# Options of computing, which no token depends on, as an engine for counting has them.
NOT_COMPUTING = {
    "attention_backend": "auto",
    "device": "cpu",
    "dtype": "float32",
    "guided_decoding_backend": "off",
    "kv_cache_dtype": "auto",
}


def open_intake(config: EngineConfig) -> Intake:
    """Returns an intake that prepares prompts as the engine with these options would, from the
    configuration, the tokenizer and the processors alone. Compiles nothing and reads no weights;
    of a model on the hub it fetches none. Raises what `read_model_files` raises."""
    config = config.model_copy(update=NOT_COMPUTING)
    files = read_model_files(config, PROMPT_FILES)
    nothing = CudaSetup(torch=torch.__version__)
    machine = Machine(cpus=(0,), placement=None, cuda=nothing, kernels=TORCH)
    runtime = final_options(config, files, machine)
    with closed_on_error() as opened:
        media = build_media(files, config)
        opened.callback(media.close)
        return build_intake(files, runtime, media)
