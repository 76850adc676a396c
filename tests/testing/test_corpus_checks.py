"""Bugs planted in a reader of a format of corpora: each is found by the check that the table
names."""

import json
import pickle
import struct

import pytest

from mmdeploy_llm.hooks import CorpusFormatSpec, PluginManager
from mmdeploy_llm.testing import CheckFailed
from mmdeploy_llm.testing.check import check_plugin
from mmdeploy_llm.testing.data import corpus, corpus_subject
from mmdeploy_llm.testing.data.corpus_subject import CorpusSubject

PLUGIN = """
import os, pickle, struct
from mmdeploy_llm.hooks import CorpusFormatSpec, DamagedRow, hookimpl

SEEN = []

def row_of(data):
    try:
        return pickle.loads(data)
    except Exception as error:
        return DamagedRow(message=f"torn: {error}")

def read(file):
    with file.open() as content:
        while head := content.read(4):
            (size,) = struct.unpack(">I", head)
            data = content.read(size)
            if len(data) < size:
                raise EOFError("cut off")
            yield row_of(data)

@hookimpl
def provide_corpus_formats():
    return [CorpusFormatSpec(name="frames", suffixes=(".frames",), reader=f"{__name__}:read")]
"""
WITH, LAST = "    with file.open() as content:", "            yield row_of(data)"
BUGS = {  # what is wrong -> (text, its replacement, the check)
    "the end of a file in silence": (
        'raise EOFError("cut off")', "return", "cut_files_end"),
    "waits for what never comes": (
        'raise EOFError("cut off")', "__import__('time').sleep(60)",
        "cut_files_end"),
    "an empty row at the end": (
        'raise EOFError("cut off")', "yield {}; yield {}; return", "cut_files_end"),
    "state in the module": (
        LAST, "            SEEN.append(1)\n            yield {**row_of(data), 'n': len(SEEN)}",
        "the_same_rows_each_time"),
    "the order of a set": (
        LAST, LAST + "\n            yield {'x': list(set('abcdefghijklmno'))}",
        "the_same_rows_each_time"),
    "one file for all readers": (
        WITH, "    SEEN.append(file.open()) if not SEEN else SEEN[0].seek(0)\n"
        "    if content := SEEN[0]:", "the_same_rows_each_time"),
    "a file is left open": (WITH, "    if content := file.open():", "files_are_closed"),
    "the path is opened": (
        WITH, "    if not os.path.exists(file.path): return\n"
        "    with open(file.path, 'rb') as content:", "names_are_no_promise"),
    "damage costs the rest": (
        "return DamagedRow(message=f\"torn: {error}\")", "raise", "a_damaged_row_costs_itself"),
    "damage is skipped": (
        LAST, "            row = row_of(data)\n            if isinstance(row, dict): yield row",
        "a_damaged_row_costs_itself"),
    "the process ends": (
        'raise EOFError("cut off")', "os._exit(1) if SEEN.append(1) or os.getppid() != "
        "PARENT else None\n                raise EOFError", "hostile_files_end"),
    "bytes become a text": (
        LAST, "            row = row_of(data)\n            yield {name: str(own) if isinstance("
        "own, bytes) else own for name, own in row.items()}", "values_survive"),
    "a large value costs the file": (
        LAST, "            if len(data) > file.max_bytes: raise ValueError\n" + LAST,
        "large_values_cost_their_row"),
    "the whole file at once": (
        WITH, "    import io\n    with io.BytesIO(file.open().read()) as content:",
        "big_files_are_read_as_they_are_wanted"),
    "all rows at once": (
        "            yield row_of(data)",
        "            SEEN.append(row_of(data))\n        yield from SEEN",
        "big_files_are_read_as_they_are_wanted"),
    "first bytes of others": (
        'reader=f"', "first_bytes=(b'\\x89P',), reader=f\"", "suffixes_and_first_bytes_fit"),
    "a row is wrong": (
        "return pickle.loads(data)", "return {**pickle.loads(data), 'id': 'x'}",
        "rows_are_those_of_the_files"),
}  # fmt: skip
# Other formats, whose cuts must be told: the number of rows first, a sum after each, and text.
COUNTED = """
import json, struct
from mmdeploy_llm.hooks import CorpusFormatSpec, hookimpl

def read(file):
    with file.open() as content:
        head = content.read(8)
        if len(head) < 8:
            raise EOFError("no head")
        _, count = struct.unpack("<II", head)
        table = content.read(4 * count)
        if len(table) < 4 * count:
            raise EOFError("the table is cut")
        for size in struct.unpack(f"<{count}I", table):
            data = content.read(size)
            if len(data) < size:
                raise EOFError("rows are missing")
            yield json.loads(data)

@hookimpl
def provide_corpus_formats():
    return [CorpusFormatSpec(name="frames", suffixes=(".frames",), reader=f"{__name__}:read")]
"""
SUMMED = (
    COUNTED[: COUNTED.index("        head")]
    + """        while head := content.read(6):
            if len(head) < 6:
                raise EOFError("a head is cut")
            name, size = struct.unpack("<HI", head)
            data = content.read(size)
            if len(data) < size:
                raise EOFError("a row is cut")
            row = {"id": str(name), "image": data}
            if len(content.read(4)) < 4:
                raise EOFError("a sum is cut")
            yield row
"""
    + COUNTED[COUNTED.index("\n@hookimpl") :]
)
LINES = (
    COUNTED[: COUNTED.index("        head")]
    + """        for line in content:
            if not line.endswith(b"\\n"):
                raise EOFError("a line is cut")
            if line.strip():
                yield json.loads(line)
"""
    + COUNTED[COUNTED.index("\n@hookimpl") :]
)
BLOCKS = (
    COUNTED[: COUNTED.index("        head")]
    + """        row = {}
        for line in content.read().decode().splitlines():
            if line == "//":
                yield row
                row = {}
            elif line:
                name, _, value = line.partition(": ")
                row[name] = value
        if row:
            raise EOFError("a block is cut")
"""
    + COUNTED[COUNTED.index("\n@hookimpl") :]
)
OTHERS = {"COUNTED": COUNTED, "SUMMED": SUMMED, "LINES": LINES, "BLOCKS": BLOCKS}
CUTS = {  # what is wrong -> (the format, text, its replacement)
    "fewer rows than are counted": ("COUNTED", 'raise EOFError("rows are missing")', "return"),
    "a table that is cut": ("COUNTED", 'raise EOFError("the table is cut")', "return"),
    "no row without a head": ("COUNTED", 'raise EOFError("no head")', "return"),
    "the end of a head": ("SUMMED", 'raise EOFError("a head is cut")', "return"),
    "the end of a row": ("SUMMED", 'raise EOFError("a row is cut")', "break"),
    "a row that is shorter": (
        "SUMMED", 'raise EOFError("a row is cut")', 'yield {"id": str(name), "image": data}; return'
    ),
    "a sum that is not looked at": ("SUMMED", 'raise EOFError("a sum is cut")', "pass"),
    "errors that end it": (
        "SUMMED", "        while head", "        import contextlib\n        with contextlib."
        "suppress(EOFError):\n         while head"),
    "a line that is cut": ("LINES", 'raise EOFError("a line is cut")', "return"),
    "lines that are no JSON": (
        "LINES", 'raise EOFError("a line is cut")', "continue"),
    "a block that is cut": ("BLOCKS", 'raise EOFError("a block is cut")', "pass"),
}  # fmt: skip
ROWS = [{"id": "a", "n": 1}, {"id": "b", "n": None}, {"id": "c", "n": [1.5, b"x" * 90]}]


def framed(*rows):
    texts = [row if isinstance(row, bytes) else pickle.dumps(row) for row in rows]
    return b"".join(struct.pack(">I", len(text)) + text for text in texts)


def content_of(name):
    """Returns a good file of one of the other formats."""
    rows = [{"id": str(n), "prompt": f"question {n} " * (3 + n)} for n in range(4)]
    texts = [json.dumps(row).encode() for row in rows]
    if name == "COUNTED":
        sizes = struct.pack(f"<II{len(texts)}I", 1, len(texts), *map(len, texts))
        return sizes + b"".join(texts)
    if name == "SUMMED":
        images = [bytes([n + 65]) * 70 for n in range(4)]
        return b"".join(
            struct.pack("<HI", n, len(own)) + own + b"\x9a\x9b\x9c\x9d"
            for n, own in enumerate(images)
        )
    if name == "LINES":
        return b"".join(text + b"\n" for text in texts)
    return "".join(f"id: {row['id']}\nprompt: {row['prompt']}\n//\n" for row in rows).encode()


def write(path, rows):
    with path.open("wb") as file:
        for row in rows:
            file.write(framed(row))


def subject_of(folder, text=PLUGIN):
    path = folder / "frames_plugin.py"
    path.write_text(text)
    manager = PluginManager.load(plugins=(), files=[path])
    return CorpusSubject(
        spec=manager.provided(CorpusFormatSpec)[0],
        file=path,
        samples={"three": framed(*ROWS), "one": framed(ROWS[0])},
        rows={"three": ROWS},
        damaged={"torn": (framed(ROWS[0], b"torn", ROWS[2]), [ROWS[0], None, ROWS[2]])},
        write=write,
    )


@pytest.mark.one_is_quick
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_subject, "SECONDS", 0.5 if "waits" in name else 20.0)
    monkeypatch.setattr(corpus, "HOSTILE", {"noise": corpus.HOSTILE["noise"]})
    text, instead, check = BUGS[name]
    assert text in PLUGIN
    changed = PLUGIN.replace(text, instead).replace("PARENT", str(corpus_subject.os.getppid()))
    subject = subject_of(tmp_path, changed)
    with pytest.raises(CheckFailed) as failure:
        {one.__name__: one for one in corpus.CHECKS}[check](subject)
    print(f"{name}: {check}: {failure.value}")


def other_of(folder, name, text, instead):
    """Returns the subject of one of the other formats, with a change."""
    path = folder / f"{name.lower()}_plugin.py"
    path.write_text(OTHERS[name].replace(text, instead))
    (spec,) = PluginManager.load(plugins=(), files=[path]).provided(CorpusFormatSpec)
    return CorpusSubject(spec=spec, file=path, samples={"four": content_of(name)})


@pytest.mark.one_is_quick
@pytest.mark.parametrize("bug", CUTS)
def test_a_cut_in_silence_is_found(bug, tmp_path):
    name, text, instead = CUTS[bug]
    assert text in OTHERS[name]
    with pytest.raises(CheckFailed) as failure:
        corpus.cut_files_end(other_of(tmp_path, name, text, instead))
    print(f"{bug}: {failure.value}")


@pytest.mark.one_is_quick
@pytest.mark.parametrize("name", OTHERS)
def test_formats_that_tell_of_cuts_pass(name, tmp_path):
    corpus.cut_files_end(other_of(tmp_path, name, "", ""))


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return subject_of(tmp_path_factory.mktemp("good"))


@pytest.mark.one_is_quick
@pytest.mark.parametrize("check", corpus.CHECKS, ids=lambda check: check.__name__)
def test_the_reader_without_a_bug_passes(check, good):
    check(good)


@pytest.mark.full
def test_what_is_missing_is_said(tmp_path):
    """`plugins check` has no files of the format: it runs what needs none."""
    path = tmp_path / "frames_plugin.py"
    path.write_text(PLUGIN)
    found = {one.check: one for one in check_plugin(str(path)) if "corpus format" in one.subject}
    assert found["hostile_files_end"].outcome == "pass"
    assert "`samples`" in found["cut_files_end"].message
    assert "`write`" in found["values_survive"].message
    assert {one.outcome for one in found.values()} == {"pass", "skip"}
