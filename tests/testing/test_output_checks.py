"""Bugs planted in a store of records: each is found by the check that the table names; that store,
the one in SQLite and the formats of the core pass."""

import re
from pathlib import Path

import pytest

from mmdeploy_llm.data.outputs.own_formats import FORMATS
from mmdeploy_llm.hooks import OutputSinkSpec, PluginManager
from mmdeploy_llm.testing import CheckFailed, CheckSkipped, OutputSinkConformance
from mmdeploy_llm.testing.data import outputs
from mmdeploy_llm.testing.data.outputs import OutputSubject

ROOT = Path(__file__).parents[2]
PLUGIN = Path(__file__).with_name("numbered_store.py").read_text()
SQLITE = (ROOT / "examples/plugins/sqlite_output.py").read_text()
REMOVAL = re.search(r"        gone, copy = .*?\n\n", PLUGIN, re.S)[0]
COPYING = REMOVAL[: REMOVAL.index("        os.replace")]
TRANSACTION = re.search(r"        with self.database:\n.*?\n\n", SQLITE, re.S)[0]
LEFT = "left = [own for own in self.entries() if own[0] not in positions]"
# Keeps each record in a file of its own, and removes one file after the other.
FOLDER = """
import os
from mmdeploy_llm.hooks import OutputSinkSpec, RecordStore, hookimpl

@hookimpl
def provide_output_sinks():
    return [OutputSinkSpec(name="folder", suffixes=(".each",), factory=f"{__name__}:Folder")]

class Folder(RecordStore):
    def __init__(self, path, writable):
        if writable:
            path.mkdir(exist_ok=True)
        self.path = path
        self.last = max((int(own.stem) for own in self.path.iterdir()), default=-1)

    def entries(self):
        for number in sorted(int(own.stem) for own in self.path.glob("*.json")):
            yield number, self.get(number)

    def get(self, position):
        try:
            return self.path.joinpath(f"{position}.json").read_bytes().decode()
        except FileNotFoundError:
            raise LookupError(position) from None

    def append(self, line, values):
        new = self.path / f"{self.last + 1}.new"
        try:
            new.write_bytes(line.encode())
        except OSError:
            new.unlink()
            raise
        os.replace(new, new.with_suffix(".json"))
        self.last += 1
        return self.last

    def delete(self, positions):
        for position in positions:
            os.unlink(self.path / f"{position}.json")

    def close(self):
        pass
"""
BY_NAME = {check.__name__: check for check in outputs.CHECKS}
BUGS = {  # what is wrong -> (text, its replacement, the check)
    "buffered": (
        'path.open("ab+" if writable else "rb", buffering=0)',
        'path.open("ab+" if writable else "rb")', "killed_processes_lose_nothing"),
    "positions start anew": (
        "self.last = found[-1][0] if found else -1", "self.last = -1",
        "records_are_added_to_what_is_there"),
    "the text is not kept": (
        "yield int(number), record[:-1]", "yield int(number), record.strip().replace(', ', ',')",
        "records_come_back_exactly"),
    "lines of other systems": (
        'self.path.open("rb") as lines:\n            for line in lines:',
        'self.path.open("rb") as lines:\n            for line in [own.encode() + b"\\n" for own '
        "in lines.read().decode().splitlines()]:", "records_come_back_exactly"),
    "a torn record is one": (
        'if record.endswith("\\n"):', 'if record := record + "\\n" * (record[-1:] != "\\n"):',
        "torn_records_are_passed_over"),
    "a torn record stays": (
        "            self.file.truncate(sum(", "            (lambda size: None)(sum(",
        "torn_records_are_passed_over"),
    "a full disk in silence": (
        '                raise OSError("the disk is full")\n        except OSError:\n'
        "            self.file.truncate(size)\n            raise",
        "                pass\n        except OSError:\n            pass", "full_disks_are_told"),
    "removes others": (
        "gone, copy = set(positions)", "gone, copy = set(positions[:1])",
        "removed_records_are_gone"),
    "numbers them anew": (
        "for number, line in self.entries():\n                if number not in gone",
        "for new, (number, line) in enumerate(self.entries(), 9):\n"
        "                if number not in gone and [number := new]", "removed_records_are_gone"),
    "a missing file is made": (
        ' or not writable else []\n        self.file = path.open("ab+" if writable else "rb"',
        ' else []\n        self.file = path.open("ab+"',
        "other_files_stay_as_they_are"),
    "damage is passed over": (
        "yield int(number), record[:-1]",
        "if number.isdigit(): yield int(number), record[:-1]", "other_files_stay_as_they_are"),
    "all at once": (
        "        with self.path.open(\"rb\") as lines:\n            for line in lines:",
        "        if True:\n            for line in self.path.read_bytes().splitlines(True):",
        "records_are_read_one_by_one"),
    "removed before the copy is there": (
        "os.replace(copy, self.path)", "os.remove(self.path); os.rename(copy, self.path)",
        "removals_are_all_or_none"),
    "the copy is written over it": (
        "os.replace(copy, self.path)", "self.path.write_bytes(copy.read_bytes())",
        "removals_are_all_or_none"),
    "a copy that is not flushed": (
        COPYING, COPYING.replace("with copy.open(\"wb\") as out:", "out = copy.open(\"wb\")\n"
        "        if True:"), "removals_are_all_or_none"),
    "rewritten in place": (
        REMOVAL, f"        {LEFT}\n        self.file.truncate(0)\n        for own in left:\n"
        '            self.file.write("{} {}\\n".format(*own).encode())\n\n',
        "removals_are_all_or_none"),
    "a transaction for each": (
        TRANSACTION,
        "        for own in positions:\n"
        '            self.database.execute("DELETE FROM records WHERE position = ?", (own,))\n\n',
        "removals_are_all_or_none"),
    "many statements in one call": (
        TRANSACTION, '        self.database.executemany("DELETE FROM records WHERE position = ?", '
        "[(own,) for own in positions])\n\n", "removals_are_all_or_none"),
    "files removed one by one": ("os.unlink(", "os.unlink(", "removals_are_all_or_none"),
    "a full disk in silence for each file": (
        "            new.unlink()\n            raise", "            pass", "full_disks_are_told"),
}  # fmt: skip


def subject_of(folder, text=PLUGIN):
    path = folder / "numbered_plugin.py"
    path.write_text(text)
    manager = PluginManager.load(plugins=(), files=[path])
    return OutputSubject(spec=manager.provided(OutputSinkSpec)[0], file=path)


# Found where the process is killed in the midst of a call, which a loaded machine may prevent once.
TRIES = {"many statements in one call": 5}


def check_repeatedly(check, subject, times):
    for _ in range(times):
        check(subject)


@pytest.mark.one_is_quick
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name, tmp_path):
    text, instead, check = BUGS[name]
    plugin = next(own for own in (PLUGIN, SQLITE, FOLDER) if text in own)
    subject = subject_of(tmp_path, plugin.replace(text, instead))
    with pytest.raises(CheckFailed) as failure:
        check_repeatedly(BY_NAME[check], subject, TRIES.get(name, 1))
    print(f"{name}: {check}: {failure.value}")


@pytest.mark.one_is_quick
@pytest.mark.parametrize("check", outputs.CHECKS, ids=lambda check: check.__name__)
def test_the_store_without_faults_passes(check, tmp_path):
    check(subject_of(tmp_path))


@pytest.mark.one_is_quick
@pytest.mark.parametrize("check", outputs.CHECKS, ids=lambda check: check.__name__)
def test_a_store_of_many_files_passes_but_for_its_removals(check, tmp_path):
    if check in (outputs.removals_are_all_or_none, outputs.torn_records_are_passed_over):
        return  # see BUGS, and no record is torn in a file alone
    check(subject_of(tmp_path, FOLDER))


class TestSqlite(OutputSinkConformance):
    file = ROOT / "examples/plugins/sqlite_output.py"
    spec = PluginManager.load(plugins=(), files=[file]).provided(OutputSinkSpec)[0]


@pytest.mark.one_is_quick
@pytest.mark.parametrize("check", outputs.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("spec", FORMATS, ids=lambda spec: spec.name)
def test_the_formats_of_the_core_pass(spec, check):
    if check is outputs.removals_are_all_or_none:
        with pytest.raises(CheckSkipped, match="it is no RecordStore"):
            check(OutputSubject(spec=spec))
    elif check is outputs.torn_records_are_passed_over and spec.name != "jsonl":
        with pytest.raises(CheckSkipped, match="only its author can tear a record"):
            check(OutputSubject(spec=spec))
    else:
        check(OutputSubject(spec=spec))


def test_what_cannot_be_tried_is_said(tmp_path):
    subject = OutputSubject(spec=TestSqlite.spec, file=TestSqlite.file)
    with pytest.raises(CheckSkipped, match="not added at the end of a file"):
        BY_NAME["torn_records_are_passed_over"](subject)


SLOW = PLUGIN.replace(
    "        self.last += 1\n", "        self.last += 1\n        __import__('time').sleep(0.02)\n"
)


def test_a_slow_store_gets_fewer_and_larger_records(tmp_path, monkeypatch):
    """One that writes a version a record took minutes; what is wrong is still found."""
    monkeypatch.setattr(outputs, "ADDING_SECONDS", 0.2)
    monkeypatch.setattr(outputs, "LEAST_RECORDS", 20)
    assert outputs._num_records(subject_of(tmp_path, SLOW)) == 20
    outputs.records_are_read_one_by_one(subject_of(tmp_path, SLOW))
    text, instead, _ = BUGS["all at once"]
    with pytest.raises(CheckFailed, match="MiB were taken for the first record of 19 MiB"):
        outputs.records_are_read_one_by_one(subject_of(tmp_path, SLOW.replace(text, instead)))


def test_a_quick_store_gets_many_records(tmp_path, monkeypatch):
    monkeypatch.setattr(outputs, "ADDING_SECONDS", 60.0)
    assert outputs._num_records(subject_of(tmp_path)) == outputs.MOST_RECORDS
