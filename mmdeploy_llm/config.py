"""EngineConfig is what the user asked; RuntimeConfig is what the engine runs. `resolve` turns one
into the other, once."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, NonNegativeInt, field_validator, model_validator

from .errors import ConfigError
from .params import FrozenParams

MEDIA_LIMIT_DEFAULT = 1  # per kind and prompt, as FastDeploy

# FastDeploy options about serving, ports and processes: accepted, warned about, without a meaning
# offline.
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

DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
}


def _dtype_name(value: Any) -> Any:
    """ "bf16", torch.bfloat16 and "bfloat16" are the same."""
    name = str(value).removeprefix("torch.")
    return DTYPES.get(name, name)


def _names(value: Any) -> Any:
    """A comma-separated text or a list as a tuple."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return tuple(value) if isinstance(value, list) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_names)]
DEVICE = re.compile(r"cpu|cuda(:[0-9]+)?")
DOMAIN = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*|[0-9a-f:.]*:[0-9a-f:.]*")
SCHEME = re.compile(r"[a-z][a-z0-9+.-]+")
OWN_RULES = frozenset({"http", "https", "file", "local", "data"})  # schemes with other options
DType = Annotated[Literal["auto", "bfloat16", "float16", "float32"], BeforeValidator(_dtype_name)]


class EngineConfig(FrozenParams):
    """Everything the user may ask of an engine. None and "auto" mean: decide from the model and
    the machine.

    Raises ConfigError for an unknown option (with the nearest known one) and for a value out of
    range.
    """

    model: str = Field(description="a local folder, a hub id, or the name of a bundled model")
    tokenizer: str | None = Field(
        default=None, description="another folder or hub id for the tokenizer"
    )
    revision: str | None = Field(default=None, description="branch, tag or commit on the hub")
    dtype: DType = Field(
        default="auto", description="of weights and activations; auto: the checkpoint's"
    )
    device: str = Field(
        default="auto", description="cpu, cuda, cuda:1; auto: cuda where there is one"
    )
    max_model_len: int | None = Field(
        default=None, ge=2, description="prompt and output tokens of one request"
    )
    tensor_parallel_size: int = Field(
        default=1, ge=1, description="devices that share one model, a process on each"
    )
    data_parallel_size: int = Field(
        default=1, ge=1, description="engines that share the work, each with a whole model"
    )
    block_size: int | None = Field(
        default=None, ge=1, description="tokens in a KV cache block; default: the backend's"
    )
    max_num_seqs: int | None = Field(
        default=None, ge=1, description="requests that run at the same time"
    )
    max_num_batched_tokens: int | None = Field(
        default=None, ge=1, description="tokens computed in one step"
    )
    gpu_memory_utilization: float = Field(
        default=0.9, gt=0, le=1, description="share of a GPU's memory to use"
    )
    kv_cache_memory: int | None = Field(default=None, ge=1, description="bytes for the KV cache")
    num_gpu_blocks_override: int | None = Field(
        default=None, ge=2, description="KV cache blocks, instead of by memory"
    )
    quantization: Literal["int8"] | None = Field(
        default=None,
        description="int8: linear layers in 8 bits (weights and what is multiplied with them), "
        "on CPU",
    )
    kv_cache_dtype: DType | Literal["int8", "fp8"] = Field(
        default="auto",
        description="of the KV cache; auto: as dtype; int8: half of bf16's memory, on CPU, and on "
        "CUDA with Triton; fp8: as much, on CUDA with Triton",
    )
    enable_prefix_caching: bool = Field(
        default=True, description="share the blocks of equal prompt beginnings"
    )
    prefix_cache_memory: int | None = Field(
        default=None,
        ge=1,
        description="bytes of the KV cache for beginnings that no request uses now; "
        "default: one longest request on CPU, an eighth of it at most; all of it on CUDA",
    )
    enable_chunked_prefill: bool = Field(
        default=True, description="compute long prompts over several steps"
    )
    limit_mm_per_prompt: Mapping[str, int] | None = Field(
        default=None, description="media per prompt and kind"
    )
    mm_processor_kwargs: Mapping[str, Any] | None = Field(
        default=None, description="options of media processors"
    )
    encoder_cache_memory: int | None = Field(
        default=None, ge=1, description="bytes for cached media embeddings"
    )
    num_intake_threads: int | None = Field(
        default=None, ge=1, description="threads that prepare prompts ahead"
    )
    allowed_media_root: Path | None = Field(
        default=None, description="local media must lie below this folder"
    )
    max_media_bytes: int = Field(default=256 * 2**20, ge=1, description="of one encoded media item")
    max_image_pixels: int = Field(default=178_956_970, ge=1, description="of one image")
    allow_media_urls: bool = Field(
        default=False, description="fetch media from http(s) URLs of any public host"
    )
    allowed_media_domains: Names = Field(
        default=(), description="fetch http(s) URLs of these hosts only; *.example.com: all below"
    )
    allow_private_media_addresses: bool = Field(
        default=False, description="the allowed domains may be in private networks"
    )
    allowed_media_schemes: Names = Field(
        default=(), description="fetch media from stores such as s3, gs, az, hf"
    )
    media_fetch_timeout: float = Field(
        default=30.0, gt=0, le=86400, description="seconds to fetch one media item, retries too"
    )
    max_video_seconds: float = Field(default=4 * 3600.0, gt=0, description="length of one video")
    max_video_frames: int = Field(default=4096, ge=1, description="frames used of one video")
    media_isolation: Literal["auto", "thread", "process"] = Field(
        default="auto",
        description="decode media in threads, or in processes that can be killed; "
        "auto: processes for video, threads for images",
    )
    media_timeout: float = Field(
        default=60.0, gt=0, le=86400, description="seconds to decode or process one item"
    )
    media_process_memory: int = Field(
        default=4 * 2**30, ge=2**28, description="bytes a process that decodes may use"
    )
    reasoning_parser: str | None = Field(
        default=None, description="parser that splits off reasoning; auto: the model's own"
    )
    tool_call_parser: str | None = Field(
        default=None, description="parser that takes out tool calls; auto: the model's own"
    )
    chat_template: str | None = Field(
        default=None, description="a Jinja template, or a file with one"
    )
    enable_logprob: bool = Field(
        default=True, description="whether requests may ask for log-probabilities"
    )
    max_logprobs: int = Field(
        default=20, ge=-1, description="most candidates a request may ask for; -1: any number"
    )
    guided_decoding_backend: Literal["auto", "xgrammar", "off"] = Field(
        default="auto", description="for grammars"
    )
    seed: int = Field(
        default=0, ge=0, description="seeds requests that give none, with their number"
    )
    plugins: Names | None = Field(
        default=None, description="load exactly these plugins; default: all installed"
    )
    blocked_plugins: Names = Field(default=(), description="plugins not to load")
    num_threads: int | None = Field(
        default=None, ge=1, description="CPU threads for compute; default: one for each core"
    )
    cpu_affinity: Literal["auto"] | tuple[NonNegativeInt, ...] | None = Field(
        default=None,
        description="keep each compute thread on a CPU of its own: one of each core, or these",
    )
    numa_node: int | None = Field(
        default=None, ge=0, description="compute on this NUMA node, in its memory"
    )
    native_kernels: bool | None = Field(
        default=None,
        description="C++ kernels on CPU, built on first use; default: where a compiler is found. "
        "False: no Triton kernels on CUDA either",
    )
    use_warmup: bool = Field(
        default=True, description="run one small step before the first request"
    )
    enforce_eager: bool = Field(
        default=False, description="no CUDA graphs: a quicker start, slower decoding"
    )
    load_format: Literal["auto", "safetensors", "dummy"] = Field(
        default="auto",
        description="safetensors files, or dummy: random weights, for tests of speed",
    )
    trust_remote_code: Literal[False] = Field(
        default=False, description="code from checkpoints is never run"
    )
    attention_backend: str = Field(default="auto", description="name of an attention backend")

    @field_validator("limit_mm_per_prompt")
    @classmethod
    def _limits_are_counts(cls, value: Mapping[str, int] | None) -> Mapping[str, int] | None:
        for kind, limit in (value or {}).items():
            if limit < 0:
                raise ValueError(f"the limit for {kind!r} must be 0 or more")
        return value

    @field_validator("allowed_media_domains")
    @classmethod
    def _domains_are_host_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        domains = tuple(name.lower().strip("[]").rstrip(".") for name in value)
        for name in domains:
            if not DOMAIN.fullmatch(name):
                raise ValueError(
                    f"{name!r} is no host name; write example.com, *.example.com for all hosts "
                    "below it, or an IP address: no scheme, port or path"
                )
        return domains

    @field_validator("allowed_media_schemes")
    @classmethod
    def _schemes_are_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        schemes = tuple(name.lower().removesuffix("://") for name in value)
        for name in schemes:
            if name in OWN_RULES or not SCHEME.fullmatch(name):
                raise ValueError(
                    f"{name!r} cannot be listed; give names of stores such as s3, gs, az (http and "
                    "https have allowed_media_domains, files have allowed_media_root)"
                )
        return schemes

    @model_validator(mode="after")
    def _private_addresses_need_names(self) -> Self:
        if self.allow_private_media_addresses and not self.allowed_media_domains:
            raise ValueError(
                "allow_private_media_addresses needs allowed_media_domains: name the hosts of the "
                "private network"
            )
        return self

    @classmethod
    def from_options(cls, model: str, options: Mapping[str, Any]) -> EngineConfig:
        """The config of `LLM(model, **options)`; warns about options that only serving has."""
        serving = sorted(set(options) & SERVING_OPTIONS)
        if serving:
            warnings.warn(
                f"ignored, without a meaning offline: {', '.join(serving)}",
                UserWarning,
                stacklevel=3,
            )
        return cls(
            model=model, **{name: value for name, value in options.items() if name not in serving}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """What `resolve` must know of the model. max_position_embeddings: longest sequence it was
    made for."""

    dtype: str
    max_position_embeddings: int
    hidden_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What `resolve` must know of the machine. num_cpus: usable ones. num_threads: that suit them
    for compute. cuda_problem: what is missing where has_cuda is False."""

    has_cuda: bool
    num_cpus: int
    num_threads: int
    cuda_problem: str = "torch finds no CUDA device; install a CUDA build of torch or use cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """What the engine runs; every field has its final value. Sizes in tokens unless the name
    says otherwise."""

    device: str
    dtype: str
    kv_cache_dtype: str
    max_model_len: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    kv_cache_memory_bytes: int | None  # None: measured when the model is loaded
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
    use_warmup: bool
    enforce_eager: bool  # True on a CPU, which has no graphs
    attention_backend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionChoice:
    """An attention backend by name, and the KV cache block size it runs with."""

    name: str
    block_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionNeeds:
    """What a backend is chosen by. name: the one asked for, or "auto". block_size: the one asked
    for, None leaves it to the backend."""

    name: str
    device: str
    dtype: str
    kv_cache_dtype: str
    block_size: int | None = None


ChooseAttention = Callable[[AttentionNeeds], AttentionChoice]  # raises ConfigError


def resolve(
    config: EngineConfig, model: ModelLimits, host: HostFacts, choose_attention: ChooseAttention
) -> RuntimeConfig:
    """Every open choice of `config`, made. Raises ConfigError where choices contradict the
    model or each other."""
    device = _device(config, host)
    is_cuda = device.startswith("cuda")
    dtype = _dtype(config, model, is_cuda)
    max_num_seqs = config.max_num_seqs or (256 if is_cuda else 32)
    max_model_len = _max_model_len(config, model)
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
    embedding_bytes = model.hidden_size * (4 if dtype == "float32" else 2)
    return RuntimeConfig(
        device=device,
        dtype=dtype,
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
        encoder_cache_tokens=max(1, encoder_bytes // embedding_bytes),
        num_intake_threads=config.num_intake_threads or max(1, min(8, host.num_cpus)),
        num_threads=config.num_threads or host.num_threads,
        max_logprobs=config.max_logprobs if config.enable_logprob else 0,
        seed=config.seed,
        use_warmup=config.use_warmup,
        enforce_eager=config.enforce_eager or not is_cuda,
        attention_backend=attention.name,
    )


def _dtype(config: EngineConfig, model: ModelLimits, is_cuda: bool) -> str:
    if config.dtype != "auto":
        return config.dtype
    # CPUs have no fast float16.
    return "bfloat16" if model.dtype == "float16" and not is_cuda else model.dtype


def _kv_cache_dtype(config: EngineConfig, dtype: str) -> str:
    """By its name in torch."""
    names = {"auto": dtype, "fp8": "float8_e4m3fn"}
    return names.get(config.kv_cache_dtype, config.kv_cache_dtype)


def _num_batched_tokens(
    config: EngineConfig, max_num_seqs: int, max_model_len: int, is_cuda: bool
) -> int:
    """Tokens of a step at most: one for every running request at least."""
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


def _device(config: EngineConfig, host: HostFacts) -> str:
    if config.device == "auto":
        return "cuda" if host.has_cuda else "cpu"
    if not DEVICE.fullmatch(config.device):
        raise ConfigError(f"device = {config.device!r} is not known; use cpu, cuda or cuda:N")
    if config.device != "cpu" and not host.has_cuda:
        raise ConfigError(f"device = {config.device!r}, but {host.cuda_problem}")
    return config.device


def _max_model_len(config: EngineConfig, model: ModelLimits) -> int:
    if config.max_model_len is None:
        return model.max_position_embeddings
    if config.max_model_len > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len = {config.max_model_len} is over the {model.max_position_embeddings} "
            "positions the model was made for (max_position_embeddings in config.json); lower it"
        )
    return config.max_model_len
