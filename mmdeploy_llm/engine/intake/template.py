"""Finds chat templates, and prepares messages for them."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmdeploy_llm.engine.intake.templates import Renderer, TemplateFailedError, TemplateTimeError
from mmdeploy_llm.errors import MMDeployLLMError, RequestError
from mmdeploy_llm.hooks.names import did_you_mean, error_text
from mmdeploy_llm.system.guarding.folder_files import read_text
from mmdeploy_llm.weights.folder import read_json

logger = logging.getLogger(__name__)

RENDER_SECONDS = 30.0
END_MARK = "\ue8ff end of the message \ue8ff "  # where continue_final_message truncates the text
REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")

# Arguments of transformers' apply_chat_template that chat_template_kwargs may set.
PASSED_ON = frozenset({"add_generation_prompt", "continue_final_message", "documents", "tools"})
RESERVED = frozenset(
    (
        "chat_template",
        "conversation",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "tokenize",
        "tokenizer_kwargs",
        "truncation",
    )
)


def checkpoint_template(folder: Path, tokenizer: Any) -> str | None:
    """Returns the model's own template, None when it has none.

    A processor's template (chat_template.jinja, chat_template.json) wins over the tokenizer's,
    which may handle text only. Raises CheckpointError for an unreadable file.
    """
    path = folder / "chat_template.jinja"
    if path.exists():
        return read_text(path)
    template = read_json(folder / "chat_template.json").get("chat_template")
    if template is None:
        template = tokenizer.chat_template
    if isinstance(template, Mapping):
        template = template.get("default")
    return template if isinstance(template, str) else None


def template_variables(kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns chat_template_kwargs, checked; options.thinking_mode (FastDeploy) sets
    enable_thinking.

    Raises RequestError for anything but a dict with text keys, and for keys that would change how
    the template is run.
    """
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise RequestError(f"chat_template_kwargs must be a dict, got {type(kwargs).__name__}")
    wrong = sorted(RESERVED & set(kwargs))
    if wrong:
        raise RequestError(
            f"chat_template_kwargs must not set {', '.join(wrong)}; it takes variables of the "
            f"template and {', '.join(sorted(PASSED_ON))}"
        )
    variables = dict(kwargs)
    options = kwargs.get("options")
    if isinstance(options, Mapping) and "thinking_mode" in options:
        is_open = options["thinking_mode"] not in ("close", "false", False)
        variables.setdefault("enable_thinking", is_open)
    return variables


def warn_of_unread(kwargs: Mapping[str, Any] | None, template: str, noted: set[str]) -> None:
    """Warns of chat_template_kwargs that the template never reads, of each name once. noted: those
    that were warned of, to which the others are added."""
    words = frozenset(re.findall(r"[^\W\d]\w*", template)) | PASSED_ON | {"options"}
    for name in kwargs or ():
        if name not in words and name not in noted:
            noted.add(name)
            hint = did_you_mean(name, words)
            logger.warning("chat_template_kwargs: the template never reads %r%s", name, hint)


def render(
    tokenizer: Any,
    template: str,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    *,
    renderer: Renderer,
    seconds: float = RENDER_SECONDS,
) -> str:
    """Renders the messages with the template, as transformers' apply_chat_template does.

    Raises RequestError with the template's message, when rendering takes longer than `seconds` or
    too much memory; EngineError when the renderer is closed or cannot start its process.
    """
    values = dict(variables)
    field = values.pop("continue_final_message", False)
    defaults = {"add_generation_prompt": not field, "documents": None, "tools": None}
    try:
        chat = [_message(message) for message in messages]
        if field:
            _check_continued(chat, values)
            chat[-1] = _marked(chat[-1], field if isinstance(field, str) else "content")
        inputs = {**tokenizer.special_tokens_map, **defaults, **values, "messages": chat}
        text = renderer.render(template, _plain(inputs), seconds)
        return _until_mark(text) if field else text
    except TemplateTimeError:
        raise RequestError(
            f"the chat template did not render these messages within {seconds:g} s; give another "
            "chat_template"
        ) from None
    except MMDeployLLMError:
        raise
    except TemplateFailedError as error:
        raise RequestError(
            f"the chat template cannot render these messages: {error}{_roles(messages, error)}"
        ) from None
    except Exception as error:  # a template is a program and may raise anything
        raise RequestError(
            f"the chat template cannot render these messages: {error_text(error)}"
        ) from error


def _roles(messages: Sequence[Mapping[str, Any]], error: Exception) -> str:
    """Returns the roles of the messages where a template complains of one without naming it."""
    if "role" not in str(error).lower():
        return ""
    return f" (the roles are: {', '.join(str(own.get('role'))[:40] for own in messages[:10])})"


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Copies a message without empty fields, its reasoning under both names that templates read."""
    copied = {name: value for name, value in message.items() if value is not None}
    reasoning = next((copied[name] for name in REASONING_NAMES if name in copied), None)
    if reasoning is None:
        return copied
    return {"thinking": reasoning, **copied, "reasoning_content": reasoning}


def _check_continued(chat: Sequence[Mapping[str, Any]], values: Mapping[str, Any]) -> None:
    """Raises RequestError unless continue_final_message can be honoured."""
    if values.get("add_generation_prompt"):
        raise RequestError(
            "add_generation_prompt starts a new message and continue_final_message continues the "
            "last one; give one of them"
        )
    role = chat[-1].get("role")
    if role != "assistant":
        raise RequestError(
            "continue_final_message continues a message of role 'assistant', but the last one, "
            f"message {len(chat) - 1}, has role {role!r}; append the beginning of an answer"
        )


def _marked(message: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns the message with END_MARK after the text that the model is to continue."""
    content = message.get(name)
    if isinstance(content, str):
        names = [each for each in REASONING_NAMES if name in REASONING_NAMES and each in message]
        return message | dict.fromkeys((name, *names), content + END_MARK)
    parts = list(content or ())
    for index in reversed(range(len(parts))):
        if "text" in parts[index]:
            parts[index] = {**parts[index], "text": parts[index]["text"] + END_MARK}
            return {**message, name: parts}
    raise RequestError(
        f"continue_final_message: the last message, of role 'assistant', has no text in {name!r}"
    )


def _until_mark(text: str) -> str:
    """Returns the text before END_MARK.

    A template that strips messages also strips the space at the end of the mark; it would have
    stripped the message's own space, so the text is stripped here.
    """
    position = text.rindex(END_MARK.rstrip())
    return text[:position] if text.startswith(END_MARK, position) else text[:position].rstrip()


def _plain(value: Any) -> Any:
    """Copies a value to plain types, because templates must not call methods of other objects."""
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return value if type(value) is kind else kind(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if callable(getattr(value, "model_dump", None)):
        return _plain(value.model_dump())
    return f"<{type(value).__name__}>"
