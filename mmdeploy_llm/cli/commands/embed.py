"""The command embed: a vector of each item of a corpus."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import typer

from mmdeploy_llm.cli.options.columns import ColumnChoices
from mmdeploy_llm.cli.options.groups import with_groups
from mmdeploy_llm.cli.options.output import Output
from mmdeploy_llm.cli.options.vectors import EmbedOptions

from .batches import Input, run_input

if TYPE_CHECKING:
    from mmdeploy_llm.batch.summary import BatchSummary


@with_groups
def embed(
    ctx: typer.Context,
    input: Input = None,
    *,
    desk: EmbedOptions,
    output: Output = "vectors.parquet",
    columns: ColumnChoices,
) -> None:
    """Make a vector of each item of a corpus or a folder of media, for `search` and `dedupe`.

    Vectors are appended to the output as they finish. An item that cannot be read gets a record
    with its error and does not affect the others."""
    run_input(ctx, input, desk, output, columns, after=_finished)


def _finished(summary: BatchSummary) -> Iterable[str]:
    from mmdeploy_llm.data.vectors.written import finish

    return finish(summary.sink)
