"""The plugin decoders: its steps are recorded, and what the standard decoder lacks runs on
transformers' modules. test_text_models.py compares each family with transformers."""

import logging

import pytest
import torch
import transformers

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.basic_layers import recordings
from mmdeploy_llm.model_folder import read_checkpoint
from mmdeploy_llm_plugins.decoders import CLASSES
from mmdeploy_llm_plugins.decoders.families import FAMILIES
from mmdeploy_llm_plugins.decoders.model import StandardModel, decoder_config, new_model
from mmdeploy_llm_plugins.transformers_any.model import AnyModel

PROMPTS = ([5, 9, 200, 31, 7], [40, 41, 42])
PARAMS = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=1)


def answers(folder):
    """Returns tokens with their log-probabilities, and whether each recorded step was recorded."""
    options = {"dtype": "bfloat16", "max_num_seqs": 2, "enable_logprob": True, "max_model_len": 128}
    with LLM(str(folder), use_warmup=False, **options) as llm:
        outputs = llm.generate([*PROMPTS], PARAMS, use_tqdm=False)
        known = list(llm.model.model._recordings.values())
    found = [(out.outputs.token_ids, out.outputs.logprobs) for out in outputs]
    return found, {own is not None for own in known}


@pytest.mark.parametrize(
    "family", ["starcoder2", *(pytest.param(it, marks=pytest.mark.full) for it in ("cohere2",))]
)
def test_recorded_steps_have_the_tokens_of_others(tiny_folder, monkeypatch, family):
    found, are_recorded = answers(tiny_folder(family))
    assert are_recorded == {True}
    monkeypatch.setattr(recordings, "MAX_RECORDED_ROWS", 0)
    assert answers(tiny_folder(family)) == (found, set())


def test_every_class_has_a_family_that_reads_what_transformers_declares():
    """With the defaults of its config, those of the published models."""
    assert FAMILIES.keys() == CLASSES.keys()
    for name, architecture in CLASSES.items():
        config = getattr(transformers, architecture).config_class()
        assert decoder_config(FAMILIES[name], config).num_layers == config.num_hidden_layers


@pytest.mark.parametrize(
    ("family", "options"), [("cohere", {"use_qk_norm": True}), ("olmo", {"clip_qkv": 8.0})]
)
def test_what_the_decoder_lacks_runs_on_transformers_modules(tiny_folder, caplog, family, options):
    config = read_checkpoint(tiny_folder(family)).config
    with torch.device("meta"):
        assert isinstance(new_model(config), StandardModel)
    for name, value in options.items():
        setattr(config, name, value)
    with caplog.at_level(logging.INFO), torch.device("meta"):
        assert isinstance(new_model(config), AnyModel)
    assert next(iter(options)) in caplog.text
