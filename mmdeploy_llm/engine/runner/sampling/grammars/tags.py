"""Translates structural tags into Lark: free text in which some words begin structured parts.

    {"structures": [{"begin": "<f=add>", "schema": {...}, "end": "</f>"}], "triggers": ["<f="]}

is the form of FastDeploy and vLLM; xgrammar's and OpenAI's {"type": "structural_tag", "format":
{"type": "triggered_tags", "triggers": [...], "tags": [{"begin", "content": {"type": "json_schema",
"json_schema": ...}, "end"}]}} means the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from mmdeploy_llm.errors import RequestError

from .ebnf import lark_text
from .schemas import check_schema

KIND = "structural_tag"
MAX_TAGS = 256
SHAPE = (
    '{"structures": [{"begin": text, "schema": JSON schema, "end": text}, ...], '
    '"triggers": [text, ...]}'
)


def tags_to_lark(given: Any, special_ids: Mapping[str, int], spacing: Mapping[str, Any]) -> str:
    """Returns a Lark grammar: text; whenever it contains a trigger, the rest of the `begin` of one
    of the trigger's tags, JSON that follows its schema, and its `end`. Raises RequestError.

    special_ids: ids of the special tokens, by text: they never occur in free text.
    spacing: options for the JSON.
    """
    tags, triggers = _read(given)
    lines = ["start: (" + " | ".join(f"t{i}" for i in range(len(tags))) + ")* e"]
    lines += ["e: TEXT", "TEXT: /(.|\\n)*/"]
    words = _Words(special_ids)
    for number, (begin, schema, end) in enumerate(tags):
        found = [trigger for trigger in triggers if begin.startswith(trigger)]
        if len(found) != 1:
            raise _wrong(f"the begin {begin[:80]!r} must start with exactly one of the triggers")
        if found[0] in special_ids:
            first = f"TEXT {words.lark(found[0])}"
        elif words.has_special(found[0]):
            raise _wrong(f"the trigger {found[0][:80]!r} mixes text and special tokens")
        else:
            lines.append(f"g{number}[lazy]: TEXT {lark_text(found[0])}")
            first = f"g{number}"
        options = {**spacing, "coerce_one_of": True, "lenient": False}
        content = json.dumps({**schema, "x-guidance": options})
        rest = words.lark(begin.removeprefix(found[0]))
        lines.append(f"t{number}: {first} {rest} j{number} {words.lark(end)}")
        lines.append(f"j{number}: %json {content}")
    return "\n".join(lines)


def split_special(text: str, special_ids: Mapping[str, int]) -> list[str]:
    """Splits a text at the texts of special tokens, which are pieces of their own."""
    longest_first = sorted(filter(None, special_ids), key=len, reverse=True)
    pattern = f"({'|'.join(map(re.escape, longest_first))})"
    pieces = re.split(pattern, text) if longest_first else [text]
    return [piece for piece in pieces if piece]


class _Words:
    """Writes texts that may contain special tokens as Lark."""

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self._ids = special_ids

    def has_special(self, text: str) -> bool:
        return any(piece in self._ids for piece in split_special(text, self._ids))

    def lark(self, text: str) -> str:
        return " ".join(
            f"<[{self._ids[piece]}]>" if piece in self._ids else lark_text(piece)
            for piece in split_special(text, self._ids)
        )


def _read(given: Any) -> tuple[list[tuple[str, dict[str, Any], str]], list[str]]:
    """Returns (begin, schema, end) of each tag, and the triggers."""
    if not isinstance(given, dict):
        raise _wrong(f"found {type(given).__name__}")
    if "format" in given:
        entries, triggers = _read_format(given["format"])
    else:
        entries, triggers = given.get("structures"), given.get("triggers")
    if not (isinstance(entries, list) and 0 < len(entries) <= MAX_TAGS):
        raise _wrong(f"a list of 1 to {MAX_TAGS} tags is needed")
    if not (isinstance(triggers, list) and 0 < len(triggers) <= MAX_TAGS):
        raise _wrong(f"a list of 1 to {MAX_TAGS} triggers is needed")
    if not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise _wrong("a trigger is not a text, or empty")
    return [_read_tag(entry) for entry in entries], list(dict.fromkeys(triggers))


def _read_format(given: Any) -> tuple[Any, Any]:
    """Returns tags and triggers of the newer form."""
    kind = given.get("type") if isinstance(given, dict) else None
    if kind == "tag":
        return [given], [given.get("begin")]
    if kind != "triggered_tags":
        raise _wrong(f"the format {str(kind)[:80]!r} is not supported; give triggered_tags")
    used = [name for name in ("at_least_one", "stop_after_first", "excludes") if given.get(name)]
    if used:
        raise _wrong(f"triggered_tags with {', '.join(used)} is not supported; leave it out")
    return given.get("tags"), given.get("triggers")


def _read_tag(entry: Any) -> tuple[str, dict[str, Any], str]:
    if not isinstance(entry, dict):
        raise _wrong("a tag is not an object")
    begin, end, schema = entry.get("begin"), entry.get("end"), entry.get("schema")
    content = entry.get("content")
    if isinstance(content, dict) and content.get("type") == "json_schema":
        schema = content.get("json_schema")
    if not isinstance(begin, str) or not isinstance(end, str) or schema is None:
        raise _wrong("a tag needs begin, schema and end")
    check_schema(f"guided_decoding.{KIND}", schema)
    return begin, schema if isinstance(schema, dict) else {}, end


def _wrong(found: str) -> RequestError:
    return RequestError(f"guided_decoding.{KIND} is not valid: {found}; the form is {SHAPE}")
