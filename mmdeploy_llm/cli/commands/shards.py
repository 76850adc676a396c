"""--shard auto: finds the shard of this process in the environment variables of its launcher."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import typer

from mmdeploy_llm.cli import shard_variables
from mmdeploy_llm.errors import ConfigError

AUTO = "auto"
MARK = "{shard}"
NONE = (
    "--shard auto finds no shard in the environment: torchrun sets RANK and WORLD_SIZE, srun "
    "SLURM_PROCID and SLURM_STEP_NUM_TASKS, a job array of SLURM SLURM_ARRAY_TASK_ID, an indexed "
    "job of Kubernetes JOB_COMPLETION_INDEX, with NUM_SHARDS set in its pods to its completions. "
    "Give the shard itself, such as --shard 1/4"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One of num_shards shards. index: from 0. source: the variables that say so."""

    index: int
    num_shards: int
    source: str

    @property
    def text(self) -> str:
        """The shard as --shard has it, such as 2/8."""
        return f"{self.index + 1}/{self.num_shards}"

    def name(self, output: str) -> str:
        """Returns the name of this shard's file: no two shards may write to one. "{shard}" stands
        for it; without that it goes before the suffix."""
        own = f"{self.index + 1:05d}-of-{self.num_shards:05d}"
        if MARK in output:
            return output.replace(MARK, own)
        stem, suffix = os.path.splitext(output)
        return f"{stem}-{own}{suffix}"


def shard_names(
    shard: str | None, output: str, page: str | None
) -> tuple[str | None, str, str | None]:
    """Returns --shard and the names of the output and the report of this process. With `auto` they
    are this shard's own, and the option becomes I/N; prints what was found. Raises ConfigError."""
    if shard is None or shard.strip() != AUTO:
        return shard, output, page
    found = find_shard(shard_variables())
    own = found.name(output)
    typer.echo(f"shard {found.text}, from {found.source}; output: {own}", err=True)
    return found.text, own, None if page is None else found.name(page)


def find_shard(variables: Mapping[str, str]) -> Shard:
    """Returns the shard that the variables name. Raises ConfigError when none do."""
    if "RANK" in variables and "WORLD_SIZE" in variables:
        return _shard(variables, "RANK", "WORLD_SIZE")
    if "SLURM_ARRAY_TASK_ID" in variables or "SLURM_PROCID" in variables:
        return _of_slurm(variables)
    if "JOB_COMPLETION_INDEX" in variables:
        if "NUM_SHARDS" not in variables:
            raise ConfigError(
                "JOB_COMPLETION_INDEX is set, and Kubernetes has no variable for the number of "
                "indexes: set NUM_SHARDS in the pod's env to the job's completions, or give "
                "--shard I/N"
            )
        return _shard(variables, "JOB_COMPLETION_INDEX", "NUM_SHARDS")
    raise ConfigError(NONE)


def _of_slurm(variables: Mapping[str, str]) -> Shard:
    """Returns the shard of a task of srun, of an array, or of both: each element of the array has
    as many shards as tasks."""
    array, tasks = Shard(index=0, num_shards=1, source=""), Shard(index=0, num_shards=1, source="")
    if "SLURM_ARRAY_TASK_ID" in variables:
        array = _of_array(variables)
    if "SLURM_STEP_NUM_TASKS" in variables:
        tasks = _shard(variables, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    elif _number(variables, "SLURM_NTASKS", 1) > 1:
        raise ConfigError(
            f"this job has {variables['SLURM_NTASKS']} tasks, and this process is none of them: "
            "start the command with srun, or give --shard I/N"
        )
    sources = [one.source for one in (array, tasks) if one.source]
    if not sources:
        raise ConfigError(NONE)
    return Shard(
        index=array.index * tasks.num_shards + tasks.index,
        num_shards=array.num_shards * tasks.num_shards,
        source=" and ".join(sources),
    )


def _of_array(variables: Mapping[str, str]) -> Shard:
    own = _number(variables, "SLURM_ARRAY_TASK_ID")
    first = _number(variables, "SLURM_ARRAY_TASK_MIN", 0)
    last = _number(variables, "SLURM_ARRAY_TASK_MAX", own)
    count = _number(variables, "SLURM_ARRAY_TASK_COUNT", last - first + 1)
    step = (last - first) // (count - 1) if count > 1 else 1
    if step < 1 or first + step * (count - 1) != last or (own - first) % step:
        raise ConfigError(
            f"the job array has {count} elements from {first} to {last} at unequal distances, so "
            "that its shards cannot be numbered; use --array=0-N, or give --shard I/N"
        )
    index = (own - first) // step
    return Shard(index=index, num_shards=count, source="SLURM_ARRAY_TASK_ID")


def _shard(variables: Mapping[str, str], index: str, count: str) -> Shard:
    own, total = _number(variables, index), _number(variables, count)
    if not 0 <= own < total:
        raise ConfigError(f"{index} is {own} and {count} is {total}; the index must be smaller")
    return Shard(index=own, num_shards=total, source=f"{index} and {count}")


def _number(variables: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = variables.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise ConfigError(f"{name} must be a number, got {(text or '')[:40]!r}") from None
