"""RuntimeConfig: what the engine runs, with every option decided. `resolve` makes it of an
EngineConfig, once, at start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.values.params import EarlyStopParams

from .config import EngineConfig
from .weight_formats import QuantizationName, format_on

MEDIA_LIMIT_DEFAULT = 1  # items of each kind in one prompt, as in FastDeploy


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """Says of a model what `resolve` needs. max_position_embeddings: the longest sequence
    that the model was made for."""

    dtype: str
    max_position_embeddings: int | None
    hidden_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineLimits:
    """Says of the machine what `resolve` needs.

    num_cpus: CPUs that this process may use.
    num_threads: compute threads that suit them.
    cuda_problem: why CUDA cannot be used, for the error message where has_cuda is False.
    cpu_level: instruction sets of the CPU kernels; None: plain torch computes.
    has_bf16: whether torch has bfloat16 products on this CPU.
    """

    has_cuda: bool
    num_cpus: int
    num_threads: int
    cuda_problem: str = "torch finds no CUDA device; install a CUDA build of torch or use cpu"
    cpu_level: str | None = None
    has_bf16: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """Every option with its final value: here what is decided at start, and what the rooms read;
    all others in `options`. Sizes are in tokens unless the name says otherwise.

    options: as the caller gave them, with the device and CPUs of this share of the machine.
    generation: what is usual for the model and in its generation_config.json.
    """

    options: EngineConfig

    device: str
    dtype: str
    dtype_choice: str | None  # says what dtype "auto" is and why; None when dtype was given
    kv_cache_dtype: str
    max_model_len: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    kv_cache_memory_bytes: int | None  # None: measured after the model is loaded
    num_blocks_override: int | None
    enable_prefix_caching: bool
    prefix_cache_memory_bytes: int | None  # None: the device's default
    enable_chunked_prefill: bool
    limit_mm_per_prompt: Mapping[str, int]
    encoder_cache_tokens: int
    num_intake_threads: int
    num_threads: int
    max_logprobs: int
    seed: int
    enforce_eager: bool  # True on a CPU, which has no graphs
    attention_backend: str
    early_stop: EarlyStopParams | None = None
    speculates: bool = False
    generation: Mapping[str, Any] = field(default_factory=dict)

    @property
    def quantization(self) -> QuantizationName | None:
        """The format that weights are rounded to: that of the options, as the device has it."""
        return format_on(self.options.quantization, is_cuda=self.device != "cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionChoice:
    """The name of an attention backend and the KV cache block size that it uses. why: says who
    provides it and why others of higher priority do not compute."""

    name: str
    block_size: int
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionNeeds:
    """Says what decides between attention backends.

    name: the requested backend, or "auto".
    block_size: the requested block size; None leaves it to the backend.
    head_dims: sizes of the model's heads, () if they are not known.
    media_spans ... sequences: whether the model needs them, as AttentionBackendSpec has them.
    deterministic: whether the answers must not depend on the batch.
    """

    name: str
    device: str
    dtype: str
    kv_cache_dtype: str
    block_size: int | None = None
    head_dims: tuple[int, ...] = ()
    media_spans: bool = False
    windows: bool = False
    softcaps: bool = False
    sinks: bool = False
    alibi: bool = False
    sequences: bool = False
    deterministic: bool = False


ChooseAttention = Callable[[AttentionNeeds], AttentionChoice]  # raises ConfigError


def resolve(
    config: EngineConfig, model: ModelLimits, host: MachineLimits, choose_attention: ChooseAttention
) -> RuntimeConfig:
    """Decides every option that is left open. Raises ConfigError for one that cannot be had."""
    device = _device(config, host)
    is_cuda = device.startswith("cuda")
    dtype = _dtype(config, model, is_cuda)
    max_num_seqs, max_model_len = max_num_seqs_of(config, is_cuda), _max_model_len(config, model)
    kv_cache_dtype = _kv_cache_dtype(config, dtype)
    attention = choose_attention(
        AttentionNeeds(
            name=config.attention_backend,
            device=device,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            block_size=config.block_size,
        )
    )
    encoder_bytes = config.encoder_cache_memory or (2**30 if is_cuda else 2**28)
    row_bytes = model.hidden_size * (4 if dtype == "float32" else 2)
    return RuntimeConfig(
        options=config,
        device=device,
        dtype=dtype,
        dtype_choice=_dtype_choice(dtype, model, host, is_cuda) if config.dtype == "auto" else None,
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=max_model_len,
        block_size=attention.block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=_num_batched_tokens(config, max_num_seqs, max_model_len, is_cuda),
        gpu_memory_utilization=config.gpu_memory_utilization,
        kv_cache_memory_bytes=config.kv_cache_memory,
        num_blocks_override=config.num_gpu_blocks_override,
        enable_prefix_caching=config.enable_prefix_caching,
        prefix_cache_memory_bytes=config.prefix_cache_memory,
        enable_chunked_prefill=config.enable_chunked_prefill,
        limit_mm_per_prompt={
            **dict.fromkeys(("image", "video"), MEDIA_LIMIT_DEFAULT),
            **(config.limit_mm_per_prompt or {}),
        },
        encoder_cache_tokens=max(1, encoder_bytes // row_bytes),
        num_intake_threads=config.num_intake_threads or max(1, min(8, host.num_cpus)),
        num_threads=config.num_threads or host.num_threads,
        max_logprobs=config.max_logprobs if config.enable_logprob else 0,
        seed=0 if config.seed is None else config.seed,  # the config has drawn one for None
        enforce_eager=config.enforce_eager or not is_cuda,
        attention_backend=attention.name,
        early_stop=config.early_stop_config,
        speculates=config.speculative is not None,
    )


def _dtype(config: EngineConfig, model: ModelLimits, is_cuda: bool) -> str:
    """Returns the dtype that computes fastest without giving other tokens than the checkpoint's. It
    is the checkpoint's own: bfloat16 has led or equalled float32 at every level, with kernels and
    without, in what was measured (examples/benchmarks/HISTORY.md). CPUs compute float16 slowly."""
    if config.dtype == "float16" and config.quantization is not None:
        raise ConfigError(
            f"quantization = {config.quantization!r} computes in bfloat16 or float32, but dtype is "
            "float16: choose one of these with dtype, or leave dtype out"
        )
    if config.dtype != "auto":
        return config.dtype
    return "bfloat16" if model.dtype == "float16" and not is_cuda else model.dtype


def _dtype_choice(dtype: str, model: ModelLimits, host: MachineLimits, is_cuda: bool) -> str:
    """Returns one line that says what "auto" chose."""
    line = f"dtype 'auto' is {dtype}, as in the checkpoint"
    if dtype != model.dtype:
        line = f"dtype 'auto' is {dtype} for a checkpoint in {model.dtype}, which it rounds"
    if is_cuda:
        return line
    if host.cpu_level is not None:
        return f"{line}; computed by the kernels for {host.cpu_level}"
    is_wide = dtype == "bfloat16" and not host.has_bf16
    return f"{line}; computed by plain torch{', in float32 inside products' if is_wide else ''}"


def _kv_cache_dtype(config: EngineConfig, dtype: str) -> str:
    """Returns the dtype's name in torch."""
    names = {"auto": dtype, "fp8": "float8_e4m3fn"}
    return names.get(config.kv_cache_dtype, config.kv_cache_dtype)


def _num_batched_tokens(
    config: EngineConfig, max_num_seqs: int, max_model_len: int, is_cuda: bool
) -> int:
    """Returns the upper bound on tokens in one step. Raises ConfigError where it is below
    max_num_seqs: every running request needs one token."""
    num_batched = config.max_num_batched_tokens or (8192 if is_cuda else 2048)
    if not config.enable_chunked_prefill:
        num_batched = max(num_batched, max_model_len)
    if num_batched < max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens = {num_batched} is below max_num_seqs = {max_num_seqs}: "
            "a step could not give every running request one token; raise the first "
            "or lower the second"
        )
    return num_batched


def _device(config: EngineConfig, host: MachineLimits) -> str:
    if config.device == "auto":
        return "cuda" if host.has_cuda else "cpu"
    if config.device != "cpu" and not host.has_cuda:
        raise ConfigError(f"device = {config.device!r}, but {host.cuda_problem}")
    return config.device


def max_num_seqs_of(config: EngineConfig, is_cuda: bool) -> int:
    """Returns how many requests are computed at the same time, at most."""
    return config.max_num_seqs or (256 if is_cuda else 32)


def _max_model_len(config: EngineConfig, model: ModelLimits) -> int:
    longest = model.max_position_embeddings
    if config.max_model_len is None:
        if longest is None:
            raise ConfigError(
                "config.json of the model does not say how long a sequence may be (it has no "
                "max_position_embeddings); set max_model_len, the tokens of prompt and answer"
            )
        return longest
    if longest is not None and config.max_model_len > longest:
        raise ConfigError(
            f"max_model_len = {config.max_model_len} is over the {longest} "
            "positions the model was made for (max_position_embeddings in config.json); lower it"
        )
    return config.max_model_len
