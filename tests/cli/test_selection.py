"""Which items are done, and in which order: --limit --random, --only, --files-from, --order."""

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image
from typer.testing import CliRunner

from mmdeploy_llm.batch.in_order import InOrder
from mmdeploy_llm.batch.options import selected
from mmdeploy_llm.batch.sources import open_source
from mmdeploy_llm.cli.program import app
from mmdeploy_llm.data.records.ids import DoneItems, Selection
from mmdeploy_llm.data.records.item import Item
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.values.prompt import PromptParts

NUM_FILES = 70  # enough for an order that mixes sizes
CAPTION, BATCH = ("caption", "pics"), ("batch", "in.jsonl", "-o", "out.jsonl")


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "PNG")
    (tmp_path / "pics").mkdir()
    for number in range(NUM_FILES):
        data = buffer.getvalue() + bytes(number * 37 % 50)
        (tmp_path / "pics" / f"{number}.png").write_bytes(data)
    rows = [{"id": f"r{number}", "prompt": str(number)} for number in range(1, 21)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def plan(monkeypatch):
    """Returns a function that plans a command and returns the ids that it would do."""
    jobs = []
    name = "mmdeploy_llm.cli.commands.batches.run_and_report"
    monkeypatch.setattr(name, lambda job, *_, **__: jobs.append(job))

    def run(*words, **options):
        done = CliRunner().invoke(app, [*words], **options)
        assert done.exit_code == 0, done.output
        return [str(item.id) for item in jobs.pop().items], done.stderr

    return run


def fails(*words, **options):
    done = CliRunner().invoke(app, [*words], **options)
    assert done.exit_code == 2, done.output
    return done.stderr


@pytest.mark.full
@pytest.mark.parametrize(("words", "num"), [(CAPTION, NUM_FILES), (BATCH, 20)])
def test_random_items_are_the_same_in_each_run_and_told(plan, words, num):
    first, told = plan(*words, "--limit", "5", "--random")
    assert f"5 random items of {num}, drawn with the seed 0" in told
    assert plan(*words, "--limit", "5", "--random")[0] == first
    assert f"1 random item of {num}, " in plan(*words, "--limit", "1", "--random")[1]
    others = plan(*words, "--limit", "5", "--random", "--random-seed", "3")[0]
    assert len(set(first)) == len(set(others)) == 5
    assert set(first) != set(others)
    assert len(plan(*words, "--limit", "500", "--random")[0]) == num
    shards = [plan(*words, "--limit", "5", "--random", "--shard", f"{n}/2")[0] for n in (1, 2)]
    assert sorted(shards[0] + shards[1]) == sorted(first)


@pytest.mark.one_is_quick
@pytest.mark.parametrize("words", [CAPTION, BATCH])
def test_random_needs_a_number_and_a_seed_needs_random(words):
    assert "random items need a number" in fails(*words, "--random")
    assert "only with --random" in fails(*words, "--random-seed", "1", "--limit", "2")
    assert "give one of them" in fails(*words, "--only", "a", "--limit", "2")
    assert "give one of them" in fails(*words, "--only", "a", "--limit", "2", "--random")


def test_random_rows_of_an_iterator_are_refused():
    with pytest.raises(ConfigError, match="cannot be drawn of an iterator"):
        open_source(iter([{"prompt": "x"}]), SamplingParams(), selected(limit=1, random=True))


def test_only_these_ids_and_those_of_a_file(plan):
    Path("ids.txt").write_text("3.png\npics/5.png\n\n")
    found, _ = plan(*CAPTION, "--only", "1.png", "--only", "@ids.txt")
    assert sorted(found) == ["1.png", "3.png", "5.png"]
    assert plan(*BATCH, "--only", "r7", "--only", "r2")[0] == ["r2", "r7"]


def test_an_id_that_nothing_has_is_told(plan, caplog):
    assert "no file of the input has the id '1.pgn'; did you mean '1.png'" in fails(
        *CAPTION, "--only", "1.pgn"
    )
    assert "no item of the input has an id of --only: 'r99'" in fails(*BATCH, "--only", "r99")
    assert plan(*BATCH, "--only", "r2", "--only", "r99")[0] == ["r2"]
    assert "--only: no item of the input has 1 of the ids: 'r99'" in caplog.text


@pytest.mark.full
def test_files_are_listed_by_a_file_or_a_pipe(plan):
    Path("list.txt").write_bytes(b"\xef\xbb\xbfpics/4.png\r\n\r\npics/2.png\n")
    words = ("--files-from", "list.txt", "--order", "input")
    assert plan("caption", *words)[0] == ["4.png", "2.png"]
    assert plan("batch", "-o", "out.jsonl", *words)[0] == ["4.png", "2.png"]
    piped = plan("caption", "--files-from", "-", input=b"pics/4.png\0pics/9.png\0")[0]
    assert sorted(piped) == ["4.png", "9.png"]
    assert sorted(plan("caption", "pics/1.png", *words)[0]) == ["1.png", "2.png", "4.png"]


@pytest.mark.full
def test_a_listed_path_that_is_gone_fails_alone_with_its_name():
    Path("list.txt").write_text("pics/1.png\npics/gone.png\n")
    words = ("caption", "--files-from", "list.txt", "--max-tokens", "64", "--no-report")
    done = CliRunner().invoke(app, [*words])
    records = [json.loads(line) for line in Path("captions.jsonl").read_text().splitlines()]
    gone = {record["id"]: record for record in records}.pop("gone.png")
    assert (done.exit_code, len(records), gone["outcome"]) == (1, 2, "failed")
    assert "pics/gone.png" in gone["error"]["message"], done.output
    assert "1 captioned, 1 failed" in done.stdout
    assert "1 x 400 MediaError" in done.stdout


@pytest.mark.full
def test_lists_that_are_wrong():
    Path("empty.txt").write_text("\n")
    Path("list.txt").write_text("pics/nowhere.png\n")
    assert "has no paths" in fails("caption", "--files-from", "empty.txt")
    assert "cannot be read" in fails("caption", "--files-from", "nowhere.txt")
    assert "'pics/nowhere.png' does not exist" in fails("caption", "--files-from", "list.txt")
    assert "give PATHs" in fails("caption")
    assert "give INPUT" in fails("batch", "-o", "out.jsonl")
    assert "one of them" in fails(*BATCH, "--files-from", "list.txt")
    assert "no columns" in fails(
        "batch", "-o", "out.jsonl", "--files-from", "list.txt", "--image-column", "x"
    )


def test_the_order_of_the_input_is_kept_and_else_sizes_are_mixed(plan):
    listed = [f"{number}.png" for number in range(NUM_FILES)]
    assert plan(*CAPTION, "--order", "input")[0] == listed
    mixed = plan(*CAPTION)[0]
    assert mixed != listed
    assert sorted(mixed) == sorted(listed)
    assert "order must be one of finished, input" in fails(*CAPTION, "--order", "size")


class Writer:
    """Collects records."""

    num_again = 0

    def __init__(self):
        self.keys, self.index = [], {}

    def write(self, record, place, item=None):
        self.keys.append(record.key)
        return True


def test_records_wait_for_those_before_them_and_none_is_lost():
    items = [
        Item(line=n, id=str(n), prompt=PromptParts(), params=SamplingParams()) for n in range(1, 7)
    ]
    done = DoneItems()
    done.add("2", "")
    writer = Writer()
    with InOrder(writer, done) as ordered:
        assert list(ordered.noted(items)) == items
        firsts = {n: ordered.write(SimpleNamespace(key=str(n)), n) for n in (3, 2)}
        assert writer.keys == []
        ordered.write(SimpleNamespace(key="1"), 1)
        assert writer.keys == ["1", "2", "3"]
        ordered.write(SimpleNamespace(key="6"), 6)
        ordered.write(SimpleNamespace(key="5"), 5)  # the run ends without 4
        assert writer.keys == ["1", "2", "3"]
    assert firsts == {3: True, 2: False}
    assert writer.keys == ["1", "2", "3", "5", "6"]


def test_a_selection_counts_what_it_takes():
    selection = selected(limit=7, random=True, shard="2/3").over(50)
    taken = [line for line in range(1, 51) if selection.takes(line)]
    assert selection.count(50) == len(taken)
    assert Selection(only=frozenset("ab")).count(50) == 2
    with pytest.raises(ConfigError, match="must be a list of ids"):
        selected(only="a.png")
    with pytest.raises(ConfigError, match="at least one id"):
        selected(only=[])
