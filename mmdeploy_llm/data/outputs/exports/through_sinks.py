"""Exports to the formats of outputs themselves: the records, and where the format holds them the
media; `--resume` continues what was written as it does the output that was read."""

from __future__ import annotations

from typing import Literal, cast

from mmdeploy_llm.data.outputs.opening.choose import open_sink
from mmdeploy_llm.data.outputs.scan import Kept
from mmdeploy_llm.data.records.state import RunState

from .export import Export


def write_output(export: Export, form: str) -> None:
    """Writes the records as an output of a batch."""
    options = export.options
    sink = open_sink(export.output, form, part_items=options.part_items, kinds=options.kinds)
    mode = cast(Literal["new", "overwrite"], export.mode)
    sink.check(mode)
    with sink.writer(mode, Kept()) as writer:
        sink.configurations.adopt([source.configurations for source in export.sources])
        state = RunState(ending="running", total=None, shard=1, num_shards=1, output=sink.name)
        state.write(sink.state_file)
        for item in export.items():
            writer.write(item.record, item.number, item.item() if item.record.is_ok else None)
        writer.finish(lambda record: record.line)
        if export.is_complete:
            RunState(ending="done", total=None, shard=1, num_shards=1, output=sink.name).write(
                sink.state_file
            )
