"""Checks a finished text against the constraint of its request, and says what broke it."""

from __future__ import annotations

import json
from collections.abc import Callable

from mmdeploy_llm.errors import InvalidAnswerError
from mmdeploy_llm.request import Request
from mmdeploy_llm.values.outputs.request_output import FinishReason
from mmdeploy_llm.values.params import GuidedDecodingParams
from mmdeploy_llm.values.plan import RequestFailure

from .detokenizer import Vocabulary
from .pipeline import TextPipeline

Matches = Callable[[GuidedDecodingParams, str], bool]


def breach(
    request: Request, pipeline: TextPipeline, reason: FinishReason, matches: Matches | None
) -> RequestFailure | None:
    """Returns why a finished text breaks the constraint of its request; None when it keeps it.
    White space that a parser takes from the ends of the text may belong to it."""
    guided = request.params.guided_decoding
    assert guided is not None
    assert matches is not None, "refused at intake without a grammar backend"
    texts = dict.fromkeys((pipeline.answer, *_with_blanks(pipeline.answer, pipeline.raw_text)))
    if pipeline.failure is None and any(matches(guided, text) for text in texts):
        return None
    cause, advice = {
        "length": (f"max_tokens = {request.params.max_tokens} ended the text", "raise max_tokens"),
        "repetition": ("early_stop ended the text", "loosen early_stop"),
    }.get(reason, ("a stop text or token ended the text", "give another one"))
    place = "before the answer was complete"
    if not pipeline.answer:
        place = "in its thinking, before the answer"
        advice += " or set reasoning_max_tokens"
    return RequestFailure(
        code=InvalidAnswerError.code,
        message=f"{cause} {place} that guided_decoding.{guided.name} asks for; {advice}",
    )


def tags_in(guided: GuidedDecodingParams, vocabulary: Vocabulary) -> list[str]:
    """Returns the special tokens in the tags that structure a text: without them it would not
    keep its constraint."""
    given = guided.structural_tag
    if given is None:
        return []
    text = json.dumps(json.loads(given) if isinstance(given, str) else given, ensure_ascii=False)
    return [tag for tag in map(vocabulary.token, vocabulary.special_ids) if tag and tag in text]


def _with_blanks(answer: str, raw: str) -> tuple[str, ...]:
    """Returns a text with the white space before it, after it and around it in the undivided text,
    where it stands there as a whole."""
    start = raw.rfind(answer) if answer else -1
    if start < 0:
        return ()
    before, after = raw[:start], raw[start + len(answer) :]
    head, tail = before[len(before.rstrip()) :], after[: len(after) - len(after.lstrip())]
    return head + answer, answer + tail, head + answer + tail
