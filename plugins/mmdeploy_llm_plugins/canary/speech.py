"""How `transcribe` asks Canary and Cohere ASR. Their answers have no times: Canary's authors align
them by another model, and transformers' prompts ask for none."""

from __future__ import annotations

from mmdeploy_llm_processors.from_transformers.loading import extractor_fields

from mmdeploy_llm.errors import RequestError
from mmdeploy_llm.hooks import Checkpoint
from mmdeploy_llm_plugins.encoder_decoder.speech import RATE, Untimed

from .prompts import CanaryPrompts, CohereAsrPrompts

SECONDS = 30.0  # heard at once, where the checkpoint's files do not say it


class CanarySpeech(Untimed):
    """See hooks.SpeechRules."""

    prompts: type[CanaryPrompts] = CanaryPrompts

    def __init__(self, checkpoint: Checkpoint) -> None:
        fields = extractor_fields(checkpoint) or {}
        self._prompts = self.prompts(checkpoint)
        self.rate = int(fields.get("sampling_rate", RATE))
        self.seconds = float(fields.get("max_audio_clip_s", SECONDS))

    def prompt(self, language: str | None, task: str, before: str) -> str:
        """Returns the languages. Raises RequestError for what the model cannot be asked."""
        if task == "translate" and not self._prompts.translates:
            raise RequestError("this model cannot translate; leave the task out")
        spoken = "" if language is None else f"<|{language}|>"
        asked = f"{before}{spoken}{'<|en|>' * (task == 'translate' and bool(spoken))}"
        self._prompts.asked(asked)
        return asked


class CohereAsrSpeech(CanarySpeech):
    """See hooks.SpeechRules."""

    prompts = CohereAsrPrompts
