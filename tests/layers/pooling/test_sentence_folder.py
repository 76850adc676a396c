"""A sentence-transformers folder says what its vectors are, and nothing of it is left out."""

import json
import os
from pathlib import Path

import pytest

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.layers.pooling.rules import EmbeddingRules
from mmdeploy_llm.layers.pooling.sentence_folder import read_rules

NEW = "sentence_transformers.base.modules.{0}.{1}"
OLD = "sentence_transformers.models.{1}"


def line(number, kind, path="", prefix=OLD):
    return {
        "idx": number,
        "name": str(number),
        "path": path,
        "type": prefix.format(kind.lower(), kind),
    }


TRANSFORMER = line(0, "Transformer")
POOLING = line(1, "Pooling", "1_Pooling")
DENSE = line(2, "Dense", "2_Dense")
NORMALIZE = line(3, "Normalize", "3_Normalize")
LINES = [TRANSFORMER, POOLING, DENSE, NORMALIZE]
DENSE_CONFIG = {
    "in_features": 8,
    "out_features": 4,
    "bias": False,
    "activation_function": "torch.nn.modules.linear.Identity",
}
FILES = {
    "modules.json": LINES,
    "1_Pooling/config.json": {"word_embedding_dimension": 8, "pooling_mode_mean_tokens": True},
    "2_Dense/config.json": DENSE_CONFIG,
    "2_Dense/model.safetensors": "",
}


def write(folder: Path, files=(), **changed):
    for name, value in {**FILES, **dict(files), **changed}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(value if isinstance(value, str) else json.dumps(value), "utf-8")
    return folder


def test_a_folder_without_modules_says_nothing(tmp_path):
    assert read_rules(tmp_path) is None


@pytest.mark.parametrize("prefix", [OLD, NEW])
def test_old_and_new_names_of_classes(tmp_path, prefix):
    lines = [line(0, "Transformer", prefix=prefix), line(1, "Pooling", "1_Pooling", prefix)]
    rules = read_rules(write(tmp_path, {"modules.json": lines}))
    assert rules == EmbeddingRules(
        pooling="mean",
        normalize=False,
        size=8,
        prompts={"query": "", "document": ""},
        query_prompt="query",
        document_prompt="document",
    )


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode_cls_token": False}, "mean"),
        ({}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": ["cls"], "pooling_mode_mean_tokens": True}, "cls"),
    ],
)
def test_old_and_new_flags_of_the_pooling(tmp_path, config, pooling):
    assert read_rules(write(tmp_path, {"1_Pooling/config.json": config})).pooling == pooling


def test_dense_layers_prompts_and_lengths(tmp_path):
    model = {
        "prompts": {"query": "Q: ", "web": None},
        "default_prompt_name": "query",
        "similarity_fn_name": "dot",
        "truncate_dim": 3,
    }
    files = {
        "config_sentence_transformers.json": model,
        "sentence_bert_config.json": {"max_seq_length": 77, "do_lower_case": True},
    }
    rules = read_rules(write(tmp_path, files))
    assert rules.prompts == {"query": "Q: ", "document": "", "web": ""}
    assert (rules.default_prompt, rules.similarity, rules.dimensions) == ("query", "dot", 3)
    assert (rules.max_tokens, rules.lower_case, rules.normalize) == (77, True, True)
    (dense,) = rules.dense
    assert dense.weights == tmp_path / "2_Dense/model.safetensors"
    assert (dense.in_features, dense.out_features, dense.activation) == (8, 4, "identity")
    assert not dense.has_bias
    assert not dense.is_residual


def test_the_tokenizer_says_the_length_where_the_folder_does_not(tmp_path):
    limit = {"tokenizer_config.json": {"model_max_length": 512}}
    assert read_rules(write(tmp_path, limit)).max_tokens == 512
    endless = {"tokenizer_config.json": {"model_max_length": int(1e30)}}
    assert read_rules(write(tmp_path, endless)).max_tokens is None


def test_a_reranker_that_compares_logits(tmp_path):
    lines = [TRANSFORMER, line(1, "LogitScore", "1_LogitScore")]
    files = {
        "modules.json": lines,
        "1_LogitScore/config.json": {
            "true_token_id": 9,
            "false_token_id": 4,
            "module_input_name": "causal_logits",
        },
        "sentence_bert_config.json": {
            "transformer_task": "text-generation",
            "modality_config": {"message": {"method": "forward", "method_output_name": "logits"}},
            "processing_kwargs": {"chat_template": {"add_generation_prompt": True}},
        },
        "config_sentence_transformers.json": {
            "model_type": "CrossEncoder",
            "activation_fn": "torch.nn.modules.linear.Identity",
        },
    }
    rules = read_rules(write(tmp_path, files))
    assert (rules.score_tokens, rules.activation, rules.system) == ((9, 4), "identity", "")
    assert rules.chat_options == {"add_generation_prompt": True}
    assert rules.pairs.has_roles
    assert rules.pooling is None


def one(number, **changed):
    lines = [dict(entry) for entry in LINES]
    lines[number] |= changed
    return {"modules.json": lines}


def dense(**changed):
    return {"2_Dense/config.json": DENSE_CONFIG | changed}


def pooling(**changed):
    return {"1_Pooling/config.json": changed}


def model(**changed):
    return {"config_sentence_transformers.json": changed}


def words(**changed):
    return {"sentence_bert_config.json": changed}


WRONG = [
    ({"modules.json": "[{"}, "modules.json of the model cannot be read"),
    ({"modules.json": {"0": TRANSFORMER}}, "must hold a JSON array"),
    ({"modules.json": "[" * 5000}, "nested too deeply"),
    ({"modules.json": []}, "holds 0 modules; allowed: 1 to 64"),
    ({"modules.json": ["Pooling"]}, r"'\[0\]' in modules.json of the model is 'Pooling'"),
    ({"modules.json": [POOLING]}, "another first module"),
    ({"modules.json": [TRANSFORMER, TRANSFORMER]}, "another module"),
    ({"modules.json": [TRANSFORMER, DENSE]}, "allowed: a Pooling"),
    ({"modules.json": [TRANSFORMER, DENSE, POOLING]}, "one, before every Dense"),
    ({"modules.json": [TRANSFORMER, POOLING, NORMALIZE, DENSE]}, "Normalize as the last"),
    (
        {"modules.json": [TRANSFORMER, POOLING, POOLING | {"name": "b"}]},
        "pooling of sentence_embedding",
    ),
    (one(2, type="custom_st.Dense"), "code to run; allowed: names that begin with"),
    (one(2, type="pylate.models.Dense"), "'pylate.models.Dense', a class outside"),
    (one(2, type=7), r"'\[2\].type' in modules.json of the model is 7; allowed: a text"),
    (one(2, type=OLD.format("", "Router")), r"another module \(Router\)"),
    (one(2, type=OLD.format("", "WordWeights")), r"another module \(WordWeights\)"),
    (one(2, type=OLD.format("", "LayerNorm")), r"another module \(LayerNorm\)"),
    (one(2, kwargs=["task"]), r"\[2\].kwargs"),
    (one(2, name="1"), "the same in two modules"),
    (one(0, path="0_Transformer"), "0_Transformer' for the first module"),
    (one(1, path="../1_Pooling"), "a path below the model's folder"),
    (one(1, path="/etc"), "a path below the model's folder"),
    (one(1, path="C:\\x"), "a path below the model's folder"),
    (one(1, path="a\\..\\..\\b"), "a path below the model's folder"),
    (one(1, path="a\0b"), "a path below the model's folder"),
    (one(1, path="x" * 5000), "a path below the model's folder"),
    (one(1, path="2_Missing"), "2_Missing/config.json of the model is missing"),
    (pooling(pooling_mode="max"), "is 'max'; allowed: cls, lasttoken, mean"),
    (pooling(pooling_mode=["cls", "mean"]), "allowed: one mode"),
    (pooling(pooling_mode=[]), "pooling_mode"),
    (pooling(pooling_mode={"cls": 1}), "pooling_mode"),
    (pooling(pooling_mode_weightedmean_tokens=True), "is 'weightedmean'"),
    (pooling(pooling_mode_cls_token="yes"), "is 'yes'; allowed: true or false"),
    (pooling(include_prompt=0), "is 0; allowed: true or false"),
    (pooling(word_embedding_dimension=-8), "an integer from 1 to"),
    (
        pooling(word_embedding_dimension=9),
        "in_features' in 2_Dense/config.json of the model is 8; allowed: 9",
    ),
    (dense(in_features=0), "in_features' in 2_Dense/config.json of the model is 0"),
    (dense(in_features=True), "2_Dense/config.json of the model is True"),
    (dense(out_features=None), "are missing"),
    (dense(activation_function="os.system"), "is 'os.system'; allowed: torch.nn"),
    (dense(activation_function="torch.load"), "is 'torch.load'; allowed: torch.nn"),
    (
        dense(module_input_name="token_embeddings"),
        "is 'token_embeddings'; allowed: sentence_embedding",
    ),
    (
        dense(bias="false"),
        "'bias' in 2_Dense/config.json of the model is 'false'; allowed: true or false",
    ),
    (model(model_type="SparseEncoder"), "is 'SparseEncoder'; allowed"),
    (model(prompts=["query"]), "is \\['query'\\]; allowed: an object"),
    (model(prompts={"query": 1}), "is 1; allowed: a text"),
    (model(default_prompt_name="passage"), "is 'passage'; allowed: document, query"),
    (model(similarity_fn_name="hamming"), "is 'hamming'; allowed: cosine"),
    (
        model(truncate_dim=0),
        "'truncate_dim' in config_sentence_transformers.json of the model is 0",
    ),
    (model(activation_fn="custom.Softplus"), "is 'custom.Softplus'"),
    (words(transformer_task="fill-mask"), "is 'fill-mask'; allowed"),
    (words(max_seq_length="512"), "is '512'; allowed: an integer"),
    (words(query_expansion={"strategy": "fixed"}), "query_expansion"),
    (words(model_args={"attn_implementation": "eager"}), "model_args"),
    (words(processing_kwargs={"text": {"max_length": 4}}), "is 'text'; allowed: chat_template"),
    (words(modality_config=[]), "modality_config"),
]


@pytest.mark.one_is_quick
@pytest.mark.parametrize(("files", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_what_cannot_be_computed_is_refused_by_name(tmp_path, files, message):
    with pytest.raises(CheckpointError, match=message):
        read_rules(write(tmp_path, files))


def test_a_pickle_is_never_opened(tmp_path):
    write(tmp_path)
    os.rename(tmp_path / "2_Dense/model.safetensors", tmp_path / "2_Dense/pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is a pickle"):
        read_rules(tmp_path)
    (tmp_path / "2_Dense/pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match=r"2_Dense/model\.safetensors of the model is mis"):
        read_rules(tmp_path)


def test_a_module_may_not_be_a_link_out_of_the_folder_but_its_files_may(tmp_path):
    other, folder = tmp_path / "other", write(tmp_path / "model")
    os.rename(folder / "1_Pooling", other)
    (folder / "1_Pooling").symlink_to(other)
    with pytest.raises(CheckpointError, match="a link out of the folder"):
        read_rules(folder)
    (folder / "1_Pooling").unlink()
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").symlink_to(other / "config.json")  # as in the hub's cache
    assert read_rules(folder).pooling == "mean"


def test_a_fifo_is_no_list_of_modules(tmp_path):
    os.mkfifo(tmp_path / "modules.json")
    with pytest.raises(CheckpointError, match="is a FIFO"):
        read_rules(tmp_path)
