"""The interactive commands: generate and chat."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any

import typer

from mmdeploy_llm.batch.arguments import AskingArguments
from mmdeploy_llm.cli.engines import open_async_llm, open_llm
from mmdeploy_llm.cli.exits import SOME_FAILED, SOME_LACKING, print_error
from mmdeploy_llm.cli.options.answer import AnswerOptions
from mmdeploy_llm.cli.options.groups import Given, Rows, is_named, with_groups
from mmdeploy_llm.cli.options.missing import check_pictures
from mmdeploy_llm.cli.options.model import ModelOptions
from mmdeploy_llm.cli.options.single import Image, Tools
from mmdeploy_llm.cli.options.suggested import Demo, choose_model, note_of
from mmdeploy_llm.cli.options.values import (
    MANY_MEDIA,
    engine_options,
    read_tools,
    sampling_params,
    template_kwargs,
    text_value,
)
from mmdeploy_llm.cli.terminal.interrupts import forget_interrupt
from mmdeploy_llm.errors import ConfigError

# click does not rewrap a paragraph that begins with "\b".
GENERATE_EPILOG = """\b
Examples:
  mmdeploy-llm generate "What is in this picture?" --image photo.jpg
  mmdeploy-llm generate "Why is the sky blue?" --model models/acme-4b --no-thinking
  cat story.txt | mmdeploy-llm generate --raw --max-tokens 200 -"""

CHAT_EPILOG = """\b
Examples:
  mmdeploy-llm chat --image photo.jpg
  mmdeploy-llm chat --system "Answer in one sentence." --model models/acme-4b
  mmdeploy-llm chat --message "How many shapes are there?" --image drawing.png"""


@with_groups
def generate(
    ctx: typer.Context,
    prompt: Annotated[str, typer.Argument(help="The question, or @FILE; - is standard input.")],
    *,
    image: Image = None,
    raw: Annotated[
        bool,
        typer.Option("--raw", help="Continue the text, without a chat template."),
    ] = False,
    asked: Annotated[Given, Rows(AskingArguments, "system")],
    tools: Tools = None,
    answer: AnswerOptions,
    model: ModelOptions,
    demo: Demo = False,
) -> None:
    """Answer one prompt, with or without pictures.

    The answer is printed on standard output as it is generated, followed by one line of JSON per
    tool call. Reasoning goes to standard error. The exit code is 1 when the request fails, and 4
    when the thinking took all tokens."""
    check_pictures(image or [])
    model = _with_model(ctx, model, image or [], is_demo=demo)
    text, images = text_value("PROMPT", prompt) or "", image or []
    options = _options(ctx, model, answer, {"image": max(1, len(images))})
    params = sampling_params(answer.to_sampling())
    from mmdeploy_llm.cli.terminal.output import make_console, opening, print_answer, user_message

    system = text_value("--system", asked.get("system"))
    request: dict[str, Any] = {"prompt": text, "multimodal_data": {"image": images}}
    if raw and system is not None:
        raise ConfigError("--system needs a chat template, and --raw leaves it out; give one")
    if not raw:
        messages = [*opening(system), user_message(text, images)]
        request = {"messages": messages, "chat_template_kwargs": template_kwargs(answer.thinking)}
    if tools is not None:
        request["tools"] = read_tools(tools)
    with open_llm(model.model, options) as llm:
        outputs = llm.stream(request, params)
        printed = print_answer(outputs, make_console(), make_console(is_stderr=True))
    if printed.error is not None:
        print_error(printed.error)
        raise typer.Exit(SOME_FAILED)
    if printed.lack is not None and not printed.text and not printed.calls:
        raise typer.Exit(SOME_LACKING)


@with_groups
def chat(
    ctx: typer.Context,
    *,
    message: Annotated[
        str | None,
        typer.Option(help="Send this message, or @FILE, and exit."),
    ] = None,
    image: Image = None,
    asked: Annotated[Given, Rows(AskingArguments, "system")],
    tools: Tools = None,
    answer: AnswerOptions,
    model: ModelOptions,
    demo: Demo = False,
) -> None:
    """Chat with a model about pictures.

    Each line of the terminal or of a pipe is a message. /image PATH attaches a picture to the next
    message, /reset starts a new conversation, /quit ends. Ctrl-C stops an answer."""
    check_pictures(image or [])
    model = _with_model(ctx, model, image or [], is_demo=demo)
    message, system = text_value("--message", message), text_value("--system", asked.get("system"))
    options = _options(ctx, model, answer, MANY_MEDIA)
    params = sampling_params(answer.to_sampling())
    from mmdeploy_llm.cli.terminal.output import CHAT_HELP, ChatSession, make_console

    more = {"chat_template_kwargs": template_kwargs(answer.thinking)}
    if tools is not None:
        more["tools"] = read_tools(tools)
    with open_async_llm(model.model, options) as llm:
        out, aside = make_console(), make_console(is_stderr=True)
        session = ChatSession(llm, params, out=out, aside=aside, system=system, more=more)
        for path in image or []:
            session.add_image(path)
        if message is None and sys.stdin.isatty():
            typer.echo(f"{model.model}: {CHAT_HELP}", err=True)
        session.run(typed_lines() if message is None else [message])
    if session.num_failed:
        raise typer.Exit(SOME_FAILED)


def _with_model(
    ctx: typer.Context, model: ModelOptions, images: list[str], *, is_demo: bool
) -> ModelOptions:
    """Returns the options with the model that answers, see choose_model. A demonstration that
    nobody has named says what it knows, where there are no pictures to tell that they are its
    own."""
    found = choose_model(ctx, model.model, images, "photos", is_demo=is_demo)
    if not images and not is_demo and not is_named(ctx, "model"):
        typer.echo(note_of(found, "photos"), err=True)
    return replace(model, model=found)


def _options(
    ctx: typer.Context, model: ModelOptions, answer: AnswerOptions, limits: dict[str, int]
) -> dict[str, Any]:
    given = {**model.to_engine(), **answer.to_engine()}
    return engine_options(ctx, model.engine, **given, limit_mm_per_prompt=limits)


def typed_lines() -> Iterator[str]:
    """Yields the lines of a pipe, or of a terminal with a prompt and line editing."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    while True:
        forget_interrupt()  # the last one has stopped an answer
        try:
            yield input("> ")
        except EOFError:
            return
