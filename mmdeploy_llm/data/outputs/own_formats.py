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
        about="records, one line of JSON each",
        options=("part_items",),
    ),
    OutputSinkSpec(
        name="csv",
        suffixes=(".csv",),
        factory=f"{HERE}.csv_table:CsvSink",
        about="a table: a row for each record",
        holds=("answers",),
    ),
    OutputSinkSpec(
        name="openai",
        suffixes=(".jsonl",),
        factory=f"{HERE}.openai:OpenAISink",
        about="a line for each record as OpenAI's Batch API writes it",
        holds=("answers",),
        priority=-1,  # it is named: these names are those of records
    ),
    OutputSinkSpec(
        name="parquet",
        suffixes=(".parquet", ".pq"),
        factory=f"{HERE}.parquet:ParquetParts",
        about="a folder of Parquet files, a row for each record",
        options=("part_items",),
    ),
    OutputSinkSpec(
        name="webdataset",
        suffixes=(".tar",),
        factory=f"{HERE}.tars:TarParts",
        about="a folder of WebDataset tars, each answer beside its picture",
        options=("part_items", "media_root"),
    ),
    OutputSinkSpec(
        name="npy",
        suffixes=(".npy",),
        factory=f"{HERE}.npy:NpyParts",
        about="a folder of arrays of numpy, a vector for each record",
        holds=("vectors",),
        options=("part_items",),
    ),
    OutputSinkSpec(
        name="lance",
        suffixes=(".lance",),
        factory=f"{HERE}.lance_store:LanceStore",
        about="a Lance dataset, a row with a vector for each record",
        holds=("vectors",),
    ),
)


@hookimpl
def provide_output_sinks() -> tuple[OutputSinkSpec, ...]:
    """Returns all of them."""
    return FORMATS
