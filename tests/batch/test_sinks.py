"""Outputs of parts hold what JSON lines hold, are resumed as these are, and are read by the
libraries for their formats."""

import errno
import gc
import json
import os
import subprocess
import sys
import tarfile

import pytest

from mmdeploy_llm.batch.job import plan_batch, run_batch
from mmdeploy_llm.batch.settings import BatchSettings
from mmdeploy_llm.data.outputs.opening.choose import open_sink
from mmdeploy_llm.data.outputs.scan import newest
from mmdeploy_llm.data.records.configuration import Configuration
from mmdeploy_llm.data.records.outcome import NOTHING, Retried
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.system.portable import files

FOLDERS = ("out.parquet", "out.tar")
URLS = ("memory://bucket/out.parquet", "memory://bucket/out.tar", "memory://bucket/out.jsonl")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """The working folder, with an empty store in memory."""
    import fsspec

    monkeypatch.chdir(tmp_path)
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]
    return tmp_path


@pytest.fixture
def image(here, png):
    path = here / "a.png"
    path.write_bytes(png)
    return path


@pytest.fixture
def rows(image):
    """Twelve items: two fail, ids are of every kind, one text is not Unicode."""
    media = {"image": [str(image)]}
    ids = [f"item/{number}.x" for number in range(8)] + [9, "ä", "nul\udcff", "z" * 300]
    return [
        {
            "id": own,
            "prompt": f"bad {n}" if n in (2, 9) else f"prompt {n}",
            "multimodal_data": media,
        }
        for n, own in enumerate(ids)
    ]


@pytest.fixture
def do(fake_llm):
    """Runs a batch with parts of 5 items; returns its summary and the prompts that were done."""

    def run(given, output, mode="new", part_items=5, **values):
        before = len(fake_llm.prompts)
        if str(output).endswith(".jsonl") and "://" not in str(output):
            part_items = None
        settings = BatchSettings(mode=mode, part_items=part_items, **values)
        summary = run_batch(plan_batch(given, output, settings), lambda: fake_llm)
        return summary, [prompt.text for prompt in fake_llm.prompts[before:]]

    return run


def records(output):
    return sorted(newest(open_sink(output).entries), key=lambda record: record.line)


@pytest.mark.full
@pytest.mark.parametrize("output", [*FOLDERS, *URLS])
def test_the_records_are_those_of_a_jsonl_file(do, rows, output):
    do(rows, "plain.jsonl")
    summary, _ = do(rows, output)
    assert records(output) == records("plain.jsonl")
    assert [record.id for record in summary.records()] == [row["id"] for row in rows]
    assert [record.line for record in summary.records(3)] == [1, 3, 10]
    assert (summary.num_records, summary.num_failed) == (12, 2)
    assert len(summary.sink.parts()) == 3


@pytest.mark.full
@pytest.mark.parametrize("output", [*FOLDERS, *URLS])
def test_a_resumed_run_does_what_is_left_and_keeps_one_record_of_each(do, rows, output):
    do(rows[:7], output)
    again = [{**row, "prompt": row["prompt"].replace("bad", "good")} for row in rows]
    again[0]["prompt"] = "changed"
    summary, prompts = do(again, output, "resume")
    assert prompts == ["changed", "good 2", *(row["prompt"] for row in again[7:])]
    assert (summary.num_again, summary.num_failed, summary.num_records) == (1, 0, 12)
    found = list(open_sink(output).entries())
    assert sorted(entry.record.line for entry in found) == list(range(1, 13))
    assert [record.line for record in summary.records()] == list(range(1, 13))
    assert records(output)[0].text == "a caption of changed"
    assert do(again, output, "resume")[1] == []


@pytest.mark.full
@pytest.mark.parametrize("output", ["plain.jsonl", *FOLDERS])
def test_only_failures_with_these_codes_are_retried(do, rows, output):
    do(rows, output)
    assert do(rows, output, "resume", retried=Retried.parse([408]))[1] == []
    assert do(rows, output, "resume", retried=NOTHING)[1] == []
    retried = do(rows, output, "resume", retried=Retried.parse([408, 400]))
    assert retried[1] == ["bad 2", "bad 9"]
    assert [entry.record.line for entry in open_sink(output).entries()].count(3) == 1


class Killed(BaseException):
    """Stands for kill -9: nothing of the program runs after it."""


def kill_during(do, monkeypatch, rows, output, method, number):
    """Ends a run at the given call of a method of the writer."""
    from mmdeploy_llm.data.outputs import part_writer

    real, calls = getattr(part_writer.PartsWriter, method), []

    def dying(self, *args):
        calls.append(None)
        if len(calls) == number:
            raise Killed
        return real(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(part_writer.PartsWriter, method, dying)
        with pytest.raises(Killed):
            do(rows, output)


@pytest.mark.one_is_quick
@pytest.mark.parametrize("output", [*FOLDERS, *URLS])
def test_what_was_written_before_a_kill_stays(do, rows, output, monkeypatch):
    kill_during(do, monkeypatch, rows, output, "write", 9)
    assert len(records(output)) == 8
    _, prompts = do(rows, output, "resume", retried=NOTHING)
    assert len(prompts) == 4
    assert len(records(output)) == 12


@pytest.mark.full
@pytest.mark.parametrize("output", [*FOLDERS, *URLS])
def test_a_part_that_exists_makes_its_journal_void(do, rows, output, here):
    summary, _ = do(rows, output)
    sink = summary.sink
    with sink.shelf.open("part-00001" + sink.suffix) as part:
        content = part.read()
    if sink.suffix == ".parquet":
        content = b"".join(each.to_json().encode() + b"\n" for each in records(output)[5:10])
    (sink.folder / sink.open_name(1)).write_bytes(content)  # as a kill before its removal leaves it
    assert len(list(open_sink(output).entries())) == 12
    assert do(rows, output, "resume", retried=NOTHING)[1] == []
    more = [*rows, {"id": "new", "prompt": "new"}]
    do(more, output, "resume", retried=NOTHING)
    assert len(list(open_sink(output).entries())) == 13
    assert not list(sink.folder.glob(".open*"))


@pytest.mark.full
@pytest.mark.one_is_quick
@pytest.mark.parametrize("output", FOLDERS)
def test_a_growing_part_cut_at_any_byte_is_completed(do, rows, output, here, monkeypatch):
    kill_during(do, monkeypatch, rows[:5], output, "_seal", 1)
    (growing,) = (here / output).glob(".open-*")
    whole = growing.read_bytes()
    step = 97 if len(whole) < 10_000 else 701
    for cut in (*range(0, len(whole), step), len(whole)):
        growing.write_bytes(whole[:cut])
        num_left = len(records(output))
        _, prompts = do(rows[:5], output, "resume", retried=NOTHING)
        assert len(prompts) == 5 - num_left
        assert [record.line for record in records(output)] == [1, 2, 3, 4, 5]
        (part,) = (here / output).glob("part-*")
        part.unlink()
    assert num_left == 5


@pytest.mark.full
@pytest.mark.parametrize("output", FOLDERS)
def test_an_output_that_was_moved_knows_its_configuration(do, rows, output, here):
    def described(model, weights):
        return lambda: Configuration(model=model, values={"model": weights})

    do(rows, output, describe_engine=described("first", "a"))
    (here / output / ".config.json").unlink()
    with pytest.raises(ConfigError, match=r"the files of the model differ \('second' now, 'first'"):
        do([*rows, {"prompt": "x"}], output, "resume", describe_engine=described("second", "b"))
    assert do(rows, output, "resume", describe_engine=described("other name", "a"))[1]


@pytest.mark.full
def test_pyarrow_pandas_and_datasets_read_a_folder(do, rows, here):
    import pandas
    from pyarrow import dataset

    do(rows, "out.parquet")
    do(rows, "plain.jsonl")
    do([*rows, {"id": "later", "prompt": "later"}], "out.parquet", "resume")
    (here / "out.parquet" / ".open-00009.jsonl").write_text("a run that goes on\n")
    table = dataset.dataset("out.parquet").to_table()
    assert table.num_rows == 13
    frame = pandas.read_parquet("out.parquet")
    assert set(frame["id"]) == {*(str(row["id"]) for row in rows[:10]), "nul�", "z" * 300, "later"}
    expected = {record.line: record for record in records("plain.jsonl")}
    for row in table.to_pylist()[:12]:
        record = expected.get(row["line"])
        if record is not None and record.is_ok:
            assert (row["text"], row["num_prompt_tokens"]) == (record.text, 20)
            assert row["timings"]["total"] == record.timings.total
    parts = dataset.dataset("out.parquet").get_fragments()
    assert len({str(part.physical_schema.remove_metadata()) for part in parts}) == 1


@pytest.mark.full
def test_datasets_reads_a_folder(do, rows, here, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="needs datasets")
    do(rows, "out.parquet")
    files = sorted(map(str, (here / "out.parquet").glob("*.parquet")))
    found = datasets.load_dataset("parquet", data_files=files, cache_dir=str(here / "cache"))
    assert len(found["train"]) == 12
    assert sorted(filter(None, found["train"]["line"])) == list(range(1, 13))


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of webdataset
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_tarfile_and_webdataset_read_a_folder(do, rows, here, image):
    import webdataset

    do(rows, "out.tar")
    again = [{**row, "prompt": row["prompt"].replace("bad", "good")} for row in rows]
    do(again, "out.tar", "resume")
    tars = sorted(map(str, (here / "out.tar").glob("*.tar")))
    members = {}
    for path in tars:
        with tarfile.open(path) as tar:
            for member in tar:
                assert member.name not in members
                members[member.name] = tar.extractfile(member).read()
    assert [name for name in members if name.endswith(".png")]
    assert {data for name, data in members.items() if name.endswith(".png")} == {image.read_bytes()}
    samples = list(webdataset.WebDataset(tars, shardshuffle=False).decode().to_tuple("txt", "json"))
    assert len(samples) == 12
    assert all(text == record["text"] for text, record in samples)
    assert {record["line"] for _, record in samples} == set(range(1, 13))
    gc.collect()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_readers_of_webdatasets_skip_failures(do, rows, here):
    import webdataset

    do(rows, "out.tar")
    tars = sorted(map(str, (here / "out.tar").glob("*.tar")))
    samples = list(webdataset.WebDataset(tars, shardshuffle=False).to_tuple("png", "txt", "json"))
    assert len(samples) == 10
    gc.collect()


@pytest.mark.full
def test_other_formats_and_places_are_refused(do, rows, here):
    do(rows[:2], "a.jsonl")
    do(rows[:2], "b.parquet")
    with pytest.raises(
        ConfigError, match="is a file, and an output in the format parquet is a fold"
    ):
        do(rows, "a.jsonl", "resume", format="parquet")
    with pytest.raises(ConfigError, match=r"parts of another format .*--format parquet continues"):
        do(rows, "b.parquet", "resume", format="webdataset")
    with pytest.raises(ConfigError, match="a folder; name a file"):
        do(rows, "b.parquet", "resume", part_items=None, format="jsonl")
    with pytest.raises(ConfigError, match="exists already; --resume"):
        do(rows, "b.parquet")
    for mode in ("overwrite", "resume"):
        with pytest.raises(ConfigError, match="parts of another format"):
            do(rows, "b.parquet", mode, format="webdataset")
    with pytest.raises(ConfigError, match=r"must be one of jsonl, csv, .*got 'xml'"):
        do(rows, "c", format="xml")
    with pytest.raises(ConfigError, match="jsonl is one file"):
        open_sink("c.jsonl", part_items=3)
    with pytest.raises(ConfigError, match="without file://"):
        open_sink("file:///tmp/c.parquet")
    with pytest.raises(ConfigError, match="journal is for an output at a URL"):
        open_sink("c.parquet", journal="j")
    assert sorted(path.name for path in here.glob("c*")) == []


@pytest.mark.one_is_quick
@pytest.mark.parametrize("output", [*FOLDERS, *URLS])
def test_overwrite_begins_again(do, rows, output):
    do(rows, output)
    do(rows[:3], output, "overwrite")
    assert [record.line for record in records(output)] == [1, 2, 3]


@pytest.mark.one_is_quick
@pytest.mark.parametrize("output", FOLDERS)
def test_the_lock_of_parts_is_the_file_that_has_its_name(do, rows, output, monkeypatch):
    """Another run removes the lock between our opening and locking it, as an export does."""
    do(rows[:3], output)
    sink, lock, calls = open_sink(output), files.lock, []
    place = sink.folder / ".lock"
    assert place.read_bytes() == b""

    def late(file):
        calls.append(file)
        if len(calls) == 1:
            place.unlink()
        lock(file)

    monkeypatch.setattr(files, "lock", late)
    with sink.writer("resume", sink.scan(lambda record: record.line)):
        assert place.read_text().startswith(f"process {os.getpid()} on ")
    assert len(calls) == 2


@pytest.mark.one_is_quick
@pytest.mark.parametrize("output", FOLDERS)
def test_what_another_run_wrote_meanwhile_is_not_lost(do, rows, output):
    do(rows[:3], output)
    sink = open_sink(output)
    kept = sink.scan(lambda record: record.line)
    do(rows[:4], output, "resume")
    with pytest.raises(ConfigError, match="another run wrote"):
        sink.writer("resume", kept)


@pytest.mark.one_is_quick
@pytest.mark.parametrize("output", FOLDERS)
def test_a_full_disk_loses_nothing(do, rows, output, monkeypatch):
    from mmdeploy_llm.data.records.shelves import LocalShelf

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(LocalShelf, "take", full)
        with pytest.raises(OSError, match=r"No space left on device\); its records are in"):
            do(rows, output)
    assert len(records(output)) == 5
    assert len(do(rows, output, "resume", retried=NOTHING)[1]) == 7


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_folder_that_cannot_be_written(do, rows, here):
    (here / "locked").mkdir(mode=0o500)
    with pytest.raises(OSError, match="Permission denied"):
        do(rows, "locked/out.parquet")


@pytest.mark.one_is_quick
@pytest.mark.parametrize("output", FOLDERS)
def test_links_are_not_followed(do, rows, output, here):
    precious = here / "precious"
    precious.write_text("precious")
    suffix = open_sink(output).suffix
    (here / output).mkdir()
    for name in (".open-00000", ".part-00000", "part-00000"):
        (here / output / (name + suffix)).symlink_to(precious)
    (here / output / ".open-00000.jsonl").unlink(missing_ok=True)
    do(rows, output, "overwrite")
    assert precious.read_text() == "precious"
    assert len(records(output)) == 12
    (here / output / ".lock").unlink()
    (here / output / ".lock").symlink_to(precious)
    with pytest.raises(ConfigError, match="a link"):
        do([*rows, {"prompt": "x"}], output, "resume")


def test_a_growing_part_that_vanishes_is_noticed(do, rows, here):
    def given():
        for number, row in enumerate(rows):
            if number == 4:
                next((here / "out.tar").glob(".open*")).unlink()
            yield row

    with pytest.raises(ConfigError, match="was removed or replaced while the run wrote"):
        do(given(), "out.tar", part_items=100)


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("output", "harm"),
    [("out.parquet", b"PAR1 and nothing"), ("out.tar", b"x" * 1024), ("out.tar", b"")],
)
def test_a_damaged_part_is_named(do, rows, here, output, harm):
    do(rows, output)
    part = next((here / output).glob("part-00001.*"))
    part.write_bytes(harm)
    with pytest.raises(ConfigError, match=r"part-00001\.\w+' is not a part of a batch's output"):
        do(rows, output, "resume")
    assert part.read_bytes() == harm


def test_a_store_that_fails_says_where_the_results_are(do, rows, here, monkeypatch):
    from fsspec.implementations.memory import MemoryFileSystem

    def refused(*_, **__):
        raise RuntimeError("403 Forbidden")

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "put_file", refused)
        with pytest.raises(ConfigError, match=r"403 Forbidden; finished items that are not there"):
            do(rows, URLS[0])
    assert len(records(URLS[0])) == 5
    assert len(do(rows, URLS[0], "resume", retried=NOTHING)[1]) == 7
    assert len(records(URLS[0])) == 12


@pytest.mark.full
def test_an_upload_that_is_cut_short_is_noticed(do, rows, here, monkeypatch):
    from fsspec.implementations.memory import MemoryFileSystem

    real = MemoryFileSystem.put_file

    def cut(self, path, target, **options):
        real(self, path, target, **options)
        self.pipe_file(target, self.cat_file(target)[:-7])

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "put_file", cut)
        with pytest.raises(ConfigError, match="remove it there, then --resume uploads it again"):
            do(rows, URLS[0])
    with pytest.raises(ConfigError, match="is not a part of a batch's output"):
        do(rows, URLS[0], "resume")
    MemoryFileSystem().rm_file("/bucket/out.parquet/part-00000.parquet")
    assert len(do(rows, URLS[0], "resume", retried=NOTHING)[1]) == 7


def test_a_named_journal(do, rows, here):
    do(rows, URLS[1], journal="kept/here")
    assert (here / "kept/here/.config.json").exists()
    assert do(rows, URLS[1], "resume", journal="elsewhere", retried=NOTHING)[1] == []


@pytest.mark.full
def test_an_output_without_its_library_says_what_to_install(here):
    program = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from mmdeploy_llm.data.outputs.opening.choose import open_sink\n"
        "try: open_sink('out.parquet')\n"
        "except ValueError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert 'pip install "mmdeploy-llm[parquet]"' in done.stdout


def test_a_row_has_what_the_line_has(do, rows, here):
    """Every field of a line is a column or in `more`, whatever it is called."""
    from mmdeploy_llm.data.outputs.parquet import new_columns, row_of, values_of

    do(rows, "plain.jsonl")
    for line in (here / "plain.jsonl").read_text().splitlines():
        values = {**json.loads(line), "columns": {"title": "x"}, "later": [1]}
        values["media"] = [{**own, "pages": None} for own in values["media"]]
        columns = new_columns()
        columns.add(values)
        found = values_of(row_of(values, columns), columns)
        assert {k: v for k, v in found.items() if v is not None} == {
            k: v for k, v in values.items() if v is not None
        }


def samples(here):
    """Key -> {suffix: content} of the tars."""
    found = {}
    for path in sorted((here / "out.tar").glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                key, _, suffix = member.name.partition(".")
                found.setdefault(key, {})[suffix] = tar.extractfile(member).read()
    return found


def test_media_are_stored_as_they_were_given(do, here, png, image):
    import base64

    from PIL import Image

    url = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    clip = here / "clip.mov"
    clip.write_bytes(b"\0\0\0\x14ftypisom and more")
    odd = here / "photo.raw"
    odd.write_bytes(b"unknown bytes")
    (here / "gone.png").write_bytes(png)
    given = {
        "path": image,
        "bytes": png,
        "data": url,
        "file": image.as_uri(),
        "video": str(clip),
        "odd": str(odd),
        "web": "https://example.org/a.png",
        "object": Image.new("RGB", (2, 2)),
        "gone": str(here / "missing.png"),
        "struct": {"bytes": png, "path": "elsewhere.jpg"},
        "folder": str(here),
    }
    rows = [
        {"id": name, "prompt": name, "multimodal_data": {"image": [value]}}
        for name, value in given.items()
    ]
    part = {"type": "image_url", "image_url": {"url": str(image)}}
    rows.append({"id": "none", "prompt": "none"})
    content = [part, {"type": "text", "text": "x"}]
    rows.append({"id": "chat", "messages": [{"role": "user", "content": content}]})
    do(rows, "out.tar", part_items=100)
    found = samples(here)
    for name in ("path", "bytes", "data", "file", "struct", "chat"):
        assert found[name]["png"] == png, name
    assert found["video"]["mp4"] == clip.read_bytes()
    assert found["odd"]["raw"] == b"unknown bytes"
    reasons = {}
    for name in ("web", "object", "gone", "folder"):
        assert set(found[name]) == {"txt", "json"}
        reasons[name] = json.loads(found[name]["json"])["sample"]["left_out"]
    assert reasons["web"] == "it is a URL"
    assert reasons["object"] == "it is an object of the program, a Image"
    assert "No such file" in reasons["gone"]
    assert reasons["folder"] == "it is not a regular file"
    assert json.loads(found["none"]["json"])["sample"] == {
        "key": "none",
        "media": None,
        "left_out": None,
    }


def test_a_file_that_shrinks_while_it_is_copied_leaves_no_half_sample(do, here, image, monkeypatch):
    from mmdeploy_llm.data.records import media

    size = image.stat().st_size
    with monkeypatch.context() as patch:
        patch.setattr(media, "_size", lambda _: size + 5000)
        rows = [{"id": "a", "prompt": "a", "multimodal_data": {"image": [str(image)]}}]
        do(rows, "out.tar")
    assert set(samples(here)["a"]) == {"txt", "json"}
    assert (
        json.loads(samples(here)["a"]["json"])["sample"]["left_out"] == "it is shorter than it was"
    )


def test_tars_of_several_kinds_of_media_say_how_they_are_read(do, here, image):
    """Some rows have a picture, the others none."""
    rows = [
        {"id": "a", "prompt": "good", "multimodal_data": {"image": [str(image)]}},
        {"id": "b", "prompt": "good"},
    ]
    summary, _ = do(rows[:1], "alike.tar")
    assert not any("features=" in note for note in summary.notes)
    summary, _ = do(rows, "mixed.tar")
    (note,) = (note for note in summary.notes if "features=" in note)
    assert note.endswith(
        'features=Features({"__key__": Value("string"), "png": Image(), "txt": Value("string")}))'
    )
