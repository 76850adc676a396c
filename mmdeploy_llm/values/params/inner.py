"""The params inside SamplingParams: GuidedDecodingParams, a constraint that the text of an answer
must follow; EarlyStopParams, when to end a text that runs away; NoRepeatNGramParams, which
sequences of tokens an answer must not repeat."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Self, Unpack

from pydantic import BeforeValidator, Field, model_validator

from mmdeploy_llm.values.text.display import shown

from .frozen import MAX_INT, Accepts, FrozenParams
from .value_types import Schema

if TYPE_CHECKING:
    from .inner_dicts import EarlyStopOptions, GuidedDecodingOptions, NoRepeatNGramOptions


class GuidedDecodingParams(FrozenParams):
    """A constraint on the answer: exactly one of json, regex, choice, grammar, json_object and
    structural_tag. Needs llguidance, from `pip install "mmdeploy-llm[guided]"`."""

    json_schema: Schema = Field(
        default=None,
        alias="json",
        description="JSON schema that the text must follow: a dict, JSON text or a pydantic class",
    )
    regex: str | None = Field(
        default=None, description="regular expression that the whole text must match"
    )
    choice: tuple[str, ...] | None = Field(
        default=None, description="list of texts, one of which is generated"
    )
    grammar: str | None = Field(
        default=None,
        description="EBNF grammar in the syntax of xgrammar and llama.cpp, with a rule named root; "
        "before a recursion, text is matched as far as possible",
    )
    json_object: bool | None = Field(
        default=None, description="True: the text is any valid JSON object"
    )
    structural_tag: dict[str, Any] | str | None = Field(
        default=None,
        description="free text with structured parts, as a dict or as JSON text: "
        '{"structures": [{"begin": "<f=add>", "schema": {...}, "end": "</f>"}], "triggers": '
        '["<f="]}; after a trigger follow the rest of one begin, JSON of its schema and its end',
    )
    disable_any_whitespace: bool = Field(
        default=True,
        description="JSON has the whitespace that Python's json.dumps writes, after each comma and "
        "colon, as in most texts that models are trained on; False: any whitespace between its "
        "parts, which a model may repeat until max_tokens; for json, json_object, structural_tag",
    )

    if TYPE_CHECKING:

        def __init__(self, **options: Unpack[GuidedDecodingOptions]) -> None: ...

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = self._given()
        if len(given) != 1:
            raise ValueError(
                "give exactly one of json, regex, choice, grammar, json_object, structural_tag; "
                f"got {given or 'none'}"
            )
        is_json = given[0] in ("json_schema", "json_object", "structural_tag")
        asks = "disable_any_whitespace" in self.model_fields_set and self.disable_any_whitespace
        if asks and not is_json:
            raise ValueError(f"disable_any_whitespace is for JSON, not {given[0]}; leave it out")
        return self

    @property
    def kind(self) -> str:
        """Name of the constraint's field."""
        return self._given()[0]

    @property
    def name(self) -> str:
        """Name of the constraint as a caller gives it."""
        return "json" if self.kind == "json_schema" else self.kind

    def _given(self) -> list[str]:
        return [name for name in CONSTRAINTS if getattr(self, name) not in (None, False, ())]


StructuredOutputsParams = GuidedDecodingParams  # vLLM's name
CONSTRAINTS = ("json_schema", "regex", "choice", "grammar", "json_object", "structural_tag")


def read_response_format(given: Any) -> GuidedDecodingParams | None:
    """Returns the constraint of a response_format. Raises ValueError for an unknown one."""
    kind = given.get("type") if isinstance(given, Mapping) else None
    schema = given.get("json_schema") if isinstance(given, Mapping) else None
    if kind == "text":
        return None
    if kind == "structural_tag":
        return GuidedDecodingParams(structural_tag=dict(given))
    if kind == "json_object" and schema is None:
        return GuidedDecodingParams(json_object=True)
    if kind in ("json_object", "json_schema"):  # DashInfer: a schema as text with json_object
        inner = schema.get("schema", schema) if isinstance(schema, Mapping) else schema
        if isinstance(inner, (Mapping, str)):
            return GuidedDecodingParams(json=inner if isinstance(inner, str) else dict(inner))
        raise ValueError(f"json_schema must be {{'schema': JSON schema}}, got {schema!r}")
    raise ValueError(
        "response_format must be a dict whose type is text, json_object, json_schema or "
        f"structural_tag, got {given!r}"
    )


class EarlyStopParams(FrozenParams):
    """When to end a text that runs away: one that repeats itself, whose tokens are all nearly
    certain. FastDeploy's `early_stop_config`."""

    enable_early_stop: bool = Field(default=True, description="False: never")
    window_size: int = Field(
        default=3000, ge=1, description="number of tokens in a row that must be nearly certain"
    )
    threshold: float = Field(
        default=0.99,
        ge=0,
        lt=1,
        description="probability above which a token is nearly certain: the model's own, before "
        "temperature, penalties and other rules",
    )

    if TYPE_CHECKING:

        def __init__(self, **options: Unpack[EarlyStopOptions]) -> None: ...

    @model_validator(mode="before")
    @classmethod
    def _read_strategy(cls, values: Any) -> Any:
        """Accepts the key `strategy` with its one value at FastDeploy, which is what this does."""
        if not isinstance(values, dict) or values.get("strategy") != "repetition":
            return values
        return {name: value for name, value in values.items() if name != "strategy"}


def read_early_stop(values: Any) -> Any:
    """Replaces FastDeploy's option `enable_early_stop` by the `early_stop_config` that it means."""
    if not isinstance(values, dict) or values.get("enable_early_stop") is None:
        return values
    own = {name: value for name, value in values.items() if name != "enable_early_stop"}
    is_enabled, config = values["enable_early_stop"], own.get("early_stop_config")
    if not isinstance(is_enabled, bool):
        raise ValueError(f"enable_early_stop must be True or False, got {shown(is_enabled)}")
    return {**own, "early_stop_config": ({} if config is None else config) if is_enabled else None}


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
