"""EngineConfig: the options of an LLM as the user gave them. None and "auto" are decided later, by
`runtime_config.resolve`."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, NonNegativeInt, field_validator, model_validator

from mmdeploy_llm.values.params import MAX_SEED, EarlyStopParams, read_early_stop

from .loading import LoadOptions
from .types import (
    IMAGE_TOKENS,
    Budget,
    CacheDType,
    CpuLevel,
    Device,
    Domains,
    DType,
    GroupSize,
    GuidedDecodingBackend,
    MediaLimits,
    Names,
    NoCode,
    Quantization,
    Schemes,
)
from .weight_formats import FORMATS, described, names_of


class EngineConfig(LoadOptions):
    """Every option of an engine. None and "auto" mean: decided from the model and the machine.

    Raises ConfigError for an unknown option (with what to write instead, where it is known) and for
    a value out of range. Warns of options that only a server has, or another engine, and leaves
    them out.
    """

    model: str = Field(
        description="a local folder or GGUF file (its vision tower is the file with mmproj in its "
        "name in the same folder), a model's id on the Hugging Face hub, or the "
        "name of a bundled model"
    )
    tokenizer: str | None = Field(
        default=None,
        description="folder, GGUF file or hub id of another tokenizer; None: the model's own",
    )
    revision: str | None = Field(
        default=None, description="branch, tag or commit on the hub; None: its main branch"
    )
    dtype: DType = Field(
        default="auto",
        description="dtype of weights and activations: bfloat16, float16 or float32; auto: as in "
        "the checkpoint, with bfloat16 for a float16 checkpoint on a CPU; what it chose and what "
        "computes it is said in one line at load",
    )
    device: Device = Field(
        default="auto",
        description="cpu, cuda or cuda:N; auto: cuda where torch finds a GPU, else cpu",
    )
    max_model_len: int | None = Field(
        default=None,
        ge=2,
        description="upper bound on the tokens of one request, prompt and output together; None: "
        "what the model was made for, or what the KV cache holds if that is less",
    )
    tensor_parallel_size: int = Field(
        default=1,
        ge=1,
        description="number of devices that share one model, with one process on each",
    )
    data_parallel_size: int = Field(
        default=1,
        ge=1,
        description="number of engines that share the work, each with a whole model in a process "
        "of its own",
    )
    block_size: int | None = Field(
        default=None,
        ge=1,
        description="tokens in one block of the KV cache; None: what suits the attention backend "
        "(64; 128 with flash-attn 3 and 4, 256 with flash-attn 2 and torch-varlen, which need a "
        "multiple of 256)",
    )
    max_num_seqs: int | None = Field(
        default=None,
        ge=1,
        description="upper bound on requests that run at once; None: 32 on CPU, 256 on CUDA",
    )
    max_num_batched_tokens: int | None = Field(
        default=None,
        ge=1,
        description="upper bound on tokens computed in one step; None: 2048 on CPU, 8192 on CUDA, "
        "and max_model_len at least where chunked prefill is off",
    )
    gpu_memory_utilization: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="share of a GPU's memory that may be used, from 0 to 1; no meaning on CPU",
    )
    kv_cache_memory: int | None = Field(
        default=None,
        ge=1,
        description="bytes for the KV cache; None: 40 % of free memory on CPU, 8 GiB at most; on "
        "CUDA what the largest steps leave of gpu_memory_utilization, measured at start",
    )
    num_gpu_blocks_override: int | None = Field(
        default=None,
        ge=2,
        description="number of KV cache blocks, on any device; None: as many as kv_cache_memory "
        "holds",
    )
    quantization: Quantization | None = Field(
        default=None,
        description=f"rounds loaded weights: {described()}; None: as stored",
    )
    quantization_group_size: GroupSize | None = Field(
        default=None,
        description="columns of a row that share a scale: a multiple of 16, or -1 for the whole "
        "row; fewer are nearer to the unrounded weights and take more memory; None: 64 in 4 bits, "
        "128 in 8",
    )
    kv_cache_dtype: CacheDType = Field(
        default="auto",
        description="dtype of the KV cache; int8 and fp8 take half of bfloat16's memory, int4 "
        "takes 28 % of it: all on CUDA with Triton, int8 and int4 on CPU; auto: as dtype",
    )
    enable_prefix_caching: bool = Field(
        default=True,
        description="whether to keep the KV blocks of prompts and reuse them for prompts with the "
        "same prefix",
    )
    prefix_cache_memory: int | None = Field(
        default=None,
        ge=1,
        description="bytes of the KV cache that may hold prefixes no running request uses; None: "
        "on CPU those of one request of max_model_len, at most an eighth of the KV cache; on CUDA "
        "all of it",
    )
    enable_chunked_prefill: bool = Field(
        default=True,
        description="whether to compute a long prompt in chunks over several steps, together with "
        "other requests",
    )
    limit_mm_per_prompt: MediaLimits | None = Field(
        default=None,
        description='upper bound on media items in one prompt for each kind, such as {"image": '
        "100}; None, or a kind that is not named: 1",
    )
    mm_processor_kwargs: Mapping[str, Any] | None = Field(
        default=None,
        description="dict of options for the model's media processors, such as bounds on pixels or "
        "frames; None: the checkpoint's own",
    )
    image_tokens: Budget = Field(default="full", description=IMAGE_TOKENS)
    video_tokens: Budget = Field(default="full", description="the same of a video")
    encoder_cache_memory: int | None = Field(
        default=None,
        ge=1,
        description="bytes for embeddings of images and videos, kept for the next prompt with the "
        "same item; None: 256 MiB on CPU, 1 GiB on CUDA; with cross attention one item for each "
        "request, within a quarter of the memory",
    )
    num_intake_threads: int | None = Field(
        default=None,
        ge=1,
        description="number of threads that read media and tokenize prompts while the engine "
        "computes; None: one for each CPU, at most 8",
    )
    allowed_media_root: Path | None = Field(
        default=None,
        description="folder that local media must lie in, with links resolved; None: any file that "
        "the process can read",
    )
    max_media_bytes: int = Field(
        default=256 * 2**20,
        ge=1,
        description="upper bound on the bytes of one image or video file",
    )
    max_image_pixels: int = Field(
        default=178_956_970,
        ge=1,
        description="upper bound on the pixels (width times height) of one image or frame, read "
        "from the header before it is decoded",
    )
    allow_media_urls: bool = Field(
        default=False,
        description="whether media may be fetched from http(s) URLs of any public host",
    )
    allowed_media_domains: Domains = Field(
        default=(),
        description="hosts whose http(s) URLs may be fetched; *.example.com stands for every host "
        "below example.com; empty: none, unless allow_media_urls is set",
    )
    allow_private_media_addresses: bool = Field(
        default=False,
        description="whether the hosts of allowed_media_domains may have private addresses or be "
        "this machine",
    )
    allowed_media_schemes: Schemes = Field(
        default=(),
        description="URL schemes of object stores that media may be read from, such as s3, gs, az "
        "or hf; empty: none",
    )
    media_fetch_timeout: float = Field(
        default=30.0,
        gt=0,
        le=86400,
        description="seconds that fetching one media item may take, all retries included",
    )
    max_video_seconds: float = Field(
        default=4 * 3600.0, gt=0, description="upper bound on the length of one video, in seconds"
    )
    max_video_frames: int = Field(
        default=4096, ge=1, description="upper bound on the frames that are used of one video"
    )
    media_isolation: Literal["auto", "thread", "process"] = Field(
        default="auto",
        description="where media are decoded: in threads, or in processes that can be killed; "
        "auto: videos in processes, images in threads",
    )
    media_timeout: float = Field(
        default=60.0,
        gt=0,
        le=86400,
        description="seconds that decoding or processing one media item may take",
    )
    media_process_memory: int = Field(
        default=4 * 2**30,
        ge=2**28,
        description="upper bound on the memory of one decoding process, in bytes",
    )
    reasoning_parser: str | None = Field(
        default=None,
        description="name of the parser that separates reasoning from the answer; auto: the one of "
        "the model's family, if its chat template reasons; None: no parser",
    )
    tool_call_parser: str | None = Field(
        default=None,
        description="name of the parser that extracts tool calls from the text; auto: the one of "
        "the model's family; None: no parser",
    )
    chat_template: str | None = Field(
        default=None,
        description="a Jinja template, or a path to one, for chat; None: the checkpoint's own",
    )
    enable_logprob: bool = Field(
        default=True,
        description="whether requests may have log-probabilities; False is max_logprobs=0",
    )
    max_logprobs: int = Field(
        default=20,
        ge=-1,
        description="upper bound on `logprobs` and `prompt_logprobs` of a request; -1: no bound",
    )
    guided_decoding_backend: GuidedDecodingBackend = Field(
        default="auto",
        description="whether requests may have `guided_decoding`: auto uses llguidance, which must "
        "be installed once a request needs it; off refuses them. The names of FastDeploy's "
        "libraries are accepted with a warning and mean auto",
    )
    guided_decoding_timeout: float = Field(
        default=5.0,
        gt=0,
        le=86400,
        description="seconds after which a constraint that still compiles is refused",
    )
    seed: int | None = Field(
        default=0,
        ge=0,
        description="base of the seeds of requests that have none of their own; each request gets "
        "another one; None: a number that the system draws, which `llm.runtime.seed` holds, "
        "so that the run can be repeated",
    )
    early_stop_config: EarlyStopParams | None = Field(
        default=None,
        description="EarlyStopParams, or a dict with their values: ends texts that run away; "
        "enable_early_stop=True gives it its defaults, False switches it off; None: off",
    )
    logits_processors: Names = Field(
        default=(),
        description="names of logits processors from plugins, in the order in which they change "
        "the logits of those requests whose `logits_processors_args` have one of their arguments",
    )
    num_threads: int | None = Field(
        default=None,
        ge=1,
        description="number of CPU threads that compute; None: as many as the program has set for "
        "torch or OpenMP, else one for each core (SMT siblings not counted), within the CPUs and a "
        "container's share of CPU time",
    )
    cpu_affinity: Literal["auto"] | tuple[NonNegativeInt, ...] | None = Field(
        default=None,
        description="binds each compute thread to one CPU: auto to one of each core, a list of CPU "
        "numbers to these; None: the system schedules them",
    )
    numa_node: int | None = Field(
        default=None,
        ge=0,
        description="NUMA node whose cores and memory are used; None: any, but several engines or "
        "ranks have one each where they come out even",
    )
    native_kernels: bool | None = Field(
        default=None,
        description="whether to use the C++ kernels on CPU, built on first use; None: where a "
        "compiler is found; False: plain torch computes the same, on CUDA without Triton kernels "
        "too",
    )
    cpu_level: CpuLevel | None = Field(
        default=None,
        description="the instruction sets that the C++ kernels for CPUs use; None: the best that "
        "this processor executes. A lower level shows how fast another processor would be; torch's "
        "own operations keep theirs",
    )
    deterministic: bool = Field(
        default=False,
        description="whether to promise that the tokens and log-probabilities of a prompt with a "
        "seed are the same bits whatever is computed with it; needs a CPU, the C++ kernels and a "
        "model family that promises it, else refused",
    )
    speculative: Literal["ngram", "mtp"] | None = Field(
        default=None,
        description="a step tries up to 7 tokens, where that is faster; the answers stay the same. "
        "ngram: those that followed the last ones earlier in the text; mtp: those that the "
        "checkpoint's own draft layer guesses; None: it does not",
    )
    enforce_eager: bool = Field(
        default=False,
        description="whether to run without CUDA graphs: starts faster, decodes more slowly; no "
        "meaning on CPU",
    )
    quiet: bool = Field(
        default=False,
        description="whether to leave out the lines on stderr after loading: the dtype where it is "
        "auto, and the number of KV cache blocks (total_block_num)",
    )
    trust_remote_code: NoCode = Field(
        default=False,
        description="has no effect: code from checkpoints is never run; True warns",
    )
    attention_backend: str = Field(
        default="auto",
        description="name of an attention backend: flash-attn-3, flash-attn-4, flash-attn, "
        "torch-varlen or triton on CUDA, native on CPU, reference anywhere, or one of a plugin; "
        "auto: that of the highest priority that can serve the model here",
    )

    @field_validator("seed", mode="before")
    @classmethod
    def _draw_seed(cls, value: Any) -> Any:
        return secrets.randbelow(MAX_SEED + 1) if value is None else value

    @model_validator(mode="before")
    @classmethod
    def _read_early_stop(cls, values: Any) -> Any:
        return read_early_stop(values)

    @model_validator(mode="after")
    def _private_addresses_need_names(self) -> Self:
        if self.allow_private_media_addresses and not self.allowed_media_domains:
            raise ValueError(
                "allow_private_media_addresses needs allowed_media_domains: name the hosts of the "
                "private network"
            )
        return self

    @model_validator(mode="after")
    def _groups_are_of_codes(self) -> Self:
        own = FORMATS.get(self.quantization or "")
        if self.quantization_group_size is not None and (own is None or own.group_size is None):
            grouped = names_of(row for row in FORMATS.values() if row.group_size is not None)
            raise ValueError(
                f"quantization_group_size needs a quantization that has groups ({grouped}), and "
                f"quantization is {self.quantization!r}"
            )
        return self

    @classmethod
    def from_options(cls, model: str | PathLike[str], options: Mapping[str, Any]) -> EngineConfig:
        """Makes the config of `LLM(model, **options)`."""
        return cls(model=os.fspath(model) if isinstance(model, PathLike) else model, **options)
