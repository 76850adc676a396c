"""Mixers of Mamba-2 in transformers' models are the engine's where these compute the same."""

import pytest
import torch
import transformers
from mmdeploy_llm_plugins.transformers_any.model import AnyModel
from mmdeploy_llm_plugins.transformers_parts import mamba
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from mmdeploy_llm.hooks import Checkpoint
from mmdeploy_llm.testing.checkpoint import write_checkpoint
from mmdeploy_llm.testing.tiny import make_tokenizer
from mmdeploy_llm.weights.load import build_model

CLASSES = (
    "BambaForCausalLM",
    "FalconH1ForCausalLM",
    "Mamba2ForCausalLM",
    "NemotronHForCausalLM",
    "Zamba2ForCausalLM",
)


@pytest.fixture(scope="module")
def census(load_file):
    return load_file("plugins/transformers_any/census/census.py")


@pytest.fixture
def loaded(census, tmp_path):
    """Returns a function from the name of a class to the model, loaded, and transformers' own."""

    def load(name, dtype=torch.float32, **changes):
        config = census.config_of(name)
        for key, value in changes.items():
            setattr(config, key, value)
        write_checkpoint(config, tmp_path, tokenizer=make_tokenizer("qwen2"), dtype=dtype)
        own = getattr(transformers, name).from_pretrained(tmp_path, dtype=dtype).eval()
        checkpoint = Checkpoint(folder=tmp_path, config=own.config)
        return build_model(AnyModel, checkpoint, dtype, torch.device("cpu")), own

    return load


def mixers(model):
    return [module for module in model.modules() if isinstance(module, mamba.AnyMamba2)]


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.full] * (name != CLASSES[0])) for name in CLASSES],
)
def test_logits_are_those_of_transformers(loaded, name):
    """In bfloat16 they are no farther from those of the same weights in float32 than transformers'
    own are."""
    model, own = loaded(name)
    assert mixers(model)
    ids = torch.arange(5, 45).unsqueeze(0)
    with torch.inference_mode():
        found, wanted = (each(ids, use_cache=False).logits for each in (model.inner, own))
    assert (found - wanted).norm() < 1e-4 * wanted.norm()
    model, own = loaded(name, torch.bfloat16)
    assert mixers(model)
    with torch.inference_mode():
        found, near = (each(ids, use_cache=False).logits for each in (model.inner, own))
        wanted = own.float()(ids, use_cache=False).logits
    assert (found - wanted).norm() < 1.25 * (near - wanted).norm()


@pytest.mark.full
@pytest.mark.parametrize("is_before", [False, True])
def test_norms_of_falcon_h1(loaded, is_before):
    """Its mixers have a norm where the config says so; one before the gate is not the engine's."""
    changes = {"mamba_rms_norm": True, "mamba_norm_before_gate": is_before}
    model, own = loaded("FalconH1ForCausalLM", **changes)
    assert bool(mixers(model)) is not is_before
    ids = torch.arange(5, 45).unsqueeze(0)
    with torch.inference_mode():
        found, wanted = (each(ids, use_cache=False).logits for each in (model.inner, own))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.full
def test_other_mixers_stay(loaded):
    """One with another activation does; its scan fills prompts up to fewer tokens."""
    model, own = loaded("FalconH1ForCausalLM", hidden_act="gelu")
    assert not mixers(model)
    sizes = {module.chunk_size for module in model.modules() if hasattr(module, "A_log")}
    assert sizes == {mamba.CHUNK}
    ids = torch.arange(5, 45).unsqueeze(0)
    with torch.inference_mode():
        found, wanted = (each(ids, use_cache=False).logits for each in (model.inner, own))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.full
def test_what_computes_something_else_is_put_back(loaded, monkeypatch, caplog):
    monkeypatch.setattr(mamba, "_is_same", lambda *_: False)
    model, own = loaded("BambaForCausalLM")
    assert not mixers(model)
    assert "compute something else than BambaMixer, which stays" in caplog.text
    ids = torch.arange(5, 45).unsqueeze(0)
    with torch.inference_mode():
        found, wanted = (each(ids, use_cache=False).logits for each in (model.inner, own))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.full
def test_a_token_that_continues_is_compared_too(loaded, monkeypatch, caplog):
    """Mixers that compute prompts alike and forget their states are put back."""
    monkeypatch.setattr(mamba._Passed, "keep", lambda _: None)
    model, _ = loaded("BambaForCausalLM")
    assert not mixers(model)
    assert "compute something else than BambaMixer, which stays" in caplog.text


def test_one_of_each_configuration_is_compared(caplog):
    """Those of one that computes something else are put back, the others stay."""
    plain = []
    for layer, size in enumerate((16, 16, 32, 32)):
        config = transformers.Mamba2Config(
            hidden_size=64, num_heads=8, head_dim=16, n_groups=2, state_size=size
        )
        plain.append(Mamba2Mixer(config, layer))
    model = torch.nn.ModuleList(plain).requires_grad_(False)
    random = torch.Generator().manual_seed(0)
    for param in model.parameters():
        param.uniform_(-0.5, 0.5, generator=random)
    mamba.use_engine_mixers(model)
    mamba.check_mixers(model)
    assert len(mixers(model)) == 4
    assert "which stays" not in caplog.text
    plain[2].norm.variance_epsilon = 10.0
    mamba.check_mixers(model)
    assert [module.layer for module in mixers(model)] == [0, 1]
    assert caplog.text.count("compute something else than Mamba2Mixer, which stays") == 1
