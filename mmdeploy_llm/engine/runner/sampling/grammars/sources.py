"""Translates constraints into the grammars of llguidance: JSON that holds a schema or Lark text."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from mmdeploy_llm.errors import RequestError
from mmdeploy_llm.values.params import GuidedDecodingParams

from .ebnf import EbnfError, lark_text, to_lark
from .numbers import check_numbers
from .schemas import check_schema, without_notes
from .tags import tags_to_lark

MAX_CHARACTERS = 100_000
DIGITS = {"\\d": "[0-9]", "\\D": "[^0-9]"}  # also within a class, which classes may contain
MAX_DEPTH = 100  # nested levels of a JSON schema
# The separators of json.dumps, which most JSON in training texts follows.
DUMPED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
ANY_WHITESPACE = {"whitespace_flexible": True, "item_separator": ",", "key_separator": ":"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """A constraint as the request gives it, comparable with others.

    kind: the field that it comes from. text: its text, or JSON. is_spaced: JSON may have any
    whitespace.
    """

    kind: str
    text: str
    is_spaced: bool = False


def read_constraint(params: GuidedDecodingParams) -> Constraint:
    """Returns the constraint of a request. Raises RequestError for what is not JSON or too long."""
    kind, value = params.kind, getattr(params, params.kind)
    try:
        text = value if isinstance(value, str) else json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _not_json(kind, error) from error
    size = sum(map(len, value)) if kind == "choice" else len(text)
    if size > MAX_CHARACTERS:
        raise RequestError(
            f"{_name(kind)} has {size} characters, {MAX_CHARACTERS} are allowed; shorten it"
        )
    return Constraint(kind=kind, text=text, is_spaced=not params.disable_any_whitespace)


def translate(constraint: Constraint, special_ids: Mapping[str, int]) -> str:
    """Returns the grammar of a constraint in llguidance's JSON. Raises RequestError for one that
    cannot be read, is nested too deeply or can never be fulfilled.

    special_ids: ids of the special tokens, by text.
    """
    kind, text = constraint.kind, constraint.text
    spacing = ANY_WHITESPACE if constraint.is_spaced else DUMPED
    match kind:
        case "json_schema":
            schema, _ = without_notes(_parsed(kind, text))
            check_schema(_name(kind), schema)
            check_numbers(_name(kind), text)
            return _grammar("json_schema", with_options(schema, spacing))
        case "json_object":
            return _grammar("json_schema", with_options({"type": "object"}, spacing))
        case "structural_tag":
            tags, _ = without_notes(_parsed(kind, text))
            check_numbers(_name(kind), text)
            lark = tags_to_lark(tags, special_ids, spacing)
        case "choice":
            choices = dict.fromkeys(json.loads(text))
            lark = "start: C\nC: " + " | ".join(map(lark_text, choices))
        case "regex":
            lark = "start: R\nR: " + _regex(text)
        case _:
            try:
                lark = to_lark(text)
            except EbnfError as error:
                raise RequestError(f"{_name(kind)} is not valid: {error}") from error
    return _grammar("lark_grammar", lark)


def ignored_formats(constraint: Constraint) -> frozenset[str]:
    """Returns the formats in a constraint's schemas that nothing enforces."""
    has_schema = constraint.kind in ("json_schema", "structural_tag")
    return without_notes(json.loads(constraint.text))[1] if has_schema else frozenset()


def wrong(constraint: Constraint, reason: str) -> RequestError:
    """Returns the error of a constraint that cannot be used. reason: a sentence's predicate."""
    return RequestError(f"{_name(constraint.kind)} {reason}")


def with_options(schema: Any, spacing: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schema with options of llguidance. It checks that the alternatives of a oneOf
    exclude each other where it can, and reads it as anyOf where it cannot."""
    given = schema if isinstance(schema, dict) else {}
    return {**given, "x-guidance": {**spacing, "coerce_one_of": True, "lenient": False}}


def _grammar(kind: str, value: Any) -> str:
    return json.dumps({"grammars": [{kind: value}]})


def _name(kind: str) -> str:
    return f"guided_decoding.{'json' if kind == 'json_schema' else kind}"


def _not_json(kind: str, error: Exception) -> RequestError:
    return RequestError(f"{_name(kind)} is not JSON: {error}")


def _regex(text: str) -> str:
    """Returns a regular expression between slashes. Digits are those of ASCII, as in the `pattern`
    of a JSON schema."""
    plain = {"/": "\\/", "\n": "\\n"}
    pieces = [
        DIGITS.get(piece, plain.get(piece, piece.replace("\n", "\\n")))
        for piece in re.findall(r"\\?.", text, re.DOTALL)
    ]
    return f"/{''.join(pieces)}/" if text else '""'


def _parsed(kind: str, text: str) -> Any:
    """Returns the value of JSON text. Raises RequestError for one that is nested too deeply."""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _not_json(kind, error) from error
    level, depth = [parsed], 0
    while level:
        depth += 1
        level = [child for node in level for child in _children(node)]
    if depth > MAX_DEPTH:
        raise RequestError(
            f"{_name(kind)} is nested {depth} levels deep, {MAX_DEPTH} are allowed; make it "
            "flatter, with $defs and $ref"
        )
    return parsed


def _children(node: Any) -> Collection[Any]:
    if isinstance(node, dict):
        return node.values()
    return node if isinstance(node, list) else ()
