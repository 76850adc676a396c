"""RunState: how far the last run of an output has come, for the report of several outputs."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from mmdeploy_llm.errors import ConfigError

from .files import Folder, open_regular

MAX_BYTES = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The state of a run.

    ending: "running" until it ends; also of a run that was killed.
    total: items of this shard, None when unknown.
    output: its name, by which a journal knows whose it is.
    """

    ending: str
    total: int | None
    shard: int
    num_shards: int
    output: str

    def write(self, path: Path) -> None:
        """Writes the file of an output, which only the run that has locked the output does."""
        with Folder.open(path.parent) as folder:
            folder.write(path.name, [json.dumps(asdict(self)).encode() + b"\n"])

    @classmethod
    def read(cls, path: Path) -> RunState | None:
        """Reads the file of an output, None when it has none. Raises ConfigError for a file of
        something else."""
        try:
            with open_regular(path, os.O_RDONLY) as file:
                values = json.loads(file.read(MAX_BYTES))
            state = cls(**values)
            counts = (state.shard, state.num_shards, state.total or 0)
            is_sound = all(isinstance(number, int) for number in counts)
            is_sound = is_sound and isinstance(state.output, str)
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, RecursionError) as error:
            if isinstance(error, ConfigError):
                raise
            is_sound = False
        if not is_sound:
            raise ConfigError(f"{str(path)!r} does not hold the state of a batch; move it away")
        return state
