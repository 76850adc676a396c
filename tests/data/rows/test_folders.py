"""Folders in the layouts of the library `datasets`: nothing outside of them is opened."""

import json

import pytest

from mmdeploy_llm.data.rows.formats.formats import open_rows
from mmdeploy_llm.data.rows.rows import BadItem
from mmdeploy_llm.errors import ConfigError

pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow: the extra 'parquet'")
parquet = pytest.importorskip("pyarrow.parquet")


@pytest.fixture
def folder(tmp_path, pngs):
    """A folder of two pictures, beside one with a secret."""
    for name in ("mine", "secret"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.png").write_bytes(pngs[0])
    (tmp_path / "secret/s.csv").write_text("text\nSECRET\n")
    return tmp_path / "mine"


@pytest.mark.one_is_quick
@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_media_of_a_metadata_file(read, folder, suffix):
    rows = [{"file_name": "0.png", "title": "a"}, {"file_name": "sub/1.png", "title": "b"}]
    path = folder / f"metadata.{suffix}"
    if suffix == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif suffix == "csv":
        path.write_text("file_name,title\n0.png,a\nsub/1.png,b\n")
    else:
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert [row.values for row in read(folder)] == [
        {"image": {"path": f"{folder}/0.png"}, "title": "a"},
        {"image": {"path": f"{folder}/sub/1.png"}, "title": "b"},
    ]


def test_videos_and_columns_of_several_files(read, folder):
    (folder / "metadata.jsonl").write_text('{"file_name": "a.mp4", "first_file_name": "0.png"}')
    (row,) = read(folder)
    assert row.values == {
        "video": {"path": f"{folder}/a.mp4"},
        "first": {"path": f"{folder}/0.png"},
    }


OUTSIDE = [
    "../secret/0.png",
    "sub/../../secret/0.png",
    "..\\secret\\0.png",
    "/etc/hosts",
    "https://example.com/0.png",
    "file:///etc/hosts",
    "zip://0.png::https://example.com/a.zip",
    "data:image/png;base64,AAAA",
    "",
    "./.",
    7,
    None,
    ["0.png"],
]


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_file_that_is_not_beneath_the_folder_is_an_error_of_its_row(read, folder, name):
    lines = [{"file_name": name}, {"file_name": "0.png"}]
    (folder / "metadata.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    bad, good = read(folder)
    assert isinstance(bad, BadItem)
    assert "beneath the folder" in bad.message
    assert good.values["image"]["path"] == f"{folder}/0.png"


@pytest.mark.parametrize(
    "described",
    [
        "data_files: ../secret/s.csv",
        "data_dir: ../secret",
        "data_files: 'https://example.com/a.csv'",
    ],
)
def test_what_a_readme_names_is_not_opened(read, folder, described):
    (folder / "README.md").write_text(
        f"---\nconfigs:\n- config_name: default\n  {described}\n---\n"
    )
    (folder / "mine.py").write_text("raise AssertionError\n")
    (folder / "metadata.csv").write_text("file_name\n0.png\n")
    (row,) = read(folder)
    assert row.values == {"image": {"path": f"{folder}/0.png"}}


def save(folder, table, files=("data-00000-of-00001.arrow",), **state):
    folder.mkdir(exist_ok=True)
    for name in files:
        if "/" not in name:
            with pyarrow.ipc.new_stream(str(folder / name), table.schema) as writer:
                writer.write_table(table)
    listed = {"_data_files": [{"filename": name} for name in files], **state}
    (folder / "state.json").write_text(json.dumps(listed))
    (folder / "dataset_info.json").write_text("{}")


@pytest.mark.full
def test_saved_splits(read, tmp_path):
    table = pyarrow.table({"text": ["a", "b"]})
    for split in ("train", "test"):
        save(tmp_path / split, table, ("0.arrow", "1.arrow"))
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert [row.values["text"] for row in read(tmp_path)] == ["a", "b"] * 2
    assert open_rows(str(tmp_path)).num_rows == 4
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ConfigError, match="choose one by the folder"):
        open_rows(str(tmp_path))


@pytest.mark.parametrize("name", ["../secret/s.arrow", "/etc/hosts", "https://e.com/a.arrow", "no"])
def test_saved_data_that_is_not_beneath_the_folder_is_refused(folder, name):
    table = pyarrow.table({"text": ["SECRET"]})
    save(folder.parent / "secret", table, ("s.arrow",))
    save(folder, table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    with pytest.raises(ConfigError, match="no file beneath it"):
        open_rows(str(folder))


@pytest.mark.parametrize(
    "state",
    ["[]", "{", "[" * 100_000, "{}", '{"_data_files": 7}', '{"_data_files": [7]}', "\udcff"],
)
def test_a_state_without_sense_is_an_error(folder, state):
    (folder / "state.json").write_bytes(state.encode("utf-8", "surrogatepass"))
    (folder / "dataset_info.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"cannot be read|lists"):
        open_rows(str(folder))


def test_splits_that_lead_out_are_refused(folder):
    save(folder.parent / "secret", pyarrow.table({"text": ["SECRET"]}))
    (folder / "dataset_dict.json").write_text('{"splits": ["../secret"]}')
    with pytest.raises(ConfigError, match="no file beneath it"):
        open_rows(str(folder))


def test_a_selection_by_indices_is_refused(folder):
    save(folder, pyarrow.table({"text": ["a"]}), _indices_files=[{"filename": "i.arrow"}])
    with pytest.raises(ConfigError, match="save it again"):
        open_rows(str(folder))
