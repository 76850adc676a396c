"""Opens models for commands. The engine is imported only then."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import typer

from mmdeploy_llm.cli.options.missing import check_model
from mmdeploy_llm.cli.options.suggested import is_demonstration, note_of
from mmdeploy_llm.cli.terminal.letters import printable
from mmdeploy_llm.data.files.counting import files_so_far
from mmdeploy_llm.media.budgets.photo import telling_the_cost

if TYPE_CHECKING:
    from mmdeploy_llm.batch.report.previews import FilePreviews
    from mmdeploy_llm.client.aio.async_llm import AsyncLLM
    from mmdeploy_llm.client.llm import LLM
    from mmdeploy_llm.engine.desk.answerer import Answerer
    from mmdeploy_llm.media.loading.loader import MediaLoader


def say_what_starts(model: str) -> None:
    """Says on a terminal which model starts, before the seconds in which nothing else is said."""
    if sys.stderr is not None and sys.stderr.isatty():
        typer.echo(f"starting {model} ...", err=True)


def say_what_runs(
    model: str,
    paths: Iterable[str],
    places: Iterable[str],
    *,
    purpose: str,
    is_checked: bool,
    limit: int | None = None,
    is_resumed: bool = False,
) -> None:
    """Says which model starts with how many files, and where the results go: the first line of a
    run. A terminal has it at once, a file or a pipe once the options are checked, so that an error
    in them is the only line. paths: files, folders and names of other inputs. places: names of the
    outputs. purpose: what for, a key of LACKS: a demonstration says what it lacks. is_checked:
    whether the options are. limit: files that are done, None: all. is_resumed: whether an
    output goes on, whose items nobody has read yet."""
    if sys.stderr is None or sys.stderr.isatty() == is_checked:
        return
    found, where = files_so_far(paths, limit=limit), " and ".join(places)
    less = ", less those that are done" if is_resumed else ""
    line = f"starting {model}" + (f" with {found}{less}" if found else "")
    typer.echo(printable(line + (f"; results go to {where}" if where else " ...")), err=True)
    if is_demonstration(model):
        typer.echo(note_of(model, purpose), err=True)


def open_llm(model: str, options: Mapping[str, Any]) -> AbstractContextManager[LLM]:
    """Opens the model and closes it at the end of the block."""
    say_what_starts(model)
    return _open(model, options)


@contextmanager
def _open(model: str, options: Mapping[str, Any]) -> Iterator[LLM]:
    check_model(model, options)  # before the client of the engine is imported
    from mmdeploy_llm.client.llm import LLM

    with LLM(model=model, **{"quiet": True, **options}) as llm:
        yield llm


def open_answerer(
    model: str, options: Mapping[str, Any], cluster: str | None
) -> AbstractContextManager[Answerer]:
    """Opens the model of a run in this process, or on the Ray cluster with this address."""
    if cluster is None:
        return telling_the_cost(_open(model, options), options)
    from mmdeploy_llm.client.ray import ClusterLLM

    return ClusterLLM(model, address=cluster, **options)


def open_async_llm(model: str, options: Mapping[str, Any]) -> AsyncLLM:
    """Opens the model for single requests."""
    say_what_starts(model)
    from mmdeploy_llm.client.aio.async_llm import AsyncLLM

    return AsyncLLM(model, **{"quiet": True, **options})


def open_media(model: str, options: Mapping[str, Any]) -> MediaLoader:
    """Returns the model's media loader, without loading weights."""
    from mmdeploy_llm.engine.startup import media
    from mmdeploy_llm.values.options.config import EngineConfig

    return media.open_media(EngineConfig.from_options(model, options))


def open_reader(model: str, options: Mapping[str, Any]) -> MediaLoader:
    """Returns a loader that reads media within the limits and needs no files of the model."""
    from mmdeploy_llm.media.loading import reader
    from mmdeploy_llm.values.options.config import EngineConfig

    return reader.open_reader(EngineConfig.from_options(model, options))


def previews_of(model: str, options: Mapping[str, Any]) -> FilePreviews:
    """Returns what makes the pictures of a report."""
    from mmdeploy_llm.batch.report.previews import FilePreviews

    return FilePreviews(lambda: open_reader(model, options), lambda: open_media(model, options))
