"""Keywords of other engines' calls: an error of a wrong one says what to write here, and one that
asks for nothing is left out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from types import MappingProxyType
from typing import Any, TypeVar

from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.values.params.counterparts import OF_A_REQUEST, OF_THE_ENGINE
from mmdeploy_llm.values.params.elsewhere import is_off
from mmdeploy_llm.values.text.spelling import meant

VECTOR_CALLS = ("classify", "embed", "embed_iter", "rerank", "score")
CALLS = ("chat", "generate", "generate_iter", "stream", "submit", *VECTOR_CALLS)
Cls = TypeVar("Cls", bound=type)

_MEDIA = 'give media with the prompt: {"prompt": ..., "multimodal_data": {"image": ...}}'
_PROMPTS = "give them as prompts, the first argument"
_OF_PROMPT = (
    'give it with the prompt: {{"prompt": ..., "{0}": ...}}, or {{"messages": ..., "{0}": ...}}'
)
_FOR_TEMPLATE = 'use chat(chat_template_kwargs={{"{}": ...}})'
_PARAMS = "use sampling_params=SamplingParams(...)"
_RAW = "the tokenizer decides; give token ids as prompts to decide yourself"
# Keywords of generate, chat, pipelines and processors elsewhere -> what to write here.
OF_CALLS: Mapping[str, str] = MappingProxyType(
    {
        "add_special_tokens": _RAW,
        "audio": _MEDIA,
        "audios": _MEDIA,
        "batch_size": "leave it out: as many prompts as fit are computed at once; "
        "LLM(max_num_seqs=...) bounds them",
        "chat_template_content_format": "leave it out: the template is tried to see which form of "
        "content it reads",
        "documents": _FOR_TEMPLATE.format("documents"),
        "enable_thinking": _FOR_TEMPLATE.format("enable_thinking"),
        "generate_kwargs": _PARAMS,
        "generation_config": _PARAMS,
        "guided_options_request": "use SamplingParams(guided_decoding=...)",
        "image": _MEDIA,
        "image_data": _MEDIA,
        "images": _MEDIA,
        "input_ids": _PROMPTS,
        "inputs": _PROMPTS,
        "mm_processor_kwargs": _OF_PROMPT.format("mm_processor_kwargs"),
        "multi_modal_data": _MEDIA,
        "multimodal_data": _MEDIA,
        "padding": "leave it out: nothing is padded",
        "pooling_params": "use the arguments of embed: dimensions, normalize, pooling",
        "priority": _OF_PROMPT.format("priority"),
        "prompt_token_ids": _PROMPTS,
        "reasoning_effort": _FOR_TEMPLATE.format("reasoning_effort"),
        "request_id": "use AsyncLLM, whose requests have ids",
        "return_full_text": "leave it out: the text of an output is what was generated",
        "return_tensors": "leave it out: outputs have lists of token ids",
        "stream": "use stream(prompts, sampling_params), which yields deltas",
        "text": _PROMPTS,
        "timeout": "use submit(prompt, timeout=seconds) of AsyncLLM",
        "tokenization_kwargs": _RAW,
        "trace_headers": "leave it out: nothing is traced",
        "truncation": OF_A_REQUEST["truncate_prompt_tokens"],
        "video": _MEDIA,
        "videos": _MEDIA,
    }
)
# Values that are what happens here anyway, beside None, False and what is empty.
OFF: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {"chat_template_content_format": ("auto",), "priority": (0,)}
)
# Keywords of other engines that the calls take under another name.
ALSO: Mapping[str, str] = MappingProxyType({"lora_name": "adapter", "lora_request": "adapter"})
FALSE_ASKS = frozenset({"add_special_tokens", "enable_thinking"})


def explaining_keywords(cls: Cls) -> Cls:
    """Decorates a class whose calls say of keywords that they do not have what to write instead."""
    for name in CALLS:
        if callable(method := getattr(cls, name, None)):
            setattr(cls, name, _explaining(method))
    return cls


def _explaining(method: Callable[..., Any]) -> Callable[..., Any]:
    known = inspect.signature(method).parameters

    @wraps(method)
    def call(self: Any, *args: Any, **given: Any) -> Any:
        if not given.keys() <= known.keys():
            given = _known_ones(method.__name__, known, given)
        return method(self, *args, **given)

    return call


def _known_ones(
    method: str, known: Mapping[str, object], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the keywords that the method has. Raises TypeError for others that ask for
    something."""
    given = {**given}
    for name in (name for name in ALSO if name in given and ALSO[name] in known):
        value = given.pop(name)
        if value is not None and given.setdefault(ALSO[name], value) is not value:
            raise TypeError(f"{method}() got {name} and {ALSO[name]}; give one of them")
    for name, value in given.items():
        if name not in known and not _asks_for_nothing(name, value):
            hint = _advice(name, value, known)
            raise TypeError(f"{method}() has no argument {name!r}; {hint}")
    return {name: value for name, value in given.items() if name in known}


def _asks_for_nothing(name: str, value: Any) -> bool:
    if name in OF_CALLS:
        return is_off(value, OFF.get(name, ()), false_asks=name in FALSE_ASKS)
    return value is None and name in (*SamplingParams.model_fields, *OF_A_REQUEST)


def _advice(name: str, value: Any, known: Mapping[str, object]) -> str:
    if name in OF_CALLS:
        return OF_CALLS[name]
    if name in SamplingParams.model_fields:
        return f"use sampling_params=SamplingParams({name}={value!r:.40})"
    if name in OF_A_REQUEST:
        return f"of options of one request, which are in SamplingParams: {OF_A_REQUEST[name]}"
    if name in (*EngineConfig.model_fields, *OF_THE_ENGINE):
        return f"it is an option of LLM: {OF_THE_ENGINE.get(name, f'LLM({name}=...)')}"
    near = meant(name, known)
    return f"did you mean {near!r}?" if near else f"known: {', '.join(list(known)[1:])}"
