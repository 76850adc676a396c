"""Finds numbers of a JSON schema that llguidance would round.

It reads every number as a double, and decimals with an error of a last digit unless they have few
digits: where that changes a value that the JSON must have or keep to, the schema is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from mmdeploy_llm.errors import RequestError

VALUES = frozenset({"const", "enum"})
LOWER, UPPER = (
    frozenset({"minimum", "exclusiveMinimum"}),
    frozenset({"maximum", "exclusiveMaximum"}),
)
BOUNDS = LOWER | UPPER | {"multipleOf"}
LARGEST = 2**63 - 1  # of the library's integers
MAX_EXACT = 2**53  # the last of the integers that doubles hold without a gap
MAX_DIGITS = 16
MAX_EXPONENT = 22  # of the powers of ten that doubles hold


def check_numbers(name: str, text: str) -> None:
    """Raises RequestError for the text of a schema with a number that would be rounded."""
    for keyword, number in _numbers(json.loads(text, parse_float=Decimal)):
        if not _is_exact(number):
            raise RequestError(
                f"{name} has the number {str(number)[:80]} in {keyword!r}, which would be rounded "
                "to a double; give whole numbers up to 2**53 and decimals of 15 digits, or a text"
            )


def _numbers(schema: Any) -> Iterator[tuple[str, int | Decimal]]:
    """Yields the numbers that matter, each with its keyword, but no bounds that every integer of
    the library keeps."""
    stack: list[Any] = [schema]
    while stack:
        node = stack.pop()
        for keyword, value in node.items() if isinstance(node, dict) else ():
            if keyword in VALUES:
                yield from ((keyword, number) for number in _inside(value))
            elif keyword in BOUNDS and _is_number(value):
                is_wide = keyword in UPPER and value >= LARGEST
                is_wide = is_wide or (keyword in LOWER and value <= -LARGEST)
                if not (is_wide and node.get("type") == "integer"):
                    yield keyword, value
        stack.extend(node.values() if isinstance(node, dict) else ())
        stack.extend(node if isinstance(node, list) else ())


def _inside(value: Any) -> Iterator[int | Decimal]:
    stack = [value]
    while stack:
        node = stack.pop()
        if _is_number(node):
            yield node
        stack.extend(node.values() if isinstance(node, dict) else ())
        stack.extend(node if isinstance(node, list) else ())


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, Decimal)) and not isinstance(value, bool)


def _is_exact(number: int | Decimal) -> bool:
    if isinstance(number, int):
        return number in (LARGEST, -LARGEST) or (
            abs(number) <= LARGEST and int(float(number)) == number
        )
    _, digits, exponent = number.as_tuple()
    text = "".join(map(str, digits)).lstrip("0")
    short = text.rstrip("0") or "0"
    assert isinstance(exponent, int), "JSON has finite numbers"
    power = exponent + len(text) - len(short)
    return len(short) <= MAX_DIGITS and int(short) <= MAX_EXACT and abs(power) <= MAX_EXPONENT
