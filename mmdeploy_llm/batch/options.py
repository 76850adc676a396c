"""BatchOptions: the options of LLM.run_batch that are those of a corpus and of an output."""

from __future__ import annotations

import difflib
from typing import Any

from mmdeploy_llm.errors import ConfigError

from .corpus.columns import ColumnArguments, ColumnOptions
from .sinks.options import OutputOptions, output_settings


class BatchOptions(ColumnArguments, OutputOptions, total=False):
    """Options of LLM.run_batch; see ColumnArguments and OutputOptions."""


def option_settings(options: BatchOptions) -> dict[str, Any]:
    """Returns the fields of BatchSettings for the options. Raises ConfigError, also for an unknown
    one."""
    columns = ColumnArguments.__annotations__
    known = (*columns, *OutputOptions.__annotations__)
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, (*known, "report", "prompt"), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise ConfigError(f"run_batch has no argument {name!r}; {hint}")
    given: dict[str, Any] = {name: value for name, value in options.items() if name not in columns}
    named: Any = {name: value for name, value in options.items() if name in columns}
    return {"columns": ColumnOptions.given(named), **output_settings(**given)}
