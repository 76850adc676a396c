"""--shard auto: which shard the environment names, and the names of its files."""

import pytest
from typer.testing import CliRunner

from mmdeploy_llm.cli import SHARD_VARIABLES, app
from mmdeploy_llm.cli.commands.batches import page_beside
from mmdeploy_llm.cli.commands.shards import Shard, find_shard
from mmdeploy_llm.errors import ConfigError

ARRAY = {
    "SLURM_ARRAY_TASK_ID": "7",
    "SLURM_ARRAY_TASK_COUNT": "4",
    "SLURM_ARRAY_TASK_MIN": "3",
    "SLURM_ARRAY_TASK_MAX": "9",
}
TASK = {"SLURM_PROCID": "1", "SLURM_NTASKS": "3", "SLURM_STEP_NUM_TASKS": "2"}


@pytest.mark.parametrize(
    ("variables", "shard"),
    [
        ({"RANK": "0", "WORLD_SIZE": "1"}, "1/1"),
        ({"RANK": "3", "WORLD_SIZE": "4", **TASK}, "4/4"),
        (TASK, "2/2"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", **ARRAY}, "3/4"),
        ({**ARRAY, **TASK}, "6/8"),
        ({"SLURM_ARRAY_TASK_ID": "0", "SLURM_ARRAY_TASK_COUNT": "1"}, "1/1"),
        ({"JOB_COMPLETION_INDEX": "2", "NUM_SHARDS": "5"}, "3/5"),
    ],
)
def test_the_shard_of_each_launcher(variables, shard):
    found = find_shard(variables)
    assert found.text == shard
    assert all(name in SHARD_VARIABLES for name in variables)
    assert all(name in variables for name in found.source.split(" and "))


def test_the_elements_of_an_array_with_tasks_are_all_different():
    found = set()
    for own in ("3", "5", "7", "9"):
        for task in ("0", "1"):
            mine = {**ARRAY, **TASK, "SLURM_ARRAY_TASK_ID": own, "SLURM_PROCID": task}
            found.add(find_shard(mine).index)
    assert found == set(range(8))


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, "finds no shard in the environment"),
        ({"SLURM_PROCID": "0"}, "finds no shard"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK is 4 and WORLD_SIZE is 4"),
        ({"RANK": "x", "WORLD_SIZE": "4"}, "RANK must be a number, got 'x'"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, "start the command with srun"),
        ({**ARRAY, "SLURM_ARRAY_TASK_MAX": "20"}, "at unequal distances"),
        ({"JOB_COMPLETION_INDEX": "2"}, "set NUM_SHARDS in the pod's env"),
    ],
)
def test_what_names_no_shard_says_what_is_needed(variables, words):
    with pytest.raises(ConfigError, match=words):
        find_shard(variables)


def test_names():
    shard = Shard(index=1, num_shards=8, source="")
    assert shard.name("a/out.jsonl") == "a/out-00002-of-00008.jsonl"
    assert shard.name("s3://b/out.parquet") == "s3://b/out-00002-of-00008.parquet"
    assert shard.name("out-{shard}/x.tar") == "out-00002-of-00008/x.tar"
    assert page_beside("s3://bucket/a/out.parquet") == "out.html"
    assert page_beside("x/out.tar/") == "x/out.html"


def test_the_command(tmp_path, monkeypatch):
    """Two of two processes that were started alike write different files."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text("{\n" * 5)  # needs no model
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = ["batch", "in.jsonl", "-o", "out.jsonl", "--shard", "auto"]
    for rank, num_lines in (("0", 3), ("1", 2)):
        monkeypatch.setenv("RANK", rank)
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 1, result.output
        name = f"out-0000{int(rank) + 1}-of-00002.jsonl"
        assert f"from RANK and WORLD_SIZE; output: {name}" in result.stderr
        assert len((tmp_path / name).read_text().splitlines()) == num_lines
    monkeypatch.delenv("RANK")
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert "--shard auto finds no shard" in result.stderr


@pytest.mark.one_is_quick
@pytest.mark.parametrize("codes", ["x", "200", "", "408,,"])
def test_codes_that_are_none(codes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text("{\n")
    words = ["batch", "in.jsonl", "-o", "out.jsonl", "--resume", "--retry-failed", codes]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert "error codes from 400 to 599, such as empty,truncated" in result.stderr
    result = CliRunner().invoke(app, [*words[:-1], "408,500"])
    assert result.exit_code == 1
