"""Moonshine: speech to text, by an encoder that reads the samples of a sound of any length."""

from __future__ import annotations

from mmdeploy_llm.hooks import MediaProcessorSpec, ModelSpec, hookimpl

PACKAGE = "mmdeploy_llm_plugins.moonshine"
# name -> the begin of the names of its classes, here and transformers'
FAMILIES = {"moonshine": "Moonshine", "moonshine_streaming": "MoonshineStreaming"}


@hookimpl
def provide_models() -> tuple[ModelSpec, ...]:
    """Returns a spec for each family."""
    return tuple(
        ModelSpec(
            name=name,
            architectures=(f"{own}ForConditionalGeneration",),
            factory=f"{PACKAGE}.model:{own}ForConditionalGeneration",
            encoder=f"{PACKAGE}.prompts:MoonshinePrompts",
            speech=f"{PACKAGE}.speech:MoonshineSpeech",
            tiny=f"{PACKAGE}.tiny:{name.upper()}",
            question=" ",
            media=("audio",),
            sampling={"temperature": 0.0},
        )
        for name, own in FAMILIES.items()
    )


@hookimpl
def provide_media_processors() -> tuple[MediaProcessorSpec, ...]:
    """Returns the specs for sounds."""
    return tuple(
        MediaProcessorSpec(
            name=f"{name}-audio",
            kind="audio",
            factory=f"{PACKAGE}.sound:{own}Sounds",
            models=(name,),
        )
        for name, own in FAMILIES.items()
    )
