"""An output that somebody else changes while a run writes to it: the run ends and says where its
results are, and what it says to do leads to an output with every item once."""

import errno
import os
import re
import shutil
import signal
import tempfile

import pytest

from mmdeploy_llm.batch.job import plan_batch, run_batch
from mmdeploy_llm.batch.settings import BatchSettings
from mmdeploy_llm.data.outputs.opening.choose import open_sink
from mmdeploy_llm.data.records.files import OutputLostError, OutputWriteError
from mmdeploy_llm.errors import ConfigError

NUM = 24
FOLDERS = ("out.parquet", "out.tar")
URLS = ("memory://lost/out.parquet", "memory://lost/out.tar", "memory://lost/out.jsonl")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rows(harm=None, at=13):
    for number in range(NUM):
        if harm is not None and number == at:
            harm()
        yield {"id": f"item-{number}", "prompt": f"a {number}"}


@pytest.fixture
def do(fake_llm):
    def run(output, given, mode="new"):
        part_items = 5 if output in (*FOLDERS, *URLS) else None
        settings = BatchSettings(mode=mode, part_items=part_items)
        return run_batch(plan_batch(given, output, settings), lambda: fake_llm)

    return run


def follow(words, output):
    """Does what a message says."""
    if found := re.search(r"truncate -s (\d+) '(.+?)'", words):
        os.truncate(found[2], int(found[1]))
    elif found := re.search(r"its results are in '(.+?)': give that folder its name", words):
        shutil.rmtree(output, ignore_errors=True)
        os.rename(found[1], output)
    elif found := re.search(r"in '([^']+)': move '([^']+)' away, rename", words):
        os.rename(found[2], "away")
        os.rename(found[1], found[2])
    elif found := re.search(r"in '([^']+)': move it to '([^']+)'", words):
        os.makedirs(os.path.dirname(found[2]))
        os.rename(found[1], found[2])
    elif found := re.search(
        r"'([^']+)' was removed .* in '([^']+)': rename that file to it", words
    ):
        os.rename(found[2], found[1])


def growing(output):
    if output.endswith(".jsonl"):
        return output
    return next(os.path.join(output, name) for name in os.listdir(output) if ".open" in name)


def part(output, number=1):
    return next(os.path.join(output, n) for n in os.listdir(output) if f"part-0000{number}" in n)


def append(path, data):
    with open(path, "ab") as file:
        file.write(data)


def overwrite(path, place=0.5):
    """Changes bytes in the middle, as a bad sector or a careless program does."""
    with open(path, "r+b") as file:
        file.seek(int(os.path.getsize(path) * place))
        file.write(b"#" * 9)


def edit(path):
    """Replaces a file, as `sed -i` and most editors do."""
    shutil.copy(path, "copy")
    os.replace("copy", path)


HARM = {
    "cut to nothing": lambda out: os.truncate(growing(out), 0),
    "cut in a record": lambda out: os.truncate(growing(out), os.path.getsize(growing(out)) - 9),
    "a byte added": lambda out: append(growing(out), b"x"),
    "lines added": lambda out: append(growing(out), b"hello\nworld\n"),
    "changed inside": lambda out: overwrite(growing(out)),
    "extended with zeros": lambda out: os.truncate(growing(out), 10**6),
    "folder renamed": lambda out: os.rename(out, "moved"),
    "folder replaced": lambda out: (os.rename(out, "moved"), os.mkdir(out)),
    "folder removed": lambda out: shutil.rmtree(out),
    "growing part removed": lambda out: os.unlink(growing(out)),
    "growing part edited": lambda out: edit(growing(out)),
    "part removed": lambda out: os.unlink(part(out)),
    "part cut": lambda out: os.truncate(part(out), 100),
    "part replaced": lambda out: shutil.copy(part(out, 0), part(out, 1)),
}
OF_FOLDERS = [name for name in HARM if "part" in name or "folder" in name]


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("output", "harm"),
    [
        *(("out.jsonl", harm) for harm in HARM if harm not in OF_FOLDERS),
        *((output, harm) for output in FOLDERS for harm in HARM),
    ],
)
def test_a_changed_output_is_noticed_and_continued(do, fake_llm, output, harm):
    with pytest.raises(OutputLostError) as caught:
        do(output, rows(lambda: HARM[harm](output)))
    is_at_once = harm != "changed inside" and not harm.startswith("part")
    assert fake_llm.num_taken <= 16 or not is_at_once
    words = str(caught.value)
    assert "--resume" in words
    follow(words, output)
    if harm in ("part cut", "part replaced"):
        os.rename(part(output), "away")
    do(output, rows(), "resume")
    assert sorted(entry.record.id for entry in open_sink(output).entries()) == sorted(
        f"item-{number}" for number in range(NUM)
    )
    assert all(entry.record.text for entry in open_sink(output).entries())


@pytest.mark.one_is_quick
@pytest.mark.parametrize("harm", ["cut to nothing", "changed inside", "a byte added"])
def test_what_is_changed_after_the_last_result_is_noticed(do, harm):
    def given():
        yield from rows()
        HARM[harm]("out.jsonl")

    with pytest.raises(OutputLostError):
        do("out.jsonl", given())


@pytest.mark.one_is_quick
@pytest.mark.parametrize("output", ["out.jsonl", *FOLDERS])
def test_results_of_an_earlier_run_that_are_changed_are_noticed(do, output):
    do(output, list(rows())[:7])
    harm = overwrite if output == "out.jsonl" else os.unlink
    path = output if output == "out.jsonl" else part(output, 0)
    with pytest.raises(OutputLostError):
        do(output, rows(lambda: harm(path)), "resume")


@pytest.mark.one_is_quick
@pytest.mark.parametrize("output", ["out.jsonl", *FOLDERS])
def test_a_working_folder_that_changes_is_no_loss(do, here, output, monkeypatch):
    (here / "other").mkdir()
    do(str(here / output), rows(lambda: monkeypatch.chdir("other")))
    assert len(list(open_sink(here / output).entries())) == NUM


@pytest.mark.one_is_quick
@pytest.mark.parametrize("output", ["out.jsonl", *FOLDERS])
@pytest.mark.parametrize("method", ["write", "fsync"])
def test_a_full_disk_leaves_whole_results_and_says_how_to_go_on(do, output, method, monkeypatch):
    from mmdeploy_llm.data.records import growing as growing_module

    real, calls = growing_module.write_all, []

    def full(file, data):
        calls.append(None)
        if len(calls) == 14:
            real(file, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data)

    real_sync = os.fsync

    def no_sync(fd):
        name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
        if name == "out.jsonl" or name.startswith(".open-0"):
            raise OSError(errno.ENOSPC, "No space left on device")
        real_sync(fd)

    with monkeypatch.context() as patch:
        if method == "write":
            patch.setattr(growing_module, "write_all", full)
        else:
            patch.setattr(os, "fsync", no_sync)
        with pytest.raises(OutputWriteError, match=r"No space left on device\).*--resume"):
            do(output, rows())
    do(output, rows(), "resume")
    assert len(list(open_sink(output).entries())) == NUM


@pytest.mark.parametrize(
    ("output", "file"),
    [
        ("out.csv", "out.csv.partial"),  # the table
        ("out.jsonl", "out.jsonl.config.json.partial"),
        ("out.jsonl", "out.jsonl.state.json.partial"),
    ],
)
def test_a_disk_that_is_full_for_what_stands_beside_the_answers(do, output, file, monkeypatch):
    real_sync, synced = os.fsync, []

    def no_sync(fd):
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        if synced[-1] == file:
            raise OSError(errno.ENOSPC, "No space left on device")
        real_sync(fd)

    words = rf"{file.removesuffix('.partial')}' cannot be written \(No space left.*'{output}' or"
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", no_sync)
        with pytest.raises(OutputWriteError, match=words):
            do(output, rows())
    assert file in synced
    do(output, rows(), "resume")
    assert len(list(open_sink(output).entries())) == NUM


def test_a_growing_tar_with_a_damaged_sample_inside_is_kept(do, here):
    """What follows the damage is not cut off as torn."""

    def die():
        raise RuntimeError

    with pytest.raises(RuntimeError):
        do("out.tar", rows(die, at=4))
    path = growing("out.tar")
    before = os.path.getsize(path)
    with open(path, "r+b") as file:
        file.write(b"#" * 1024)
    with pytest.raises(ConfigError, match=r"\.open-00000\.tar' is not a part .* move it away"):
        do("out.tar", rows(), "resume")
    assert os.path.getsize(path) == before
    os.rename(path, "away")
    do("out.tar", rows(), "resume")
    assert len(list(open_sink("out.tar").entries())) == NUM


@pytest.mark.one_is_quick
@pytest.mark.parametrize("output", FOLDERS)
def test_two_growing_parts_become_two_parts(do, output):
    """Two of them arise where one was saved elsewhere and moved back."""

    def die():
        raise RuntimeError

    with pytest.raises(RuntimeError):
        do(output, rows(die, at=4))
    path = growing(output)
    shutil.copy(path, path.replace("00000", "00003"))
    do(output, rows(), "resume")
    assert len({entry.record.id for entry in open_sink(output).entries()}) == NUM
    assert len(list(open_sink(output).entries())) == NUM


@pytest.mark.one_is_quick
@pytest.mark.parametrize("output", URLS)
@pytest.mark.parametrize("is_cut", [True, False])
def test_parts_in_a_store_that_vanish_are_noticed(do, output, is_cut):
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.store.clear()

    def harm():
        name = next(name for name in memory.ls(output) if "part-00000" in name["name"])["name"]
        content = memory.cat_file(name)
        memory.rm_file(name)
        if is_cut:
            memory.pipe_file(name, content[:-1])

    with pytest.raises(OutputLostError, match=r"1 of 5 parts .* were removed or changed"):
        do(output, rows(harm))
    if is_cut:
        memory.rm_file(next(n["name"] for n in memory.ls(output) if "part-00000" in n["name"]))
    do(output, rows(), "resume")
    assert len(list(open_sink(output).entries())) == NUM


def test_an_engine_that_fails_does_not_hide_a_lost_output(do):
    def fail():
        os.unlink("out.jsonl")
        raise RuntimeError("the engine died")

    with pytest.raises(OutputLostError, match="was removed or replaced"):
        do("out.jsonl", rows(fail))


def test_an_output_that_is_overwritten_as_a_whole_has_nothing_to_save(do, here):
    def harm():
        size = os.path.getsize("out.jsonl")
        (here / "out.jsonl").write_bytes(b"#" * size)

    with pytest.raises(OutputLostError, match=r"12 of the 24 .* the others are in"):
        do("out.jsonl", rows(harm))
    os.unlink("out.jsonl")

    def last():
        yield from rows()
        harm()

    with pytest.raises(OutputLostError, match="move it away, then --resume does them again"):
        do("out.jsonl", last())


@pytest.mark.one_is_quick
@pytest.mark.parametrize("is_cut", [True, False])
def test_a_run_that_is_stopped_for_a_while_goes_on_or_notices(do, here, in_child, is_cut):
    def run():
        do("out.jsonl", rows(lambda: os.kill(os.getpid(), signal.SIGSTOP)))

    child = in_child.start(run)
    os.waitpid(child, os.WUNTRACED)
    if is_cut:
        os.truncate("out.jsonl", 100)
    os.kill(child, signal.SIGCONT)
    assert in_child.wait(child) == int(is_cut)
    do("out.jsonl", rows(), "resume")
    assert len(list(open_sink("out.jsonl").entries())) == NUM


@pytest.mark.full
def test_a_folder_that_becomes_read_only_keeps_its_results(do, in_child, monkeypatch):
    """Runs as a user who is bound by permissions."""

    def run():
        if os.geteuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        with pytest.raises(OutputWriteError, match="Permission denied"):
            do("out.parquet", rows(lambda: os.chmod("out.parquet", 0o500)))
        os.chmod("out.parquet", 0o700)
        do("out.parquet", rows(), "resume")
        assert len(list(open_sink("out.parquet").entries())) == NUM

    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        monkeypatch.chdir(folder)
        assert in_child(run) == 0
        monkeypatch.undo()
