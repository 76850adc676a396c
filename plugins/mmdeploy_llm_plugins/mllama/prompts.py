"""How Llama 3.2 Vision reads a prompt: each picture has one token, from which on it is seen.

<|begin_of_text|> What is in <|image|> this and in <|image|> that ?
                             [ the first one     ][ the second one, and in the answer ]
                             pictures that follow one another directly are seen together
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from mmdeploy_llm.errors import MediaError, RequestError
from mmdeploy_llm.hooks import Checkpoint, EncoderPrompt, MediaInput, MediaView

from .image import TOKEN, tile_tokens


class MllamaPrompts:
    """See hooks.EncoderPrompts."""

    has_places = True

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._image_id: int = checkpoint.config.image_token_index
        self._tile_tokens = tile_tokens(checkpoint.config.vision_config)

    def divide(
        self,
        text: str | None,
        ids: Sequence[int],
        media: Sequence[MediaInput],
        encode: Callable[[str], list[int]],
    ) -> EncoderPrompt:
        """Returns the tokens as they are, and the pictures with what sees them."""
        if not ids:
            raise RequestError("the prompt has no tokens; give at least one character")
        places = [index for index, token in enumerate(ids) if token == self._image_id]
        if len(places) != len(media):
            raise MediaError(
                f"the prompt has {len(places)} {TOKEN} for {len(media)} images; write one for each"
            )
        views = tuple(
            MediaView(first=place, end=end, num_tokens=self._num_seen(item))
            for place, end, item in zip(places, _ends(places), media, strict=True)
        )
        return EncoderPrompt(ids=tuple(ids), items=tuple(media), views=views)

    def _num_seen(self, item: MediaInput) -> int:
        """Returns the tokens of the tiles that hold a part of the picture; they come first."""
        mask = item.tensors.get("aspect_ratio_mask")
        return item.num_tokens if mask is None else int(mask.sum()) * self._tile_tokens


def _ends(places: Sequence[int]) -> list[int | None]:
    """Returns where each picture is last seen: up to the next one, or to the end of its group."""
    ends: list[int | None] = [None]
    for place, following in reversed([*pairwise(places)]):
        ends.insert(0, ends[0] if following == place + 1 else following)
    return ends[: len(places)]
