"""GuidedDecodingParams: a constraint that the text of an answer must follow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self, Unpack

from pydantic import Field, model_validator

from .frozen import FrozenParams
from .value_types import Schema

if TYPE_CHECKING:
    from .inner_dicts import GuidedDecodingOptions


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
