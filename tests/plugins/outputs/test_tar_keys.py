"""Keys of WebDataset outputs: those of the source, in any language, each once in a tar."""

import io
import json
import re
import tarfile

import pytest
from mmdeploy_llm_plugins.outputs.tars import key_of_sample

from mmdeploy_llm.data.outputs.opening.choose import open_sink
from mmdeploy_llm.data.outputs.opening.merged import MergedOutputs
from mmdeploy_llm.data.outputs.scan import Kept
from mmdeploy_llm.data.records.record import ItemError, Record
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.hooks import PluginManager

BASE_PLUS_EXT = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")  # webdataset's


def write(path, *records, mode="new", **options):
    sink = open_sink(str(path), **options)
    kept = sink.scan(lambda own: own.line) if mode == "resume" else Kept()
    with sink.writer(mode, kept) as writer:
        for record in records:
            writer.write(record, record.line)
        writer.finish(lambda own: own.line)
    return list(MergedOutputs([str(path)]).records())


def keys_of(path):
    """The keys of the samples, as webdataset reads the names of members."""
    found = []
    for part in sorted(path.glob("*.tar")):
        with tarfile.open(part) as tar:
            names = [member.name for member in tar if not member.name.startswith("__failed__")]
        found += [BASE_PLUS_EXT.match(name)[1] for name in names if name.endswith(".txt")]
    return found


def records(*ids):
    return [Record(id=own, line=line, text=f"of {own}") for line, own in enumerate(ids, 1)]


@pytest.mark.parametrize(
    ("own", "key"),
    [
        ("000000.tar/a", "a"),
        ("000000.tar/dir.x/a-b c", "dir.x/a-b c"),
        ("train/000000.tar.gz/größe_日本", "größe_日本"),
        ("0.TGZ/x", "x"),
        ("x.tar/y.tar/z", "z"),
        ("x.tar/" + "k" * 300, "k" * 300),
    ],
)
def test_the_key_of_the_source_is_kept(own, key):
    assert key_of_sample(Record(id=own, line=1)) == key


@pytest.mark.parametrize(
    "own",
    [
        *("0.tar/../a", "0.tar//a", "0.tar/a.b", "0.tar/__x__/a", "0.tar/\n", "0.tar/\udcff"),
        *("0.tar/" + "k" * 1001, "0.tar/.", "__meta__", "..", "a/b", "0.tar/./a"),
    ],
)
def test_a_key_that_readers_would_not_take_is_replaced(own):
    key = key_of_sample(Record(id=own, line=1))
    assert BASE_PLUS_EXT.match(f"{key}.txt")[1] == key
    assert not re.match("__[^/]*__($|/)", key)
    assert "/" not in key
    assert key != own.rpartition("/")[2]


def test_keys_are_safe_and_differ():
    names = ["a", "../a", "a/b", "a.b", "a b", "/a/b", "ä", "ö", "\n", "x" * 300, "x" * 301, 7, 77]
    keys = [key_of_sample(Record(id=name, line=1)) for name in names]
    assert len(set(keys)) == len(names)
    for key in keys:
        assert len(key.encode()) < 150
        assert not set(key) & set("./ \n")
    assert keys[6:8] == ["ä", "ö"]
    assert key_of_sample(Record(id="7")) == key_of_sample(Record(id=7)) == "7"
    path = Record(id="p/cat.jpg", path="p/cat.jpg")
    assert key_of_sample(path).startswith("cat-")


def test_names_of_files_keep_their_letters():
    for name in ("日本語", "größe", "naïve-café", "👍"):
        key = key_of_sample(Record(id=f"p/{name}.jpg", path=f"p/{name}.jpg"))
        assert key.startswith(f"{name}-")


def test_an_output_is_joined_to_its_source_by_key(tmp_path):
    ids = [f"{shard}.tar/{name}" for shard in ("000", "001") for name in ("a", "ä/b", "c" * 200)]
    rows = records(*ids[:3])
    assert write(tmp_path / "out.tar", *rows) == rows
    assert keys_of(tmp_path / "out.tar") == ["a", "ä/b", "c" * 200]
    both = write(tmp_path / "both.tar", *records(*ids))
    assert [own.id for own in both] == ids
    keys = keys_of(tmp_path / "both.tar")
    assert len(set(keys)) == 6
    assert keys[:3] == ["a", "ä/b", "c" * 200]


def test_long_and_foreign_names_survive_a_tar_that_is_torn(tmp_path):
    path = tmp_path / "out.tar"
    rows = records("0.tar/" + "日" * 300, "0.tar/" + "本" * 300, "0.tar/x")
    kinds = PluginManager.load(plugins=["outputs"]).kinds
    sink = open_sink(str(path), kinds=kinds)
    with sink.writer("new", Kept()) as writer:
        for row in rows:
            writer.write(row, row.line)
    whole = (path / ".open-00000.tar").read_bytes()
    ends = [entry.end for entry in sink.entries()]
    for cut in range(0, len(whole), 512):
        (path / ".open-00000.tar").write_bytes(whole[:cut])
        num_whole = sum(end <= cut for end in ends)
        found = [entry.record for entry in open_sink(str(path), kinds=kinds).entries()]
        assert found == rows[:num_whole]
    done = write(path, *rows[2:], mode="resume")
    assert done == rows
    assert keys_of(path) == ["日" * 300, "本" * 300, "x"]


def test_an_item_that_is_done_again_has_its_own_key(tmp_path):
    path = tmp_path / "out.tar"
    error = {"error": ItemError(code=400, kind="RequestError", message="x")}
    failed = Record(id="0.tar/a", line=1, **error)
    write(path, failed, *records("0.tar/a", "0.tar/b")[1:], part_items=1)
    write(path, *records("0.tar/a"), mode="resume", part_items=1)
    assert sorted(keys_of(path)) == ["a", "b"]


@pytest.mark.parametrize("damage", [b"12 path", b"x path=a\n", b"9999 path=a\n", b"\xff" * 60])
def test_damaged_extensions_are_told(tmp_path, damage):
    path = tmp_path / "out.tar"
    write(path, *records("0.tar/" + "日" * 60))
    part = path / "part-00000.tar"
    data = bytearray(part.read_bytes())
    place = data.index(b" path=") - 3
    data[place : place + len(damage)] = damage
    part.write_bytes(data)
    told = ""
    try:
        assert len(list(MergedOutputs([str(path)]).records())) <= 1
    except ConfigError as error:
        told = str(error)
    assert not told or "part-00000.tar" in told


def test_all_columns_of_a_sample_are_carried(tmp_path, monkeypatch):
    from mmdeploy_llm.batch.corpus.columns import ColumnOptions
    from mmdeploy_llm.batch.sources import open_source
    from mmdeploy_llm.data.records.ids import Selection
    from mmdeploy_llm.values.params import SamplingParams

    monkeypatch.chdir(tmp_path)
    with tarfile.open("000.tar", "w") as tar:
        fields = json.dumps({"title": "t", "tags": ["x"], "id": 7}).encode()
        for name, data in (("ä.png", b"\x89PNG"), ("ä.json", fields), ("ä.cls", b"3")):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    source = open_source(
        "000.tar", SamplingParams(), Selection(), columns=ColumnOptions(carried=("*",))
    )
    (item,) = source
    assert item.id == "000.tar/ä"
    assert item.columns == {"title": "t", "tags": ["x"], "cls": "3", "__key__": "ä"}


def test_items_that_failed_are_no_samples_of_a_corpus(tmp_path, monkeypatch):
    from mmdeploy_llm.batch.sources import open_source
    from mmdeploy_llm.data.records.ids import Selection
    from mmdeploy_llm.values.params import SamplingParams

    monkeypatch.chdir(tmp_path)
    error = {"error": ItemError(code=400, kind="RequestError", message="x")}
    write(tmp_path / "out.tar", *records("a"), Record(id="b", line=2, **error))
    source = open_source("out.tar", SamplingParams(), Selection(), question="{text}?")
    assert [item.id for item in source] == ["part-00000.tar/a"]
