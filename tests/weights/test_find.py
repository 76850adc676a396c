"""Which weight files of a folder are found, and which folders are refused."""

import json

import pytest

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.weights.find import find_weights

INDEX = "model.safetensors.index.json"


def touch(folder, *names):
    for name in names:
        (folder / name).write_bytes(b"")


def write_index(folder, weight_map):
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_a_single_file_wins(tmp_path):
    touch(tmp_path, "model.safetensors", "other.safetensors")
    write_index(tmp_path, {"a": "other.safetensors"})
    assert [path.name for path in find_weights(tmp_path)] == ["model.safetensors"]


def test_the_shards_of_the_index_and_no_others(tmp_path):
    touch(tmp_path, "b.safetensors", "a.safetensors", "consolidated.safetensors")
    write_index(tmp_path, {"x": "b.safetensors", "y": "a.safetensors", "z": "b.safetensors"})
    assert [path.name for path in find_weights(tmp_path)] == ["a.safetensors", "b.safetensors"]


def test_files_of_any_name_without_an_index(tmp_path):
    touch(tmp_path, "b.safetensors", "a.safetensors", "notes.txt")
    assert [path.name for path in find_weights(tmp_path)] == ["a.safetensors", "b.safetensors"]


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_pickles_are_refused_with_the_reason(tmp_path, name):
    touch(tmp_path, name)
    with pytest.raises(CheckpointError, match=r"(?s)pickle.*run any code.*save_pretrained") as info:
        find_weights(tmp_path)
    assert name in str(info.value)


def test_an_empty_folder(tmp_path):
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors file in"):
        find_weights(tmp_path)


def test_missing_shards_are_named(tmp_path):
    touch(tmp_path, "a.safetensors")
    write_index(tmp_path, {"x": "a.safetensors", "y": "b.safetensors"})
    with pytest.raises(CheckpointError, match=r"1 of 2 .*b\.safetensors; download"):
        find_weights(tmp_path)


@pytest.mark.parametrize("name", ["../a.safetensors", "/etc/passwd", "sub/a.safetensors", ".."])
def test_shards_outside_the_folder_are_refused(tmp_path, name):
    write_index(tmp_path, {"x": name})
    with pytest.raises(CheckpointError, match="same folder"):
        find_weights(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": {}}', '{"weight_map": 3}'])
def test_a_malformed_index(tmp_path, text):
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=r"weight_map|index.json of the model"):
        find_weights(tmp_path)
