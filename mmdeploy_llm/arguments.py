"""Checks the arguments of LLM's methods and brings them into one form: lists of prompts, of
conversations, of sampling parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .params import SamplingParams


def as_prompts(prompts: Any) -> list[Any]:
    """Returns one prompt, or an iterable of them, as a list. Raises TypeError for a prompt of an
    unknown type, ValueError for None."""
    if prompts is None:
        raise ValueError(
            "prompts must not be None; give a text, token ids, a dict, or a list of these"
        )
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise TypeError(_wrong_type(prompts))
    items = list(prompts)
    if items and all(_is_token_id(item) for item in items):
        return [prompts if isinstance(prompts, Sequence) else items]
    for item in items:
        if not isinstance(item, (str, Mapping, list, tuple)):
            raise TypeError(_wrong_type(item))
    return items


def _wrong_type(item: Any) -> str:
    return (
        f"Invalid type for 'prompt': {type(item).__name__}, "
        "expected one of ['str', 'list', 'dict']: a text, a list of token ids, "
        "or a dict with 'prompt', 'prompt_token_ids' or 'messages'"
    )


def _is_token_id(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def as_conversations(messages: Any) -> list[Any]:
    """Returns one conversation, or an iterable of them, as a list. Raises TypeError for anything
    else."""
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Iterable):
        raise TypeError(
            f"messages must be a list of message dicts, or a list of such lists, got "
            f"{type(messages).__name__}"
        )
    items = list(messages)
    if items and all(isinstance(item, Mapping) for item in items):
        return [messages if isinstance(messages, Sequence) else items]
    for item in items:
        if isinstance(item, (str, Mapping)) or not isinstance(item, Sequence):
            raise TypeError(
                f"a conversation must be a list of message dicts, got {type(item).__name__}"
            )
    return items


def one_params(params: Any) -> SamplingParams:
    """Returns `params`, or the defaults for None. Raises TypeError for anything else."""
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise TypeError(f"sampling_params must be SamplingParams, got {type(params).__name__}")
    return params


def params_for(params: Any, count: int, what: str) -> list[SamplingParams]:
    """Returns one SamplingParams for each of `count` prompts. Raises TypeError, and ValueError when
    their number is neither 1 nor `count`. what: the caller's word for prompts, for the message."""
    if isinstance(params, (list, tuple)):
        if len(params) not in (1, count):
            raise ValueError(
                f"{what} and sampling_params must be the same length, got {count} {what} and "
                f"{len(params)} sampling_params; give one for each, or one for all"
            )
        each = [one_params(own) for own in params]
        return each * count if len(each) == 1 else each
    return [one_params(params)] * count
