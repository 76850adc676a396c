"""The command run, which runs a job file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from mmdeploy_llm.cli.options.job_file import COMMAND, FOLDER, all_words, has_jobs, read_job
from mmdeploy_llm.errors import ConfigError

MORE_WORDS = {"allow_extra_args": True, "ignore_unknown_options": True}

RUN_EPILOG = """\b
Examples:
  mmdeploy-llm caption photos/ -p "List the tags." --save-job tags.toml
  mmdeploy-llm run tags.toml --resume
  mmdeploy-llm run jobs/nightly.toml --limit 100 --random --overwrite

\b
A job is a TOML file:
  command = "caption"             or "batch"
  paths = ["photos"]              its arguments and options, by their names
  prompt = "@question.txt"
  max_tokens = 200
  engine = {max_model_len = 4096}
The job runs in the folder of its file, or in `folder`, relative to that. Paths
in it, and in options after it, are relative to this folder.
Options after the file replace those in it."""


def run(
    ctx: typer.Context,
    job: Annotated[
        str, typer.Argument(metavar="JOB", help="TOML file with a command and its options.")
    ],
) -> None:
    """Run a job file: a command with its options. Further options replace those of the file."""
    parent: Any = ctx.parent
    values = read_job(job)
    name = values.pop(COMMAND)
    known = {
        each: command for each, command in parent.command.commands.items() if has_jobs(command)
    }
    if name not in known:
        raise ConfigError(
            f"{job}: command must be one of {', '.join(known)}, got {str(name)[:40]!r}"
        )
    folder = values.pop(FOLDER, ".")
    if not isinstance(folder, str):
        raise ConfigError(f"{job}: folder must be a text, got {folder!r}")
    try:
        words = all_words(known[name], parent, values, ctx.args)
        os.chdir(Path(job).parent / folder)
        inner = known[name].make_context(name, words, parent=parent)
    except (ConfigError, OSError) as error:
        raise ConfigError(f"{job}: {error}") from error
    except Exception as error:
        if not hasattr(error, "format_message"):  # only wrong usage has one
            raise
        raise ConfigError(f"{job}: {error.format_message()}") from error
    with inner:
        known[name].invoke(inner)
