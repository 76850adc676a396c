"""Moonshine: speech to text, by an encoder that reads the samples of a sound of any length."""

from __future__ import annotations

from mmdeploy_llm.hooks import MediaProcessorSpec, ModelSpec, hookimpl

PACKAGE = "mmdeploy_llm_plugins.moonshine"


@hookimpl
def provide_models() -> tuple[ModelSpec, ...]:
    """Returns the spec."""
    return (
        ModelSpec(
            name="moonshine",
            architectures=("MoonshineForConditionalGeneration",),
            factory=f"{PACKAGE}.model:MoonshineForConditionalGeneration",
            encoder=f"{PACKAGE}.prompts:MoonshinePrompts",
            speech=f"{PACKAGE}.speech:MoonshineSpeech",
            tiny=f"{PACKAGE}.tiny:MOONSHINE",
            question=" ",
            media=("audio",),
            sampling={"temperature": 0.0},
        ),
    )


@hookimpl
def provide_media_processors() -> tuple[MediaProcessorSpec, ...]:
    """Returns the spec for sounds."""
    return (
        MediaProcessorSpec(
            name="moonshine-audio",
            kind="audio",
            factory=f"{PACKAGE}.sound:MoonshineSounds",
            models=("moonshine",),
        ),
    )
