"""Canary and Cohere ASR: speech to text, by a FastConformer encoder and a decoder that is told the
language."""

from __future__ import annotations

from mmdeploy_llm.hooks import MediaProcessorSpec, ModelSpec, hookimpl

PACKAGE = "mmdeploy_llm_plugins.canary"
# name -> the begin of the names of its classes, here and, but for prompts and sounds, transformers'
FAMILIES = {"canary": "Canary", "cohere_asr": "CohereAsr"}


@hookimpl
def provide_models() -> tuple[ModelSpec, ...]:
    """Returns a spec for each family."""
    return tuple(
        ModelSpec(
            name=name,
            architectures=(f"{own}ForConditionalGeneration",),
            factory=f"{PACKAGE}.model:{own}ForConditionalGeneration",
            encoder=f"{PACKAGE}.prompts:{own}Prompts",
            speech=f"{PACKAGE}.speech:{own}Speech",
            tiny=f"{PACKAGE}.tiny:{name.upper()}",
            question="<|en|>",
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
