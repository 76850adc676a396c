"""An output in the format of OpenAI's Batch API: `answers.jsonl` is written whole at the end of
each run, from the records in `answers.jsonl.records.jsonl` beside it."""

from __future__ import annotations

import os
from collections.abc import Iterator

from mmdeploy_llm.data.openai.bodies import as_line, line_of
from mmdeploy_llm.data.records.files import open_regular

from .made import MadeSink

BEGIN = b'{"id": "batch_req_'


class OpenAISink(MadeSink):
    """The lines of responses, and the records that they are made from; see Sink for the methods."""

    ending = ".records.jsonl"

    def is_ours(self) -> bool:
        """Returns whether the file has lines that a batch has written, or nothing."""
        with open_regular(self.made, os.O_RDONLY) as file:
            begin = file.read(len(BEGIN)) or b""
        return begin == BEGIN or not begin

    def pieces(self) -> Iterator[bytes]:
        """Yields the line of each record."""
        model = ", ".join(self.configurations.models)
        created = (self.modified() or 0) // 10**9
        for entry in self.entries():
            yield as_line(line_of(entry.record, model, created))
