"""assemble: from what the user asked to a running engine. Called once per LLM; decides nothing
later.

EngineConfig --> plugins --> checkpoint --> RuntimeConfig --> model --> KV cache --> the rooms
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from . import native
from .attention import select as attention
from .config import (
    AttentionChoice,
    EngineConfig,
    HostFacts,
    ModelLimits,
    RuntimeConfig,
    resolve,
)
from .delivery.delivery import Delivery
from .engine import Engine
from .errors import UnsupportedMediaError
from .hooks import (
    Checkpoint,
    EngineInfo,
    MediaProcessor,
    Model,
    ModelSpec,
    PluginManager,
    ReasoningParser,
    ReasoningParserSpec,
    ToolParser,
    ToolParserSpec,
)
from .hooks.contracts import media_size
from .intake.checkpoint import TOKENIZER_FILES, read_checkpoint, resolve_model
from .intake.intake import Intake
from .intake.media import MediaLoader, media_limits
from .intake.template import checkpoint_template, load_template
from .intake.tokenizer import PromptTokenizer, eos_token_ids, load_tokenizer
from .kernels import Kernels
from .layers.install import install_kernels
from .layers.tp_plan import tp_plan
from .messages import MEDIA_KINDS
from .native import ComputeThreads, Placement
from .parallel import FirstRank, Ranks, shares_of
from .runner import devices, sizing
from .runner.distributed import DistributedRunner
from .runner.executor import Executor, Facts
from .runner.graphs import CudaRecorder, graph_sizes
from .runner.kv_cache import KVCacheShape, allocate, available_memory, count_blocks
from .runner.parts import bound_kernel_cache, load_device_kernels, load_kernels, rank_configs
from .runner.peers import NoPeers, Peers
from .runner.runner import Runner
from .runner.slots import Slots
from .runner.trial import CudaMeter
from .sampling import GrammarBackend, make_sampler
from .schedule.scheduler import Scheduler, SchedulerConfig
from .weights.load import Split, build_model

logger = logging.getLogger(__name__)

WARM_UP_TOKENS = 16
CPU_IDLE_SHARE = 8  # one block of so many, at most, keeps content that no request uses


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """An engine, the intake before it, and what callers may look at. model: None where other
    processes have it."""

    engine: Engine
    intake: Intake
    plugins: PluginManager
    model: Model | None
    runtime: RuntimeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Computer:
    """What computes in this process, and its facts."""

    runner: Runner
    model: Model
    facts: Facts
    kernels: Kernels | None = None  # for the CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What the rooms are made of."""

    config: EngineConfig
    plugins: PluginManager
    checkpoint: Checkpoint
    spec: ModelSpec
    chat_template: str | None
    parser: ReasoningParserSpec | None
    tool_parser: ToolParserSpec | None
    tokenizer: PromptTokenizer
    eos_token_ids: frozenset[int]
    vocab_size: int
    grammars: GrammarBackend | None


def assemble(config: EngineConfig) -> Assembly:
    """Everything from a config. Raises ConfigError, ModelError and PluginError."""
    parts = _read(config)
    model: Model | None = None
    if config.tensor_parallel_size > 1:
        kernels = load_kernels(config)  # built once, not by all ranks at the same time
        with torch.device("meta"):  # sizes that do not divide are told before processes start
            whole: Any = parts.plugins.build(parts.spec, parts.checkpoint.config)
        _split(parts, FirstRank(config.tensor_parallel_size))(whole)
        ranks = DistributedRunner(rank_configs(config), build_rank)
        executor: Executor = ranks
        facts = ranks.facts
    else:
        local = _computer(parts)
        executor, model, facts = local.runner, local.model, local.facts
        kernels = local.kernels
    sizing.log_cache(facts.num_blocks, facts.shape)
    engine = Engine(
        scheduler=_scheduler(parts, facts),
        runner=executor,
        delivery=_delivery(parts),
        plugins=parts.plugins,
        info=_info(parts, facts.runtime, facts.num_blocks),
    )
    return Assembly(
        engine=engine,
        intake=_intake(parts, facts.runtime, kernels),
        plugins=parts.plugins,
        model=model,
        runtime=facts.runtime,
    )


def build_rank(config: EngineConfig, ranks: Ranks, peers: Peers) -> Computer:
    """What computes in the process of one rank."""
    return _computer(_read(config), ranks, peers)


def _computer(parts: _Parts, ranks: Ranks | None = None, peers: Peers | None = None) -> Computer:
    config = parts.config
    kernels = load_kernels(config)
    placement = native.choose_placement(config.cpu_affinity, config.numa_node)
    runtime = _runtime(config, parts.checkpoint, kernels, placement)
    bound_kernel_cache()
    if runtime.device == "cpu":
        native.keep_freed_memory()
    if runtime.num_threads != torch.get_num_threads():
        torch.set_num_threads(runtime.num_threads)
    threads = None
    if placement is not None and kernels is not None and kernels.threads is not None:
        threads = native.ComputeThreads(kernels.threads, placement, runtime.num_threads)
        threads.place()  # before the weights take memory
    used = kernels or load_device_kernels(config, torch.device(runtime.device))
    model = _model(parts, runtime, used, ranks)
    runtime = _with_media_size(runtime, model)
    shape = sizing.kv_cache_shape(model, runtime)
    num_blocks = _num_blocks(parts, runtime, model, shape, used, ranks, peers)
    runtime = sizing.fitted(config, runtime, num_blocks)
    runner = _runner(parts, runtime, model, shape, num_blocks, used, threads, peers)
    if used is not None and used.memory is not None:
        used.memory.settle()
    facts = Facts(runtime=runtime, shape=shape, num_blocks=num_blocks)
    return Computer(runner=runner, model=model, facts=facts, kernels=kernels)


def _model(
    parts: _Parts, runtime: RuntimeConfig, kernels: Kernels | None, ranks: Ranks | None
) -> Model:
    """With its weights; of ranks, the part of one."""
    build, num_ranks = parts.plugins.build, 1 if ranks is None else ranks.size
    model: Model = build_model(
        lambda config: sizing.checked_size(build(parts.spec, config), runtime, num_ranks),
        parts.checkpoint,
        dtype=getattr(torch, runtime.dtype),
        device=torch.device(runtime.device),
        load_format=parts.config.load_format,
        split=None if ranks is None else _split(parts, ranks),
        memory=None if kernels is None else kernels.memory,
    )
    if kernels is not None and isinstance(model, nn.Module):
        install_kernels(model, kernels, parts.config.quantization)
    return model


def _split(parts: _Parts, ranks: Ranks) -> Split:
    """What makes a whole model the part of one rank."""
    plan = partial(tp_plan, own=parts.spec.tp_plan)
    return shares_of(plan, ranks, parts.checkpoint.architecture)


def open_media(config: EngineConfig) -> MediaLoader:
    """What reads the media of a model, without the model's weights. Raises as `assemble`."""
    parts = _read(config)
    return MediaLoader(
        processors=_processors(parts),
        fetch=parts.plugins.fetch_media,
        limits=media_limits(config),
        max_items=config.limit_mm_per_prompt or {},
        guard=parts.plugins.guard,
    )


def _read(config: EngineConfig) -> _Parts:
    """Whatever can fail cheaply, before the weights are read."""
    plugins = PluginManager.load(config.plugins, config.blocked_plugins)
    checkpoint = read_checkpoint(resolve_model(config.model, config.revision))
    folder = checkpoint.folder
    if config.tokenizer is not None:
        folder = resolve_model(config.tokenizer, config.revision, TOKENIZER_FILES)
    tokenizer = PromptTokenizer(load_tokenizer(folder))
    eos_ids = eos_token_ids(checkpoint, tokenizer)
    vocab_size = int(checkpoint.config.get_text_config().vocab_size)
    grammars = None
    if config.guided_decoding_backend != "off":
        grammars = GrammarBackend(tokenizer.raw, vocab_size, eos_ids)
    spec = plugins.model_for(checkpoint.config.architectures or ())
    tools = spec.tools if config.tool_call_parser == "auto" else config.tool_call_parser
    template = _chat_template(config, checkpoint, tokenizer)
    return _Parts(
        config=config,
        plugins=plugins,
        checkpoint=checkpoint,
        spec=spec,
        chat_template=template,
        parser=_reasoning_parser(config, plugins, spec, template),
        tool_parser=plugins.tool_parser(tools) if tools else None,
        tokenizer=tokenizer,
        eos_token_ids=eos_ids,
        vocab_size=vocab_size,
        grammars=grammars,
    )


def _runtime(
    config: EngineConfig,
    checkpoint: Checkpoint,
    kernels: Kernels | None,
    placement: Placement | None,
) -> RuntimeConfig:
    text = checkpoint.config.get_text_config()
    dtype = getattr(checkpoint.config, "dtype", None) or getattr(text, "dtype", None) or "float32"
    limits = ModelLimits(
        dtype=str(dtype).removeprefix("torch."),
        max_position_embeddings=text.max_position_embeddings,
        hidden_size=text.hidden_size,
    )
    cpus = native.usable_cpus()
    cuda = devices.CudaFacts(torch=torch.__version__)
    if config.device != "cpu":
        cuda = devices.read_cuda()
    problem = devices.problem(cuda)
    if config.device == "auto" and problem and cuda.driver:
        logger.warning("device = 'auto' is the CPU: %s", problem)
    host = HostFacts(
        has_cuda=problem is None,
        cuda_problem=problem or "",
        num_cpus=len(cpus),
        num_threads=placement.num_threads if placement else native.num_suitable_threads(cpus),
    )
    heads = getattr(text, "num_attention_heads", None)
    choose = partial(
        attention.select,
        has_kernels=kernels is not None and kernels.attention is not None,
        capabilities=[card.capability for card in cuda.cards],
        head_dim=getattr(text, "head_dim", None) or (heads and text.hidden_size // heads),
    )
    runtime = resolve(config, limits, host, choose)
    devices.check_device(runtime.device, runtime.dtype, cuda, config.tensor_parallel_size)
    attention.check_installed(runtime.attention_backend)
    return runtime


def _num_blocks(
    parts: _Parts,
    runtime: RuntimeConfig,
    model: Model,
    shape: KVCacheShape,
    kernels: Kernels | None,
    ranks: Ranks | None,
    peers: Peers | None,
) -> int:
    """By memory: on CUDA what the largest steps leave, on a CPU a share of what is free."""
    if runtime.num_blocks_override is not None:
        return runtime.num_blocks_override
    memory, device = runtime.kv_cache_memory_bytes, torch.device(runtime.device)
    if memory is None and device.type == "cuda":
        bare = replace(runtime, use_warmup=False, enforce_eager=True)
        memory = sizing.measured_memory(
            lambda count: _runner(parts, bare, model, shape, count, kernels, None, peers),
            _processors(parts),
            runtime,
            model,
            CudaMeter(device, runtime.gpu_memory_utilization),
            peers or NoPeers(),
        )
    elif memory is None:
        memory = available_memory(device, runtime.gpu_memory_utilization)
        memory //= 1 if ranks is None else ranks.size
    blocks_each = -(-runtime.max_model_len // runtime.block_size)
    num_blocks = count_blocks(shape, memory, runtime.max_num_seqs * blocks_each)
    return num_blocks if ranks is None else ranks.least(num_blocks)


def _with_media_size(runtime: RuntimeConfig, model: Model) -> RuntimeConfig:
    """The encoder cache in tokens, where the model keeps more than an embedding for each."""
    num_tokens = runtime.encoder_cache_tokens * model.hidden_size // media_size(model)
    return replace(runtime, encoder_cache_tokens=max(1, num_tokens))


def _max_idle_blocks(runtime: RuntimeConfig, shape: KVCacheShape, num_blocks: int) -> int | None:
    """On CUDA the whole KV cache is taken anyway. On CPU untouched memory costs nothing, and a long
    batch of different prompts would fill it all with beginnings that never come again."""
    if runtime.prefix_cache_memory_bytes is not None:
        return max(1, runtime.prefix_cache_memory_bytes // shape.bytes_per_block)
    if runtime.device != "cpu":
        return None
    context = -(-runtime.max_model_len // runtime.block_size)
    return max(1, min(num_blocks // CPU_IDLE_SHARE, context))


def _scheduler(parts: _Parts, facts: Facts) -> Scheduler:
    runtime, num_blocks = facts.runtime, facts.num_blocks
    return Scheduler(
        SchedulerConfig(
            max_num_seqs=runtime.max_num_seqs,
            max_num_batched_tokens=runtime.max_num_batched_tokens,
            max_model_len=runtime.max_model_len,
            num_blocks=num_blocks,
            block_size=runtime.block_size,
            enable_prefix_caching=runtime.enable_prefix_caching,
            max_idle_blocks=_max_idle_blocks(runtime, facts.shape, num_blocks),
            enable_chunked_prefill=runtime.enable_chunked_prefill,
            encoder_cache_tokens=runtime.encoder_cache_tokens,
            atomic_media=parts.spec.atomic_media,
        )
    )


def _runner(
    parts: _Parts,
    runtime: RuntimeConfig,
    model: Model,
    shape: KVCacheShape,
    num_blocks: int,
    kernels: Kernels | None,
    threads: ComputeThreads | None,
    peers: Peers | None,
) -> Runner:
    device = torch.device(runtime.device)
    chosen = AttentionChoice(name=runtime.attention_backend, block_size=runtime.block_size)
    runner = Runner(
        model=model,
        backend=attention.create(chosen, kernels, model.head_dim, device),
        cache=allocate(shape, num_blocks, device),
        sampler=make_sampler(
            max_num_slots=runtime.max_num_seqs,
            vocab_size=parts.vocab_size,
            device=device,
            grammars=parts.grammars,
            kernels=kernels,
        ),
        slots=Slots(runtime.max_num_seqs, runtime.max_model_len, runtime.block_size),
        device=device,
        has_atomic_media=parts.spec.atomic_media,
        model_name=f"{type(model).__name__} (plugin {parts.plugins.owner(parts.spec)!r})",
        threads=threads,
        peers=peers,
    )
    if runtime.use_warmup:
        runner.warm_up(min(WARM_UP_TOKENS, runtime.max_model_len - 1))
    if not runtime.enforce_eager:
        runner.record_graphs(graph_sizes(runtime.max_num_seqs), CudaRecorder(device))
    return runner


def _delivery(parts: _Parts) -> Delivery:
    plugins, spec, tools = parts.plugins, parts.parser, parts.tool_parser
    new_parser: Callable[[], ReasoningParser] | None = None
    new_tool_parser: Callable[[], ToolParser] | None = None
    if spec is not None:
        new_parser = lambda: plugins.build(spec)  # noqa: E731 - mypy cannot see through partial
    if tools is not None:
        new_tool_parser = lambda: plugins.build(tools)  # noqa: E731
    return Delivery(
        parts.tokenizer.raw,
        new_parser,
        _full_name(plugins, spec),
        new_tool_parser,
        _full_name(plugins, tools),
    )


def _full_name(plugins: PluginManager, spec: ReasoningParserSpec | ToolParserSpec | None) -> str:
    return "" if spec is None else f"{spec.name!r} of plugin {plugins.owner(spec)!r}"


def _intake(parts: _Parts, runtime: RuntimeConfig, kernels: Kernels | None) -> Intake:
    config, processors = parts.config, _processors(parts)
    if kernels is not None and kernels.pixels is not None:
        for processor in processors.values():
            processor.use_kernels(kernels.pixels)
    return Intake(
        tokenizer=parts.tokenizer,
        processors=processors,
        fetch=parts.plugins.fetch_media,
        config=runtime,
        limits=media_limits(config),
        vocab_size=parts.vocab_size,
        eos_token_ids=parts.eos_token_ids,
        generation=parts.checkpoint.generation,
        chat_template=parts.chat_template,
        reasoning_end_marker=_end_marker(parts.plugins, parts.parser),
        validate_guided=parts.grammars.validate if parts.grammars else None,
        guard=parts.plugins.guard,
    )


def _processors(parts: _Parts) -> dict[str, MediaProcessor]:
    """kind -> processor, for the kinds that the model takes and an installed plugin can make.

    A processor for any model may find that this one takes no such media: it is left out.
    """
    found = {}
    for kind in parts.spec.media:
        spec = parts.plugins.media_processor(kind, parts.spec.name)
        if spec is None:
            continue
        try:
            found[kind] = parts.plugins.build(spec, parts.checkpoint, _options_of(kind, parts))
        except UnsupportedMediaError as reason:
            logger.info("no %s: %s", kind, reason)
    return found


def _options_of(kind: str, parts: _Parts) -> dict[str, Any]:
    """mm_processor_kwargs without those of other kinds that plugins bring: those of charts begin
    with "chart_", and no processor of images could know them."""
    others = tuple(f"{other}_" for other in parts.spec.media if other not in (kind, *MEDIA_KINDS))
    options = parts.config.mm_processor_kwargs or {}
    return {name: value for name, value in options.items() if not name.startswith(others)}


def _chat_template(
    config: EngineConfig, checkpoint: Checkpoint, tokenizer: PromptTokenizer
) -> str | None:
    if config.chat_template is not None:
        return load_template(config.chat_template)
    return checkpoint_template(checkpoint.folder, tokenizer.raw)


def _reasoning_parser(
    config: EngineConfig, plugins: PluginManager, spec: ModelSpec, template: str | None
) -> ReasoningParserSpec | None:
    """The one that is asked for. "auto": the family's, but none where the chat template never
    mentions its end marker: not every model of a family thinks, and of one that does not all text
    would be held back for a tag that never comes."""
    is_auto = config.reasoning_parser == "auto"
    name = spec.reasoning if is_auto else config.reasoning_parser
    if not name:
        return None
    parser = plugins.reasoning_parser(name)
    end = _end_marker(plugins, parser)
    if is_auto and template is not None and end is not None and end not in template:
        return None
    return parser


def _end_marker(plugins: PluginManager, parser: ReasoningParserSpec | None) -> str | None:
    if parser is None:
        return None
    factory: Callable[..., Any] = plugins.resolve(parser)
    return getattr(factory, "end_marker", None)


def _info(parts: _Parts, runtime: RuntimeConfig, num_blocks: int) -> EngineInfo:
    return EngineInfo(
        model=parts.config.model,
        architecture=parts.checkpoint.architecture,
        device=runtime.device,
        dtype=runtime.dtype,
        num_blocks=num_blocks,
        block_size=runtime.block_size,
        max_num_seqs=runtime.max_num_seqs,
        max_model_len=runtime.max_model_len,
    )
