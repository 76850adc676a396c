"""How Moonshine's answers are read: they are words without times, so a window is one line."""

from __future__ import annotations

from mmdeploy_llm.errors import RequestError
from mmdeploy_llm.hooks import Checkpoint
from mmdeploy_llm_plugins.encoder_decoder.speech import RATE, Untimed

from .sound import longest_of

SECONDS = 30.0  # of the longest sounds that the published ones were trained on


class MoonshineSpeech(Untimed):
    """See hooks.SpeechRules."""

    seconds = SECONDS

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.rate = int(checkpoint.preprocessor.get("sampling_rate", RATE))
        if hasattr(checkpoint.config, "encoder_config"):  # of Moonshine Streaming
            self.seconds = min(SECONDS, longest_of(checkpoint.config) / self.rate)

    def prompt(self, language: str | None, task: str, before: str) -> str:
        """Returns an empty question. Raises RequestError for what the model cannot be asked."""
        if language is not None:
            raise RequestError(
                f"a moonshine checkpoint knows one language and is not asked for {language!r:.40}; "
                "leave the language out, or take the checkpoint of that language"
            )
        if task != "transcribe":
            raise RequestError("a moonshine model cannot translate; leave the task out")
        if before:
            raise RequestError("a moonshine model reads no words before a sound; leave them out")
        return " "
