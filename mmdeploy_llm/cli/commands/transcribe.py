"""The command transcribe: subtitles and texts of files of speech."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from mmdeploy_llm.cli.engines import open_llm
from mmdeploy_llm.cli.exits import SOME_FAILED, print_error
from mmdeploy_llm.cli.options.groups import with_groups
from mmdeploy_llm.cli.options.missing import check_media
from mmdeploy_llm.cli.options.suggested import choose_model
from mmdeploy_llm.cli.options.transcribing import TranscribeOptions, TranscriptOptions

if TYPE_CHECKING:
    from mmdeploy_llm.batch.speech.plan import Plan
    from mmdeploy_llm.batch.speech.run import Transcriber


@with_groups
def transcribe(
    ctx: typer.Context,
    sounds: Annotated[
        list[str], typer.Argument(metavar="SOUNDS", help="Files of sound, their folders, globs.")
    ],
    *,
    desk: TranscribeOptions,
) -> None:
    """Transcribe files of speech; write subtitles and texts."""
    check_media(sounds)
    if desk.output.corrected:
        return _write_corrected(sounds, desk.output)
    model = choose_model(ctx, desk.model.model, sounds, "speech", is_demo=None)
    desk = replace(desk, model=replace(desk.model, model=model))
    options = desk.llm_options(ctx)
    from mmdeploy_llm.batch.speech.plan import made_by, open_rule, plan
    from mmdeploy_llm.batch.speech.run import Transcriber, Wish, asked_of, detector_of
    from mmdeploy_llm.batch.speech.writing import read_formats
    from mmdeploy_llm.values.options.config import EngineConfig

    out, wish = desk.output, Wish(**desk.speech.wish)
    formats = read_formats(out.transcripts)
    config = EngineConfig.from_options(desk.model.model, options)
    rule, limits = open_rule(config)
    asked_of(rule, wish)  # a wrong wish is told before the load
    detector = detector_of(wish, rule)
    planned = plan(
        sounds,
        formats,
        out.output,
        made_by(config, wish),
        is_recursive=out.folders.get("recursive", True),
        overwrite=out.overwrite,
    )
    for words in planned.told:
        typer.echo(words)
    for refused in planned.refused:
        print_error(f"{refused.path}: {refused.error}")
    num_failed = len(planned.refused)
    if planned.tasks:
        with open_llm(desk.model.model, options) as llm:
            num_failed = _run(Transcriber(llm, rule, wish, limits, detector), planned)
    if num_failed:
        raise typer.Exit(SOME_FAILED)


def _write_corrected(sounds: list[str], out: TranscriptOptions) -> None:
    """Says which transcripts are written from subtitles."""
    from mmdeploy_llm.batch.speech.corrected import write_corrected
    from mmdeploy_llm.batch.speech.writing import read_formats

    num_failed, is_recursive = 0, out.folders.get("recursive", True)
    found = write_corrected(
        sounds,
        read_formats(out.transcripts),
        out.output,
        is_recursive=is_recursive,
        overwrite=out.overwrite,
    )
    for own in found:
        if own.error is not None:
            print_error(f"{own.path}: {own.error}")
            num_failed += 1
        else:
            typer.echo(f"{own.path}: {' and '.join(own.written) or 'all others say the same'}")
    if num_failed:
        raise typer.Exit(SOME_FAILED)


def _run(transcriber: Transcriber, planned: Plan) -> int:
    """Says which transcripts are written, as they are, and after Ctrl-C how to go on. Returns how
    many failed."""
    num_doubtful, skips = 0, list[tuple[float, float]]()
    num_failed, num_written, num_files = len(planned.refused), 0, len(planned.tasks)
    try:
        for found in planned.run(transcriber):
            if found.error is None:
                typer.echo(found.told)
                num_written += 1
                num_doubtful += bool(found.doubtful)
                skips += [] if found.skipped is None else [found.skipped]
            else:
                print_error(f"{found.path}: {found.error}")
                num_failed += 1
    except KeyboardInterrupt:
        told = f"stopped with {num_files - num_written} of {num_files} files left"
        typer.echo(f"{told}; the same command (without --overwrite) does them", err=True)
        raise
    if num_written + num_failed > 1:
        doubtful = f", {num_doubtful} of them with doubtful lines" if num_doubtful else ""
        skipped = f", {_skipped(skips)}" if skips else ""
        typer.echo(f"{num_written} files transcribed{doubtful}{skipped}, {num_failed} failed")
    return num_failed


def _skipped(skips: list[tuple[float, float]]) -> str:
    """Returns in words what of all files was not heard."""
    from mmdeploy_llm.batch.speech.run import skipped_told

    skipped, seconds = (sum(column) for column in zip(*skips, strict=True))
    return skipped_told(skipped, seconds)
