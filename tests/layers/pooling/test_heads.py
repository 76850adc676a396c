"""Checkpoints without an output head, or with one of labels, run in every family, and equal
transformers; so do the dense layers of a sentence-transformers folder."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

from mmdeploy_llm.engine.startup.loaded import new_model
from mmdeploy_llm.engine.startup.model_files import read_model_files
from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.hooks.objects.relatives import head_of, relatives
from mmdeploy_llm.layers.pooling.heads import add_dense
from mmdeploy_llm.layers.pooling.rules import DenseRule, EmbeddingRules
from mmdeploy_llm.testing.models.dense import DenseRunner
from mmdeploy_llm.testing.tiny import generating
from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.weights.load import build_model

CPU = torch.device("cpu")
# None of a family's placeholders, which transformers reads otherwise than as text.
IDS = torch.randint(30, 60, (1, 23), generator=torch.Generator().manual_seed(1))
# The rows of scores differ in their last bits from those of transformers, whose sums are others.
TOLERANCE = 2e-4
QUICK = {"mistral": "base", "qwen3": "labels"}
CASES = [
    pytest.param(name, kind, marks=() if QUICK.get(name) == kind else pytest.mark.full)
    for name, spec in generating().items()
    if spec.encoder is None  # whose vectors would be the decoder's
    for kind in ("base", "labels")
]


def without_head(folder: Path, new: Path, kind: str):
    """Writes what transformers saves of the same model with another head, and returns its model;
    None where it has no such class."""
    if kind == "base":
        model = transformers.AutoModel.from_pretrained(folder)
    else:
        try:
            labels = transformers.AutoModelForSequenceClassification
            model = labels.from_pretrained(folder, num_labels=3)
        except ValueError:
            return None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            torch.nn.init.normal_(model.score.weight)
    shutil.copytree(folder, new, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    model.save_pretrained(new)
    return model.eval()


def loaded(folder: Path):
    files = read_model_files(EngineConfig(model=str(folder)))
    model = build_model(
        lambda config: new_model(files, config), files.checkpoint, torch.float32, CPU
    )
    add_dense(model, files.rules, CPU)
    return model


def hidden_of(model):
    runner = DenseRunner(model)
    return runner.hidden([(runner.add(IDS[0].tolist()), IDS.shape[1])])


@pytest.mark.few_in_ci(24)
@pytest.mark.one_is_quick
@pytest.mark.parametrize(("family", "kind"), CASES)
def test_another_head_of_any_family_equals_transformers(tiny_folder, tmp_path, family, kind):
    reference = without_head(tiny_folder(family), tmp_path / "new", kind)
    if reference is None:
        return
    own = loaded(tmp_path / "new")
    hidden = hidden_of(own)
    with torch.inference_mode():
        if kind == "base":
            expected = reference(input_ids=IDS).last_hidden_state[0]
        else:
            for config in (reference.config, reference.config.get_text_config()):
                config.pad_token_id = None  # none of these tokens is padding
            expected, hidden = reference(input_ids=IDS).logits, own.score(hidden[-1:])
    torch.testing.assert_close(hidden, expected, atol=TOLERANCE, rtol=TOLERANCE)
    assert own.is_embedder
    assert getattr(own, "lm_head", None) is None


@pytest.mark.full
def test_a_folder_with_a_pooling_needs_no_output_head(tiny_folder, tmp_path):
    """Qwen3-Embedding is stored so: it has the name of the model with a head, the keys of one
    without."""
    without_head(tiny_folder("qwen3", tie_word_embeddings=False), tmp_path / "new", "base")
    config = json.loads((tmp_path / "new/config.json").read_text())
    config["architectures"] = ["Qwen3ForCausalLM"]
    (tmp_path / "new/config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="layers"):
        loaded(tmp_path / "new")
    kinds = ("Transformer", "Pooling")
    lines = [
        {"name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (kind, path) in enumerate(zip(kinds, ("", "1_Pooling"), strict=True))
    ]
    (tmp_path / "new/modules.json").write_text(json.dumps(lines))
    (tmp_path / "new/1_Pooling").mkdir()
    (tmp_path / "new/1_Pooling/config.json").write_text('{"pooling_mode_lasttoken": true}')
    model = loaded(tmp_path / "new")
    assert model.is_embedder
    assert model.default_pooling == "last"


def test_scores_do_not_depend_on_the_other_rows(tiny_folder, tmp_path):
    without_head(tiny_folder("qwen3"), tmp_path / "new", "labels")
    model = loaded(tmp_path / "new")
    rows = torch.randn(9, model.hidden_size)
    together = model.score(rows)
    assert torch.equal(together, torch.cat([model.score(row) for row in rows.split(1)]))


@pytest.mark.parametrize(
    ("architecture", "others"),
    [
        ("Qwen3Model", ("Qwen3ForConditionalGeneration", "Qwen3ForCausalLM")),
        ("Gemma3TextModel", ("Gemma3ForCausalLM",)),
        ("Gemma3TextForSequenceClassification", ("Gemma3ForCausalLM",)),
        ("LlamaForCausalLM", ()),
        ("BertForMaskedLM", ()),
    ],
)
def test_relatives_of_an_architecture(architecture, others):
    assert relatives(architecture) == others


def test_a_family_that_names_an_architecture_has_its_head():
    assert head_of("XModel", ("XModel", "XForCausalLM")) == "words"
    assert head_of("XModel", ("*",)) == "words"
    assert head_of("XModel", ("XForCausalLM",)) == "none"
    assert head_of("XForSequenceClassification", ("XForCausalLM",)) == "labels"


RULE = DenseRule(
    weights=Path(),
    in_features=8,
    out_features=4,
    has_bias=True,
    activation="tanh",
    is_residual=True,
)
WEIGHTS = {
    "linear.weight": torch.randn(4, 8, dtype=torch.float64),
    "linear.bias": torch.randn(4).bfloat16(),
    "residual.weight": torch.randn(4, 8),
}


class OfSize8:
    hidden_size = 8


def dense_model(folder, weights, *rules, size=8):
    save_file(weights, folder / "model.safetensors")
    own = [replace(rule, weights=folder / "model.safetensors") for rule in rules]
    model = OfSize8()
    add_dense(model, EmbeddingRules(dense=tuple(own), size=size), CPU)
    return model


def test_dense_layers_are_those_of_sentence_transformers(tmp_path):
    x = torch.randn(3, 8)
    found = dense_model(tmp_path, WEIGHTS, RULE).embedding(x)
    weight, bias, shortcut = (WEIGHTS[key].float() for key in WEIGHTS)
    expected = torch.tanh(x @ weight.T + bias) + x @ shortcut.T
    torch.testing.assert_close(found, expected)


def test_a_residual_layer_of_one_size_adds_its_input(tmp_path):
    x, weight = torch.randn(3, 8), torch.randn(8, 8)
    rule = replace(RULE, out_features=8, has_bias=False, activation="identity")
    found = dense_model(tmp_path, {"linear.weight": weight}, rule).embedding(x)
    torch.testing.assert_close(found, x @ weight.T + x)


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("weights", "size", "message"),
    [
        ({}, 8, r"holds nothing; by its config.json it holds linear.bias \[4\], linear.weight"),
        (WEIGHTS | {"linear.weight": torch.zeros(8, 4)}, 8, r"linear.weight \[8, 4\]"),
        (WEIGHTS | {"more": torch.zeros(1)}, 8, r"more \[1\]"),
        (WEIGHTS | {"linear.bias": torch.zeros(4, dtype=torch.int8)}, 8, "holds no floats"),
        (WEIGHTS, 9, "states of 9 values, but the model has 8"),
    ],
)
def test_dense_weights_of_another_form_are_refused(tmp_path, weights, size, message):
    with pytest.raises(CheckpointError, match=message):
        dense_model(tmp_path, weights, RULE, size=size)
