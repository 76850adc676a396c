"""NoRepeatNGramParams: which sequences of tokens an answer must not repeat."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any, Self, Unpack

from pydantic import BeforeValidator, Field, model_validator

from .frozen import MAX_INT, Accepts, FrozenParams

if TYPE_CHECKING:
    from .inner_dicts import NoRepeatNGramOptions

MAX_SIZE = 1024
MAX_TEXTS = 64


def _as_tuple(value: Any) -> Any:
    if isinstance(value, (str, int)):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


class NoRepeatNGramParams(FrozenParams):
    """Which sequences of tokens an answer must not repeat: what models that read documents need,
    whose tables and dotted lines run in loops. The prompt does not count. The defaults are those of
    DeepSeek-OCR."""

    size: int = Field(
        default=30,
        ge=1,
        le=MAX_SIZE,
        description="never generates a sequence of this many tokens that the answer already has",
    )
    window: int | None = Field(
        default=90,
        ge=1,
        description="only the last so many tokens of the answer count; None: all of them",
    )
    may_repeat: Annotated[
        tuple[str, ...],
        BeforeValidator(_as_tuple),
        Field(max_length=MAX_TEXTS),
        Accepts("str | Sequence[str]"),
    ] = Field(
        default=(),
        description="texts whose tokens may repeat, such as <td></td>; one text or a list",
    )
    may_repeat_token_ids: Annotated[
        tuple[Annotated[int, Field(ge=0, le=MAX_INT)], ...],
        BeforeValidator(_as_tuple),
        Accepts("int | Sequence[int]"),
    ] = Field(default=(), description="ids of tokens that may repeat")

    if TYPE_CHECKING:

        def __init__(self, **options: Unpack[NoRepeatNGramOptions]) -> None: ...

    def with_ids(self, encode: Callable[[str], Iterable[int]]) -> Self:
        """Returns them with the ids of the texts whose tokens may repeat."""
        ids = {token_id for text in self.may_repeat for token_id in encode(text)}
        known = tuple(sorted({*self.may_repeat_token_ids, *ids}))
        return self.model_copy(update={"may_repeat": (), "may_repeat_token_ids": known})

    @model_validator(mode="after")
    def _window_holds_one(self) -> Self:
        if self.window is not None and self.window < self.size:
            raise ValueError(
                f"window must be at least size = {self.size}, got {self.window}: no sequence "
                "could repeat in it"
            )
        return self
