"""Checks the arguments of LLM's methods and brings them into one form: lists of prompts, of
conversations, of sampling parameters."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mmdeploy_llm.engine.desk.ask import Ask
from mmdeploy_llm.engine.intake.encodings import encoded_rows, is_encoding, listed
from mmdeploy_llm.engine.intake.prompts import PROMPT_KEYS
from mmdeploy_llm.values.adapter_ref import AnyAdapter
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.values.prompt import PromptParts

NameOf = Callable[[Any], str]  # the name of an adapter, also of one that is loaded for it
_END = object()


def as_prompts(prompts: Any) -> list[Any]:
    """Returns one prompt, or an iterable of them, as a list; the rows of a tokenizer's batch or of
    an array as one prompt each. Raises TypeError for a prompt of an unknown type, ValueError for
    None."""
    return [prompts] if isinstance(prompts, str) else _several(prompts)


def _several(prompts: Any) -> list[Any]:
    if prompts is None:
        raise ValueError(
            "prompts must not be None; give a text, token ids, a dict, or a list of these"
        )
    if is_encoding(prompts):
        rows = encoded_rows(prompts)
        return [prompts] if len(rows) == 1 else rows
    if isinstance(prompts, (Mapping, PromptParts)):
        return [prompts]
    _check_not_a_table(prompts)
    if not isinstance(prompts, Iterable) or getattr(prompts, "ndim", 1) == 0:
        raise TypeError(_wrong_type(prompts))
    items: list[Any] = listed(prompts) if _is_array(prompts) else list(prompts)
    if items and all(_is_token_id(item) for item in items):
        return [prompts if isinstance(prompts, Sequence) else items]
    for index, item in enumerate(items):
        if not isinstance(item, (str, Mapping, list, tuple, PromptParts)) and not _is_array(item):
            raise TypeError(f"prompts[{index}]: {_wrong_type(item)}")
    return items


def iterable_prompts(prompts: Any, name: str) -> Iterable[Any]:
    """Returns an iterable of prompts. Raises TypeError for anything else. name: of the method that
    takes one prompt."""
    if isinstance(prompts, (str, Mapping)) or not isinstance(prompts, Iterable):
        raise TypeError(f"{name}_iter takes an iterable of prompts; use {name} for one prompt")
    _check_not_a_table(prompts)
    return prompts


def _check_not_a_table(prompts: Any) -> None:
    """Raises TypeError for a data frame, whose items are the names of its columns, and for a row of
    one, whose items are its cells: each would be answered as a prompt."""
    kind = type(prompts).__name__
    if hasattr(prompts, "columns"):
        raise TypeError(
            f"a table ({kind}) is not a list of prompts; give one of its columns, such as "
            "table['prompt'], or a list of dicts, one for each row"
        )
    names = prompts.keys() if callable(getattr(prompts, "keys", None)) else ()
    if any(isinstance(name, str) and name in PROMPT_KEYS for name in names):
        raise TypeError(f"a row of a table ({kind}) is not a list of prompts; give dict(row)")


def _wrong_type(item: Any) -> str:
    return (
        f"Invalid type for 'prompt': {type(item).__name__}, "
        "expected one of ['str', 'list', 'dict']: a text, a list of token ids, "
        "or a dict with 'prompt', 'prompt_token_ids' or 'messages'"
    )


def _is_array(value: Any) -> bool:
    """Whether the value is an array or tensor with at least one dimension."""
    return callable(getattr(value, "tolist", None)) and getattr(value, "ndim", 1) > 0


def _is_token_id(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def is_conversation(value: Any) -> bool:
    """Returns whether `value` is one list of message dicts. One of them without a role counts too,
    so that the error names it."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, Mapping) for item in value):
        return False
    return any("role" in item or "content" in item for item in value)


def as_prompt(prompt: Any) -> Any:
    """Returns a prompt; a conversation becomes {"messages": conversation}."""
    return {"messages": prompt} if is_conversation(prompt) else prompt


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
    for index, item in enumerate(items):
        if isinstance(item, (str, Mapping)) or not isinstance(item, Sequence):
            raise TypeError(
                f"conversation {index} must be a list of message dicts, got {type(item).__name__}"
            )
    return items


def asks_of(items: Any, params: Sequence[SamplingParams], stream: bool = False) -> list[Ask]:
    """Returns what is asked at the desk for prompts with their parameters."""
    pairs = zip(items, params, strict=True)
    return [Ask(prompt=item, params=own, stream=stream) for item, own in pairs]


def asks_of_chats(
    items: Any, params: Sequence[SamplingParams], options: Mapping[str, Any], stream: bool = False
) -> list[Ask]:
    """Returns what is asked at the desk for conversations with their parameters and options."""
    return [
        Ask(
            prompt={"messages": item, **options},
            item=item,
            where=f"conversation {index}, ",
            params=own,
            stream=stream,
        )
        for index, (item, own) in enumerate(zip(items, params, strict=True))
    ]


def with_adapters(asks: Sequence[Ask], adapter: AnyAdapter, name_of: NameOf) -> Sequence[Ask]:
    """Returns the asks with an adapter for all of them, or with one for each. Raises
    TypeError, and ValueError where the numbers of both differ."""
    return asks if adapter is None else _each_with_its_own(asks, adapter, name_of)


def _each_with_its_own(asks: Sequence[Ask], adapter: Any, name_of: NameOf) -> Sequence[Ask]:
    is_each = isinstance(adapter, (list, tuple))
    names = [name_of(own) for own in (adapter if is_each else [adapter])]
    if is_each and len(names) != len(asks):
        raise ValueError(
            f"{len(asks)} prompts and {len(names)} adapters; give one for each, or one for all"
        )
    names = names if is_each else names * len(asks)
    return [replace(ask, adapter=name) for ask, name in zip(asks, names, strict=True)]


def chat_options(
    template_kwargs: Mapping[str, Any] | None,
    template: str | None,
    tools: Any,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
) -> dict[str, Any]:
    """Returns the options of a chat as a prompt's dict has them, with the two flags among the
    template's arguments; {} without any.

    Raises ValueError for kwargs of a wrong type, a flag that is given twice, and both flags.
    """
    if template_kwargs is not None and not isinstance(template_kwargs, Mapping):
        raise ValueError(
            f"chat_template_kwargs must be a dict, got {type(template_kwargs).__name__}"
        )
    given = {
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
    }
    flags = {name: flag for name, flag in given.items() if flag is not None}
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ValueError(f"{name} must be True, False or None, got {flag!r}")
        if name in (template_kwargs or {}):
            raise ValueError(f"{name} is given twice, once in chat_template_kwargs; leave out one")
    if all(given.values()):
        raise ValueError(
            "add_generation_prompt starts a new message and continue_final_message continues the "
            "last one; give one of them"
        )
    if flags:
        template_kwargs = {**(template_kwargs or {}), **flags}
    options = {
        "chat_template_kwargs": template_kwargs,
        "chat_template": template,
        "tools": tools,
    }
    return {name: value for name, value in options.items() if value is not None}


def asks_of_stream(prompts: Any, params: Any, options: Mapping[str, Any]) -> list[Ask]:
    """Returns what is asked for prompts, or for one conversation with its options, whose answers
    are read while they are generated. Raises ValueError for options of other prompts."""
    if is_conversation(prompts):
        return asks_of_chats([prompts], params_for(params, 1, "messages"), options, stream=True)
    if options:
        raise ValueError(
            "the options of a chat are used with one conversation, a list of message dicts; for "
            "other prompts write them into a dict with 'messages'"
        )
    items = as_prompts(prompts)
    return asks_of(items, params_for(params, len(items), "prompts"), stream=True)


def one_params(params: Any) -> SamplingParams:
    """Returns `params`, or the defaults for None. Raises TypeError for anything else."""
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise TypeError(f"sampling_params must be SamplingParams, got {_other_params(params)}")
    return params


def _other_params(params: Any) -> str:
    if isinstance(params, type):
        return f"the class {params.__name__}; call it: SamplingParams(...)"
    hint = "; write SamplingParams(**options)" if isinstance(params, Mapping) else ""
    return f"{type(params).__name__}{hint}"


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


class Asks:
    """Pairs prompts with sampling parameters while it is iterated: one for all, or the next of an
    iterable for each.

    error: why they ended early, once they have: iterables of different lengths, or parameters
        of a wrong type. It is set and not raised, so that the prompts before it are answered.

    Raises TypeError for arguments that cannot be paired.
    """

    def __init__(self, prompts: Any, params: Any) -> None:
        iterable_prompts(prompts, "generate")
        is_each = not isinstance(params, (SamplingParams, str, Mapping))
        self._is_each = is_each and isinstance(params, Iterable)
        self._params = iter(params) if self._is_each else itertools.repeat(one_params(params))
        self._prompts = prompts
        self.error: Exception | None = None

    def __iter__(self) -> Iterator[Ask]:
        count = 0
        for prompt in self._prompts:
            own = next(self._params, _END)
            if own is _END:
                self._end(f"sampling_params has {count} items, but there are more prompts")
                return
            try:
                ask = Ask(prompt=prompt, params=one_params(own))
            except TypeError as error:
                self.error = TypeError(f"item {count} of the sampling_params: {error}")
                return
            yield ask
            count += 1
        if self._is_each and next(self._params, _END) is not _END:
            self._end(f"sampling_params has more items than the {count} prompts")

    def _end(self, fault: str) -> None:
        self.error = ValueError(f"{fault}; give one for each prompt, or one for all")
