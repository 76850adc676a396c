"""references.py: checkpoints and answers are made once, and a test that writes to one is found."""

import json
import shutil

import pytest
import torch

SIZES = {"num_hidden_layers": 1, "dtype": torch.float32}


@pytest.fixture
def module(load_file):
    return load_file("references.py")


@pytest.fixture
def counted(module, monkeypatch):
    """Counts checkpoints that are written, and models that are loaded."""
    calls = []
    for name in ("write_tiny", "transformers_reference"):
        real = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *args, _real=real, **kw: calls.append(_real) or _real(*args, **kw)
        )
    return calls


def test_everything_is_made_once(module, counted, tmp_path):
    answers = []
    for _ in range(2):  # as two processes, or two runs
        made = module.References(tmp_path)
        folder = made.tiny("qwen2", **SIZES)
        reference = made.of(folder)
        answers.append((reference.logits([5, 6, 7]), reference.generate([5, 6, 7], 3)))
    assert [call.__name__ for call in counted] == ["write_tiny", "transformers_reference"]
    assert torch.equal(answers[0][0], answers[1][0])
    assert answers[0][1] == answers[1][1] == reference.loaded.generate([5, 6, 7], 3)
    assert made.changed() == []


def test_other_options_files_and_questions_have_other_answers(module, counted, tmp_path):
    made = module.References(tmp_path)
    folder = made.tiny("qwen2", **SIZES)
    assert made.tiny("qwen2", **{**SIZES, "seed": 1}) != folder
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert made.of(copy).logits([5]).equal(made.of(folder).logits([5]))
    assert len(counted) == 3
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    assert not made.of(copy).logits([5]).equal(made.of(folder).logits([5]))
    assert made.of(folder).generate([5], 2) != made.of(folder).generate([5], 3)


@pytest.mark.parametrize("change", ["written", "removed"])
def test_a_checkpoint_that_was_changed_is_found_and_written_again(module, tmp_path, change):
    made = module.References(tmp_path)
    folder = made.tiny("qwen2", **SIZES)
    before = (folder / "config.json").read_text()
    if change == "written":
        (folder / "config.json").write_text("{}")
    else:
        (folder / "config.json").unlink()
    again = module.References(tmp_path).tiny("qwen2", **SIZES)  # an interrupted run left it
    assert (again / "config.json").read_text() == before
    assert made.changed() == [folder]
    assert not folder.exists()
