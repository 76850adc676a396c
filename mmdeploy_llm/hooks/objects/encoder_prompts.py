"""EncoderPrompts: what a model with an encoder and a decoder makes of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mmdeploy_llm.request import MediaInput, MediaView


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderPrompt:
    """A prompt in two parts.

    ids: the tokens that the decoder continues, at least one.
    items: what the encoder reads. They stand outside of the tokens: all tokens attend to them.
    places: one for each item, where they do stand in the tokens: the index in `ids` of each of its
        embeddings; (): outside.
    views: one for each item, where it is meant for some tokens only; (): for all.
    processors: logits processors without which the answer is not the model's own, such as the rules
        of its timestamps: name -> what it gets as `LogitsRow.arguments`.
    end_ids: tokens that end the answer besides those that the checkpoint's files name.
    unguided: why the answer cannot keep a constraint, and what to do: a request with
        guided_decoding is refused with it. "": it can.
    greedy: why the answer can be the likeliest tokens only, and what to do: a request with params
        that choose others is refused with it, and an answer may be empty. "": it can be another.
    heads: the layer and the head of each cross attention whose weights the answer has, see
        `CompletionOutput.attention` and `Model.answer_attention`; (): none.
    """

    ids: tuple[int, ...]
    items: tuple[MediaInput, ...]
    places: tuple[tuple[int, ...], ...] = ()
    views: tuple[MediaView, ...] = ()
    processors: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    end_ids: tuple[int, ...] = ()
    unguided: str = ""
    greedy: str = ""
    heads: tuple[tuple[int, int], ...] = ()


class EncoderPrompts(Protocol):
    """The rule of a family, built as factory(checkpoint), see `ModelSpec.encoder`. One instance per
    engine, called from several threads at once.

    has_places: a prompt says by the tokens of its processors where media stand, one for each item,
        and keeps them.
    """

    has_places: bool

    def divide(
        self,
        text: str | None,
        ids: Sequence[int],
        media: Sequence[MediaInput],
        encode: Callable[[str], list[int]],
    ) -> EncoderPrompt:
        """Divides a prompt between encoder and decoder.

        text: of the prompt; None where the caller gave ids. ids: its tokens, with those that the
        tokenizer adds by itself to a text. media: processed, in the order of the prompt; of a
        prompt that is only counted, items without tensors. encode: text to ids, without any that
        the tokenizer adds. An item that depends on the text has a key that does, too. Raises
        RequestError for a prompt that the model cannot take.
        """
