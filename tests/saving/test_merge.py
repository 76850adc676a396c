"""merge: the weights that PEFT's own merge gives, in the folder of a model."""

import pytest
import torch
import transformers

from mmdeploy_llm.saving import merge_adapter
from mmdeploy_llm.tiny import write_tiny

peft = pytest.importorskip("peft")
pytestmark = [pytest.mark.filterwarnings("ignore")]

TEXT, VISION = transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText
UNTIED = {"tie_word_embeddings": False}
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
CASES = {
    "dense": ("qwen2", TEXT, UNTIED, {"target_modules": LINEAR}),
    "dora": ("qwen3", TEXT, UNTIED, {"target_modules": LINEAR, "use_dora": True}),
    "biases": ("qwen2", TEXT, UNTIED, {"target_modules": ["q_proj"], "bias": "all"}),
    "all linear": ("llama", TEXT, UNTIED, {"target_modules": "all-linear"}),
    "head": ("qwen2", TEXT, UNTIED, {"target_modules": ["lm_head", "embed_tokens"]}),
    "saved": ("qwen2", TEXT, UNTIED, {"target_modules": LINEAR, "modules_to_save": ["lm_head"]}),
    "tokens": (
        "qwen2",
        TEXT,
        {"tie_word_embeddings": True},
        {"target_modules": ["q_proj"], "trainable_token_indices": [3, 5]},
    ),
    "experts": (
        "qwen3_moe",
        TEXT,
        UNTIED,
        {"target_modules": ["q_proj"], "target_parameters": EXPERTS},
    ),
    "fused": ("phi3", TEXT, UNTIED, {"target_modules": ["qkv_proj", "gate_up_proj"]}),
    "hybrid": ("qwen3_5", VISION, UNTIED, {"target_modules": ["in_proj_qkv", "out_proj"]}),
    "vision": (
        "qwen2_5_vl",
        VISION,
        {},
        {"target_modules": r".*(visual|layers).*\.(qkv|q_proj|proj|fc1)"},
    ),
}


def trained(model, folder, **settings):
    """Saves an adapter with random values; returns the model with it merged by PEFT."""
    own = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=6, **settings))
    with torch.no_grad():
        for parameter in own.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    own.save_pretrained(folder)
    return own.merge_and_unload()


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_it_is_pefts_merge(tmp_path, case):
    family, kind, sizes, settings = CASES[case]
    torch.manual_seed(0)
    folder = write_tiny(family, tmp_path / "model", **sizes)
    expected = trained(
        kind.from_pretrained(folder, dtype=torch.float32), tmp_path / "a", **settings
    )
    begun = kind.from_pretrained(folder, dtype=torch.float32).state_dict()
    merged = merge_adapter(str(folder), tmp_path / "a", tmp_path / "out")
    found = kind.from_pretrained(tmp_path / "out", dtype=torch.float32).state_dict()
    expected = expected.state_dict()
    assert found.keys() == expected.keys()
    assert any(not torch.equal(begun[name], expected[name]) for name in begun)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-5, msg=name)
    assert (merged.folder, merged.is_untied, merged.taken) == (tmp_path / "out", False, ())
    names = {path.name for path in folder.iterdir()} - {"model.safetensors"}
    assert names <= {path.name for path in (tmp_path / "out").iterdir()}
