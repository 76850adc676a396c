"""Chat templates: where they come from, and rendering them in transformers' sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmdeploy_llm.errors import CheckpointError, ConfigError, RequestError

from .checkpoint import read_json

# What chat_template_kwargs may set of transformers' apply_chat_template besides template variables.
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
    """The model's own template, None when it has none.

    A processor's template (chat_template.jinja, chat_template.json) wins over the tokenizer's,
    which may know text only. Raises CheckpointError for an unreadable file.
    """
    path = folder / "chat_template.jinja"
    try:
        if path.is_file():
            return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path.name} of the model cannot be read: {error}") from error
    template = read_json(folder / "chat_template.json").get("chat_template")
    if template is None:
        template = tokenizer.chat_template
    if isinstance(template, Mapping):
        template = template.get("default")
    return template if isinstance(template, str) else None


def load_template(text: str) -> str:
    """A template given by the user: a file's content when there is such a file, else the text.

    Raises ConfigError for a text that has neither braces nor a line break and names no file: it
    looks like a file path, as in FastDeploy.
    """
    is_template = any(mark in text for mark in "{}\n")
    try:
        if not is_template or Path(text).is_file():
            return Path(text).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        if not is_template:
            raise ConfigError(
                f"the chat template {Path(text).name!r} looks like a file path, but there is no "
                "such file that can be read; give a Jinja template or an existing file"
            ) from error
    return text


def template_variables(kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """chat_template_kwargs, checked. FastDeploy's options.thinking_mode sets enable_thinking too.

    Raises RequestError for what is not a dict with text keys or would change how a template is run.
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


def render(
    tokenizer: Any,
    template: str,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
) -> str:
    """The prompt that the template makes of the messages. Raises RequestError with its message."""
    arguments = {"add_generation_prompt": not variables.get("continue_final_message"), **variables}
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            chat_template=template,
            tokenize=False,
            **arguments,
        )
    except Exception as error:  # a template is a program; what it raises is about these messages
        raise RequestError(
            f"the chat template cannot render these messages: {type(error).__name__}: {error}"
        ) from error
    return str(text)
