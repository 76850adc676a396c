"""PEFT is the oracle: what it saves is read, and changes the weights as its own merge does."""

import dataclasses

import pytest
import torch
from torch import nn

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.layers.adapters import config as own
from mmdeploy_llm.layers.adapters import read_adapter

peft = pytest.importorskip("peft")


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(12, 16), nn.Linear(16, 12, bias=False)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(3, 10, 12))
        self.down_proj = nn.Parameter(torch.randn(3, 12, 5))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = Experts()


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn, self.mlp = Attention(), Mlp()


class Model(nn.Module):
    """Has the kinds of modules that adapters change, under the names of a decoder."""

    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(20, 12)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.patch_embed = nn.Conv2d(3, 8, 2)
        self.lm_head = nn.Linear(12, 20, bias=False)


ALL = ["q_proj", "o_proj"]
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
FORMS = {
    "plain": {"target_modules": ALL},
    "rslora": {"target_modules": ["q_proj"], "use_rslora": True},
    "regex": {"target_modules": r".*\.(q|o)_proj"},
    "excluded": {"target_modules": r".*_proj", "exclude_modules": r".*\.1\..*"},
    "layers": {"target_modules": ALL, "layers_to_transform": [1], "layers_pattern": "layers"},
    "one layer": {
        "target_modules": ALL,
        "layers_to_transform": 0,
        "layers_pattern": ["blocks", "layers"],
    },
    "patterns": {
        "target_modules": ALL,
        "rank_pattern": {"q_proj": 2, r"layers\.\d+\.self_attn\.o_proj": 3},
        "alpha_pattern": {"layers.1.self_attn.q_proj": 5, "^layers.0.self_attn.o_proj": 7},
    },
    "saved": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "all biases": {"target_modules": ["o_proj"], "bias": "all"},
    "own biases": {"target_modules": ["q_proj"], "bias": "lora_only"},
    "lora bias": {"target_modules": ["q_proj"], "lora_bias": True},
    "dora": {"target_modules": ALL, "use_dora": True},
    "rank-stable dora": {"target_modules": ALL, "use_dora": True, "use_rslora": True},
    "embedding": {"target_modules": ["embed_tokens", "lm_head"]},
    "dora of an embedding": {"target_modules": ["embed_tokens"], "use_dora": True},
    "convolution": {"target_modules": ["patch_embed"]},
    "experts": {"target_modules": ["q_proj"], "target_parameters": EXPERTS},
    "one stack": {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [3, 5]},
    "named tokens": {
        "target_modules": ["q_proj"],
        "trainable_token_indices": {"embed_tokens": [7]},
    },
    "gaussian": {"target_modules": ["q_proj"], "init_lora_weights": "gaussian"},
    "orthogonal": {"target_modules": ["q_proj"], "init_lora_weights": "orthogonal"},
}


def saved_by_peft(folder, base, **settings):
    """Writes an adapter of `base` with random values; returns it merged by PEFT."""
    given = {"r": 4, "lora_alpha": 6, **settings}
    model = peft.get_peft_model(base, peft.LoraConfig(**given))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return model.merge_and_unload()


def merged(base, adapter):
    """Returns the weights of `base` with what `adapter` changes, by name."""
    weights = dict(base.state_dict()) | adapter.saved
    for path, change in (adapter.modules | adapter.embeddings).items():
        name = path if path in weights else f"{path}.weight"
        delta = change.scale * change.b @ change.a
        delta = delta.mT if path in adapter.embeddings else delta
        weight = weights[name] + delta.reshape(weights[name].shape)
        if change.magnitude is not None:
            rows = weight.mT if path in adapter.embeddings else weight
            rows = rows * (change.magnitude / rows.norm(dim=1))[:, None]
            weight = rows.mT if path in adapter.embeddings else rows
        weights[name] = weight
        if change.bias is not None:
            weights[f"{path}.bias"] = weights[f"{path}.bias"] + change.bias
    for path, rows in adapter.tokens.items():
        weights[f"{path}.weight"] = weights[f"{path}.weight"].clone()
        weights[f"{path}.weight"][rows.ids] = rows.rows
    return weights


@pytest.mark.one_is_quick
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.filterwarnings("ignore")
def test_it_changes_the_weights_as_peft_does(tmp_path, form):
    torch.manual_seed(0)
    base = Model()
    begun = {name: value.clone() for name, value in base.state_dict().items()}
    expected = saved_by_peft(tmp_path, base, **FORMS[form]).state_dict()
    plain = Model()
    plain.load_state_dict(begun)
    found = merged(plain, read_adapter(tmp_path))
    assert found.keys() == expected.keys()
    changed = [name for name in begun if not torch.equal(begun[name], expected[name])]
    assert changed, "the oracle changes nothing"
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-5, msg=name)


def test_every_setting_of_peft_is_decided():
    """A setting that a new version brings must be served, without effect, or refused."""
    fields = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    served = set(own.LoraConfig.model_fields)
    assert not served & (own.WITHOUT_EFFECT | set(own.REFUSED))
    assert fields - served - own.WITHOUT_EFFECT - set(own.REFUSED) == set()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_weights_that_the_training_changed_are_refused(tmp_path, init):
    base = Model()
    saved_by_peft(tmp_path, base, target_modules=["q_proj"], init_lora_weights=init)
    with pytest.raises(CheckpointError, match=f"'{init}'.*path_initial_model"):
        read_adapter(tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_other_methods_are_refused_by_name(tmp_path):
    config = peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[])
    peft.get_peft_model(Model(), config).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="'IA3'; only LORA"):
        read_adapter(tmp_path)
