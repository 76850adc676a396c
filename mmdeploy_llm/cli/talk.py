"""The commands that answer while one waits: generate and chat."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from .options import (
    MANY_MEDIA,
    SOME_FAILED,
    Device,
    DType,
    Engine,
    Image,
    MaxTokens,
    Model,
    Parser,
    Temperature,
    Thinking,
    engine_options,
    open_llm,
    print_error,
    sampling_params,
    template_kwargs,
)


def generate(
    ctx: typer.Context,
    prompt: Annotated[str, typer.Argument(help="What to ask; - reads it from standard input.")],
    image: Image = None,
    model: Model = "shapes-vl",
    raw: Annotated[
        bool,
        typer.Option("--raw", help="Continue PROMPT as it is, without the model's chat template."),
    ] = False,
    thinking: Thinking = None,
    max_tokens: MaxTokens = 1024,
    temperature: Temperature = 0.0,
    reasoning_parser: Parser = "auto",
    dtype: DType = "auto",
    device: Device = "auto",
    engine: Engine = None,
) -> None:
    """Answer one prompt.

    The answer goes to standard output, reasoning to standard error."""
    from mmdeploy_llm.terminal import make_console, print_answer, user_message

    text, images = sys.stdin.read() if prompt == "-" else prompt, image or []
    request: dict[str, Any] = {"prompt": text, "multimodal_data": {"image": images}}
    if not raw:
        message = user_message(text, images)
        request = {"messages": [message], "chat_template_kwargs": template_kwargs(thinking)}
    options = engine_options(
        ctx,
        engine,
        dtype=dtype,
        device=device,
        reasoning_parser=reasoning_parser,
        limit_mm_per_prompt={"image": max(1, len(images))},
    )
    params = sampling_params(max_tokens=max_tokens, temperature=temperature)
    with open_llm(model, options) as llm:
        outputs = llm.stream(request, params)
        _, error = print_answer(outputs, make_console(), make_console(is_stderr=True))
    if error is not None:
        print_error(error)
        raise typer.Exit(SOME_FAILED)


def chat(
    ctx: typer.Context,
    message: Annotated[str | None, typer.Option(help="Say this, print the answer and end.")] = None,
    image: Image = None,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    model: Model = "shapes-vl",
    thinking: Thinking = None,
    max_tokens: MaxTokens = 1024,
    temperature: Temperature = 0.0,
    reasoning_parser: Parser = "auto",
    dtype: DType = "auto",
    device: Device = "auto",
    engine: Engine = None,
) -> None:
    """Talk with a model about pictures.

    Lines come from the terminal or a pipe; /image PATH adds a picture, /reset forgets, /quit
    ends."""
    from mmdeploy_llm.terminal import CHAT_HELP, ChatSession, make_console

    options = engine_options(
        ctx,
        engine,
        dtype=dtype,
        device=device,
        reasoning_parser=reasoning_parser,
        limit_mm_per_prompt=MANY_MEDIA,
    )
    params = sampling_params(max_tokens=max_tokens, temperature=temperature)
    out, aside = make_console(), make_console(is_stderr=True)
    with open_llm(model, options) as llm:
        kwargs = template_kwargs(thinking)
        session = ChatSession(
            llm, params, out=out, aside=aside, system=system, template_kwargs=kwargs
        )
        for path in image or []:
            session.add_image(path)
        if message is None and sys.stdin.isatty():
            typer.echo(f"{model}: {CHAT_HELP}", err=True)
        session.run(typed_lines() if message is None else [message])
    if session.num_failed:
        raise typer.Exit(SOME_FAILED)


def typed_lines() -> Iterator[str]:
    """Lines of a terminal, with a prompt and line editing, or of a pipe."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    while True:
        try:
            yield input("> ")
        except EOFError:
            return
