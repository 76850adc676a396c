"""An output that one run writes is refused to another, which is told who writes it; full disks."""

from __future__ import annotations

import errno
import os
import resource
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from mmdeploy_llm.batch.documents.reading.folder import write_folder
from mmdeploy_llm.batch.report.page import ReportHead, write_report
from mmdeploy_llm.batch.speech.plan import plan
from mmdeploy_llm.batch.speech.run import Transcript
from mmdeploy_llm.checkpoints.saving.folders import written
from mmdeploy_llm.data.outputs.scan import RecordIndex
from mmdeploy_llm.data.records.configuration import Configuration
from mmdeploy_llm.data.records.files import Folder
from mmdeploy_llm.data.vectors.table import write_table
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.system.guarding.claims import claimed
from mmdeploy_llm.system.portable import files
from mmdeploy_llm.values.text.display import system_words

KILLED = """
import os, sys
from mmdeploy_llm.system.guarding.claims import claimed
with claimed(sys.argv[1]):
    os._exit(9)
"""
HEAD = ReportHead(model="m", created="today", version="1")
MADE = Configuration(model="a-model", values={"model": "12ab"})


def test_a_second_run_is_told_who_writes_and_a_third_one_may(tmp_path):
    out = tmp_path / "new" / "page.html"
    with claimed(out):
        told = rf"another run \(process {os.getpid()} on .*page.html'; wait for its end, or name"
        with pytest.raises(ConfigError, match=told), claimed(out):
            raise AssertionError
        with claimed(tmp_path / "new" / "other.html"):
            pass
    with claimed(out):
        pass
    assert list(out.parent.iterdir()) == []


def test_what_a_killed_run_left_is_taken_over_and_that_is_told(tmp_path, caplog):
    out = tmp_path / "page.html"
    assert subprocess.run([sys.executable, "-c", KILLED, out], check=False).returncode == 9
    assert [path.name for path in tmp_path.iterdir()] == [".page.html.lock"]
    with claimed(out):
        pass
    assert "a run that did not end (process " in caplog.text
    assert "takes over" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_locks_that_are_missing_or_in_the_way_are_told(tmp_path, caplog, monkeypatch):
    (tmp_path / ".in.html.lock").mkdir()
    (tmp_path / ".loop.html.lock").symlink_to(".loop.html.lock")
    for name in ("in", "loop"):
        told = rf"\.{name}\.html\.lock' is in the way of a lock: .* remove it"
        with pytest.raises(ConfigError, match=told), claimed(tmp_path / f"{name}.html"):
            raise AssertionError
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"/file/in\.html"), claimed(tmp_path / "file" / "in.html"):
        raise AssertionError

    def none(file):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(files, "lock", none)
    with claimed(tmp_path / "page.html"):
        pass
    assert "cannot be locked (No locks available)" in caplog.text


def test_the_lock_of_another_user_is_named(tmp_path, monkeypatch):
    (tmp_path / ".a.html.lock").touch()

    def refused(path, flags):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(files, "open_unfollowed", refused)
    told = r"\.a\.html\.lock', the lock of .*a\.html'.*Permission.* another user's run writes"
    with pytest.raises(ConfigError, match=told), claimed(tmp_path / "a.html"):
        raise AssertionError
    with pytest.raises(PermissionError, match=r"b\.html'"), claimed(tmp_path / "b.html"):
        raise AssertionError


def _report(folder: Path) -> None:
    write_report(folder / "out", [], HEAD, RecordIndex(), lambda media: (), num_shown=0)


def _table(path: Path) -> None:
    write_table(path, [], is_replaced=False)


def _checkpoint(folder: Path) -> None:
    with written(folder / "out", "digest"):
        pass


@pytest.mark.parametrize(
    ("is_folder", "write"),
    [
        pytest.param(False, _report, id="report"),
        pytest.param(False, _checkpoint, id="quantize, merge, save"),
        pytest.param(False, lambda folder: _table(folder / "out"), id="duplicates"),
        pytest.param(True, lambda f: write_folder(f / "out", [], is_marked=False), id="read"),
    ],
)
def test_an_output_of_a_command_is_written_by_one_run(tmp_path, is_folder, write):
    if is_folder:
        (tmp_path / "out").mkdir()
    with (
        claimed(tmp_path / "out", is_folder=is_folder),
        pytest.raises(ConfigError, match=r"another run .* is writing to '.*out'"),
    ):
        write(tmp_path)
    if is_folder:
        assert not any((tmp_path / "out").iterdir())
    else:
        assert list(tmp_path.iterdir()) == []


def test_a_file_that_another_run_transcribes_fails_and_the_others_are_written(tmp_path):
    for name in ("a.wav", "b.wav"):
        (tmp_path / name).write_bytes(b"RIFF")
    planned = plan([str(tmp_path)], ("srt", "txt"), None, MADE)

    class Deaf:
        def run(self, paths):
            return (Transcript(path=path) for path in paths)

    with claimed(tmp_path / "a"):
        found = {each.path.name: each.error for each in planned.run(Deaf())}
    assert found["b.wav"] is None
    assert "another run" in found["a.wav"]
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"a.wav", "b.wav", "b.srt", "b.txt"}


class Patient:
    """Finishes a file only when all have begun, as poor answers make it."""

    def run(self, paths):
        for path in list(paths):
            yield Transcript(path=path)


def test_files_in_work_hold_no_open_files(tmp_path):
    names = [f"{number}.wav" for number in range(60)]
    for name in names:
        (tmp_path / name).write_bytes(b"RIFF")
    planned = plan([str(tmp_path)], ("srt",), None, MADE)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/dev/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 20, before[1]))
    try:
        found = list(planned.run(Patient()))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert [each.error for each in found] == [None] * len(names)
    assert len(list(tmp_path.glob("*.srt"))) == len(names)


def test_transcripts_that_another_run_has_written_meanwhile_stay(tmp_path):
    (tmp_path / "a.wav").write_bytes(b"RIFF")
    new = plan([str(tmp_path)], ("srt",), None, MADE)
    again = plan([str(tmp_path)], ("srt",), None, MADE, overwrite=True)
    (tmp_path / "a.srt").write_text("theirs")
    (found,) = new.run(Patient())
    assert "another run wrote" in found.error
    assert (tmp_path / "a.srt").read_text() == "theirs"
    (found,) = again.run(Patient())
    assert found.error is None
    assert (tmp_path / "a.srt").read_text() == ""


def test_tables_and_checkpoints_that_came_meanwhile_stay(tmp_path):
    (tmp_path / "out.csv").touch()
    with pytest.raises(ConfigError, match="exists already"):
        _table(tmp_path / "out.csv")
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="exists; give another"):
        _checkpoint(tmp_path)


def test_an_error_of_what_is_written_is_not_one_of_the_output(tmp_path):
    def pieces():
        yield b"x"
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with Folder.open(tmp_path) as folder:
        with pytest.raises(OSError, match="Input/output") as raised:
            folder.write("out.jsonl", pieces())
        assert raised.value.filename is None
        assert folder.all_names() == []


def test_a_full_disk_names_the_file_and_leaves_nothing(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Folder.open(tmp_path) as folder:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        try:
            with pytest.raises(OSError, match=r"page\.html"):
                folder.write("page.html", [b"x" * 900] * 3)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space", "a"), "'a': No space; make room there, or name an"),
        (OSError(errno.ENOSPC, "No space"), "No space; make room there"),
        (PermissionError(errno.EACCES, "No", "a"), "'a': No; change the rights of the file or"),
        (FileNotFoundError(errno.ENOENT, "None", "a"), "'a': None"),
        (OSError(errno.EXDEV, "Cross", "a", None, "b"), "'a' -> 'b': Cross"),
        (OSError("words of our own"), "words of our own"),
    ],
)
def test_what_the_system_refuses_says_what_to_do(error, words):
    assert system_words(error).startswith(words)


def test_an_error_without_a_file_has_no_advice_on_rights():
    assert system_words(ssl.SSLCertVerificationError(1, "expired")) == "expired"
