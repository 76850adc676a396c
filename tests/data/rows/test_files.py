"""Which files an input names, on this machine and by fsspec."""

import builtins
import os
import re

import pytest

from mmdeploy_llm.data.records.ids import Selection
from mmdeploy_llm.data.rows.files import MAX_FILES, find_files
from mmdeploy_llm.data.rows.formats.formats import open_rows
from mmdeploy_llm.errors import ConfigError

fsspec = pytest.importorskip("fsspec", reason="needs fsspec: the extra 'fsspec'")


@pytest.fixture
def memory():
    """A file system in memory; what a test has left is removed."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield system
    system.store.clear()


def names(given):
    return [file.name for file in find_files(str(given), (".tar",))]


def test_names_are_relative_to_where_the_corpus_begins(tmp_path):
    for name in ("a/10.tar", "a/2.tar", "b/1.tar", "b/.hidden.tar", "b/notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert names(tmp_path) == ["a/2.tar", "a/10.tar", "b/1.tar"]
    assert names(tmp_path / "a") == ["2.tar", "10.tar"]
    assert names(tmp_path / "a/10.tar") == ["10.tar"]
    assert names(tmp_path / "a/*.tar") == ["2.tar", "10.tar"]
    assert names(tmp_path / "{a,b}/*.tar") == ["a/2.tar", "a/10.tar", "b/1.tar"]
    assert names(tmp_path / "**/*.tar") == ["a/2.tar", "a/10.tar", "b/1.tar"]


def test_a_file_whose_name_has_braces_is_itself(tmp_path):
    (tmp_path / "{0..3}.tar").touch()
    assert [file.path for file in find_files(f"{tmp_path}/{{0..3}}.tar", (".tar",))] == [
        f"{tmp_path}/{{0..3}}.tar"
    ]


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("{0..3}.tar", r"1.tar' does not exist \(3 of 4"),
        ("{3..0}.tar", "must rise"),
        (f"{{0..{MAX_FILES}}}.tar", "at most"),
        ("{0..999}{0..9999}.tar", "more than"),
        ("*.tgz", "has no files"),
    ],
)
def test_a_pattern_that_names_nothing_is_an_error(tmp_path, pattern, words):
    (tmp_path / "0.tar").touch()
    with pytest.raises(ConfigError, match=words):
        find_files(f"{tmp_path}/{pattern}", (".tar",))


@pytest.mark.parametrize("given", ["pipe:curl x", " pipe:cat a.tar", "pipe:a{0..1}.tar"])
def test_a_command_is_refused(given):
    with pytest.raises(ConfigError, match="would run a command"):
        open_rows(given)


def test_a_fifo_is_refused(tmp_path):
    os.mkfifo(tmp_path / "a.tar")
    with pytest.raises(ConfigError, match="not a regular file"):
        open_rows(f"{tmp_path}/a.tar")


@pytest.mark.parametrize(
    "url", ["memory://c/{0..1}.tar", "memory://c/*.tar", "memory://c/0.tar", "memory://c"]
)
def test_shards_are_read_from_a_url(read, write_tar, memory, url):
    if url == "memory://c":  # a folder there has no suffix that tells the format
        with pytest.raises(ConfigError, match="unknown suffix"):
            read(url)
        return
    for number in range(2):
        path = write_tar(f"{number}.tar", {f"{number}.jpg": b"x" * 3000})
        memory.pipe(f"/c/{number}.tar", path.read_bytes())
    wanted = ["0.tar/0"] if url.endswith("0.tar") else ["0.tar/0", "1.tar/1"]
    rows = read(url)
    assert [row.key for row in rows] == wanted
    assert all(row.values["jpg"] == b"x" * 3000 for row in rows)


def test_a_shard_that_is_missing_there_is_its_own_error(read, write_tar, memory):
    memory.pipe("/c/1.tar", write_tar("1.tar", {"a.jpg": b"x"}).read_bytes())
    bad, row = read("memory://c/{0..1}.tar")
    assert (bad.id, row.key) == ("0.tar", "1.tar/a")


def test_tables_and_lines_are_read_from_a_url(read, memory):
    pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow: the extra 'parquet'")
    from pyarrow import feather, parquet

    table = pyarrow.table({"title": ["a", "b"]})
    with memory.open("/t/x.parquet", "wb") as file:
        parquet.write_table(table, file)
    with memory.open("/t/x.feather", "wb") as file:
        feather.write_feather(table, file)
    memory.pipe("/t/x.csv", b"title\na\nb\n")
    memory.pipe("/t/x.jsonl", b'{"title": "a"}\n{"title": "b"}\n')
    for suffix in ("parquet", "feather", "csv", "jsonl"):
        rows = read(f"memory://t/x.{suffix}")
        assert [row.values["title"] for row in rows] == ["a", "b"], suffix
        assert rows[0].folder in ("memory://t", None)


def test_a_scheme_that_is_not_known_is_an_error():
    with pytest.raises(ConfigError, match="cannot be opened"):
        open_rows("nothing://a/b.tar")


def test_without_fsspec_the_extra_is_named(monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name.startswith("fsspec"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=re.escape("mmdeploy-llm[fsspec]")):
        open_rows("memory://c/0.tar")


def test_a_folder_of_media_is_no_corpus(tmp_path):
    (tmp_path / "captions.jsonl").touch()
    (tmp_path / "a.png").touch()
    assert open_rows(str(tmp_path)) is None


def test_lists_beside_shards_are_left_out(read, write_tar, tmp_path):
    write_tar("0.tar", {"a.jpg": b"x"})
    (tmp_path / "0.csv").write_text("key\na\n")
    (row,) = read(tmp_path)
    assert row.key == "0.tar/a"


def test_a_loop_of_links_is_walked_once(tmp_path):
    """Two loops would be walked 2 ** 40 times."""
    (tmp_path / "a/b").mkdir(parents=True)
    for name in ("0.tar", "a/1.tar", "a/b/2.tar"):
        (tmp_path / name).touch()
    (tmp_path / "a/up").symlink_to("..")
    (tmp_path / "a/b/top").symlink_to(tmp_path)
    assert names(tmp_path / "**/*.tar") == ["0.tar", "a/1.tar", "a/b/2.tar"]
    assert names(tmp_path / "a/**/2.tar") == ["b/2.tar"]
    assert names(tmp_path / "**/b/**/*.tar")[0] == "a/b/2.tar"


@pytest.mark.parametrize("pattern", ["", "*.jsonl", "{0,1}.jsonl", "**/*.jsonl"])
def test_links_of_a_corpus_lead_beneath_it_or_the_root(tmp_path, pattern):
    """Links are followed as paths are: without a root every file may be read."""
    for folder in ("mine", "root", "secret"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "0.jsonl").write_text("[1]\n")
    (tmp_path / "mine/1.jsonl").symlink_to("0.jsonl")
    given = str(tmp_path / "mine" / pattern)
    assert len(list(open_rows(given, root=tmp_path / "root").read(Selection()))) == 2
    (tmp_path / "mine/1.jsonl").unlink()
    (tmp_path / "mine/1.jsonl").symlink_to(tmp_path / "root/0.jsonl")
    assert len(list(open_rows(given, root=tmp_path / "root").read(Selection()))) == 2
    (tmp_path / "mine/1.jsonl").unlink()
    (tmp_path / "mine/1.jsonl").symlink_to(tmp_path / "secret/0.jsonl")
    assert len(list(open_rows(given).read(Selection()))) == 2
    with pytest.raises(ConfigError, match="out of allowed_media_root"):
        open_rows(given, root=tmp_path / "root")
    open_rows(str(tmp_path / "mine/1.jsonl"), root=tmp_path / "root")  # what the caller has named


def test_a_folder_that_only_a_link_leads_to_is_walked(tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "far/1.tar").touch()
    (tmp_path / "near").mkdir()
    (tmp_path / "near/link").symlink_to(tmp_path / "far")
    assert names(tmp_path / "near/**/*.tar") == ["link/1.tar"]


@pytest.mark.parametrize("name", ["*", "{a,b}", "**/*"])
def test_a_pattern_must_tell_the_format(tmp_path, name):
    (tmp_path / "a").touch()
    with pytest.raises(ConfigError, match="unknown suffix"):
        open_rows(f"{tmp_path}/{name}")
