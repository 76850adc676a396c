"""Whisper: speech to text, by an encoder of half a minute of sound and a decoder that attends to
it."""

from __future__ import annotations

from mmdeploy_llm.hooks import (
    LogitsProcessorSpec,
    MediaProcessorSpec,
    ModelFileSpec,
    ModelSpec,
    hookimpl,
)


@hookimpl
def provide_models() -> tuple[ModelSpec, ...]:
    """Returns the spec."""
    return (
        ModelSpec(
            name="whisper",
            architectures=("WhisperForConditionalGeneration",),
            factory="mmdeploy_llm_plugins.whisper.model:WhisperForConditionalGeneration",
            encoder="mmdeploy_llm_plugins.whisper.prompts:WhisperPrompts",
            speech="mmdeploy_llm_plugins.whisper.speech:WhisperSpeech",
            tiny="mmdeploy_llm_plugins.whisper.tiny:WHISPER",
            question=" ",
            media=("audio",),
            sampling={"temperature": 0.0},
        ),
    )


@hookimpl
def provide_model_files() -> tuple[ModelFileSpec, ...]:
    """Returns the formats in which other programs store Whisper."""
    return (
        ModelFileSpec(
            name="ctranslate2",
            factory="mmdeploy_llm_plugins.whisper.ctranslate2:CTranslate2Whisper",
            # The version, which is refused by its number where it is not the one that is read.
            first_bytes=tuple(bytes([version, 0, 0, 0]) for version in range(1, 16)),
            file_names=("model.bin",),
        ),
        ModelFileSpec(
            name="whisper.cpp",
            factory="mmdeploy_llm_plugins.whisper.ggml:GGMLWhisper",
            first_bytes=(b"lmgg",),
            file_names=("ggml-*.bin",),
        ),
    )


@hookimpl
def provide_media_processors() -> tuple[MediaProcessorSpec, ...]:
    """Returns the spec for sounds."""
    return (
        MediaProcessorSpec(
            name="whisper-audio",
            kind="audio",
            factory="mmdeploy_llm_plugins.whisper.sound:WhisperSounds",
            models=("whisper",),
        ),
    )


@hookimpl
def provide_logits_processors() -> tuple[LogitsProcessorSpec, ...]:
    """Returns the rules of languages, timestamps and tokens that are never written."""
    return (
        LogitsProcessorSpec(
            name="whisper",
            factory="mmdeploy_llm_plugins.whisper.rules:WhisperRules",
            arguments=("whisper",),
        ),
    )
