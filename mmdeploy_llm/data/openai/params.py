"""Parameters of OpenAI's bodies: those of sampling, tools and formats, in our names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmdeploy_llm.errors import RequestError
from mmdeploy_llm.values.params.foreign import advice
from mmdeploy_llm.values.text.spelling import meant

# They change no answer of a batch.
HARMLESS = frozenset(
    (
        *("model", "user", "store", "metadata", "service_tier", "safety_identifier", "stream"),
        *("stream_options", "prompt_cache_key", "prompt_cache_retention", "prediction"),
        *("request_id", "background", "include", "max_tool_calls"),
    )
)
# Values that ask for nothing.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "conversation": (),
    "early_stopping": (False,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "length_penalty": (1, 1.0),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "previous_response_id": (),
    "prompt": (),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "truncation": ("disabled", "auto"),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
ADVICE = {
    "function_call": "use tools and tool_choice",
    "functions": "use tools",
    "parallel_tool_calls": "how many calls a model makes cannot be bounded",
    "previous_response_id": "answers are not stored; write the whole conversation into the line",
}
SAME = (
    *("n", "temperature", "top_p", "seed", "presence_penalty", "frequency_penalty", "stop"),
    *("response_format", "top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos"),
    *("skip_special_tokens", "stop_token_ids", "include_stop_str_in_output", "bad_words"),
    *("prompt_logprobs", "no_repeat_ngram_size"),
)
GUIDES = {  # of vLLM
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
OUR_OWN = ("chat_template", "mm_processor_kwargs", "priority")
SWITCHES = ("add_generation_prompt", "continue_final_message")


class Body:
    """The fields of a body, which are taken one by one: what is left was not understood."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        extra = values.get("extra_body")
        merged = {**values, **(extra if isinstance(extra, Mapping) else {})}
        merged.pop("extra_body", None)
        self._left = {name: value for name, value in merged.items() if value is not None}

    def take(self, name: str, default: Any = None) -> Any:
        """Returns a field."""
        return self._left.pop(name, default)

    def taken(self, *names: str) -> dict[str, Any]:
        """Returns those of the fields that are there."""
        return {name: self._left.pop(name) for name in names if name in self._left}

    def ignored(self) -> list[str]:
        """Returns the names of the fields that are left and change nothing. Raises RequestError for
        one that would."""
        for name, value in self._left.items():
            if name in HARMLESS or (name in NEUTRAL and value in NEUTRAL[name]):
                continue
            known = (*SAME, *LIMITS, *HARMLESS, "messages", "tools", "tool_choice", "logprobs")
            near = meant(str(name), known)
            hint = f"did you mean {near!r}?" if near else "it cannot be ignored"
            raise RequestError(
                f"the body's {str(name)[:80]!r} = {str(value)[:40]!r} is not supported: "
                f"{ADVICE.get(name) or advice('SamplingParams').get(name, hint)}"
            )
        return [name for name in self._left if name in HARMLESS]


def sampling_of(body: Body) -> dict[str, Any]:
    """Takes the parameters of sampling. Raises RequestError for those that contradict."""
    params = body.taken(*SAME)
    limits = body.taken(*LIMITS)
    if len(set(limits.values())) > 1:
        raise RequestError(f"the body has two limits, {limits}; give one of them")
    if limits:
        params["max_tokens"] = next(iter(limits.values()))
    bias = body.take("logit_bias")
    if bias is not None:
        params["logit_bias"] = _bias(bias)
    params.update(_guide(body))
    return params


def chat_logprobs(body: Body) -> dict[str, Any]:
    """Takes logprobs and top_logprobs of a chat."""
    wanted, top = body.take("logprobs", False), body.take("top_logprobs")
    if wanted not in (True, False):
        raise RequestError(f"logprobs must be true or false in a chat, got {str(wanted)[:40]!r}")
    if top is not None and not wanted:
        raise RequestError("top_logprobs needs logprobs: true")
    return {"logprobs": top or 0} if wanted else {}


def thinking_of(body: Body, effort: Any) -> dict[str, Any]:
    """Takes the variables of the chat template. effort: of the reasoning."""
    variables = body.take("chat_template_kwargs", {})
    if not isinstance(variables, Mapping):
        raise RequestError("chat_template_kwargs must be an object")
    found = {**body.taken(*SWITCHES), **variables}
    if effort is not None:
        is_on = effort not in ("none", "minimal")
        found = {
            "enable_thinking": is_on,
            **({"reasoning_effort": effort} if is_on else {}),
            **found,
        }
    return {"chat_template_kwargs": found} if found else {}


def tools_of(body: Body) -> dict[str, Any]:
    """Takes the tools. Raises RequestError for a choice that a model cannot be held to."""
    tools, choice = body.take("tools"), body.take("tool_choice")
    if choice not in (None, "none", "auto"):
        raise RequestError(
            f"tool_choice {str(choice)[:60]!r} is not supported: a call cannot be forced; use "
            '"auto" or "none"'
        )
    if tools is not None and not isinstance(tools, list):
        raise RequestError("tools must be a list")
    return {"tools": tools} if tools and choice != "none" else {}


def _bias(bias: Any) -> dict[int, Any]:
    try:
        return {int(token): value for token, value in bias.items()}
    except (AttributeError, TypeError, ValueError):
        raise RequestError("logit_bias must be an object of token ids and numbers") from None


def _guide(body: Body) -> dict[str, Any]:
    """Takes the constraints of vLLM."""
    guides = {GUIDES[name]: value for name, value in body.taken(*GUIDES).items()}
    other = body.take("structured_outputs")
    if isinstance(other, Mapping):
        guides.update({name: value for name, value in other.items() if value is not None})
    elif other is not None:
        raise RequestError("structured_outputs must be an object")
    body.taken("guided_decoding_backend", "guided_whitespace_pattern")
    return {"guided_decoding": guides} if guides else {}
