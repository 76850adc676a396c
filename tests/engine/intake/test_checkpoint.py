"""Finding a model folder and reading its JSON files."""

import json

import pytest
from transformers import Qwen2Config

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.weights.folder import read_checkpoint, read_json, resolve_model


@pytest.fixture
def folder(tmp_path):
    Qwen2Config(architectures=["Qwen2ForCausalLM"], vocab_size=77).save_pretrained(tmp_path)
    return tmp_path


def write(folder, name, values):
    (folder / name).write_text(json.dumps(values))


def test_reads_config_preprocessor_and_generation(folder):
    write(folder, "preprocessor_config.json", {"patch_size": 14})
    write(folder, "generation_config.json", {"top_p": 0.8})
    found = read_checkpoint(folder)
    assert (found.folder, found.config.vocab_size) == (folder, 77)
    assert found.architecture == "Qwen2ForCausalLM"
    assert found.preprocessor == {"patch_size": 14}
    assert found.generation == {"top_p": 0.8}
    write(folder, "processor_config.json", {"image_processor": {"patch_size": 16}})
    assert read_checkpoint(folder).preprocessor == {"patch_size": 16}
    write(folder, "processor_config.json", {"processor_class": "X"})
    assert read_checkpoint(folder).preprocessor == {"patch_size": 14}


def test_absent_files_are_empty(folder):
    found = read_checkpoint(folder)
    assert found.preprocessor == found.generation == {}


def test_faults_of_the_folder(tmp_path):
    with pytest.raises(CheckpointError, match=r"no config.json"):
        read_checkpoint(tmp_path)
    for text in ("{broken", "[]", "{}", '{"model_type": "no-such-model"}'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"config.json"):
            read_checkpoint(tmp_path)
    for text in ("{broken", "[]", "\udcff"):
        (tmp_path / "x.json").write_text(text, errors="surrogateescape")
        with pytest.raises(CheckpointError, match=r"x.json"):
            read_json(tmp_path / "x.json")


def test_cve_2026_27893_code_of_the_checkpoint_is_never_run(tmp_path):
    (tmp_path / "code.py").write_text("open('ran', 'w')\nclass Config: pass\n")
    write(tmp_path, "config.json", {"model_type": "own", "auto_map": {"AutoConfig": "code.Config"}})
    with pytest.raises(CheckpointError, match="trust_remote_code"):
        read_checkpoint(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.fixture
def bundled(tmp_path, monkeypatch):
    path = tmp_path / "package" / "shapes-vl"
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    monkeypatch.setattr(
        "mmdeploy_llm.values.options.model_names.bundled_models", lambda: {"shapes-vl": path}
    )
    return path


def test_local_folders_and_bundled_names(folder, bundled, monkeypatch):
    assert resolve_model(str(folder)) == folder
    assert resolve_model("shapes-vl") == bundled
    monkeypatch.chdir(folder)
    (folder / "shapes-vl").mkdir()
    assert (
        resolve_model("shapes-vl") == bundled
    )  # a folder without a model does not hide the bundled one
    (folder / "shapes-vl" / "config.json").write_text("{}")
    assert resolve_model("shapes-vl").resolve() == folder / "shapes-vl"


@pytest.mark.parametrize("name", ["shape-vl", "./gone", "/gone/model", "~/gone", "a/b/c"])
def test_names_of_nothing(name, bundled, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    hint = "did you mean the bundled model 'shapes-vl'" if name == "shape-vl" else "shapes-vl"
    with pytest.raises(CheckpointError, match=hint):
        resolve_model(name)


def test_a_name_that_is_empty_or_of_a_file_is_said_to_be(bundled, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"the name of the model is empty; .*shapes-vl"):
        resolve_model("")
    for name in ("images/a.png", "./images/a.png"):
        with pytest.raises(CheckpointError, match=r"it is a file that .*give a folder"):
            read_checkpoint(resolve_model(name))


def test_only_the_needed_files_are_requested_from_the_hub(bundled, monkeypatch, tmp_path):
    asked = {}

    def download(name, **options):
        asked.update(name=name, **options)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_model("baidu/ERNIE", revision="v1") == tmp_path
    assert (asked["name"], asked["revision"]) == ("baidu/ERNIE", "v1")
    assert "*.safetensors" in asked["allow_patterns"]
    patterns = [own for own in asked["allow_patterns"] if own != "model.bin"]  # CTranslate2's
    assert not any("bin" in pattern or ".pt" in pattern for pattern in patterns)


def test_offline_is_said_clearly(bundled, monkeypatch):
    def download(name, **options):
        raise ConnectionError("no route to host\nand more")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(
        CheckpointError, match="no local folder, and the hub did not return it"
    ) as caught:
        resolve_model("baidu/ERNIE")
    assert "no route to host" in str(caught.value)
    assert "and more" not in str(caught.value)


@pytest.mark.parametrize(
    ("model_type", "found"),
    [
        ("qwen2", ["Qwen2ForCausalLM"]),
        ("qwen2_vl", ["Qwen2VLForConditionalGeneration"]),
        ("bert", ["BertLMHeadModel"]),
        ("vit", None),
    ],
)
def test_a_config_without_architectures_has_those_of_its_type(folder, model_type, found):
    write(folder, "config.json", {"model_type": model_type})
    assert read_checkpoint(folder).config.architectures == found
