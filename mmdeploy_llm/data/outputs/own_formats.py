"""The formats of outputs of this package, declared as a plugin declares its own: a new one is one
more row. They are known whatever plugins are loaded."""

from __future__ import annotations

from mmdeploy_llm.hooks import OutputSinkSpec, hookimpl

HERE = "mmdeploy_llm.data.outputs"


# In the order in which they are listed.
FORMATS = (
    OutputSinkSpec(
        name="jsonl",
        suffixes=(".jsonl", ".ndjson"),
        factory=f"{HERE}.jsonl:lines_at",
        options=("part_items",),
    ),
    OutputSinkSpec(
        name="csv",
        suffixes=(".csv",),
        factory=f"{HERE}.csv_table:CsvSink",
        holds=("answers",),
    ),
    OutputSinkSpec(
        name="openai",
        suffixes=(".jsonl",),
        factory=f"{HERE}.openai:OpenAISink",
        holds=("answers",),
        priority=-1,  # it is named: these names are those of records
    ),
    OutputSinkSpec(
        name="parquet",
        suffixes=(".parquet", ".pq"),
        factory=f"{HERE}.parquet:ParquetParts",
        options=("part_items",),
    ),
)


@hookimpl
def provide_output_sinks() -> tuple[OutputSinkSpec, ...]:
    """Returns all of them."""
    return FORMATS
