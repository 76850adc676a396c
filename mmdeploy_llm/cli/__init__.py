"""The `mmdeploy-llm` program. It reads these environment variables; the library reads none:

MMDEPLOY_LLM_PLUGINS          load exactly these plugins (names separated by commas; empty: none)
MMDEPLOY_LLM_BLOCKED_PLUGINS  do not load these
MMDEPLOY_LLM_MODEL            the model of commands without --model
MMDEPLOY_LLM_WEIGHT_CACHE     the folder of cached weights (off: no cache)
RANK, SLURM_PROCID, JOB_COMPLETION_INDEX and others   for --shard auto, see shards.py

Exit codes: 0 success, 1 some items failed, 2 wrong usage or an unusable model, 3 stopped by
--max-failures, or an output that was lost or is not complete, 4 no item failed and some have not
the answer that was asked for, 130 stopped with Ctrl-C, 143 by SIGTERM, 129 by SIGHUP.

This file imports little, so that Ctrl-C is handled soon after the start; program.py has the
commands, and its names are imported from here when they are first used.
"""

from __future__ import annotations

import gc
import io
import os
import sys
from importlib import import_module
from typing import Any

from mmdeploy_llm.cli.terminal.interrupts import Interrupts

PLUGINS_VARIABLE = "MMDEPLOY_LLM_PLUGINS"
BLOCKED_VARIABLE = "MMDEPLOY_LLM_BLOCKED_PLUGINS"
CACHE_VARIABLE = "MMDEPLOY_LLM_WEIGHT_CACHE"
SHARD_VARIABLES = (
    *("RANK", "WORLD_SIZE", "JOB_COMPLETION_INDEX", "NUM_SHARDS"),
    *("SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_ARRAY_TASK_ID"),
    *("SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_MAX"),
)


def main() -> None:
    """Runs the program; entry point of the console script."""
    for stream, errors in (
        (sys.stdin, "surrogateescape"),  # whoever reads it tells what is not UTF-8
        (sys.stdout, "backslashreplace"),  # a terminal in GBK has no emoji
        (sys.stderr, "backslashreplace"),
    ):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)
    try:
        with Interrupts():
            import_module(f"{__name__}.program").app()
    finally:
        # Else the interpreter examines all objects of torch as it ends: 1.4 s of a CPU. Triton's
        # would be reported as leaked.
        if "triton" not in sys.modules:
            gc.freeze()


def plugin_names() -> dict[str, Any]:
    """Returns the engine options `plugins` and `blocked_plugins` that the environment sets."""
    given = {"plugins": PLUGINS_VARIABLE, "blocked_plugins": BLOCKED_VARIABLE}
    found = {option: os.environ[name] for option, name in given.items() if name in os.environ}
    names = {option: map(str.strip, value.split(",")) for option, value in found.items()}
    return {option: tuple(filter(None, own)) for option, own in names.items()}


def cache_option() -> dict[str, Any]:
    """Returns the engine option `weight_cache` where the environment sets it."""
    value = os.environ.get(CACHE_VARIABLE)
    return {"weight_cache": value != "off" and value} if value else {}


def shard_variables() -> dict[str, str]:
    """Returns the environment's variables that say which of several processes this is."""
    return {name: os.environ[name] for name in SHARD_VARIABLES if name in os.environ}


def __getattr__(name: str) -> Any:
    """Imports a name of program.py when it is first used (PEP 562)."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    program = import_module(f"{__name__}.program")
    return program if name == "program" else getattr(program, name)
