"""Training sets: pictures with their captions beside them, as trainers and `datasets` read them."""

import errno
import os

import pytest

from mmdeploy_llm.data.outputs.exports import pictures
from mmdeploy_llm.data.outputs.exports.export import ExportOptions
from mmdeploy_llm.data.outputs.exports.formats import export_records, format_of
from mmdeploy_llm.data.outputs.sidecars.options import SidecarOptions
from mmdeploy_llm.data.outputs.sidecars.text import SidecarText
from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.system.guarding.claims import claimed

from .conftest import lines_of, record_at, written


def tree(folder):
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return [str(path.relative_to(folder)) for path in found]


def test_an_imagefolder_has_the_pictures_and_their_captions(captions, photos):
    found = export_records([captions], "set", "imagefolder")
    assert tree(photos / "set/data/train") == [
        "metadata.jsonl",
        "photos/a.png",
        "photos/sub/ä ö.png",
    ]
    assert lines_of(photos / "set/data/train/metadata.jsonl") == [
        {"file_name": "photos/a.png", "text": "a red square"},
        {"file_name": "photos/sub/ä ö.png", "text": "zwei Kreise, größer"},
    ]
    assert (photos / "set/data/train/photos/a.png").read_bytes() == (
        photos / "photos/a.png"
    ).read_bytes()
    assert (found.num_in, found.num_out) == (3, 2)
    assert found.left_out == {"its outcome is failed": 1}


def test_datasets_reads_an_imagefolder(captions, photos, monkeypatch):
    datasets = pytest.importorskip("datasets")
    export_records([captions], "set", "imagefolder")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", photos / "cache")
    loaded = datasets.load_dataset(
        "imagefolder", data_dir="set", split="train", cache_dir=str(photos / "cache")
    )
    assert sorted(loaded["text"]) == ["a red square", "zwei Kreise, größer"]


def test_only_the_metadata_beside_pictures_that_are_there(captions, photos):
    before = tree(photos / "photos")
    export_records([captions], "captions.parquet")  # a folder of parts, which hold no pictures
    export_records(["captions.parquet"], "photos/metadata.jsonl")
    assert sorted([*before, "metadata.jsonl"]) == tree(photos / "photos")
    names = [line["file_name"] for line in lines_of(photos / "photos/metadata.jsonl")]
    assert names == ["a.png", "sub/ä ö.png"]
    with pytest.raises(ConfigError, match="exists already"):
        export_records([captions], "photos/metadata.jsonl")
    found = export_records([captions], "photos/sub/metadata.jsonl")
    assert found.left_out["its picture cannot be used: it is not beneath 'photos/sub'"] == 1


def test_metadata_has_a_column_for_each_carried_one(photos):
    own = written(
        photos / "c.jsonl",
        record_at("photos/a.png", columns={"url": "x", "text": 1, "file_name": "y"}),
        record_at("photos/b.jpg"),
    )
    export_records([own], "photos/metadata.jsonl")
    assert lines_of(photos / "photos/metadata.jsonl") == [
        {
            **{"file_name": "a.png", "text": "a caption", "url": "x"},
            **{"column_text": 1, "column_file_name": "y"},
        },
        {
            **{"file_name": "b.jpg", "text": "a caption", "url": None},
            **{"column_text": None, "column_file_name": None},
        },
    ]


def test_kohya_reads_one_folder_of_repeats_and_trigger(captions, photos):
    sidecar = SidecarOptions(text=SidecarText(trigger=("ohwx man",)))
    options = ExportOptions(sidecar=sidecar, repeats=20)
    found = export_records([captions], "lora", "kohya", options)
    assert tree(photos / "lora") == [
        *("20_ohwx man/a.png", "20_ohwx man/a.txt"),
        *("20_ohwx man/ä ö.png", "20_ohwx man/ä ö.txt"),
    ]
    assert (photos / "lora/20_ohwx man/a.txt").read_text() == "ohwx man, a red square\n"
    assert found.num_out == 2


def test_pictures_of_one_name_have_their_own_captions(photos):
    for name in ("x/a.png", "y/a.png", "y/A.jpg"):
        path = photos / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes((photos / "photos/a.png").read_bytes())
    own = written(
        photos / "c.jsonl", *(record_at(n, f"of {n}") for n in ("x/a.png", "y/a.png", "y/A.jpg"))
    )
    export_records([own], "lora", "kohya")
    names = tree(photos / "lora")
    assert [os.path.basename(name) for name in names] == [
        *("A-3.jpg", "A-3.txt", "a-2.png", "a-2.txt", "a.png", "a.txt")
    ]
    assert (photos / "lora/10_captions/a-2.txt").read_text() == "of y/a.png\n"


def test_pictures_in_tars_come_out(captions, photos):
    export_records([captions], "shards.tar")
    for path in photos.glob("photos/**/*.*"):
        path.unlink()
    found = export_records(["shards.tar"], "set", "imagefolder")
    assert tree(photos / "set/data/train") == [
        "metadata.jsonl",
        "photos/a.png",
        "photos/sub/ä ö.png",
    ]
    assert found.num_out == 2


def test_a_picture_that_is_gone_is_told(captions, photos):
    (photos / "photos/a.png").unlink()
    for form in ("imagefolder", "kohya"):
        found = export_records([captions], f"new {form}", form)
        assert found.num_out == 1
        assert any("No such file" in reason for reason in found.left_out)


@pytest.mark.full
def test_sidecars_of_an_output_that_is_there(captions, photos):
    (photos / "photos/a.txt").write_text("mine\n")
    found = export_records([captions], "photos", "sidecar")
    assert (photos / "photos/sub/ä ö.txt").read_text() == "zwei Kreise, größer\n"
    assert (photos / "photos/a.txt").read_text() == "mine\n"
    assert found.num_out == 1
    assert found.left_out == {"its outcome is failed": 1, "its sidecar was there and stays": 1}
    options = ExportOptions(sidecar=SidecarOptions(on_existing="overwrite"))
    export_records([captions], "photos", "sidecar", options)
    assert (photos / "photos/a.txt").read_text() == "a red square\n"
    found = export_records([captions], "photos/sub", "sidecar")
    assert found.left_out["it is not beneath the folder of the input"] == 1
    with pytest.raises(ConfigError, match="no folder"):
        export_records([captions], "photos/a.png", "sidecar")


def test_texts_of_another_suffix_are_written_at_once(captions, photos, monkeypatch, caplog):
    with claimed("photos", is_folder=True, suffix=".caption"):
        assert export_records([captions], "photos", "sidecar").num_out == 2
    assert (photos / "photos/a.txt").exists()
    assert not list((photos / "photos").glob("*.lock"))

    def refused(*args, **options):
        raise PermissionError(errno.EACCES, "Permission denied", "photos")

    monkeypatch.setattr(pictures, "claimed", refused)
    options = ExportOptions(sidecar=SidecarOptions(on_existing="overwrite"))
    assert export_records([captions], "photos", "sidecar", options).num_in == 3
    assert "'photos' has no lock (Permission denied): make sure" in caplog.text


def test_relative_paths_are_found_from_another_folder(captions, photos, monkeypatch):
    (photos / "elsewhere").mkdir()
    monkeypatch.chdir(photos / "elsewhere")
    assert export_records([captions], "one", "imagefolder").num_out == 0
    found = export_records([captions], "two", "imagefolder", ExportOptions(media_root=".."))
    assert found.num_out == 2


@pytest.mark.full
def test_a_folder_that_has_files_stays(captions, photos):
    (photos / "set").mkdir()
    (photos / "set/mine.txt").write_text("x")
    for form in ("imagefolder", "kohya"):
        with pytest.raises(ConfigError, match="has files already"):
            export_records([captions], "set", form)
        export_records([captions], "set", form, ExportOptions(is_overwritten=True))
        with pytest.raises(ConfigError, match="is a file"):
            export_records([captions], "photos/a.png", form)
    assert (photos / "set/mine.txt").read_text() == "x"


def test_links_in_the_target_are_not_followed(captions, photos):
    (photos / "secret").mkdir()
    (photos / "set/data/train").mkdir(parents=True)
    (photos / "set/data/train/photos").symlink_to(photos / "secret")
    with pytest.raises(ConfigError, match="links are not followed"):
        export_records([captions], "set", "imagefolder", ExportOptions(is_overwritten=True))
    assert os.listdir(photos / "secret") == []


def test_hostile_ids_stay_in_the_folder(photos):
    names = ("../up.png", "/etc/x.png", "a/../../b.png", "..", "con:*?.png", "x/./y.png")
    rows = [Record(id=name, path="photos/a.png", text="t").to_json() for name in names]
    (photos / "c.jsonl").write_text("".join(f"{row}\n" for row in rows))
    before = {*tree(photos)}
    assert export_records(["c.jsonl"], "set", "imagefolder").num_out == len(names)
    new = {*tree(photos)} - before
    assert all(name.startswith("set/") for name in new)
    assert len(new) == len(names) + 1


def test_names_of_formats():
    assert format_of("metadata.jsonl").name == "imagefolder"
    assert format_of("a/METADATA.jsonl").name == "imagefolder"
    assert format_of("my-metadata.jsonl").name == "jsonl"
    with pytest.raises(ConfigError, match="repeats"):
        ExportOptions(repeats=0)


def test_what_is_no_picture_is_not_copied(photos):
    (photos / "secret").write_text("not for others")
    own = written(photos / "c.jsonl", record_at("secret"))
    for form in ("imagefolder", "kohya"):
        found = export_records([own], f"new {form}", form)
        assert found.num_out == 0
        assert "it is no image, video" in str(found.left_out)
    assert tree(photos / "new kohya") == []
