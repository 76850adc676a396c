"""Parakeet: speech to text, by an encoder of mel frames each of which says one token, none or
several: CTC, RNN-T and TDT. Nemotron ASR is RNN-T on another such encoder."""

from __future__ import annotations

from mmdeploy_llm.hooks import MediaProcessorSpec, ModelSpec, hookimpl

PACKAGE = "mmdeploy_llm_plugins.parakeet"
# name -> class of transformers and here, file, begin of the names of its prompts and speech, sounds
FAMILIES = {
    "parakeet_ctc": ("ParakeetForCTC", "model", "Parakeet", "Parakeet"),
    "parakeet_rnnt": ("ParakeetForRNNT", "model", "Parakeet", "Parakeet"),
    "parakeet_tdt": ("ParakeetForTDT", "model", "Parakeet", "Parakeet"),
    "nemotron_asr_streaming": ("NemotronAsrStreamingForRNNT", "nemotron", "Parakeet", "Nemotron"),
    "nemotron3_5_asr": ("Nemotron3_5AsrForRNNT", "nemotron", "Language", "Nemotron"),
}


@hookimpl
def provide_models() -> tuple[ModelSpec, ...]:
    """Returns a spec for each class of transformers."""
    return tuple(
        ModelSpec(
            name=name,
            architectures=(own,),
            factory=f"{PACKAGE}.{file}:{own}",
            encoder=f"{PACKAGE}.prompts:{rules}Prompts",
            speech=f"{PACKAGE}.speech:{rules}Speech",
            question=" ",
            media=("audio",),
            sampling={"temperature": 0.0},
        )
        for name, (own, file, rules, _) in FAMILIES.items()
    )


@hookimpl
def provide_media_processors() -> tuple[MediaProcessorSpec, ...]:
    """Returns the specs for sounds."""
    kinds = dict.fromkeys(own[-1] for own in FAMILIES.values())
    return tuple(
        MediaProcessorSpec(
            name=f"{kind.lower()}-audio",
            kind="audio",
            factory=f"{PACKAGE}.sound:{kind}Sounds",
            models=tuple(name for name, own in FAMILIES.items() if own[-1] == kind),
        )
        for kind in kinds
    )
