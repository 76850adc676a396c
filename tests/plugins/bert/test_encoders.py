"""Encoders against transformers, each with the checks of the kit for models that give vectors."""

from dataclasses import replace

import pytest
import torch
from mmdeploy_llm_plugins.bert import provide_models, tiny
from safetensors.torch import load_file, save_file

from mmdeploy_llm.errors import CheckpointError, ModelNotSupportedError
from mmdeploy_llm.testing.embedder_conformance import EmbedderConformance
from mmdeploy_llm.testing.model_conformance import build
from mmdeploy_llm.testing.models.embedders import vectors_equal_the_reference
from mmdeploy_llm.testing.models.models import ModelSubject
from mmdeploy_llm.testing.tiny import write_family
from mmdeploy_llm.weights.folder import read_checkpoint

SPECS = {spec.name: spec for spec in provide_models()}
# The family of a checkpoint -> the spec that serves it.
FAMILIES = {
    "BERT": "bert",
    "BERT_RERANKER": "bert",
    "CAMEMBERT": "camembert",
    "DISTILBERT": "distilbert",
    "DISTILBERT_CLASSIFIER": "distilbert",
    "ELECTRA": "electra",
    "ELECTRA_RERANKER": "electra",
    "EUROBERT": "eurobert",
    "EUROBERT_OF_MASKS": "eurobert",
    "GTE": "gte",
    "GTE_RERANKER": "gte",
    "JINA": "jina_embeddings_v3",
    "JINA_CLASSIFIER": "jina_embeddings_v3",
    "MODERNBERT": "modernbert",
    "MODERNBERT_RERANKER": "modernbert",
    "MPNET": "mpnet",
    "MPNET_CLASSIFIER": "mpnet",
    "NOMIC": "nomic_bert",
    "NOMIC_RERANKER": "nomic_bert",
    "ROBERTA": "roberta",
    "ULTRABERT": "ultrabert",
    "ULTRABERT_OF_MASKS": "ultrabert",
    "XLM_ROBERTA": "xlm_roberta",
    "XLM_ROBERTA_RERANKER": "xlm_roberta",
}
QUICK = ("BERT_RERANKER", "MODERNBERT", "XLM_ROBERTA_RERANKER")


def subject_of(name, folder):
    write_family(getattr(tiny, name), folder)
    return ModelSubject(
        spec=SPECS[FAMILIES[name]],
        folder=folder,
        config=read_checkpoint(folder).config,
        cases=EmbedderConformance.cases,
        tolerance=2e-5,
        make_prompt=EmbedderConformance.make_prompt,
        make_reference=EmbedderConformance.make_reference,
    )


class TestEncoders(EmbedderConformance):
    @pytest.fixture(
        scope="class",
        params=[
            pytest.param(name, marks=[pytest.mark.full] * (name not in QUICK)) for name in FAMILIES
        ],
    )
    @classmethod
    def subject(cls, request, tmp_path_factory):
        return subject_of(request.param, tmp_path_factory.mktemp(request.param))


def loaded(folder, tensors):
    """Builds the encoder of `folder` with other tensors."""
    save_file(tensors, folder / "model.safetensors")
    config = read_checkpoint(folder).config
    return build(SPECS[config.model_type], folder, config, torch.float32)


def test_a_checkpoint_of_the_first_years_loads(tmp_path):
    """It has a prefix, the names of TensorFlow's norms, a buffer of positions, and the heads of the
    pre-training, but no pooler."""
    write_family(tiny.BERT, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    expected = dict(loaded(tmp_path, tensors).named_parameters())
    names = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    old = {}
    for key, value in tensors.items():
        for new_name, name in names.items():
            key = key.replace(new_name, name)
        if not key.startswith("pooler."):
            old[f"bert.{key}"] = value
    old["bert.embeddings.position_ids"] = torch.arange(130)[None]
    old["cls.predictions.bias"] = torch.zeros(384)
    old["cls.seq_relationship.weight"] = torch.zeros(2, 64)
    found = dict(loaded(tmp_path, old).named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_a_classifier_without_its_pooler_is_refused(tmp_path):
    write_family(tiny.BERT_RERANKER, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    rest = {key: value for key, value in tensors.items() if "pooler" not in key}
    with pytest.raises(CheckpointError, match=r"head\.dense"):
        loaded(tmp_path, rest)


@pytest.mark.one_is_quick
@pytest.mark.parametrize("name", ["XLM_ROBERTA", "MPNET"])
def test_padding_within_a_text_is_no_position(name, tmp_path):
    """A text may contain the padding token, which these models do not count; texts after it in the
    same step begin anew."""
    subject = subject_of(name, tmp_path)
    padding = 1 if name == "MPNET" else subject.config.pad_token_id
    first, second = ([100, padding, 120, padding, padding, 130], [140, padding, 150])
    subject.prompts = {"first": (first, []), "second": (second, [])}
    vectors_equal_the_reference(subject)


def test_the_longest_text_has_the_last_position(tmp_path):
    subject = subject_of("XLM_ROBERTA", tmp_path)
    longest = subject.model.max_positions
    assert longest == 130 - 1 - subject.config.pad_token_id
    subject.prompts = {"longest": ([100] * longest, [])}
    vectors_equal_the_reference(subject)


def test_token_types_are_read(tmp_path):
    subject = subject_of("BERT", tmp_path)
    ids, types = torch.tensor([90, 91, 92, 93]), torch.tensor([0, 0, 1, 1])
    sequence = subject.runner.add(ids.tolist())
    inputs = replace(subject.runner._inputs([(sequence, 4)]), token_types=types)
    with torch.inference_mode():
        found = subject.model(inputs)
        reference = subject.reference.model(input_ids=ids[None], token_type_ids=types[None])
    torch.testing.assert_close(found, reference.last_hidden_state[0], atol=2e-5, rtol=0)


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("BERT", {"is_decoder": True}, "is_decoder"),
        ("BERT", {"hidden_act": "mish"}, "'mish'"),
        ("BERT", {"position_embedding_type": "relative_key"}, "'relative_key'"),
        ("XLM_ROBERTA", {"num_attention_heads": 5}, "hidden_size 64 .* 5 attention heads"),
        ("MPNET", {"relative_attention_num_buckets": 64}, "relative_attention_num_buckets 64"),
    ],
)
def test_what_a_config_may_not_ask_for_is_refused(name, changes, message, tmp_path):
    write_family(getattr(tiny, name), tmp_path)
    config = read_checkpoint(tmp_path).config
    for field, value in changes.items():
        setattr(config, field, value)
    with pytest.raises(ModelNotSupportedError, match=message):
        build(SPECS[FAMILIES[name]], tmp_path, config, torch.float32)


def test_a_scaled_rope_of_modernbert_is_refused(tmp_path):
    write_family(tiny.MODERNBERT, tmp_path)
    config = read_checkpoint(tmp_path).config
    config.rope_parameters["full_attention"]["rope_type"] = "yarn"
    with pytest.raises(ModelNotSupportedError, match="'yarn'"):
        build(SPECS["modernbert"], tmp_path, config, torch.float32)
