"""How models read a prompt whose picture or video stands before all of it, also before the token
with which the tokenizer begins a text. InstructBLIP's Q-Former reads the text as well.

    prompt      <image>What is in it?
    BLIP-2      [ embeddings of the picture ] <s> What is in it ?
    Kosmos-2    <s> <image> [ embeddings ] </image> What is in it ?
    Q-Former    the picture, and: [CLS] What is in it ? [SEP]
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import torch
import transformers

from mmdeploy_llm.errors import CheckpointError, MediaError, RequestError
from mmdeploy_llm.hooks import Checkpoint, EncoderPrompt, MediaInput
from mmdeploy_llm_plugins.transformers_media.processing import reason_of

FOLDER = "qformer_tokenizer"  # of a checkpoint whose Q-Former reads texts
SPECIAL = re.compile(r"<[^<>]+>")
Encode = Callable[[str], list[int]]


class BeforePrompts(ABC):
    """See hooks.EncoderPrompts. token: stands for each embedding of the picture. marker: stands for
    the picture in a text. kind: of the only item of a prompt."""

    has_places = True
    token: str
    marker = "<image>"
    kind = "image"

    def divide(
        self, text: str | None, ids: Sequence[int], media: Sequence[MediaInput], encode: Encode
    ) -> EncoderPrompt:
        """Writes the picture before the prompt. Ids of the caller have all its tokens."""
        if not media:
            return EncoderPrompt(ids=tuple(ids), items=())
        if len(media) != 1:
            raise MediaError(f"this model takes one {self.kind} in each prompt, found {len(media)}")
        item, found, (own_id,) = media[0], ids, encode(self.token)[-1:]
        if text is not None:
            before, marker, text = text.replace(self.token, self.marker).partition(self.marker)
            if before.strip() or not marker or self.marker in text:
                raise MediaError(
                    f"this model's {self.kind} stands before the prompt; begin with {self.marker}"
                )
            found = self.written(item, text, ids, encode)
        places = tuple(index for index, token in enumerate(found) if token == own_id)
        if len(places) != item.num_tokens:
            raise MediaError(
                f"the prompt has {len(places)} tokens for the {self.kind}, which needs "
                f"{item.num_tokens}"
            )
        return EncoderPrompt(ids=tuple(found), items=(self.asked(item, text),), places=(places,))

    @abstractmethod
    def written(
        self, item: MediaInput, text: str, ids: Sequence[int], encode: Encode
    ) -> Sequence[int]:
        """Returns the ids of the picture and of the text after it. ids: of the whole prompt, with
        those that the tokenizer adds."""

    def asked(self, item: MediaInput, text: str | None) -> MediaInput:
        """Returns the picture with what the model reads of the text to encode it: nothing."""
        return item


class QueryPrompts(BeforePrompts):
    """The rule of BLIP-2 and InstructBLIP. Raises CheckpointError where the tokenizer of a Q-Former
    cannot be loaded."""

    token = "<image>"

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._tokenizer: Any = None
        if not (checkpoint.folder / FOLDER).is_dir():
            return
        try:
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(
                checkpoint.folder / FOLDER, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # transformers raises whatever its classes raise
            raise CheckpointError(
                f"the tokenizer in {FOLDER} cannot be used: {reason_of(error)}"
            ) from error

    def written(
        self, item: MediaInput, text: str, ids: Sequence[int], encode: Encode
    ) -> Sequence[int]:
        """See BeforePrompts."""
        (image_id,) = encode(self.token)[-1:]
        start = ids[: ids.index(image_id)]
        return [*[image_id] * item.num_tokens, *start, *encode(text)]

    def asked(self, item: MediaInput, text: str | None) -> MediaInput:
        """Returns the picture with the text that a Q-Former reads, which its key depends on."""
        if self._tokenizer is None:
            return item
        if text is None:
            raise RequestError(
                "this model's Q-Former reads the text of a prompt; give the prompt as text"
            )
        made = self._tokenizer([text], return_tensors="pt")
        read = {f"qformer_{name}": made[name] for name in ("input_ids", "attention_mask")}
        ids: torch.Tensor = read["qformer_input_ids"]
        key = blake2b(f"{item.key}\0{ids.tolist()}".encode(), digest_size=20).hexdigest()
        tensors = {**item.tensors, **read} if item.tensors else item.tensors
        return replace(item, tensors=tensors, key=key if item.key else "")


class VideoQueryPrompts(QueryPrompts):
    """The rule of InstructBLIP with videos, whose Q-Former reads the text for each frame."""

    token = marker = "<video>"
    kind = "video"


class KosmosPrompts(BeforePrompts):
    """The rule of Kosmos-2, whose processor gives the embeddings ids of words: here a token that no
    text of a prompt has stands for them."""

    token = "</line>"

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._start = checkpoint.config.text_config.bos_token_id

    def written(
        self, item: MediaInput, text: str, ids: Sequence[int], encode: Encode
    ) -> Sequence[int]:
        """See BeforePrompts. The tokenizer's own start and end are left out, as there."""
        known = {token: encode(token)[-1] for token in set(SPECIAL.findall(item.prompt_text or ""))}
        picture = [known[token] for token in SPECIAL.findall(item.prompt_text or "")]
        return [self._start, *picture, *encode(f" {text.strip()}")]
