"""Builds runners: the one that serves the engine, and short-lived ones that measure memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from mmdeploy_llm.caches import head_dims, longest_window
from mmdeploy_llm.engine.runner.graphs import CudaRecorder, graph_sizes
from mmdeploy_llm.engine.runner.runner import Runner
from mmdeploy_llm.engine.runner.sampling.make import make_sampler
from mmdeploy_llm.engine.runner.slots import Slots
from mmdeploy_llm.engine.runner.states import StateTable
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.hooks.objects.attention import AttentionBackend
from mmdeploy_llm.layers.adapters.attached.served import ServedAdapters
from mmdeploy_llm.layers.attention import select as attention
from mmdeploy_llm.layers.attention.cache_memory import KVCacheShape, allocate
from mmdeploy_llm.layers.attention.hadamard import HadamardAttention
from mmdeploy_llm.layers.attention.packed import PackedAttention
from mmdeploy_llm.layers.attention.windows import WindowAttention
from mmdeploy_llm.layers.pooling.abilities import abilities_of, is_bidirectional
from mmdeploy_llm.values.plan import NUM_FIXED

from .key_ranges import measure_keys, sample_ids
from .loaded import LoadedModel, blueprint_of
from .options import attention_host, attention_needs
from .warm_up import warm_up

logger = logging.getLogger(__name__)

WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan:
    """The KV cache of one runner. max_model_len: upper bound of a request's tokens, at most as many
    as the cache holds. num_state_rows, num_window_blocks: see SchedulerConfig."""

    shape: KVCacheShape
    num_blocks: int
    max_model_len: int
    num_state_rows: int = 0
    num_window_blocks: int = 0

    @classmethod
    def of_trial(cls, shape: KVCacheShape, num_blocks: int, max_model_len: int) -> CachePlan:
        """Returns the plan of a cache for steps at the start alone, whose blocks nobody else has:
        as many for layers with a window as for others."""
        return cls(
            shape=shape,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            num_state_rows=NUM_FIXED if shape.bytes_per_state else 0,
            num_window_blocks=num_blocks,
        )


def new_runner(
    loaded: LoadedModel, cache: CachePlan, backend: AttentionBackend | None = None
) -> Runner:
    """Returns a runner with its KV cache allocated. backend: of its attention; None: see
    new_attention. Raises ConfigError when the card has too little memory, and as new_attention."""
    runtime, files, model = loaded.runtime, loaded.files, loaded.model
    kernels = loaded.machine.kernels
    return Runner(
        model=model,
        backend=backend or new_attention(loaded, cache.shape),
        cache=allocate(cache.shape, cache.num_blocks, loaded.device, cache.num_window_blocks),
        states=StateTable(cache.shape, cache.num_state_rows, loaded.device)
        if cache.num_state_rows
        else None,
        sampler=make_sampler(
            max_num_slots=runtime.max_num_seqs,
            vocab_size=files.text.vocab_size,
            device=loaded.device,
            grammars=files.grammars,
            processors=files.logits_processors,
            kernels=kernels,
        ),
        slots=Slots(
            runtime.max_num_seqs,
            cache.max_model_len,
            runtime.block_size,
            has_windows=bool(cache.shape.windows),
            long_after=getattr(model, "long_after", None),
        ),
        device=loaded.device,
        has_atomic_media=files.spec.atomic_media,
        model_name=f"{type(model).__name__} (plugin {files.plugins.owner(files.spec)!r})",
        threads=loaded.threads,
        peers=loaded.group.peers,
        adapters=ServedAdapters(
            model,
            loaded.device,
            partial(blueprint_of, files, runtime, loaded.group.ranks),
            num_slots=runtime.options.max_adapters,
            kernels=kernels,
        ),
        rules=files.rules,
        kernels=kernels.attention,
    )


def new_attention(loaded: LoadedModel, shape: KVCacheShape) -> AttentionBackend:
    """Returns the attention of a runner with such a cache. Raises ConfigError when the backend
    cannot compute the model's heads."""
    new_backend, windows = _backend_factory(loaded), shape.windows
    backend = WindowAttention(new_backend, windows) if windows else new_backend()
    if not shape.has_integers or is_bidirectional(loaded.model):
        return backend
    return HadamardAttention(backend, loaded.machine.kernels, shape.layers, loaded.device)


def _backend_factory(loaded: LoadedModel) -> Callable[[], AttentionBackend]:
    """Returns what builds the attention backend: the resolved one, or another that takes the same
    blocks for a model that needs what it lacks. Raises ConfigError where the options exclude
    that."""
    runtime, model = loaded.runtime, loaded.model
    if is_bidirectional(model):
        return partial(PackedAttention, loaded.machine.kernels.attention)
    attends_itself = bool(getattr(model, "attends_itself", False))
    if attends_itself and runtime.kv_cache_dtype != runtime.dtype:
        raise ConfigError(
            f"kv_cache_dtype = {runtime.kv_cache_dtype!r} is not possible with a model that "
            f"computes attention itself; leave it out, or use {runtime.dtype!r}"
        )
    needs = replace(
        attention_needs(runtime),
        head_dims=head_dims(model),
        media_spans=loaded.files.spec.atomic_media,
        windows=longest_window(model) is not None,
        softcaps=bool(getattr(model, "has_softcaps", False)),
        sinks=bool(getattr(model, "has_sinks", False)),
        alibi=bool(getattr(model, "has_alibi", False)),
        sequences=attends_itself,
    )
    host, plugins = attention_host(loaded.machine), loaded.files.plugins
    chosen, asked = runtime.attention_backend, runtime.options.attention_backend
    name = attention.suited(chosen, asked, needs, plugins, host)
    if name != chosen:
        logger.info("attention backend: %r, for %r lacks what the model needs", name, chosen)
    return partial(attention.create, name, plugins, host.setup(needs))


def ready_runner(loaded: LoadedModel, cache: CachePlan) -> Runner:
    """Returns a runner that is warmed up and, on CUDA, has recorded its decode steps."""
    backend, runtime = new_attention(loaded, cache.shape), loaded.runtime
    wanted = abilities_of(loaded.model).trial
    if isinstance(backend, HadamardAttention):
        ids = sample_ids(loaded.files.tokenizer, loaded.files.text.max_position_embeddings)
        num_blocks = max(2, -(-len(ids) // runtime.block_size))
        plan = CachePlan.of_trial(cache.shape, num_blocks, len(ids) + 1)
        run = new_runner(loaded, plan, backend).run
        measure_keys(backend, run, ids, runtime.block_size, wanted)
    runner = new_runner(loaded, cache, backend)
    asked = runtime.options.use_warmup
    if loaded.device.type != "cpu" if asked is None else asked:
        num_tokens = min(WARM_UP_TOKENS, cache.max_model_len - 1)
        warm_up(runner.run, num_tokens, runtime.block_size, wanted)
    if not runtime.enforce_eager and wanted is None:
        runner.record_graphs(graph_sizes(runtime.max_num_seqs), CudaRecorder(loaded.device))
    memory = loaded.machine.kernels.memory
    if memory is not None:
        memory.settle()
    return runner
