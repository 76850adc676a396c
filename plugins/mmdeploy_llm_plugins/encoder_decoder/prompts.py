"""Holds what the rules of these families share: see hooks.EncoderPrompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mmdeploy_llm.errors import CheckpointError, MediaError
from mmdeploy_llm.hooks import Checkpoint, EncoderPrompt, MediaInput

MARKER, TOKENIZER = "<image>", "tokenizer.json"
# Of checkpoints without one, which read a picture and a text: one after the other.
TEMPLATE = (
    "{%- for m in messages -%}{%- if m.content is string -%}{{- m.content -}}{%- else -%}"
    "{%- for p in m.content -%}"
    "{{- '<image>' if p.type in ['image', 'image_url'] else p.text -}}"
    "{%- endfor -%}{%- endif -%}{%- endfor -%}"
)
# Of those that read a sound: the texts alone.
TEXTS = (
    "{%- for m in messages -%}{%- if m.content is string -%}{{- m.content -}}{%- else -%}"
    "{%- for p in m.content -%}{%- if p.type == 'text' -%}{{- p.text -}}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}{%- endfor -%}"
)


def one_item(media: Sequence[MediaInput], kind: str) -> MediaInput:
    """Returns the only item. Raises MediaError for none or several."""
    if len(media) != 1:
        raise MediaError(f"this model takes one {kind} in each prompt, found {len(media)}")
    return media[0]


def setting(checkpoint: Checkpoint, config: Any, name: str) -> Any:
    """Returns a value of generation_config.json, else of `config`, the decoder's; None without."""
    found = checkpoint.generation.get(name)
    return getattr(config, name, None) if found is None else found


def start_id(checkpoint: Checkpoint, *configs: Any) -> int:
    """Returns the first token of the decoder. Raises CheckpointError where nothing names it."""
    for config in configs:
        found = setting(checkpoint, config, "decoder_start_token_id")
        if isinstance(found, int):
            return found
    raise CheckpointError(
        "neither generation_config.json nor config.json has decoder_start_token_id, with which the "
        "decoder begins"
    )


def vocabulary(checkpoint: Checkpoint) -> dict[str, int]:
    """Returns the ids of tokens by their own names, which no text may encode to."""
    stored = checkpoint.read_json(TOKENIZER)
    vocab: Any = (stored.get("model") or {}).get("vocab") or {}
    ids = vocab if isinstance(vocab, Mapping) else {own[0]: at for at, own in enumerate(vocab)}
    added = {own["content"]: int(own["id"]) for own in stored.get("added_tokens") or ()}
    return {**ids, **added}


class BegunByText:
    """See hooks.EncoderPrompts: the encoder reads one item, and the text of a prompt, after the
    decoder's first token, begins the answer. is_replaced: it stands in place of that token.

    item: what errors call the item. marker: stands for it in a text.
    """

    has_places = False
    item, marker = "image", MARKER

    def __init__(self, start: int, *, is_replaced: bool = False) -> None:
        self._start, self._is_replaced = start, is_replaced

    def divide(
        self,
        text: str | None,
        ids: Sequence[int],
        media: Sequence[MediaInput],
        encode: Callable[[str], list[int]],
    ) -> EncoderPrompt:
        """Returns the tokens with which the answer begins, and the item."""
        item = one_item(media, self.item)
        return EncoderPrompt(ids=self.begin(text, ids, encode), items=(item,))

    def begin(
        self, text: str | None, ids: Sequence[int], encode: Callable[[str], list[int]]
    ) -> tuple[int, ...]:
        """Returns the first tokens of the decoder; see divide."""
        own = ids if text is None else encode(text.replace(self.marker, "").strip())
        is_whole = bool(own) and (self._is_replaced or own[0] == self._start)
        return tuple(own) if is_whole else (self._start, *own)
