"""The commands search and dedupe, over files of vectors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmdeploy_llm.cli.engines import open_llm, previews_of
from mmdeploy_llm.cli.options.groups import with_groups
from mmdeploy_llm.cli.options.missing import check_outputs
from mmdeploy_llm.cli.options.model import Engine, known_model
from mmdeploy_llm.cli.options.providers import ProviderOptions
from mmdeploy_llm.cli.options.single import IsJson
from mmdeploy_llm.cli.options.suggested import is_demonstration, limits_of
from mmdeploy_llm.cli.options.values import MANY_MEDIA, engine_options, text_value
from mmdeploy_llm.cli.options.vectors import Column, Instruction, TooLong
from mmdeploy_llm.errors import ConfigError

from .reports import expanded

if TYPE_CHECKING:
    from mmdeploy_llm.data.vectors.opened import Vectors
    from mmdeploy_llm.data.vectors.search import Found

OF_EMBED = "name an output of `embed`, or its files"

Files = Annotated[
    str, typer.Argument(metavar="VECTORS", help="An output of `embed`, or other vectors; a glob.")
]
Several = Annotated[
    list[str],
    typer.Argument(metavar="VECTORS", help="Outputs of `embed`, or other vectors; globs."),
]
Query = Annotated[str | None, typer.Argument(metavar="[QUERY]", help="A text to search for.")]
Images = Annotated[
    list[str] | None,
    typer.Option("--image", metavar="FILE", help="A picture to search for, alone or with QUERY."),
]
Like = Annotated[
    str | None,
    typer.Option(metavar="ID", help="Search for what is like this item; needs no model."),
]
TopK = Annotated[int, typer.Option("--top-k", "-k", min=1, metavar="N", help="How many to find.")]
Similarity = Annotated[
    str | None,
    typer.Option(
        metavar="cosine|dot",
        help="How vectors are compared.  [default: as the model's folder says, else cosine]",
    ),
]
OwnModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="NAME",
        callback=known_model,
        help="The model of the query.  [default: the output's]",
    ),
]
Page = Annotated[
    Path | None, typer.Option("--report", metavar="FILE", help="HTML page with the pictures.")
]
Threshold = Annotated[
    float, typer.Option(metavar="X", help="The cosine of two items from which they are alike.")
]
Table = Annotated[
    str,
    typer.Option(
        "--output",
        "-o",
        metavar="NAME",
        help="Where the table goes: NAME.csv, or NAME.txt for the ids of the items to keep alone.",
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing table.")]


@with_groups
def search(
    ctx: typer.Context,
    vectors: Files,
    query: Query = None,
    image: Images = None,
    like: Like = None,
    top_k: TopK = 10,
    as_json: IsJson = False,
    report: Page = None,
    model: OwnModel = None,
    instruction: Instruction = None,
    too_long: TooLong = "error",
    similarity: Similarity = None,
    column: Column = None,
    engine: Engine = None,
    *,
    providers: ProviderOptions,
) -> None:
    """Find the items of an output of `embed` that are nearest to a text, a picture or an item."""
    check_outputs([vectors], OF_EMBED)
    options = engine_options(ctx, engine, limit_mm_per_prompt=MANY_MEDIA, **providers.to_engine())
    from mmdeploy_llm.batch.report.target import check_page
    from mmdeploy_llm.data.vectors.search import open_vectors

    if (query is None and not image) == (like is None):
        raise ConfigError("give what to search for: a text, pictures with --image, or --like ID")
    if like is not None and (instruction is not None or (model is not None and report is None)):
        words = "--instruction is of a QUERY, and so is --model, if no --report needs it"
        raise ConfigError(f"--like compares vectors that are there: {words}")
    text = text_value("QUERY", query)
    if report is not None:
        check_page(report)
    opened = open_vectors(expanded([vectors]), column, providers.kinds(ctx.obj))
    if like is not None:
        name, found = model or "shapes-vl", _like(opened, like, top_k, similarity)
    else:
        name = model or _model_of(opened)
        media = {"multimodal_data": {"image": image}} if image else {}
        prompt = {**({} if text is None else {"prompt": text}), **media}
        with open_llm(name, options) as llm:
            own = text_value("--instruction", instruction)
            wish: dict[str, Any] = {"similarity": similarity, "too_long": too_long}
            (found,) = llm.search(opened, [prompt], top_k, instruction=own, **wish)
    _show(found, opened, as_json=as_json)
    if is_demonstration(name) and like is None:
        typer.echo(limits_of(name, "vectors"), err=True)
    if report is not None:
        words = text or like or ", ".join(image or ())
        _write_page(report, found, opened, words, name, options)
        typer.echo(f"report: {report}", err=as_json)


def _model_of(opened: Vectors) -> str:
    from mmdeploy_llm.data.vectors.origin import origin_of

    return origin_of(opened).model


def _like(opened: Vectors, item_id: str, top_k: int, similarity: str | None) -> list[Found]:
    from mmdeploy_llm.data.vectors.search import like

    return like(opened, item_id, top_k, similarity=similarity or "cosine")


def _show(found: Sequence[Found], opened: Vectors, *, as_json: bool) -> None:
    """Prints what was found, and on stderr what was left out."""
    from mmdeploy_llm.cli.terminal.letters import printable
    from mmdeploy_llm.cli.terminal.output import hit_table, print_table

    for words in opened.notes():
        typer.echo(printable(words), err=True)
    if as_json:
        typer.echo(json.dumps([own.to_dict() for own in found], ensure_ascii=False, indent=1))
        return
    print_table(hit_table(found))


def _write_page(
    path: Path,
    found: Sequence[Found],
    opened: Vectors,
    query: str,
    model: str,
    options: dict[str, Any],
) -> None:
    from mmdeploy_llm.batch.report.nearest import write_found

    write_found(path, found, query, model, previews_of(model, options), opened.roots)


@with_groups
def dedupe(
    ctx: typer.Context,
    vectors: Several,
    threshold: Threshold = 0.95,
    output: Table = "duplicates.csv",
    overwrite: Overwrite = False,
    as_json: IsJson = False,
    column: Column = None,
    *,
    providers: ProviderOptions,
) -> None:
    """Find groups of near-duplicates in an output of `embed`; write a table that --only reads."""
    check_outputs(vectors, OF_EMBED)
    from mmdeploy_llm.cli.terminal.letters import printable
    from mmdeploy_llm.data.vectors.search import dedupe as find
    from mmdeploy_llm.data.vectors.search import open_vectors
    from mmdeploy_llm.data.vectors.table import check_target

    check_target(Path(output), is_replaced=overwrite)
    opened = open_vectors(expanded(vectors), column, providers.kinds(ctx.obj))
    found = find(opened, threshold)
    found.write(output, overwrite=overwrite)
    counts = found.counts()
    if as_json:
        typer.echo(json.dumps({**counts, "output": output}))
    else:
        typer.echo(found.words())
    for words in opened.notes():
        typer.echo(printable(words), err=True)
    if not as_json:
        typer.echo(printable(f"table:  {output}"))
