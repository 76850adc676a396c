"""How T5Gemma 2 reads a prompt: the encoder gets all of it, with its pictures, as one item; the
decoder begins with its first token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b

import torch
from mmdeploy_llm_processors.image.special_texts import special_texts

from mmdeploy_llm.errors import MediaError, RequestError
from mmdeploy_llm.hooks import Checkpoint, EncoderPrompt, MediaInput
from mmdeploy_llm_plugins.encoder_decoder.prompts import setting
from mmdeploy_llm_plugins.gemma.image3 import TOKENS

KIND = "text"  # of an item without pictures


class T5GemmaPrompts:
    """See hooks.EncoderPrompts."""

    has_places = False

    def __init__(self, checkpoint: Checkpoint) -> None:
        config = checkpoint.config
        found = setting(checkpoint, config.decoder, "decoder_start_token_id")
        self._start: int = config.decoder.bos_token_id if found is None else found
        self._bos: int = config.decoder.bos_token_id
        self._image_id: int = config.encoder.image_token_id
        self._marker = special_texts(checkpoint, TOKENS)["boi_token"]

    def divide(
        self,
        text: str | None,
        ids: Sequence[int],
        media: Sequence[MediaInput],
        encode: Callable[[str], list[int]],
    ) -> EncoderPrompt:
        """Joins the text and its pictures to one item of the encoder."""
        if text is not None and (media or self._marker in text):
            own = encode(self._written(text, media))
            ids = [self._bos, *own] if [*ids[:1]] == [self._bos] != own[:1] else own
        if not ids:
            raise RequestError("the prompt has no tokens; give at least one character")
        places = sum(token == self._image_id for token in ids)
        needed = sum(item.num_tokens for item in media)
        if places != needed:
            raise MediaError(
                f"the prompt has {places} tokens for images, but the {len(media)} images given "
                f"need {needed}; write {self._marker} for each image into the text"
            )
        keys = "\0".join(item.key for item in media)
        key = blake2b(f"{keys}\0{[*ids]}".encode(), digest_size=20).hexdigest()
        tensors = {"input_ids": torch.tensor([*ids])}
        if media and all(item.tensors for item in media):
            tensors["pixels"] = torch.cat([item.tensors["pixels"] for item in media])
        joined = MediaInput(
            kind=media[0].kind if media else KIND,
            tensors=tensors,
            num_tokens=len(ids),
            num_text_tokens=len(ids) - needed if media else 0,
            key=key if all(item.key for item in media) else "",
        )
        return EncoderPrompt(ids=(self._start,), items=(joined,))

    def _written(self, text: str, media: Sequence[MediaInput]) -> str:
        """Writes the pictures into a text, in place of their markers."""
        parts = text.split(self._marker)
        if len(parts) != len(media) + 1:
            raise MediaError(
                f"the prompt has {len(parts) - 1} {self._marker} for {len(media)} images; write "
                "one for each"
            )
        found = parts[0]
        for item, part in zip(media, parts[1:], strict=True):
            found += (item.prompt_text or "") + part
        return found
