"""EngineConfig: the options of an LLM as the user gave them. None and "auto" are decided later, by
`runtime_config.resolve`.

This is the one table of options. A field is an option: its type, default, bounds and sentence. The
signatures of LLM and others, the TypedDict for editors, NAME=VALUE of --engine, and docs/options.md
are made of it. With a Flag the program has an option of its own in the groups that list its name
(engine_flags.py is written of them: run tests/test_option_dicts.py after a change).
The title of its class is its heading in docs/options.md.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, NonNegativeInt, field_validator, model_validator

from mmdeploy_llm.values.params import MAX_SEED, EarlyStopParams, FrozenParams, read_early_stop

from .flags import Flag
from .plugin_choice import PluginChoice
from .types import (
    Adapters,
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


class ModelOptions(FrozenParams, defer_build=True):
    """The model, and how it is read."""

    title: ClassVar[str] = "Model"

    model: str = Field(
        description="a local folder or GGUF file (its vision tower is the file with mmproj in its "
        "name in the same folder), a model's id on the Hugging Face hub, or the name of a bundled "
        "model"
    )
    tokenizer: str | None = Field(
        default=None,
        description="folder, GGUF file or hub id of another tokenizer; None: the model's own",
    )
    revision: str | None = Field(
        default=None, description="branch, tag or commit on the hub; None: its main branch"
    )
    dtype: Annotated[
        DType,
        Flag(
            "Number format of weights: auto, bfloat16, float16 or float32.",
            metavar="TYPE",
            is_rare=True,
            default="auto",
        ),
    ] = Field(
        default="auto",
        description="dtype of weights and activations: bfloat16, float16 or float32; auto: as in "
        "the checkpoint, with bfloat16 for a float16 checkpoint on a CPU; what it chose and what "
        "computes it is said in one line at load",
    )
    quantization: Annotated[
        Quantization | None,
        Flag(f"{names_of(FORMATS.values())}: weights in 8 or 4 bits."),
    ] = Field(
        default=None,
        description=f"rounds loaded weights: {described()}; None: as stored",
    )
    quantization_group_size: GroupSize | None = Field(
        default=None,
        description="columns of a row that share a scale: a multiple of 16, or -1 for the whole "
        "row; fewer are nearer to the unrounded weights and take more memory; None: 64 in 4 bits, "
        "128 in 8",
    )
    load_format: Literal["auto", "safetensors", "dummy"] = Field(
        default="auto",
        description="auto reads the checkpoint's safetensors files, or the GGUF file that is named "
        "or alone in the folder; safetensors only the former; dummy fills the weights with random "
        "numbers, for measurements of speed",
    )
    chat_template: str | None = Field(
        default=None,
        description="a Jinja template, or a path to one, for chat; None: the checkpoint's own",
    )
    reasoning_parser: Annotated[
        str | None,
        Flag(
            "How to separate reasoning from the answer: auto (the model's own parser), none, or "
            "the name of a parser that `mmdeploy-llm plugins` lists.",
            metavar="NAME",
            is_rare=True,
            default="auto",
        ),
    ] = Field(
        default=None,
        description="name of the parser that separates reasoning from the answer; auto: the one of "
        "the model's family, if its chat template reasons; None: no parser",
    )
    tool_call_parser: Annotated[
        str | None,
        Flag(
            "How to extract tool calls from the answer: auto (the model's own parser), none, or "
            "the name of a parser.",
            metavar="NAME",
            is_rare=True,
            default="auto",
        ),
    ] = Field(
        default=None,
        description="name of the parser that extracts tool calls from the text; auto: the one of "
        "the model's family; None: no parser",
    )
    trust_remote_code: NoCode = Field(
        default=False,
        description="has no effect: code from checkpoints is never run; True warns",
    )
    quiet: bool = Field(
        default=False,
        description="whether to leave out the lines on stderr after loading: the dtype where it is "
        "auto, and the number of KV cache blocks (total_block_num)",
    )

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


class DeviceOptions(FrozenParams, defer_build=True):
    """The devices that compute, and their threads."""

    title: ClassVar[str] = "Device and threads"

    device: Annotated[
        Device,
        Flag(
            "Where to compute: auto, cpu, cuda or cuda:N.",
            metavar="NAME",
            is_rare=True,
            default="auto",
        ),
    ] = Field(
        default="auto",
        description="cpu, cuda or cuda:N; auto: cuda where torch finds a GPU, else cpu",
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
    attention_backend: str = Field(
        default="auto",
        description="name of an attention backend: flash-attn-3, flash-attn-4, flash-attn, "
        "torch-varlen or triton on CUDA, native on CPU, reference anywhere, or one of a plugin; "
        "auto: that of the highest priority that can serve the model here",
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
    enforce_eager: bool = Field(
        default=False,
        description="whether to run without CUDA graphs: starts faster, decodes more slowly; no "
        "meaning on CPU",
    )
    use_warmup: bool | None = Field(
        default=None,
        description="whether to compute one small step at start, so that the first request is not "
        "slower than the others; None: on CUDA, where much is prepared then; on a CPU the first "
        "request takes no longer than that step",
    )
    weight_cache: str | bool = Field(
        default=True,
        description="whether packed and rounded weights, config and tokenizer are kept in files, "
        "which the next start on a CPU maps; a path: the folder of these files, which only this "
        "user may write; off is False; True: ~/.cache/mmdeploy_llm/weights",
    )
    weight_cache_size: int = Field(
        default=32 * 2**30,
        ge=1,
        description="upper bound on the bytes of all files of weight_cache; those that were not "
        "used for longest are removed",
    )
    num_threads: Annotated[
        int | None,
        Flag("CPU threads for compute.  [default: one per core]", metavar="N", is_rare=True),
    ] = Field(
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
    num_intake_threads: int | None = Field(
        default=None,
        ge=1,
        description="number of threads that read media and tokenize prompts while the engine "
        "computes; None: one for each CPU, at most 8",
    )

    @field_validator("weight_cache", mode="before")
    @classmethod
    def _path_as_text(cls, value: Any) -> Any:
        if value == "off":
            return False
        return fspath(value) if isinstance(value, PathLike) else value

    @field_validator("weight_cache")
    @classmethod
    def _folder_has_a_name(cls, value: str | bool) -> str | bool:
        if value == "":
            raise ValueError("the path of the folder is empty; False switches the cache off")
        return value


class SizeOptions(FrozenParams, defer_build=True):
    """How much is computed at once, and in how much memory."""

    title: ClassVar[str] = "Length, batches and memory"

    max_model_len: int | None = Field(
        default=None,
        ge=2,
        description="upper bound on the tokens of one request, prompt and output together; None: "
        "what the model was made for, or what the KV cache holds if that is less",
    )
    max_num_seqs: Annotated[
        int | None,
        Flag("Upper limit of items that run at the same time.", metavar="N", is_rare=True),
    ] = Field(
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
    enable_chunked_prefill: bool = Field(
        default=True,
        description="whether to compute a long prompt in chunks over several steps, together with "
        "other requests",
    )
    block_size: int | None = Field(
        default=None,
        ge=1,
        description="tokens in one block of the KV cache; None: what suits the attention backend "
        "(64; 128 with flash-attn 3 and 4, 256 with flash-attn 2 and torch-varlen, which need a "
        "multiple of 256)",
    )
    kv_cache_dtype: Annotated[
        CacheDType,
        Flag(
            "Number format of the KV cache. auto: the model's; int8, int4: about half and a "
            "quarter of the memory of bfloat16.",
            default="auto",
        ),
    ] = Field(
        default="auto",
        description="dtype of the KV cache; int8 and fp8 take half of bfloat16's memory, int4 "
        "takes 31 % of it: all on CUDA with Triton, int8 and int4 on CPU; auto: as dtype",
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
    gpu_memory_utilization: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="share of a GPU's memory that may be used, from 0 to 1; no meaning on CPU",
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
    encoder_cache_memory: int | None = Field(
        default=None,
        ge=1,
        description="bytes for embeddings of images and videos, kept for the next prompt with the "
        "same item; None: 256 MiB on CPU, 1 GiB on CUDA; with cross attention one item for each "
        "request, within a quarter of the memory",
    )


class MediaOptions(FrozenParams, defer_build=True):
    """The media of prompts."""

    title: ClassVar[str] = "Media"

    limit_mm_per_prompt: MediaLimits | None = Field(
        default=None,
        description='upper bound on media items in one prompt for each kind, such as {"image": '
        "100}; None, or a kind that is not named: 1",
    )
    image_tokens: Annotated[
        Budget,
        Flag(
            "Most tokens of a picture: a number, auto (what the model's authors use) or full.",
            metavar="N",
            default="auto",
        ),
    ] = Field(
        default="full",
        description="upper bound on the tokens of one image, from which the family's own rule "
        "follows; auto: what its authors use in their examples; full: what the checkpoint allows, "
        "as in transformers",
    )
    video_tokens: Annotated[
        Budget,
        Flag(
            "Most tokens of a video, as --image-tokens.", metavar="N", is_rare=True, default="auto"
        ),
    ] = Field(default="full", description="the same of a video")
    pixels: Annotated[
        Literal["square", "as-stored"],
        Flag(
            "Shape of videos whose pixels are not square, HDR, and colours that are not sRGB. "
            "square: as players and browsers show them; as-stored: as transformers reads them.",
            is_rare=True,
        ),
    ] = Field(
        default="square",
        description="shape of videos whose pixels are not square, HDR, and colours that are not "
        "sRGB (ICC profiles, codes in PNG and AVIF): `square` stretches, maps and converts them as "
        "players and browsers do; `as-stored` leaves all, as transformers does",
    )
    mm_processor_kwargs: Mapping[str, Any] | None = Field(
        default=None,
        description="dict of options for the model's media processors, such as bounds on pixels or "
        "frames; None: the checkpoint's own",
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
    allowed_media_root: Path | None = Field(
        default=None,
        description="folder that local media must lie in, with links resolved; None: any file that "
        "the process can read",
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

    @model_validator(mode="after")
    def _private_addresses_need_names(self) -> Self:
        if self.allow_private_media_addresses and not self.allowed_media_domains:
            raise ValueError(
                "allow_private_media_addresses needs allowed_media_domains: name the hosts of the "
                "private network"
            )
        return self


class AdapterOptions(FrozenParams, defer_build=True):
    """The LoRA adapters of an engine."""

    title: ClassVar[str] = "Adapters"

    adapters: Adapters = Field(
        default={},
        description='LoRA adapters by name: {"sql": "adapters/sql"}, each a PEFT folder or an id '
        "on the hub; a prompt names the one that it is computed with",
    )
    default_adapter: str = Field(
        default="",
        description='name of the adapter of prompts that name none; a prompt that names "" has the '
        "model alone; empty: the model alone",
    )
    max_adapters: int = Field(
        default=8,
        ge=1,
        description="upper bound on adapters in memory, and in one step; others are read again "
        "when a prompt needs them",
    )
    adapter_memory: int | None = Field(
        default=None,
        ge=1,
        description="bytes that adapters in memory may take together; None: what max_adapters take",
    )
    max_adapter_rank: int | None = Field(
        default=None,
        ge=1,
        description="upper bound on the rank of an adapter; None: any",
    )

    @model_validator(mode="after")
    def _the_default_is_known(self) -> Self:
        if (own := self.default_adapter) and own not in self.adapters:
            known = ", ".join(self.adapters) or "none"
            raise ValueError(
                f"default_adapter is {own!r}, which is not among adapters ({known}); give its "
                'folder too: adapters={"name": folder}, or --adapter name=folder'
            )
        return self


class AnswerOptions(FrozenParams, defer_build=True):
    """How answers are generated."""

    title: ClassVar[str] = "Answers"

    seed: int | None = Field(
        default=0,
        ge=0,
        description="base of the seeds of requests that have none of their own; each request gets "
        "another one; None: a number that the system draws, which `llm.runtime.seed` holds, "
        "so that the run can be repeated",
    )
    deterministic: bool = Field(
        default=False,
        description="whether to promise that the tokens and log-probabilities of a prompt with a "
        "seed are the same bits whatever is computed with it; needs a CPU, the C++ kernels and a "
        "model family that promises it, else refused",
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
    logits_processors: Names = Field(
        default=(),
        description="names of logits processors from plugins, in the order in which they change "
        "the logits of those requests whose `logits_processors_args` have one of their arguments",
    )
    early_stop_config: EarlyStopParams | None = Field(
        default=None,
        description="EarlyStopParams, or a dict with their values: ends texts that run away; "
        "enable_early_stop=True gives it its defaults, False switches it off; None: off",
    )
    speculative: Literal["ngram", "mtp"] | None = Field(
        default=None,
        description="a step tries up to 7 tokens, where that is faster; the answers stay the same. "
        "ngram: those that followed the last ones earlier in the text; mtp: those that the "
        "checkpoint's own draft layer guesses; None: it does not",
    )

    @field_validator("seed", mode="before")
    @classmethod
    def _draw_seed(cls, value: Any) -> Any:
        return secrets.randbelow(MAX_SEED + 1) if value is None else value

    @model_validator(mode="before")
    @classmethod
    def _read_early_stop(cls, values: Any) -> Any:
        return read_early_stop(values)


class EngineConfig(
    AnswerOptions,
    AdapterOptions,
    MediaOptions,
    SizeOptions,
    DeviceOptions,
    PluginChoice,
    ModelOptions,
    defer_build=False,
):
    """Every option of an engine. None and "auto" mean: decided from the model and the machine.

    Raises ConfigError for an unknown option (with what to write instead, where it is known) and for
    a value out of range. Warns of options that only a server has, or another engine, and leaves
    them out.
    """

    @classmethod
    def from_options(cls, model: str | PathLike[str], options: Mapping[str, Any]) -> EngineConfig:
        """Makes the config of `LLM(model, **options)`."""
        return cls(model=fspath(model) if isinstance(model, PathLike) else model, **options)
