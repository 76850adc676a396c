"""Parakeet: speech to text, by an encoder of mel frames each of which says one token, none or
several: CTC, RNN-T and TDT. Nemotron ASR is RNN-T and Granite Speech 5 CTC on other encoders."""

from __future__ import annotations

from mmdeploy_llm.hooks import MediaProcessorSpec, ModelSpec, hookimpl

PACKAGE = "mmdeploy_llm_plugins.parakeet"
# Classes of prompts and of speech, file and class of sounds.
PARAKEET = ("Parakeet", "Parakeet", "sound:Parakeet")
NEMOTRON = ("Parakeet", "Parakeet", "sound:Nemotron")
TOLD = ("Language", "Language", "sound:Nemotron")
GRANITE = ("Parakeet", "GraniteSpeech5", "granite_sound:GraniteSpeech5")
FAMILIES = {  # name -> file and class of the model, which is transformers' name; then these
    "parakeet_ctc": ("model:ParakeetForCTC", *PARAKEET),
    "parakeet_rnnt": ("model:ParakeetForRNNT", *PARAKEET),
    "parakeet_tdt": ("model:ParakeetForTDT", *PARAKEET),
    "nemotron_asr_streaming": ("nemotron:NemotronAsrStreamingForRNNT", *NEMOTRON),
    "nemotron3_5_asr": ("nemotron:Nemotron3_5AsrForRNNT", *TOLD),
    "granite_speech5": ("granite:GraniteSpeech5ForCTC", *GRANITE),
}


@hookimpl
def provide_models() -> tuple[ModelSpec, ...]:
    """Returns a spec for each class of transformers."""
    return tuple(
        ModelSpec(
            name=name,
            architectures=(own.partition(":")[2],),
            factory=f"{PACKAGE}.{own}",
            encoder=f"{PACKAGE}.prompts:{prompts}Prompts",
            speech=f"{PACKAGE}.speech:{speech}Speech",
            question=" ",
            media=("audio",),
            sampling={"temperature": 0.0},
        )
        for name, (own, prompts, speech, _) in FAMILIES.items()
    )


@hookimpl
def provide_media_processors() -> tuple[MediaProcessorSpec, ...]:
    """Returns the specs for sounds."""
    kinds = dict.fromkeys(own[-1] for own in FAMILIES.values())
    return tuple(
        MediaProcessorSpec(
            name=f"{kind.partition(':')[2].lower()}-audio",
            kind="audio",
            factory=f"{PACKAGE}.{kind}Sounds",
            models=tuple(name for name, own in FAMILIES.items() if own[-1] == kind),
        )
        for kind in kinds
    )
