"""Parakeet: speech to text, by an encoder of mel frames each of which says one token, none or
several: CTC, RNN-T and TDT."""

from __future__ import annotations

from mmdeploy_llm.hooks import MediaProcessorSpec, ModelSpec, hookimpl

PACKAGE = "mmdeploy_llm_plugins.parakeet"


@hookimpl
def provide_models() -> tuple[ModelSpec, ...]:
    """Returns a spec for each way in which tokens are found."""
    return tuple(
        ModelSpec(
            name=f"parakeet_{way.lower()}",
            architectures=(f"ParakeetFor{way}",),
            factory=f"{PACKAGE}.model:ParakeetFor{way}",
            encoder=f"{PACKAGE}.prompts:ParakeetPrompts",
            speech=f"{PACKAGE}.speech:ParakeetSpeech",
            question=" ",
            media=("audio",),
            sampling={"temperature": 0.0},
        )
        for way in ("CTC", "RNNT", "TDT")
    )


@hookimpl
def provide_media_processors() -> tuple[MediaProcessorSpec, ...]:
    """Returns the spec for sounds."""
    return (
        MediaProcessorSpec(
            name="parakeet-audio",
            kind="audio",
            factory=f"{PACKAGE}.sound:ParakeetSounds",
            models=tuple(spec.name for spec in provide_models()),
        ),
    )
