"""How Parakeet reads a prompt: a sound, and nothing besides. "<|timestamps|>" asks for the frames
of each token as `CompletionOutput.attention`; "<|de|>" tells Nemotron 3.5 ASR the language."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b

import torch
from mmdeploy_llm_processors.from_transformers.loading import PROCESSOR_FILE
from transformers.models.nemotron3_5_asr.processing_nemotron3_5_asr import DEFAULT_PROMPT_DICTIONARY
from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

from mmdeploy_llm.errors import CheckpointError, RequestError
from mmdeploy_llm.hooks import Checkpoint, EncoderPrompt, MediaInput
from mmdeploy_llm_plugins.encoder_decoder.prompts import one_item, setting

MARKER, TIMES = "<|audio|>", "<|timestamps|>"
HEADS = ((0, 0), (0, 1))  # the frames at which a token begins and ends
NAMED = re.compile(r"<\|(?!audio\||timestamps\|)([^|<>]*)\|>")
PROMPT_ID = "prompt_id"  # of a language, among the tensors of a sound
AUTO = "auto"  # the language is recognized
GREEDY = (
    "this model hears one answer in a sound, the likeliest token at each frame; leave it out, or "
    "take a model that writes, such as Whisper"
)


def blank_of(checkpoint: Checkpoint) -> int:
    """Returns the token of frames that say none, with which answers end."""
    config = checkpoint.config
    return int(getattr(config, "blank_token_id", config.pad_token_id))


class ParakeetPrompts:
    """See hooks.EncoderPrompts. Raises CheckpointError for a decoder that begins with another token
    than that of frames that say none."""

    has_places = False

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._blank = blank_of(checkpoint)
        start = setting(checkpoint, checkpoint.config, "decoder_start_token_id")
        if start is not None and start != self._blank:
            raise CheckpointError(
                f"decoder_start_token_id is {start}, must be the blank token {self._blank}, with "
                "which decoders of this family begin"
            )

    def divide(
        self,
        text: str | None,
        ids: Sequence[int],
        media: Sequence[MediaInput],
        encode: Callable[[str], list[int]],
    ) -> EncoderPrompt:
        """Returns the token with which the answer begins, and the sound. Raises RequestError for
        any words."""
        item = one_item(media, "sound")
        words = "" if text is None else text.replace(MARKER, "").replace(TIMES, "").strip()
        if words or (text is None and tuple(ids) not in ((), (self._blank,))):
            raise RequestError(
                f"this model hears and reads no words, found {words or list(ids)!r:.60}; leave the "
                f"prompt empty, or {TIMES!r} for the frames of each token"
            )
        return EncoderPrompt(
            ids=(self._blank,),
            items=(item,),
            end_ids=(self._blank,),
            unguided=GREEDY,
            greedy=GREEDY,
            heads=HEADS if TIMES in (text or "") else (),
        )


class Languages:
    """The languages that a checkpoint of Nemotron 3.5 ASR is told, as transformers' processor has
    them. Raises CheckpointError for numbers that the model does not have."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        own = checkpoint.read_json(PROCESSOR_FILE).get("prompt_dictionary")
        known: Mapping[str, int] = DEFAULT_PROMPT_DICTIONARY if own is None else own
        self._ids = {name.lower(): int(known[name]) for name in known}
        self._ids.setdefault(AUTO, int(checkpoint.config.default_prompt_id))
        self._names = ", ".join(sorted(known))
        count = checkpoint.config.num_prompts
        if wrong := {name: at for name, at in self._ids.items() if not 0 <= at < count}:
            raise CheckpointError(
                f"prompt_dictionary has {wrong}, but the model has num_prompts={count} languages"
            )

    def id_of(self, name: str) -> int:
        """Returns the number of a language by its locale, code or English name. Raises RequestError
        for one that the model is not told."""
        own = name.strip().lower()
        for found in (own, TO_LANGUAGE_CODE.get(own)):
            if found in self._ids:
                return self._ids[found]
        raise RequestError(
            f"{name!r:.40} is no language that this model is told; give one of {self._names}, or "
            "leave it out to have it recognized"
        )


class LanguagePrompts(ParakeetPrompts):
    """See hooks.EncoderPrompts; a prompt may name a language, which is otherwise recognized."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self._languages = Languages(checkpoint)

    def divide(
        self,
        text: str | None,
        ids: Sequence[int],
        media: Sequence[MediaInput],
        encode: Callable[[str], list[int]],
    ) -> EncoderPrompt:
        """Returns the token with which the answer begins, and the sound in a language. Raises
        RequestError for words, and for an unknown language or several."""
        names = NAMED.findall(text or "")
        if len(names) > 1:
            raise RequestError(f"a sound is heard in one language, found {', '.join(names)!r:.60}")
        prompt_id = self._languages.id_of(*names or (AUTO,))
        rest = None if text is None else NAMED.sub("", text)
        found = super().divide(rest, ids, media, encode)
        (item,) = found.items
        key = blake2b(f"{item.key}\0{prompt_id}".encode(), digest_size=20).hexdigest()
        told = replace(
            item,
            tensors={**item.tensors, PROMPT_ID: torch.tensor(prompt_id)},
            key=key if item.key else "",
        )
        return replace(found, items=(told,))
