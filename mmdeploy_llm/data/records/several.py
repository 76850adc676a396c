"""Joins the records of several questions about one item to one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from .outcome import Verdict, worst
from .record import ItemError, Record, Timings

SUMMED = ("num_prompt_tokens", "num_output_tokens", "num_cached_tokens")
REASONS = "; "


def parsed(record: Record) -> Record:
    """Returns a record with the values of its text, which is JSON: those of an object by their
    names, anything else as "answer". One that is not whole has none."""
    if record.outcome != "ok":
        return record
    value = json.loads(record.text)
    return replace(record, answers=value if isinstance(value, dict) else {"answer": value})


def joined(records: Mapping[str, Record], *, is_json: bool = False) -> Record:
    """Returns the record of an item whose questions, by name, have these records.

    Its text and reasoning are the first question's; `answers` has the texts of all that have not
    failed. One failed question makes the item failed, and the message names each. Tokens of the
    prompts and outputs are summed, those of media counted once; times are those of all together.
    is_json: `answers` has the values of texts that are whole JSON.
    """
    first = next(iter(records.values()))
    failed = next((own for own in records.values() if not own.is_ok), first)
    verdict = worst(
        Verdict(outcome=own.outcome, reason=_named(name, own.outcome_reason))
        for name, own in records.items()
    )
    sums = {name: sum(getattr(own, name) for own in records.values()) for name in SUMMED}
    answers = {name: own.text for name, own in records.items() if own.is_ok}
    if is_json:
        whole = {name: own for name, own in records.items() if own.outcome == "ok"}
        answers = {name: json.loads(own.text) for name, own in whole.items()}
    return replace(
        first,
        answers=answers,
        outcome=verdict.outcome,
        outcome_reason=verdict.reason,
        timings=_together([own.timings for own in records.values()]),
        outputs=_outputs(records),
        boxes=tuple(box for own in records.values() for box in own.boxes),
        picture_size=next((s for own in records.values() if (s := own.picture_size)), ()),
        finish_reason=failed.finish_reason,
        error=_error(records),
        **sums,
    )


def _named(name: str, words: str | None) -> str | None:
    return None if words is None else f"{name}: {words}"


def _error(records: Mapping[str, Record]) -> ItemError | None:
    """Returns the error of the first failed question, with the messages of all."""
    failed = {name: own.error for name, own in records.items() if own.error is not None}
    if not failed:
        return None
    words = REASONS.join(f"question {name!r}: {own.message}" for name, own in failed.items())
    return replace(next(iter(failed.values())), message=words)


def _together(timings: list[Timings]) -> Timings:
    """Returns the times of prompts that were asked together: to the first token of the first, to
    the last one of the slowest."""
    found: dict[str, float | None] = {}
    for field in fields(Timings):
        values = [own for each in timings if (own := getattr(each, field.name)) is not None]
        pick = min if field.name in ("queue", "first_token") else max
        found[field.name] = pick(values, default=None)
    return Timings(**found)


def _outputs(records: Mapping[str, Record]) -> tuple[Mapping[str, Any], ...]:
    """Returns what the fields of the first question do not say: all samples with the name of their
    question, where any has reasoning, tool calls or samples of its own."""
    _, *others = records.values()
    has_more = any(own.reasoning or own.tool_calls for own in others)
    if not has_more and not any(own.outputs for own in records.values()):
        return ()
    return tuple(
        {"question": name, **sample}
        for name, own in records.items()
        for sample in own.outputs or (_sample(own),)
    )


def _sample(own: Record) -> dict[str, Any]:
    sample: dict[str, Any] = {
        "index": 0,
        "text": own.text,
        "reasoning": own.reasoning,
        "finish_reason": own.finish_reason,
        "error": None if own.error is None else own.error.to_json(),
    }
    return {**sample, "tool_calls": own.tool_calls} if own.tool_calls else sample
