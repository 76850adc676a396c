"""The options of `LLM.run_batch` and calls like it: their signatures show them, and commands have
them by their Flags."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypedDict

from mmdeploy_llm.data.files.arguments import FindingArguments, PageArguments
from mmdeploy_llm.data.outputs.sidecars.arguments import SidecarArguments
from mmdeploy_llm.engine.desk.deaths import ENGINE_RESTARTS
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.values.options.flags import Flag

from .answers import VALIDATE_RETRIES
from .corpus.arguments import ColumnArguments


class RunArguments(TypedDict, total=False):
    """Options of every call that runs a batch: LLM.run_batch, LLM.embed_batch and LLM.read.

    shard: "2/8" answers the second of eight shards, by line number.
    limit: lines to read. random: whether these are drawn, with random_seed (0), and not the first.
    only: ids of the items to do. order: "finished" writes records as they finish, "input" in the
        order of the input.
    recursive: whether folders of media are read with their subfolders (True).
    max_failures: failed items that end the run.
    format: "jsonl", "csv", "openai" (the responses of OpenAI's Batch API), "parquet" or
        "webdataset"; None decides by the suffix of the output.
    part_items: most items of a part of the output; None is the format's own number.
    journal: folder on this machine for what is not uploaded yet, when the output is a URL.
    engine_restarts: how often in a row an engine that died is started again (2).
    log_json: file that gains one JSON object for each event of the run, see docs/outcomes.md.
    """

    recursive: Annotated[
        bool,
        Flag(
            "Whether folders are read with their subfolders.",
            is_rare=True,
            names=("--recursive/--no-recursive", "-r"),
            default=True,
        ),
    ]
    limit: Annotated[
        int | None, Flag("Process only the first N lines or files.", metavar="N", min=1)
    ]
    shard: Annotated[
        str | None,
        Flag(
            "Every N-th item from the I-th on: N runs share the input. auto: as torchrun, SLURM or "
            "an indexed job of Kubernetes numbers this process; the shard then stands in the "
            "output's name.",
            metavar="I/N|auto",
        ),
    ]
    random: Annotated[bool, Flag("With --limit: N random ones, the same in each run.")]
    random_seed: Annotated[
        int, Flag("Which ones --random draws.  [default: 0]", metavar="N", is_rare=True)
    ]
    only: Annotated[
        Collection[str] | None,
        Flag(
            "Do only the item with this id, or those of @FILE. The file has an id on each line, or "
            "is a table of `dedupe`, NAME.csv; @@ is a literal @; may be repeated.",
            metavar="ID",
            type=list[str],
        ),
    ]
    order: Annotated[
        str,
        Flag(
            "Order of the records: as items finish, or as they stand in the input. For the latter "
            "a record is held until those before it are written.",
            metavar="finished|input",
            is_rare=True,
            default="finished",
        ),
    ]
    format: Annotated[
        str | None,
        Flag(
            "Format of the output: jsonl, csv, openai, parquet or webdataset.  [default: by its "
            "suffix]",
            metavar="FORMAT",
            is_rare=True,
            names=("--format", "--output-format"),
        ),
    ]
    part_items: Annotated[
        int | None,
        Flag(
            "Items in a part of the output.  [default: 20000, of tars 10000]",
            metavar="N",
            is_rare=True,
            min=1,
        ),
    ]
    journal: Annotated[
        str | os.PathLike[str] | None,
        Flag(
            "Where this machine keeps results that are not uploaded yet, when --output is a URL.  "
            "[default: a folder NAME-DIGEST.journal here]",
            metavar="FOLDER",
            is_rare=True,
        ),
    ]
    max_failures: Annotated[
        int | None, Flag("Stop after N failed items in this run.", metavar="N", is_rare=True, min=1)
    ]
    engine_restarts: Annotated[
        int,
        Flag(
            "How often in a row an engine that died is started again. Its items are done again; "
            "one that was there at two deaths is done alone.",
            metavar="K",
            is_rare=True,
            default=ENGINE_RESTARTS,
            min=0,
        ),
    ]
    log_json: Annotated[
        str | os.PathLike[str] | None,
        Flag(
            "Add a JSON object to this file for each event. These are started, loaded, progress, "
            "an item without its answer, finished and others.",
            metavar="FILE",
            is_rare=True,
        ),
    ]


class AskingArguments(TypedDict, total=False):
    """Options of LLM.run_batch about the question and its answers.

    ask: several questions instead of `prompt`, by name: {"caption": "Describe.", "tags": "List."};
        the record has `answers` by these names, and `text` is the first one's.
    system: the system message before `prompt`, and of lines whose messages have none.
    schema: guides the answers, checks them as validate does, and gives `answers` by its fields: a
        JSON schema, a file with one, a pydantic class or "module:Class".
    validate: a JSON schema that every answer must keep, or a file with one. avoid: openings of
        answers that are not wanted, such as "This image"; max_words, max_chars: of an answer. One
        that breaks these is asked again up to validate_retries (2) times, then it is an error
        with its text.
    boxes: read the boxes in answers, see docs/boxes.md; records have them in pixels of pictures.
    """

    ask: Annotated[
        Mapping[str, str] | None,
        Flag(
            "One of several questions about each item. May be repeated; the record has the answers "
            "by these names. TEXT is as that of --prompt.",
            metavar="NAME=TEXT",
            type=list[str],
        ),
    ]
    system: Annotated[
        str | None,
        Flag(
            "The system message, or @FILE. It opens the conversation; a line of a batch may have "
            "its own.",
            metavar="TEXT",
        ),
    ]
    schema: Annotated[
        Any,
        Flag(
            "Answers in JSON: a file with a JSON schema, or a pydantic class. Answers are "
            "generated by it, checked as by --validate, and recorded by their fields. A class is "
            "imported: its module's code runs.",
            metavar="FILE|MODULE:CLASS",
        ),
    ]
    validate: Annotated[
        Mapping[str, Any] | str | os.PathLike[str] | None,
        Flag(
            "File of a JSON schema that answers are only checked by, and not guided. One that "
            "breaks it is asked again, then recorded as an error with its text.",
            metavar="SCHEMA",
            is_rare=True,
            type=Path,
        ),
    ]
    avoid: Annotated[
        str | Collection[str] | None,
        Flag(
            'An opening that is not wanted, such as "This image"; may be repeated. An answer with '
            "it is asked again, as one that breaks --validate.",
            metavar="TEXT",
            type=list[str],
        ),
    ]
    max_words: Annotated[
        int | None,
        Flag(
            "Most words of an answer; a longer one is asked again.",
            metavar="N",
            is_rare=True,
            min=1,
        ),
    ]
    max_chars: Annotated[
        int | None,
        Flag(
            "Most characters of an answer; a longer one is asked again.",
            metavar="N",
            is_rare=True,
            min=1,
        ),
    ]
    validate_retries: Annotated[
        int,
        Flag(
            "How often an answer that breaks --validate, --avoid, --max-words or --max-chars is "
            "asked again.",
            metavar="K",
            is_rare=True,
            default=VALIDATE_RETRIES,
            min=0,
        ),
    ]
    boxes: Annotated[
        bool,
        Flag(
            "Read the boxes in answers about one picture into `boxes` of each record, in pixels of "
            "the picture, upright. The report draws them, and `mmdeploy-llm export` writes COCO "
            "and YOLO. The question must ask for boxes as the model writes them.",
            is_rare=True,
        ),
    ]


class OutputArguments(AskingArguments, RunArguments, total=False):
    """Options of LLM.run_batch that are neither about columns, files nor sidecars."""


class EmbedArguments(ColumnArguments, FindingArguments, PageArguments, RunArguments, total=False):
    """Options of LLM.embed_batch, as those of LLM.run_batch; see ColumnArguments, FindingArguments,
    PageArguments and RunArguments."""


class BatchOptions(
    ColumnArguments,
    FindingArguments,
    PageArguments,
    SidecarArguments,
    OutputArguments,
    total=False,
):
    """Options of LLM.run_batch; see ColumnArguments, FindingArguments, PageArguments,
    SidecarArguments, AskingArguments and RunArguments."""


def check_known(call: str, given: Iterable[str], source: type, *others: str) -> None:
    """Raises ConfigError for a name that is no option of a call. source: a TypedDict of these.
    others: further arguments, which may be meant."""
    known = source.__annotations__
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, (*known, *others), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise ConfigError(f"{call} has no argument {name!r}; {hint}")
