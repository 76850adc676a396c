"""How Canary and Cohere ASR read a prompt: tokens for language, task and punctuation begin the
answer, as transformers' processors of these families write them.

    "<|de|>"                     German, with capitals and punctuation
    "<|de|><|nopnc|>"            without
    "<|de|><|en|>"               from German to English (Canary)
    "<|startoftranscript|>..."   exactly these tokens
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence

from transformers.models.canary.processing_canary import LANGUAGE_CODE_TO_NAME
from transformers.models.cohere_asr.processing_cohere_asr import LANGUAGES
from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

from mmdeploy_llm.errors import CheckpointError, RequestError
from mmdeploy_llm.hooks import Checkpoint
from mmdeploy_llm_plugins.encoder_decoder.prompts import TOKENIZER, BegunByText, setting, vocabulary

START = "<|startoftranscript|>"
ASKED = (
    "<|startofcontext|><|startoftranscript|><|emo:undefined|><|{source}|><|{target}|><|{marks}|>"
    "<|noitn|><|notimestamp|><|nodiarize|>"
)
MARKS = ("pnc", "nopnc")  # with and without capitals and punctuation
WORD = re.compile(r"<\|([^|<>]*)\|>")


class CanaryPrompts(BegunByText):
    """See hooks.EncoderPrompts. Raises CheckpointError where nothing says how a decoder begins.

    languages: codes that transformers' processor takes. translates: whether the answer may be in
    another than is spoken. lead: the token before the others; "": none.
    """

    item, marker = "sound", "<|audio|>"
    languages: Collection[str] = tuple(LANGUAGE_CODE_TO_NAME)
    translates, lead = True, ""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(_start(checkpoint))
        self._lead = (_token_id(checkpoint, self.lead),) if self.lead else ()

    def begin(
        self, text: str | None, ids: Sequence[int], encode: Callable[[str], list[int]]
    ) -> tuple[int, ...]:
        """Returns the tokens with which the answer begins. Raises RequestError for what the model
        cannot be asked."""
        if text is None or START in text:
            return super().begin(text, ids, encode)
        asked = self.asked(text.replace(self.marker, ""))
        own = encode(asked)
        if len(own) != len(WORD.findall(asked)):
            raise RequestError(
                f"the vocabulary of this checkpoint has not all of {asked}, with which it is asked "
                "in this language; take another language or checkpoint"
            )
        return super().begin(None, (*self._lead, *own), encode)

    def asked(self, text: str) -> str:
        """Returns the tokens that ask what the marks of a text say. Raises RequestError for words
        and marks that the model does not know, and where no language is given."""
        if words := WORD.sub("", text).strip():
            raise RequestError(
                f"this model reads no words before a sound, found {words!r:.60}; a prompt is a "
                "language such as '<|en|>'"
            )
        found = [name.strip().lower() for name in WORD.findall(text)]
        marks = [name for name in found if name in MARKS]
        spoken = [self._language(name) for name in found if name not in MARKS]
        if not spoken:
            raise RequestError(
                "this model does not recognize the language; give it: "
                f"{', '.join(sorted(self.languages))}"
            )
        source, target = spoken[0], spoken[-1]
        if len(marks) > 1 or len(spoken) > 2:
            raise RequestError(
                f"give a language, and at most one to translate to and one of {', '.join(MARKS)}; "
                f"the prompt has {', '.join(found)}"
            )
        if source != target and not self.translates:
            raise RequestError(f"this model cannot translate, from {source} to {target}; give one")
        return ASKED.format(source=source, target=target, marks=marks[0] if marks else MARKS[0])

    def _language(self, name: str) -> str:
        """Returns the code of a language by its code or English name."""
        code = str(TO_LANGUAGE_CODE.get(name, name))
        if code not in self.languages:
            raise RequestError(
                f"{name!r:.40} is no language that this model knows; give one of "
                f"{', '.join(sorted(self.languages))}"
            )
        return code


class CohereAsrPrompts(CanaryPrompts):
    """The prompts of Cohere ASR, which begin with the token of an empty word."""

    languages = LANGUAGES
    translates, lead = False, "▁"


def _start(checkpoint: Checkpoint) -> int:
    """Returns the first token of the decoder, as transformers' `generate` chooses it."""
    for name in ("decoder_start_token_id", "bos_token_id"):
        found = setting(checkpoint, checkpoint.config, name)
        if isinstance(found, int):
            return found
    raise CheckpointError(
        "neither generation_config.json nor config.json has decoder_start_token_id or "
        "bos_token_id, with which the decoder begins"
    )


def _token_id(checkpoint: Checkpoint, token: str) -> int:
    """Returns the id of a token by its own name, which no text may encode to. Raises
    CheckpointError for a vocabulary without it."""
    ids = vocabulary(checkpoint)
    if token not in ids:
        raise CheckpointError(
            f"{TOKENIZER} has no token {token!r}, with which this model is asked; take the file of "
            "the checkpoint's authors"
        )
    return ids[token]
