"""A head that is stored although config.json ties it to the embedding: the weights are followed, as
transformers does, in every family."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.hooks import Checkpoint
from mmdeploy_llm.weights.stored_head import follow_stored_head, untie

IDS = list(range(70, 90))
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
FAMILIES = ("qwen2", "qwen3_vl", "gemma3", "internvl", "glm4v", "lfm2", "granite", "ernie4_5")


def config_of(top, text=None):
    inner = None if text is None else SimpleNamespace(tie_word_embeddings=text)
    return SimpleNamespace(tie_word_embeddings=top, text_config=inner)


@pytest.fixture
def follow(tmp_path):
    """follow(tensors, config) -> the config that is used."""

    def run(tensors, config):
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        return follow_stored_head(Checkpoint(folder=tmp_path, config=config)).config

    return run


EMBEDDING = torch.arange(12.0).reshape(4, 3)
OTHER = EMBEDDING + (torch.arange(12).reshape(4, 3) == 11)  # differs in its last value


@pytest.mark.parametrize("levels", [(True,), (True, True), (True, False), (False, True)])
@pytest.mark.parametrize(
    "head", ["lm_head.weight", "model.lm_head.weight", "language_model.lm_head.weight"]
)
def test_another_head_unties_every_level(follow, caplog, levels, head):
    config = config_of(*levels)
    found = follow({"model.embed_tokens.weight": EMBEDDING, head: OTHER}, config)
    assert found.tie_word_embeddings is False
    assert found.text_config is None or found.text_config.tie_word_embeddings is False
    assert (config.tie_word_embeddings, levels[0]) in [(True, True), (False, False)]
    assert f"{head} differs from it: the stored head is used" in caplog.text


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"lm_head.weight": EMBEDDING.clone()},
        {"lm_head.weight": EMBEDDING.bfloat16()},
        {"lm_head.bias": OTHER[0].clone(), "lm_head.dense.weight": OTHER.clone()},
    ],
)
def test_the_same_head_or_none_stays_tied(follow, caplog, tensors):
    found = follow({"model.embed_tokens.weight": EMBEDDING, **tensors}, config_of(True, True))
    assert found.tie_word_embeddings is found.text_config.tie_word_embeddings is True
    assert not caplog.text


@pytest.mark.parametrize(
    "tensors",
    [
        {"lm_head.weight": EMBEDDING[:3].clone()},
        {"lm_head.qweight": torch.ones(2, 2, dtype=torch.int32)},
        {"lm_head.weight": EMBEDDING.clone(), "lm_head.bias": torch.ones(4)},
    ],
)
def test_a_head_of_another_form_is_another_head(follow, tensors):
    """What the model has no place for is an error when it is loaded, and not left out."""
    found = follow({"model.embed_tokens.weight": EMBEDDING, **tensors}, config_of(True))
    assert found.tie_word_embeddings is False


def test_chunks_are_compared_to_the_end(follow, monkeypatch):
    monkeypatch.setattr("mmdeploy_llm.weights.stored_head.CHUNK_VALUES", 5)
    tensors = {"model.embed_tokens.weight": EMBEDDING, "lm_head.weight": OTHER}
    assert follow(tensors, config_of(True)).tie_word_embeddings is False
    tensors["lm_head.weight"] = EMBEDDING.clone()
    assert follow(tensors, config_of(True)).tie_word_embeddings is True


def test_other_checkpoints_are_not_read(tmp_path):
    untied = Checkpoint(folder=tmp_path, config=config_of(False))
    assert follow_stored_head(untied) is untied
    tied = replace(untied, config=config_of(True))
    assert follow_stored_head(tied) is tied  # without weights, which may not be needed


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_transformers(tiny_copy, tmp_path, family):
    folder = tiny_copy(family, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    for level in (config, config.get("text_config", {})):
        level["tie_word_embeddings"] = True
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    (embedding,) = [key for key in tensors if key.endswith("embed_tokens.weight")]
    for key in [key for key in tensors if "lm_head" in key]:
        del tensors[key]
    random = torch.Generator().manual_seed(1)
    head = 0.05 * torch.randn(tensors[embedding].shape, generator=random)
    tensors["lm_head.weight"] = head.to(tensors[embedding].dtype)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    owner = getattr(transformers, config["architectures"][0])
    reference = owner.from_pretrained(folder, dtype=torch.float32).eval()
    expected = reference.generate(
        torch.tensor([IDS]), max_new_tokens=8, do_sample=False, eos_token_id=10**9, pad_token_id=0
    )
    with LLM(str(folder), dtype="float32", quiet=True, use_warmup=False) as llm:
        (output,) = llm.generate([{"prompt_token_ids": IDS}], GREEDY, use_tqdm=False)
    assert list(output.outputs.token_ids) == expected[0, len(IDS) :].tolist()


def test_a_saved_copy_says_what_was_read(follow, tmp_path):
    tensors = {"model.embed_tokens.weight": EMBEDDING, "lm_head.weight": OTHER}
    values = {"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": True, "a": 1}}
    other = follow(tensors, config_of(True, True))
    assert untie(values, Checkpoint(folder=tmp_path, config=other)) == {
        "tie_word_embeddings": False,
        "text_config": {"tie_word_embeddings": False, "a": 1},
    }
    tied = Checkpoint(folder=tmp_path, config=config_of(True, True))
    assert untie(values, tied) == values
