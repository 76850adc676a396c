"""BatchOptions: the options of `LLM.run_batch`, which its signature shows."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any, TypedDict

from mmdeploy_llm.data.files.arguments import FindingArguments, PageArguments
from mmdeploy_llm.data.outputs.sidecars.arguments import SidecarArguments

from .corpus.arguments import ColumnArguments


class OutputOptions(TypedDict, total=False):
    """Options of LLM.run_batch.

    ask: several questions instead of `prompt`, by name: {"caption": "Describe.", "tags": "List."};
        the record has `answers` by these names, and `text` is the first one's.
    shard: "2/8" answers the second of eight shards, by line number.
    limit: lines to read. random: whether these are drawn, with random_seed (0), and not the first.
    only: ids of the items to do. order: "finished" writes records as they finish, "input" in the
        order of the input.
    system: the system message before `prompt`, and of lines whose messages have none.
    recursive: whether folders of media are read with their subfolders (True).
    max_failures: failed items that end the run.
    format: "jsonl", "csv", "openai" (the responses of OpenAI's Batch API), "parquet" or
        "webdataset"; None decides by the suffix of the output.
    part_items: most items of a part of the output; None is the format's own number.
    journal: folder on this machine for what is not uploaded yet, when the output is a URL.
    schema: guides the answers, checks them as validate does, and gives `answers` by its fields: a
        JSON schema, a file with one, a pydantic class or "module:Class".
    validate: a JSON schema that every answer must keep, or a file with one. avoid: openings of
        answers that are not wanted, such as "This image"; max_words, max_chars: of an answer. One
        that breaks these is asked again up to validate_retries (2) times, then it is an error
        with its text.
    engine_restarts: how often in a row an engine that died is started again (2).
    boxes: read the boxes in answers, see docs/boxes.md; records have them in pixels of pictures.
    log_json: file that gains one JSON object for each event of the run, see docs/outcomes.md.
    """

    ask: Mapping[str, str] | None
    shard: str | None
    limit: int | None
    random: bool
    random_seed: int
    only: Collection[str] | None
    order: str
    system: str | None
    recursive: bool
    max_failures: int | None
    format: str | None
    part_items: int | None
    journal: str | os.PathLike[str] | None
    schema: Any
    validate: Mapping[str, Any] | str | os.PathLike[str] | None
    avoid: str | Collection[str] | None
    max_words: int | None
    max_chars: int | None
    validate_retries: int
    engine_restarts: int
    boxes: bool
    log_json: str | os.PathLike[str] | None


class BatchOptions(
    ColumnArguments, FindingArguments, PageArguments, SidecarArguments, OutputOptions, total=False
):
    """Options of LLM.run_batch; see ColumnArguments, FindingArguments, PageArguments,
    SidecarArguments and OutputOptions."""
