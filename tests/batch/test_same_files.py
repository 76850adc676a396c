"""Files of a batch are who they are: from any working folder, by any path, after a move."""

import json
import os
import shutil

import pytest

from mmdeploy_llm.batch.job import plan_source, run_batch
from mmdeploy_llm.batch.settings import BatchSettings
from mmdeploy_llm.batch.sources import open_files
from mmdeploy_llm.data.files.options import FindingOptions
from mmdeploy_llm.data.records.configuration import Configuration
from mmdeploy_llm.data.records.ids import Selection
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.values.params import SamplingParams

CONFIGURATION = Configuration(model="m", values={"a": 1})


@pytest.fixture
def photos(tmp_path, png, monkeypatch):
    """A working folder with photos/1.png, photos/2.png and photos/sub/3.png."""
    monkeypatch.chdir(tmp_path)
    for name in ("1.png", "2.png", "sub/3.png"):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png)
    return tmp_path / "photos"


@pytest.fixture
def caption(fake_llm, tmp_path):
    """Runs `caption` over paths; returns the summary, with the ids that were asked about."""

    def run(*paths, mode="resume", out=tmp_path / "out.jsonl", **finding):
        settings = BatchSettings(
            mode=mode,
            describe_engine=lambda: CONFIGURATION,
            finding=FindingOptions(**finding),
        )
        source = open_files(
            map(str, paths), SamplingParams(), Selection(), finding=settings.finding
        )
        before = fake_llm.num_taken
        summary = run_batch(plan_source(source, out, settings), lambda: fake_llm)
        return summary, fake_llm.num_taken - before

    return run


def ids_of(path):
    return sorted(json.loads(line)["id"] for line in path.read_text().splitlines())


def test_ids_are_paths_beneath_the_input(caption, photos, tmp_path):
    caption("photos", mode="new")
    assert ids_of(tmp_path / "out.jsonl") == ["1.png", "2.png", "sub/3.png"]
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert {record["path"] for record in records} == {
        "photos/1.png",
        "photos/2.png",
        "photos/sub/3.png",
    }


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    "how", ["absolute", "elsewhere", "link", "inside", "glob", "dots", "moved"]
)
def test_a_resumed_run_knows_them_by_any_path(caption, photos, tmp_path, monkeypatch, how):
    caption("photos", mode="new")
    given = "photos"
    if how == "absolute":
        given = photos
    elif how == "elsewhere":
        (tmp_path / "other").mkdir()
        monkeypatch.chdir(tmp_path / "other")
        given = "../photos"
    elif how == "link":
        (tmp_path / "link").symlink_to(photos)
        given = "link"
    elif how == "inside":
        monkeypatch.chdir(photos)
        given = "."
    elif how == "glob":
        given = "photos/**/*.png"
    elif how == "dots":
        given = "photos/sub/.."
    else:
        photos.rename(tmp_path / "renamed")
        given = "renamed"
    summary, num_asked = caption(given)
    assert (num_asked, summary.num_before, summary.num_left) == (0, 3, 0)


@pytest.mark.full
def test_a_part_of_the_input_and_another_one_are_told_apart(caption, photos, tmp_path, png):
    caption("photos", mode="new")
    assert caption("photos/sub")[1] == caption("photos/sub/3.png")[1] == 0
    shutil.copytree(photos, tmp_path / "more")
    assert caption("more")[1] == 3
    assert "../more/1.png" in ids_of(tmp_path / "out.jsonl")
    assert caption("more", "photos")[1] == 0


@pytest.mark.full
def test_files_folders_and_globs_have_their_common_folder(caption, photos, tmp_path, png):
    (tmp_path / "a.png").write_bytes(png)
    caption("a.png", "photos/sub", "photos/*.png", mode="new")
    assert ids_of(tmp_path / "out.jsonl") == [
        "a.png",
        "photos/1.png",
        "photos/2.png",
        "photos/sub/3.png",
    ]
    assert caption("photos", "a.png")[1] == caption(photos)[1] == 0


def test_another_folder_is_no_moved_one(caption, photos, tmp_path):
    """Files of the same names in the place of a disk that is not mounted."""
    caption("photos", mode="new")
    photos.rename(tmp_path / "away")
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "1.png").write_bytes(b"\x89PNG\r\n\x1a\n another")
    assert caption("others")[1] == 1
    assert ids_of(tmp_path / "out.jsonl") == ["../others/1.png", "1.png", "2.png", "sub/3.png"]


def test_names_that_are_not_unicode_are_known_again(caption, photos, tmp_path):
    name = os.fsdecode(b"\xff\xfe.png")
    (photos / name).write_bytes((photos / "1.png").read_bytes())
    photos.rename(tmp_path / os.fsdecode(b"\xfd"))
    caption(os.fsdecode(b"\xfd"), mode="new")
    assert caption(tmp_path / os.fsdecode(b"\xfd"))[1] == 0


@pytest.mark.full
def test_records_of_deleted_files_are_told_and_pruned(caption, photos, tmp_path):
    caption("photos", mode="new")
    (photos / "2.png").unlink()
    shutil.rmtree(photos / "sub")
    summary, _ = caption("photos")
    assert (summary.num_gone, summary.num_pruned) == (2, 0)
    assert "2 records are of files that are gone (--prune removes them)" in summary.notes
    assert len(ids_of(tmp_path / "out.jsonl")) == 3
    summary, num_asked = caption("photos", prune=True)
    assert (summary.num_gone, summary.num_pruned, num_asked) == (0, 2, 0)
    assert ids_of(tmp_path / "out.jsonl") == ["1.png"]
    assert caption("photos")[0].notes == ()


def test_pruned_parts(caption, photos, tmp_path):
    pytest.importorskip("pyarrow")
    from mmdeploy_llm.data.outputs.opening.merged import MergedOutputs

    out = tmp_path / "out.parquet"
    caption("photos", mode="new", out=out)
    (photos / "2.png").unlink()
    caption("photos", out=out, prune=True)
    merged = MergedOutputs([str(out)])
    assert sorted(str(record.id) for record in merged.records()) == ["1.png", "sub/3.png"]
    assert str(tmp_path) not in out.joinpath("part-00000.parquet").read_bytes().decode("latin-1")


def test_what_is_out_of_reach_is_not_gone(caption, photos, tmp_path):
    """A folder that is empty, as where no disk is mounted; excluded and unselected files."""
    caption("photos", mode="new")
    (photos / "sub" / "3.png").unlink()
    summary, _ = caption("photos", prune=True, exclude=("2.png",))
    assert (summary.num_pruned, summary.num_gone) == (0, 0)
    assert len(ids_of(tmp_path / "out.jsonl")) == 3


@pytest.mark.full
def test_nothing_is_pruned_when_the_root_is_gone(caption, photos, tmp_path, png):
    caption("photos", mode="new")
    photos.rename(tmp_path / "unmounted")
    (tmp_path / "x.png").write_bytes(png)
    for _ in range(2):  # missing, then an empty folder
        with pytest.raises(ConfigError, match=r"photos' *, is missing or empty.*no record"):
            caption("x.png", prune=True)
        photos.mkdir(exist_ok=True)
    assert len(ids_of(tmp_path / "out.jsonl")) == 3
    with pytest.raises(ConfigError, match="prune needs resume"):
        caption("x.png", mode="overwrite", prune=True)
