"""How `transcribe` asks models that hear and chat: as transformers' processors of these families
do, or as its documentation does where a processor does not say it. A window is one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers
from mmdeploy_llm_processors.from_transformers.loading import PROCESSOR_FILE, extractor_fields
from transformers.audio_utils import resolve_language
from transformers.models.qwen3_asr.processing_qwen3_asr import LANGUAGE_CODE_TO_NAME
from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

from mmdeploy_llm.errors import RequestError, UnsupportedMediaError
from mmdeploy_llm.hooks import Checkpoint, HeardText
from mmdeploy_llm_plugins.encoder_decoder.speech import RATE, Untimed

SECONDS = 30.0  # heard at once, though these models take more: a window has no times within it
MAX_TOKENS = 1024  # of an answer: three times what the fastest speech of a window needs


class ChatSpeech(Untimed):
    """See hooks.TextRules. A family says its question, and whether it comes after the sound.

    question: of a checkpoint whose processor_config.json has no default_transcription_prompt.
    """

    seconds, max_tokens = SECONDS, MAX_TOKENS
    question = ""
    is_sound_first = True

    def __init__(self, checkpoint: Checkpoint) -> None:
        fields = extractor_fields(checkpoint) or {}
        self.rate = int(fields.get("sampling_rate", RATE))
        own = checkpoint.read_json(PROCESSOR_FILE).get("default_transcription_prompt")
        self._question = own if isinstance(own, str) and self.question else self.question

    def prompt(self, language: str | None, task: str, before: str) -> str | Mapping[str, Any]:
        """Returns the conversation. Raises RequestError for what the family is not asked."""
        if task != "transcribe":
            raise RequestError("this model is not asked for translations; leave the task out")
        return self.asked(language, before)

    def asked(self, language: str | None, before: str) -> str | Mapping[str, Any]:
        """Returns the question after or before the sound."""
        if language is not None:
            raise RequestError(
                "this model recognizes the language and is not told it; leave it out"
            )
        if before:
            raise RequestError("this model is given no words before a sound; leave them out")
        parts = [{"type": "audio"}]
        if self._question:
            parts.insert(int(self.is_sound_first), {"type": "text", "text": self._question})
        return {"messages": [{"role": "user", "content": parts}]}

    def cleaned(self, text: str) -> HeardText:
        """Returns the text as it is."""
        return HeardText(words=text, language=None)


class GlmAsrSpeech(ChatSpeech):
    """Asks as GlmAsrProcessor.apply_transcription_request does."""

    question = "Please transcribe this audio into text"


class GraniteSpeechSpeech(ChatSpeech):
    """Asks as the page of Granite Speech in transformers' documentation does, under "Speech-to-Text
    with Chat Template"."""

    question = "Transcribe the following audio:"


class GraniteSpeechPlusSpeech(ChatSpeech):
    """Asks as the page of Granite Speech Plus in transformers' documentation does for words alone
    (ASR_PROMPT)."""

    question = " can you transcribe the speech into a written format?"


class OmniASRSpeech(ChatSpeech):
    """Asks as OmniASRProcessor.apply_transcription_request does without a language: the chat
    template says the rest."""


class AudioFlamingo3Speech(ChatSpeech):
    """Asks as AudioFlamingo3Processor.apply_transcription_request does, and reads answers as its
    `decode` with strip_prefix=True."""

    question = "Transcribe the input speech."
    is_sound_first = False
    prefixes = (
        "The spoken content of the audio is",
        "The transcription of the audio is",
        "The content of the input audio is",
    )

    def cleaned(self, text: str) -> HeardText:
        """Returns what stands in the quotes after the words with which the model begins."""
        words = text.strip()
        begin = next((one for one in self.prefixes if words.startswith(one)), "")
        words = words.removeprefix(begin).strip().removesuffix(".").strip()
        if len(words) > 1 and words[0] == words[-1] and words[0] in "'\"":
            words = words[1:-1].strip()
        return HeardText(words=words, language=None)


class Qwen3ASRSpeech(ChatSpeech):
    """Asks as Qwen3ASRProcessor.apply_transcription_request does: words to be spelled so are the
    system's message, and a language begins the answer, which is read as its `decode` does."""

    mark = "<asr_text>"

    def asked(self, language: str | None, before: str) -> Mapping[str, Any]:
        """Returns the conversation. Raises RequestError for a language that the model does not
        know."""
        messages: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "audio"}]}]
        if before:
            messages.insert(0, {"role": "system", "content": before})
        if language is None:
            return {"messages": messages}
        try:
            name = resolve_language(language.lower(), LANGUAGE_CODE_TO_NAME, return_code=False)
        except ValueError as error:
            raise RequestError(f"{error}") from error
        messages.append({"role": "assistant", "content": f"language {name}{self.mark}"})
        going_on = {"continue_final_message": True, "add_generation_prompt": False}
        return {"messages": messages, "chat_template_kwargs": going_on}

    def cleaned(self, text: str) -> HeardText:
        """Divides "language English<asr_text>words"."""
        begin, found, words = text.partition(self.mark)
        if not found:
            return HeardText(words=text, language=None)
        name = begin.strip().partition("\n")[0].removeprefix("language ").strip()
        codes = {known: code for code, known in LANGUAGE_CODE_TO_NAME.items()}
        return HeardText(words=words, language=codes.get(name))


class VoxtralSpeech(ChatSpeech):
    """Asks as VoxtralProcessor.apply_transcription_request does by mistral-common: the language
    stands after the instruction. Raises UnsupportedMediaError for a vocabulary without the token
    that asks."""

    task, begin = "[TRANSCRIBE]", "[INST][BEGIN_AUDIO][AUDIO][/INST]"

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        vocabulary = transformers.AutoTokenizer.from_pretrained(
            checkpoint.folder, local_files_only=True, trust_remote_code=False
        ).get_vocab()
        if self.task not in vocabulary:
            raise UnsupportedMediaError(
                f"the tokenizer of this checkpoint has no token {self.task}, by which it is asked "
                "to transcribe"
            )

    def asked(self, language: str | None, before: str) -> str:
        """Returns the prompt. Raises RequestError for words before, and an unknown language."""
        if before:
            raise RequestError("this model is given no words before a sound; leave them out")
        if language is None:
            return f"{self.begin}{self.task}"
        code = TO_LANGUAGE_CODE.get(language.lower(), language.lower())
        if code not in TO_LANGUAGE_CODE.values():
            raise RequestError(f"{language!r:.40} is no language by code or English name")
        return f"{self.begin}lang:{code}{self.task}"
