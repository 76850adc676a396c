"""The plugin decoders: what the standard decoder lacks is left to transformers_any.
test_text_models.py compares each family with transformers."""

import pytest
import torch
import transformers
from mmdeploy_llm_plugins.decoders import CLASSES
from mmdeploy_llm_plugins.decoders.families import FAMILIES
from mmdeploy_llm_plugins.decoders.model import decoder_config, new_model, refusal
from safetensors.torch import load_file, save_file

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.hooks import PluginManager
from mmdeploy_llm.weights.folder import read_checkpoint


@pytest.mark.full
def test_every_class_has_a_family_that_reads_what_transformers_declares():
    """Each family is built from the defaults of its config in transformers."""
    assert FAMILIES.keys() == CLASSES.keys()
    for name, architecture in CLASSES.items():
        config = getattr(transformers, architecture).config_class()
        assert decoder_config(FAMILIES[name], config).num_layers == config.num_hidden_layers


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("arcee", {"hidden_act": "softsign"}),
        ("cohere", {"use_qk_norm": True}),
        ("olmo", {"clip_qkv": 0.1}),
        ("phi", {"qk_layernorm": True}),
    ],
)
def test_what_the_decoder_lacks_is_left_to_transformers_any(tiny_folder, family, options, caplog):
    config = read_checkpoint(tiny_folder(family)).config
    plugins = PluginManager.load()
    assert plugins.model_for(config.architectures, config).name == family
    for name, value in options.items():
        setattr(config, name, value)
    assert plugins.model_for(config.architectures, config).name == "transformers_any"
    words = f"{next(iter(options))} "
    assert "plugin 'decoders'" in caplog.text
    assert words in caplog.text
    with pytest.raises(ModelNotSupportedError, match=words):
        new_model(config)
    alone = PluginManager.load(blocked=("transformers_any",))
    with pytest.raises(ModelNotSupportedError, match=f"no loaded plugin takes .*{words}"):
        alone.model_for(config.architectures, config)


@pytest.mark.full
@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("family", "options", "words"),
    [
        ("gpt_neo", {"attention_layers": ["local", "sparse", "local"]}, "KeyError: 'sparse'"),
        ("olmo", {"model_type": "olmo9"}, "KeyError: 'olmo9'"),
        ("bloom", {"n_head": 0}, "ZeroDivisionError: "),
        ("mpt", {"attn_config": None}, "AttributeError: 'NoneType' object has no attribute "),
    ],
)
def test_an_odd_config_is_refused_with_a_reason(tiny_folder, family, options, words):
    config = read_checkpoint(tiny_folder(family)).config
    assert refusal(config) is None
    vars(config).update(options)
    assert refusal(config).startswith("its config.json is not as expected: ")
    assert words in refusal(config)
    assert PluginManager.load().model_for(config.architectures, config).name == "transformers_any"


def tokens_of(folder):
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with LLM(str(folder), use_warmup=False, max_model_len=64) as llm:
        return llm.generate([[5, 9, 200]], params, use_tqdm=False)[0].outputs.token_ids


@pytest.mark.full
def test_the_copy_of_a_tied_head_is_not_read(tiny_folder, tiny_copy, tmp_path):
    """Checkpoints of GPT-NeoX call it embed_out."""
    options = {"tie_word_embeddings": True, "is_decoder": True}
    path = tiny_copy("gpt_neox", tmp_path, **options) / "model.safetensors"
    weights = load_file(path)
    weights["embed_out.weight"] = weights["gpt_neox.embed_in.weight"].clone()
    save_file(weights, path, {"format": "pt"})
    assert tokens_of(tmp_path) == tokens_of(tiny_folder("gpt_neox", **options))


def test_falcon_adds_its_biases_of_positions_once(tiny_folder):
    """They are rounded to bf16, then scaled. transformers' attention "eager", with which the kit
    compares, adds them twice; its default adds them once, as the models were trained."""
    shape = {"num_attention_heads": 6, "hidden_size": 48, "multi_query": False}
    folder = tiny_folder("falcon", alibi=True, parallel_attn=False, bias=True, **shape)
    model = transformers.FalconForCausalLM.from_pretrained(
        folder, attn_implementation="sdpa", dtype=torch.float32
    )
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    ids = [3 + i * 7 % 300 for i in range(400)]
    options = {"use_warmup": False, "max_model_len": 512, "max_num_batched_tokens": 128}
    with LLM(str(folder), dtype="float32", enable_logprob=True, **options) as llm:
        found = llm.generate([ids], params, use_tqdm=False)[0].prompt_logprobs
    with torch.no_grad():
        wanted = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    for place in range(1, 400):
        own = wanted[place - 1, ids[place]].item()
        assert found[place][ids[place]].logprob == pytest.approx(own, abs=1e-4)


def test_mpt_has_the_biases_that_its_config_asks_for(tiny_folder, monkeypatch):
    """transformers computes them as if alibi_bias_max were 8."""
    module, kind = transformers.models.mpt.modeling_mpt, transformers.MptModel
    folder = tiny_folder("mpt", attn_config={"alibi_bias_max": 16}, seed=3)
    ids = [3 + i * 7 % 300 for i in range(60)]

    def greedy():
        model = transformers.MptForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            return int(model(torch.tensor([ids])).logits[0, -1].argmax())

    def build(_, num_heads, length, device=None):
        return module.build_mpt_alibi_tensor(num_heads, length, 16, device)

    other = greedy()
    monkeypatch.setattr(kind, "build_mpt_alibi_tensor", build)
    params = SamplingParams(temperature=0, max_tokens=1)
    with LLM(str(folder), dtype="float32", use_warmup=False, max_model_len=64) as llm:
        found = llm.generate([ids], params, use_tqdm=False)[0].outputs.token_ids
    assert found == [greedy()] != [other]


@pytest.mark.full
def test_a_config_that_is_refused_has_the_tokens_of_transformers(tiny_folder, transformers_of):
    folder = tiny_folder("olmo", clip_qkv=0.1)
    expected = transformers_of(folder).generate([5, 9, 200], 6)
    assert tokens_of(folder) == list(expected)
    assert tokens_of(tiny_folder("olmo")) != tokens_of(folder)
