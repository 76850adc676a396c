"""One report over several outputs: the totals are those of all, and what is missing is named."""

import json
import os
import shutil

import pytest
from typer.testing import CliRunner

from mmdeploy_llm.batch.job import plan_batch, run_batch
from mmdeploy_llm.batch.settings import BatchSettings
from mmdeploy_llm.cli import app
from mmdeploy_llm.data.outputs.opening.merged import MergedOutputs, open_existing
from mmdeploy_llm.data.records.configuration import Configuration
from mmdeploy_llm.data.records.ids import Selection
from mmdeploy_llm.errors import ConfigError

NAMES = ("one.jsonl", "two.parquet", "three.tar")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def rows():
    return [{"id": f"item {n}", "prompt": "bad" if n == 4 else f"prompt {n}"} for n in range(10)]


@pytest.fixture
def do(fake_llm):
    def run(given, output, mode="new", **values):
        def describe():
            return Configuration(model="a model", values={"x": 1})

        settings = BatchSettings(mode=mode, describe_engine=describe, **values)
        return run_batch(plan_batch(given, output, settings), lambda: fake_llm)

    return run


@pytest.fixture
def shards(do, rows):
    """Three shards of a run, each in another format."""
    for shard, name in enumerate(NAMES, 1):
        do(rows, name, selection=Selection(shard=shard, num_shards=3))


@pytest.mark.full
def test_totals_are_those_of_the_whole_run(shards, do, rows):
    do(rows, "whole.jsonl")
    merged, whole = MergedOutputs(NAMES), MergedOutputs(["whole.jsonl"])
    for name in ("num_failed", "failures", "num_output_tokens", "num_media_tokens"):
        assert getattr(merged.index, name) == getattr(whole.index, name)
    assert len(merged.index) == 10
    assert list(merged.records()) == list(whole.records())
    assert [record.line for record in merged.records(4)] == [1, 2, 3, 5]
    assert merged.missing() == {}
    assert merged.models == ("a model",)


@pytest.mark.full
def test_of_an_item_in_several_outputs_the_newest_counts(shards, do, rows):
    changed = [{**row, "prompt": "new"} for row in rows[:2]]
    do(changed, "later.jsonl")
    os.utime("later.jsonl", (2**32, 2**32))
    names = ["later.jsonl", *NAMES]
    merged = MergedOutputs(names)
    assert len(merged.index) == 10
    texts = [record.text for record in merged.records()][:3]
    assert texts == ["a caption of new", "a caption of new", "a caption of prompt 2"]
    os.utime("later.jsonl", (1, 1))
    assert next(iter(MergedOutputs(names).records())).text == "a caption of prompt 0"


def test_what_is_incomplete_is_named(shards, here):
    one, state = here / "one.jsonl", here / "one.jsonl.state.json"
    one.write_text("".join(one.read_text().splitlines(keepends=True)[:2]))
    assert MergedOutputs(NAMES[:2]).missing() == {
        "one.jsonl (shard 1/3)": "2 of 4 items are not done",
        "of 3 shards": "no output of 3 was given",
    }
    values = {**json.loads(state.read_text()), "total": None, "ending": "running"}
    state.write_text(json.dumps(values))
    assert MergedOutputs(NAMES).missing() == {"one.jsonl (shard 1/3)": "its run has not ended"}


def test_single_parts_and_what_a_killed_run_left(shards, here):
    shutil.copy("two.parquet/part-00000.parquet", "moved.parquet")
    shutil.copy("three.tar/part-00000.tar", "moved.tar")
    merged = MergedOutputs(["moved.parquet", "moved.tar"])
    assert sorted(record.line for record in merged.records()) == [2, 3, 5, 6, 8, 9]
    assert merged.models == ("a model",)
    os.rename("three.tar/part-00000.tar", "three.tar/.open-00001.tar")
    os.rename("two.parquet/part-00000.parquet", "three.tar/elsewhere")
    with pytest.raises(ConfigError, match="it has no parts"):
        open_existing("two.parquet")


@pytest.mark.parametrize("name", ["missing.jsonl", "missing.parquet"])
def test_an_output_that_does_not_exist(name):
    with pytest.raises(ConfigError, match="does not exist; name outputs of batches"):
        MergedOutputs([name])


@pytest.mark.full
def test_the_command(shards, here):
    result = CliRunner().invoke(app, ["report", *NAMES[:2], "-o", "page.html"])
    assert result.exit_code == 0, result.output
    assert "one.jsonl (shard 1/3): 4 items, 0 failed" in result.stdout
    assert "incomplete: of 3 shards: no output of 3 was given" in result.stdout
    assert "together: 7 items, 1 failed" in result.stdout
    page = (here / "page.html").read_text()
    assert "a caption of prompt 0" in page
    assert "no output of 3 was given" in page
    assert "answered by a model" in page
    wrong = CliRunner().invoke(app, ["report", "page.html", "-o", "other.html"])
    assert wrong.exit_code == 2
    assert "is not a record of a batch" in wrong.stderr
    assert not os.path.exists("other.html")
