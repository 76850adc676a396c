"""Formats of plugins: whatever a reader does costs a row or a file, and nobody else's rows."""

import gzip
import logging

import pytest

from mmdeploy_llm.data.rows.formats.formats import open_rows
from mmdeploy_llm.data.rows.rows import BadItem, FirstLines
from mmdeploy_llm.errors import ConfigError, PluginConflictError, PluginLoadError
from mmdeploy_llm.hooks import PluginManager

ALL = FirstLines(count=1000)
PLUGIN = """
import decimal, os, sys
from mmdeploy_llm.hooks import CorpusFormatSpec, DamagedRow, hookimpl
{top}

def read(file):
{body}

@hookimpl
def provide_corpus_formats():
    return [CorpusFormatSpec(name={name!r}, reader=f"{{__name__}}:read", {fields})]
"""
LINES = """
    with file.open() as content:
        for line in content:
            text = line.decode().strip()
            yield eval(text)
"""


def kinds_of(folder, *, body=LINES, top="", name="own", fields="suffixes=('.own',)", use=None):
    path = folder / f"{name}_plugin.py"
    path.write_text(PLUGIN.format(body=body, top=top, name=name, fields=fields))
    return PluginManager.load(plugins=(), files=[path], use=use or {}).kinds


def read(given, kinds, lines=ALL, **options):
    return list(open_rows(str(given), kinds=kinds, **options).read(lines))


def write(folder, *lines, name="a.own"):
    (folder / name).write_text("".join(f"{line}\n" for line in lines))
    return folder / name


def shown(rows):
    return [row.message if isinstance(row, BadItem) else row.values for row in rows]


def test_good_and_bad_rows_of_one_file(tmp_path):
    """One process reads all hostile rows: each costs itself."""
    hostile = {
        "DamagedRow(message='torn')": "torn",
        "[1, 2]": "a row must be a mapping, got list",
        "{1: 2}": "the row has the name 1, which is no text",
        "{'x': {1: 2}}": "column 'x' has the name 1, which is no text",
        "{'x': object()}": "column 'x' has a object, which no row can hold",
        "{'x': {1, 2}}": "column 'x' has a set",
        "{'x': (lambda a: (a.append(a), a)[1])([])}": "column 'x' is nested more than 64 deep",
        "{'x': b'y' * 11}": "a cell has 11 bytes, 10 are allowed",
        "{'x': 10**5000}": "the row cannot be used",
        "None": "a row must be a mapping, got NoneType",
        "b'text'": "a row must be a mapping, got bytes",
    }
    file = write(tmp_path, "{'id': 'a'}", *hostile, "{'x': [b'1', bytearray(b'2'), (3,)]}", "{}")
    rows = read(file, kinds_of(tmp_path), max_bytes=10)
    found = shown(rows)
    assert found[0] == {"id": "a"}
    assert found[-2:] == [{"x": [b"1", b"2", [3]]}, {}]
    for message, wanted in zip(found[1:-2], hostile.values(), strict=True):
        assert wanted in message
    assert [row.line for row in rows] == list(range(1, len(hostile) + 4))


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("    yield {'x': 1}\n    raise RuntimeError('torn')", "RuntimeError: torn"),
        ("    yield {'x': 1}\n    sys.exit(3)", "SystemExit: 3"),
        ("    yield {'x': 1}\n    os._exit(3)", "exit status 3"),
        ("    yield {'x': 1}\n    [0] * 2**50", "more memory than is sensible"),
    ],
)
def test_a_reader_that_fails_loses_the_rest_of_its_file(body, reason, tmp_path):
    """The rows before, and the other files, are read, whether it raises or ends the process."""
    guarded = "    if 'bad' not in file.path:\n        yield {'x': 2}\n        return\n" + body
    kinds = kinds_of(tmp_path, body=guarded)
    for name in ("1.own", "2bad.own", "3.own"):
        write(tmp_path, name=name)
    found = shown(read(tmp_path / "*.own", kinds))
    assert found[:2] == [{"x": 2}, {"x": 1}]
    assert found[3:] == [{"x": 2}]
    assert "2bad.own" in found[2]
    assert reason in found[2]


@pytest.mark.full
@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("    return None", "must yield rows, got NoneType"),
        ("    return {'x': 1}", "must yield rows, got dict"),
        ("    return 'text'", "must yield rows, got str"),
        ("    return open('/nowhere/x')", "FileNotFoundError"),
    ],
)
def test_a_reader_that_yields_nothing(body, reason, tmp_path):
    (message,) = shown(read(write(tmp_path), kinds_of(tmp_path, body=body)))
    assert reason in message
    assert "corpus format own of plugin" in message


@pytest.mark.full
@pytest.mark.one_is_quick
@pytest.mark.parametrize("fault", ["import nothing_like_it", "os._exit(3)"])
def test_a_module_that_cannot_be_imported_is_told_at_once(fault, tmp_path):
    """It is imported, and fails, in the process that reads."""
    kinds = kinds_of(tmp_path, top=f"if 'pytest' not in sys.modules:\n    {fault}")
    with pytest.raises(ConfigError, match=r"nothing_like_it|cannot be loaded"):
        open_rows(str(write(tmp_path)), kinds=kinds)


@pytest.mark.full
def test_rows_are_numbered_through_files_and_only_the_wanted_are_read(tmp_path):
    """A reader may use one dict for all rows, and need not end: it is asked for what is wanted."""
    body = "    row = {'n': -1}\n    while True:\n        row['n'] += 1\n        yield row"
    rows = read(write(tmp_path), kinds_of(tmp_path, body=body), FirstLines(count=600))
    assert [row.line for row in rows] == list(range(1, 601))
    assert [row.values["n"] for row in rows] == list(range(600))


@pytest.mark.full
def test_packed_content_and_long_suffixes(tmp_path):
    kinds = kinds_of(tmp_path, fields="suffixes=('.own.gz', '.x.jsonl')")
    (tmp_path / "a.OWN.gz").write_bytes(gzip.compress(b"{'x': 1}\n"))
    assert shown(read(tmp_path / "a.OWN.gz", kinds)) == [{"x": 1}]
    write(tmp_path, "{'x': None}", name="a.x.jsonl")  # no JSON
    assert shown(read(tmp_path / "a.x.jsonl", kinds)) == [{"x": None}]
    (tmp_path / "cut.own.gz").write_bytes(gzip.compress(b"{'x': 1}\n")[:-3])
    assert "damaged or cut off" in shown(read(tmp_path / "cut.own.gz", kinds))[-1]


@pytest.mark.full
def test_first_bytes_decide_where_nobody_knows_the_suffix(tmp_path):
    kinds = kinds_of(tmp_path, fields="suffixes=('.own',), first_bytes=(b\"{'x\",)")
    for name in ("a", "a.odd"):
        assert shown(read(write(tmp_path, "{'x': 1}", name=name), kinds)) == [{"x": 1}]
    assert shown(read(write(tmp_path, '{"y": 1}', name="b"), kinds)) == [{"y": 1}]
    with pytest.raises(ConfigError, match=r"unknown suffix; known are .*\.own"):
        open_rows(str(write(tmp_path, "y", name="b.odd")), kinds=kinds)


@pytest.mark.parametrize(("priority", "is_ours"), [(0, True), (-1, False)])
def test_a_suffix_that_is_built_in(priority, is_ours, tmp_path, caplog):
    kinds = kinds_of(tmp_path, fields=f"suffixes=('.jsonl',), priority={priority}")
    file = write(tmp_path, '{"x": 1}', "{'x': 2}", name="a.jsonl")
    with caplog.at_level(logging.WARNING):
        found = shown(read(file, kinds))
    assert (found == [{"x": 1}, {"x": 2}]) == is_ours
    assert ("blocked_plugins" in caplog.text) == is_ours


@pytest.mark.full
def test_two_plugins_conflict_until_one_is_chosen(tmp_path):
    paths = []
    for name in ("first", "second"):
        kinds_of(tmp_path, name=name, body=f"    yield {{'by': {name!r}}}")
        paths.append(tmp_path / f"{name}_plugin.py")
    file = write(tmp_path)
    with pytest.raises(PluginConflictError, match=r"corpus format 'first'.*'second'"):
        open_rows(str(file), kinds=PluginManager.load(plugins=(), files=paths).kinds)
    for key in (".own", "second"):
        use = {key: "second_plugin"}
        kinds = PluginManager.load(plugins=(), files=paths, use=use).kinds
        assert shown(read(file, kinds)) == [{"by": "second"}]


@pytest.mark.full
def test_a_folder_is_read_by_the_plugin_before_lists_and_after_shards(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    kinds = kinds_of(tmp_path)
    write(folder, "{'x': 1}")
    write(folder, '{"x": 2}', name="list.jsonl")
    assert shown(read(folder, kinds)) == [{"x": 1}]
    assert shown(list(open_rows(str(folder)).read(ALL))) == [{"x": 2}]


def test_wrong_specs_are_refused(tmp_path):
    for fields in (
        "suffixes=()",
        "suffixes=('own',)",
        "suffixes=('.OWN',)",
        "suffixes=('.a',), first_bytes=(b'x',)",
    ):
        with pytest.raises(PluginLoadError, match=r"suffixes must be|first_bytes must be"):
            kinds_of(tmp_path, fields=fields)
