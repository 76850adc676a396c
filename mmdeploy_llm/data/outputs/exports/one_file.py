"""Exports to formats that are one file."""

from __future__ import annotations

from mmdeploy_llm.data.outputs.csv_table import CsvTable

from .export import Export


def write_csv(export: Export) -> None:
    """Writes a table in CSV, with a column for each answer and each carried column."""
    table = CsvTable(lambda: (item.record for item in export.items()))
    export.write_file(table)
    if table.num_guarded:
        export.notes.append(
            f"{table.num_guarded} cells begin like a formula of a spreadsheet and have an "
            "apostrophe before them"
        )
