"""Builds runners: the one that serves the engine, and short-lived ones that measure memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from mmdeploy_llm.attention import select as attention
from mmdeploy_llm.attention.windows import WindowAttention
from mmdeploy_llm.caches import head_dims
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.runner.graphs import CudaRecorder, graph_sizes
from mmdeploy_llm.runner.kv_cache import KVCacheShape, allocate
from mmdeploy_llm.runner.runner import Runner
from mmdeploy_llm.runner.slots import Slots
from mmdeploy_llm.runner.states import StateTable
from mmdeploy_llm.runtime_config import AttentionChoice
from mmdeploy_llm.sampling import make_sampler

from .loaded import LoadedModel
from .warm_up import warm_up

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


def new_runner(loaded: LoadedModel, cache: CachePlan) -> Runner:
    """Returns a runner with its KV cache allocated. Raises ConfigError when the attention backend
    cannot compute the model's heads, or the card has too little memory."""
    runtime, files, model = loaded.runtime, loaded.files, loaded.model
    chosen = AttentionChoice(name=_backend_name(loaded), block_size=runtime.block_size)
    kernels = loaded.machine.kernels
    new_backend = partial(attention.create, chosen, kernels, head_dims(model), loaded.device)
    windows = cache.shape.windows
    return Runner(
        model=model,
        backend=WindowAttention(new_backend, windows) if windows else new_backend(),
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
            has_windows=bool(windows),
            long_after=getattr(model, "long_after", None),
        ),
        device=loaded.device,
        has_atomic_media=files.spec.atomic_media,
        model_name=f"{type(model).__name__} (plugin {files.plugins.owner(files.spec)!r})",
        threads=loaded.threads,
        peers=loaded.group.peers,
    )


def _backend_name(loaded: LoadedModel) -> str:
    """Returns the attention backend: the resolved one, another for a model with sinks that it
    cannot compute, or for a model that attends itself the only one that gives it the cache by
    sequence. Raises ConfigError where the options exclude that."""
    runtime, needed = loaded.runtime, "reference"
    asked = runtime.options.attention_backend
    if not getattr(loaded.model, "attends_itself", False):
        if getattr(loaded.model, "has_sinks", False):
            return attention.with_sinks(runtime.attention_backend, asked=asked)
        return runtime.attention_backend
    if asked not in ("auto", needed):
        raise ConfigError(
            f"attention_backend = {asked!r} does not run {type(loaded.model).__name__}, which "
            f"computes attention itself; use 'auto' or {needed!r}"
        )
    if runtime.kv_cache_dtype != runtime.dtype:
        raise ConfigError(
            f"kv_cache_dtype = {runtime.kv_cache_dtype!r} is not possible with a model that "
            f"computes attention itself; leave it out, or use {runtime.dtype!r}"
        )
    return needed


def ready_runner(loaded: LoadedModel, cache: CachePlan) -> Runner:
    """Returns a runner that is warmed up and, on CUDA, has recorded its decode steps."""
    runner, runtime = new_runner(loaded, cache), loaded.runtime
    if runtime.options.use_warmup:
        warm_up(runner.run, min(WARM_UP_TOKENS, cache.max_model_len - 1), runtime.block_size)
    if not runtime.enforce_eager:
        runner.record_graphs(graph_sizes(runtime.max_num_seqs), CudaRecorder(loaded.device))
    kernels = loaded.machine.kernels
    if kernels is not None and kernels.memory is not None:
        kernels.memory.settle()
    return runner
