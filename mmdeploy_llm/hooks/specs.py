"""The hooks. The verb of a name says how it is called: provide_ once at load, fetch_ until one
answers, on_ as a notification, extend_ by the command line program only.

No hook may have default values in its signature: pluggy 1.6 and 1.7 treat them differently.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pluggy

from mmdeploy_llm.hooks.objects.attention import AttentionBackendSpec
from mmdeploy_llm.hooks.objects.chat_parts import ChatPartSpec
from mmdeploy_llm.hooks.objects.logits import LogitsProcessorSpec
from mmdeploy_llm.hooks.objects.model_files import ModelFileSpec
from mmdeploy_llm.hooks.objects.reading import ReadingPreset
from mmdeploy_llm.hooks.objects.store import CorpusFormatSpec, OutputSinkSpec
from mmdeploy_llm.hooks.objects.weights import WeightFormatSpec
from mmdeploy_llm.messages import MediaRef
from mmdeploy_llm.values.outputs.metrics import EngineInfo, RequestRecord, StepStats

from .contracts import (
    MediaLimits,
    MediaProcessorSpec,
    ModelSpec,
    ReasoningParserSpec,
    ToolParserSpec,
)

if TYPE_CHECKING:
    import typer

PROJECT = "mmdeploy_llm"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def provide_models() -> Iterable[ModelSpec]:  # type: ignore[empty-body]
    """Returns the model families that this plugin can run. Called once, at load; must not import
    torch. A spec whose `refuses` gives a reason for a config leaves the model to the next plugin
    that serves it.

    .. versionadded:: 0.1
    """


@hookspec
def provide_reasoning_parsers() -> Iterable[ReasoningParserSpec]:  # type: ignore[empty-body]
    """Returns named parsers that split generated text into reasoning and content, for
    `LLM(reasoning_parser=...)`. Called once, at load.

    .. versionadded:: 0.1
    """


@hookspec
def provide_tool_parsers() -> Iterable[ToolParserSpec]:  # type: ignore[empty-body]
    """Returns named parsers that extract tool calls from generated text, for
    `LLM(tool_call_parser=...)`. Called once, at load.

    .. versionadded:: 0.1
    """


@hookspec
def provide_logits_processors() -> Iterable[LogitsProcessorSpec]:  # type: ignore[empty-body]
    """Returns named processors that change logits before a token is chosen, for
    `SamplingParams(logits_processors=...)`. Called once, at load; must not import torch.

    .. versionadded:: 0.1
    """


@hookspec
def provide_media_processors() -> Iterable[MediaProcessorSpec]:  # type: ignore[empty-body]
    """Returns processors that turn one kind of media into model inputs, for some model families or
    for all, and splitters of one kind into items of another. Called once, at load.

    .. versionadded:: 0.1
    """


@hookspec
def provide_reading_presets() -> Iterable[ReadingPreset]:  # type: ignore[empty-body]
    """Returns how models of OCR families are asked for the text of a page, for
    `mmdeploy-llm read`. Called once, at load.

    .. versionadded:: 0.1
    """


@hookspec
def provide_corpus_formats() -> Iterable[CorpusFormatSpec]:  # type: ignore[empty-body]
    """Returns formats of files whose rows a batch reads. Called once, at load; must not import what
    reads them.

    .. versionadded:: 0.1
    """


@hookspec
def provide_output_sinks() -> Iterable[OutputSinkSpec]:  # type: ignore[empty-body]
    """Returns formats in which a batch writes its records, chosen by the suffix of `--output` or by
    `--format`. Called once, at load; must not import what writes them.

    .. versionadded:: 0.1
    """


@hookspec
def provide_attention_backends() -> Iterable[AttentionBackendSpec]:  # type: ignore[empty-body]
    """Returns backends that compute attention over the paged KV cache, and what each can compute.
    Called once, at load; must not import torch. A backend of a priority above those built in
    computes wherever it can serve; others are named with `attention_backend=`.

    .. versionadded:: 0.1
    """


@hookspec
def provide_weight_formats() -> Iterable[WeightFormatSpec]:  # type: ignore[empty-body]
    """Returns formats in which checkpoints store weights in few bits, by the `quant_method` of
    their `quantization_config`. Called once, at load; must not import torch.

    .. versionadded:: 0.1
    """


@hookspec
def provide_model_files() -> Iterable[ModelFileSpec]:  # type: ignore[empty-body]
    """Returns formats of files that hold whole models, other than safetensors and GGUF. Called
    once, at load; must not import torch.

    .. versionadded:: 0.1
    """


@hookspec
def provide_chat_parts() -> Iterable[ChatPartSpec]:  # type: ignore[empty-body]
    """Returns types of content parts of chat messages, which become texts and media before the chat
    template. Called once, at load.

    .. versionadded:: 0.1
    """


@hookspec(firstresult=True)
def fetch_media(ref: MediaRef, limits: MediaLimits) -> bytes | None:
    """Returns the bytes of `ref`, a path or URL, or None to let another plugin try. Raises
    MediaError to refuse; any other exception or return type becomes the MediaError of that request,
    with the plugin's name. Called in several intake threads at once, in the reverse order of the
    plugins' names; implementations marked `@hookimpl(trylast=True)`, as the built-in ones, come
    after the others.

    .. versionadded:: 0.1
    """


@hookspec
def on_engine_start(info: EngineInfo) -> None:
    """The engine is ready for its first request. An `on_` hook that raises is logged once and not
    called again; the engine goes on.

    .. versionadded:: 0.1
    """


@hookspec
def on_step(stats: StepStats) -> None:
    """Called after every step, in the engine's loop: return quickly, never block.

    .. versionadded:: 0.1
    """


@hookspec
def on_request_finished(record: RequestRecord) -> None:
    """A request ended, for whatever reason. The record holds counts and times, no text.

    .. versionadded:: 0.1
    """


@hookspec
def on_engine_stop(info: EngineInfo) -> None:
    """The engine was closed.

    .. versionadded:: 0.1
    """


@hookspec
def extend_cli(app: typer.Typer) -> None:
    """Adds commands to the `mmdeploy-llm` program; built-in ones cannot be replaced. When it
    raises, a warning is logged, and its commands are missing.

    .. versionadded:: 0.1
    """
