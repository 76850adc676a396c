"""A batch over files that a plugin reads: killed, resumed, sharded, counted."""

import os
import signal

import pytest

from mmdeploy_llm.batch.job import plan_batch, run_batch
from mmdeploy_llm.batch.settings import BatchSettings
from mmdeploy_llm.data.files.options import FindingOptions
from mmdeploy_llm.data.outputs.scan import read_records
from mmdeploy_llm.data.outputs.sidecars.options import check_suffix
from mmdeploy_llm.data.records.ids import Selection
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.hooks import PluginManager

PLUGIN = """
from mmdeploy_llm.hooks import CorpusFormatSpec, DamagedRow, hookimpl

def read(file):
    with file.open() as content:
        for line in content:
            name, bar, question = line.decode().rstrip().partition("|")
            yield {"id": name, "prompt": question} if bar else DamagedRow(message="it has no |")

@hookimpl
def provide_corpus_formats():
    return [CorpusFormatSpec(name="bars", suffixes=(".bars",), reader=f"{__name__}:read")]
"""
NUM_ITEMS = 12
TEXT = "".join("no bar\n" if n == 4 else f"i{n}|q{n}\n" for n in range(NUM_ITEMS))


@pytest.fixture
def bars(tmp_path):
    path = tmp_path / "bars.py"
    path.write_text(PLUGIN)
    (tmp_path / "in.bars").write_text(TEXT)
    return PluginManager.load(plugins=(), files=[path]).kinds


def do(folder, kinds, llm, **options):
    settings = BatchSettings(finding=FindingOptions(table=kinds), **options)
    out = folder / "out.jsonl"
    return run_batch(plan_batch(folder / "in.bars", out, settings), lambda: llm)


def records(folder):
    return sorted((one.line, one.id, one.is_ok) for one in read_records(folder / "out.jsonl"))


WHOLE = [(n + 1, None if n == 4 else f"i{n}", n != 4) for n in range(NUM_ITEMS)]


@pytest.mark.full
def test_a_killed_run_is_resumed_and_each_row_is_done_once(tmp_path, bars, fake_llm, in_child):
    def killed_at_the_seventh():
        real = fake_llm.answer

        def answer(prompt, n=1):
            if fake_llm.num_taken > 6:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(prompt, n)

        fake_llm.answer = answer
        do(tmp_path, bars, fake_llm)

    assert in_child(killed_at_the_seventh) == -signal.SIGKILL
    before = [one for one in records(tmp_path) if one[2]]
    assert 0 < len(before) < NUM_ITEMS
    summary = do(tmp_path, bars, fake_llm, mode="resume")
    assert records(tmp_path) == WHOLE
    assert fake_llm.num_taken == NUM_ITEMS - 1 - len(before)
    assert (summary.ending, summary.num_failed) == ("done", 1)


@pytest.mark.full
def test_shards_have_all_rows_together(tmp_path, bars, fake_llm):
    found = []
    for shard in (1, 2, 3):
        selection = Selection(shard=shard, num_shards=3)
        do(tmp_path, bars, fake_llm, mode="overwrite", selection=selection)
        found += records(tmp_path)
    assert sorted(found) == WHOLE


@pytest.mark.full
def test_a_file_that_has_changed_is_told_when_it_is_resumed(tmp_path, bars, fake_llm):
    do(tmp_path, bars, fake_llm)
    (tmp_path / "in.bars").write_text(TEXT.replace("q7", "another question"))
    do(tmp_path, bars, fake_llm, mode="resume")
    texts = {one.id: one.text for one in read_records(tmp_path / "out.jsonl")}
    assert texts["i7"].endswith("another question")
    assert fake_llm.num_taken == NUM_ITEMS


def test_no_sidecar_has_the_suffix_of_a_plugins_corpus(bars):
    check_suffix(".bars")
    with pytest.raises(ConfigError, match=r"'\.bars' is the suffix of media or corpora"):
        check_suffix(".bars", bars)
