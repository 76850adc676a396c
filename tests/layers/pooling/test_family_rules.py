"""What a family says of pairs holds where a checkpoint scores and its folder does not say more."""

import json
from types import SimpleNamespace

import pytest

from mmdeploy_llm.engine.startup.vectors import rules_of
from mmdeploy_llm.errors import CheckpointError, PluginContractError
from mmdeploy_llm.hooks import ModelSpec, PluginManager

WORDS = SimpleNamespace(get_vocab=lambda: {"no": 3, "yes": 8})
SPEC = ModelSpec(
    name="x",
    architectures=("XForCausalLM",),
    factory="m:f",
    vectors="mmdeploy_llm_plugins.qwen.vectors:QWEN3",
)
PLUGINS = SimpleNamespace(owner=lambda spec: "x")
LINE = {"name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
SCORE = {"name": "1", "path": "s", "type": "sentence_transformers.models.LogitScore"}


def rules(folder, architecture="XForCausalLM", tokenizer=WORDS, spec=SPEC, **config):
    config = SimpleNamespace(**config)
    checkpoint = SimpleNamespace(folder=folder, architecture=architecture, config=config)
    return rules_of(PLUGINS, spec, checkpoint, tokenizer)


def test_a_generating_model_scores_pairs_by_two_words(tmp_path):
    found = rules(tmp_path)
    assert found.score_tokens == (8, 3)
    assert "{document}" in found.pairs.template


@pytest.mark.parametrize(
    ("place", "is_assumed"),
    [
        ("Qwen3-0.6B", True),
        ("rerankers/Qwen3-0.6B", True),
        ("Qwen3-Reranker-0.6B", False),
        ("my_RERANK", False),
        ("hub/models--Qwen--Qwen3-Reranker-0.6B/snapshots/0123", False),
        ("hub/models--Qwen--Qwen3-0.6B/snapshots/0123", True),
    ],
)
def test_a_folder_that_names_no_reranker_is_assumed_to_be_one(tmp_path, place, is_assumed):
    folder = tmp_path / place
    folder.mkdir(parents=True)
    assert (rules(folder).assumed_of == folder.name) is is_assumed
    assert rules(folder, "XForSequenceClassification").assumed_of is None
    assert rules(folder, tokenizer=SimpleNamespace(get_vocab=dict)).assumed_of is None


def test_a_tokenizer_without_the_words_scores_nothing(tmp_path):
    found = rules(tmp_path, tokenizer=SimpleNamespace(get_vocab=lambda: {"yes": 1}))
    assert (found.score_tokens, found.pairs) == (None, None)


@pytest.mark.parametrize(
    ("architecture", "has_pairs"), [("XModel", False), ("XForSequenceClassification", True)]
)
def test_a_checkpoint_without_the_head_has_no_words(tmp_path, architecture, has_pairs):
    found = rules(tmp_path, architecture)
    assert found.score_tokens is None
    assert (found.pairs is not None) is has_pairs


def test_a_folder_that_pools_has_no_pairs(tmp_path):
    lines = [LINE, {**SCORE, "type": "sentence_transformers.models.Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(lines))
    (tmp_path / "s").mkdir()
    (tmp_path / "s/config.json").write_text("{}")
    found = rules(tmp_path)
    assert (found.pooling, found.pairs, found.score_tokens) == ("mean", None, None)


def test_a_folder_that_scores_says_how_pairs_are_joined(tmp_path):
    (tmp_path / "modules.json").write_text(json.dumps([LINE, SCORE]))
    (tmp_path / "s").mkdir()
    (tmp_path / "s/config.json").write_text('{"true_token_id": 5}')
    found = rules(tmp_path)
    assert (found.score_tokens, found.pairs) == ((5, None), None)  # by the tokenizer
    assert found.assumed_of is None
    chat = {"modality_config": {"message": {}}, "transformer_task": "text-generation"}
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps(chat))
    assert rules(tmp_path).pairs.has_roles


def test_rules_that_are_none_name_their_plugin(tmp_path):
    spec = ModelSpec(name="x", architectures=("X",), factory="m:f", vectors="json:loads")
    with pytest.raises(PluginContractError, match="of plugin 'x', must be EmbeddingRules, got fun"):
        rules(tmp_path, "X", spec=spec)


def test_installed_rules_can_be_imported(tmp_path):
    manager = PluginManager.load()
    told = [spec for spec in manager.models if spec.vectors is not None]
    assert told
    for spec in told:
        checkpoint = SimpleNamespace(
            folder=tmp_path, architecture=spec.architectures[0], config=None
        )
        found = rules_of(manager, spec, checkpoint, WORDS)
        assert found.score_tokens == (None if found.score_words is None else (8, 3))


@pytest.mark.parametrize(
    ("config", "activation"),
    [
        ({}, "sigmoid"),
        ({"num_labels": 1}, "sigmoid"),
        ({"num_labels": 3}, "identity"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, "identity"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}}, "tanh"),
    ],
)
def test_what_is_applied_to_scores(tmp_path, config, activation):
    assert rules(tmp_path, "XForSequenceClassification", **config).activation == activation


def test_an_activation_that_is_code_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"'os\.system'; allowed: torch\.nn"):
        rules(tmp_path, sentence_transformers={"activation_fn": "os.system"})
