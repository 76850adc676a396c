"""Checkpoints load under their published names and under those of transformers' modules."""

import json
import shutil

import pytest
import safetensors.torch
import torch
import transformers
from mmdeploy_llm_plugins.transformers_any.model import AnyModel
from mmdeploy_llm_plugins.transformers_parts import buffers
from mmdeploy_llm_plugins.transformers_parts.tower import TransformersTower
from mmdeploy_llm_plugins.transformers_parts.weights import WeightTable

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.hooks import Checkpoint
from mmdeploy_llm.testing.checkpoint import write_checkpoint
from mmdeploy_llm.testing.tiny import make_tokenizer
from mmdeploy_llm.weights.load import build_model

MOE = {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def load(folder):
    config = transformers.AutoConfig.from_pretrained(folder)
    checkpoint = Checkpoint(folder=folder, config=config)
    return build_model(AnyModel, checkpoint, torch.float32, torch.device("cpu"))


def keys(folder):
    return set(safetensors.torch.load_file(folder / "model.safetensors"))


def assert_same(found, wanted):
    """Asserts that every parameter of transformers' model has the same value in ours."""
    ours = dict(found.inner.named_parameters(remove_duplicate=False))
    for name, value in wanted.state_dict().items():
        assert torch.equal(ours[name], value), name


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moe")
    tokenizer = make_tokenizer()
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.Qwen3MoeConfig(
        vocab_size=len(tokenizer), num_key_value_heads=2, **sizes, **MOE
    )
    return write_checkpoint(config, folder, tokenizer=tokenizer)


@pytest.mark.one_is_quick
@pytest.mark.parametrize("is_published", [True, False])
def test_experts(moe, tmp_path, is_published):
    model = transformers.Qwen3MoeForCausalLM.from_pretrained(moe, dtype=torch.float32)
    model.save_pretrained(tmp_path, save_original_format=is_published)
    assert ("model.layers.1.mlp.experts.3.up_proj.weight" in keys(tmp_path)) == is_published
    assert_same(load(tmp_path), model)


@pytest.mark.full
@pytest.mark.parametrize("is_published", [True, False])
def test_a_model_with_images(reference_of, tmp_path, is_published):
    model = reference_of("llava_onevision").model
    model.save_pretrained(tmp_path, save_original_format=is_published)
    published = "language_model.model.layers.0.self_attn.q_proj.weight"
    assert (published in keys(tmp_path)) == is_published
    assert_same(load(tmp_path), model)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("Step3p7ForConditionalGeneration", ["model.layers.1.moe.up_proj.weight"]),
        (
            "InklingForConditionalGeneration",
            [
                "model.llm.layers.0.mlp.w13_dn.weight",
                "model.llm.layers.1.mlp.shared_experts.shared_w13_weight",
            ],
        ),
    ],
)
@pytest.mark.parametrize("is_published", [True, False])
def test_gates_and_ups_of_experts(load_file, tmp_path, name, published, is_published):
    """Both in one tensor with alternating rows, or each in one tensor of all experts."""
    shrink = load_file("plugins/transformers_any/census/shrink.py")
    architecture = getattr(transformers, name)
    text = {"n_shared_experts": 2, "mlp_layer_types": ["dense", "sparse"] * 2}
    config = shrink.shrunk(architecture.config_class, text_config=text)
    model = architecture(config)
    model.save_pretrained(tmp_path, save_original_format=is_published)
    assert keys(tmp_path).issuperset(published) == is_published
    assert_same(load(tmp_path), model)


def test_a_key_without_a_place_is_an_error(moe, tmp_path):
    shutil.copytree(moe, tmp_path, dirs_exist_ok=True)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.mlp.experts.0.side_proj.weight"] = torch.zeros(2)
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"no parameters for these keys .*side_proj"):
        load(tmp_path)


def test_a_missing_expert_is_an_error(moe, tmp_path):
    shutil.copytree(moe, tmp_path, dirs_exist_ok=True)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.2.gate_proj.weight"]
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"layers\.1\.mlp\.experts\.gate_up_proj \(some values"
    ):
        load(tmp_path)


def test_a_checkpoint_that_holds_a_tied_head_too(tmp_path):
    tokenizer = make_tokenizer()
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), tie_word_embeddings=True, **sizes)
    write_checkpoint(config, tmp_path, tokenizer=tokenizer)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    model = load(tmp_path)
    assert model.inner.lm_head.weight is model.inner.model.embed_tokens.weight
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"]


def test_joined_convolutions_of_different_sizes():
    """OLMo Hybrid's values have more channels than its queries and keys."""
    config = transformers.OlmoHybridConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        linear_key_head_dim=4,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        architectures=["OlmoHybridForCausalLM"],
    )
    with torch.device("meta"):
        model = AnyModel(config)
    key = "model.layers.0.linear_attn.{}_conv1d.weight"
    rows = [model.weight_targets(key.format(part))[0].rows for part in "qkv"]
    assert rows == [slice(0, 16), slice(16, 32), slice(32, 64)]


@pytest.mark.full
@pytest.mark.parametrize("is_saved_by_transformers", [True, False])
def test_convolutions_of_different_widths(tmp_path, is_saved_by_transformers):
    """OLMo Hybrid: files have one convolution for queries, keys and values each. save_pretrained
    cuts the joined one into three that are nearly equal, whatever their widths."""
    config = transformers.OlmoHybridConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=6,
        linear_value_head_dim=10,
        pad_token_id=0,
        architectures=["OlmoHybridForCausalLM"],
    )
    torch.manual_seed(0)
    model = transformers.OlmoHybridForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    path, name = tmp_path / "model.safetensors", "model.layers.0.linear_attn.{}_conv1d.weight"
    stored = safetensors.torch.load_file(path)
    names = [name.format(letter) for letter in "qkv"]
    assert [len(stored[own]) for own in names] == [15, 15, 14]
    if not is_saved_by_transformers:
        parts = torch.cat([stored[own] for own in names]).split([12, 12, 20])
        stored |= {own: part.clone() for own, part in zip(names, parts, strict=True)}
        safetensors.torch.save_file(stored, path, {"format": "pt"})
    assert_same(load(tmp_path), model)


@pytest.mark.full
@pytest.mark.parametrize("is_published", [True, False])
def test_embeddings_of_added_tokens(tmp_path, is_published):
    """Published checkpoints of Molmo 2 have them in a tensor of their own; save_pretrained cuts the
    whole table in two halves, of which the first may have a row more."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    config = transformers.Molmo2Config(
        text_config={"vocab_size": 95, "additional_vocab_size": 8, **sizes, **heads},
        vision_config={**sizes, **heads, "image_size": [28, 28], "patch_size": 14},
        adapter_config={
            **heads,
            "hidden_size": 32,
            "intermediate_size": 48,
            "text_hidden_size": 32,
            "vision_feature_layer": [1, 0],
        },
    )
    model = transformers.Molmo2ForConditionalGeneration(config).eval()
    model.config.architectures = ["Molmo2ForConditionalGeneration"]
    model.save_pretrained(tmp_path)
    if is_published:
        path = tmp_path / "model.safetensors"
        stored = safetensors.torch.load_file(path)
        first, second = (
            next(key for key in stored if key.endswith(name))
            for name in ("wte.embedding", "wte.new_embedding")
        )
        table = torch.cat([stored[first], stored[second]])
        stored[first], stored[second] = table[:95].clone(), table[95:].clone()
        safetensors.torch.save_file(stored, path)
    assert_same(load(tmp_path), model)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("Dots1ForCausalLM", torch.bfloat16),
        ("FlintForCausalLM", torch.bfloat16),
        ("AfmoeForCausalLM", torch.float16),
    ],
)
def test_what_transformers_keeps_in_float32(load_file, tmp_path, name, dtype):
    """Routers by a pattern of the end of their names, what is made in float32, and in float16 more
    than in bfloat16."""
    shrink = load_file("plugins/transformers_any/census/shrink.py")
    architecture = getattr(transformers, name)
    config = shrink.shrunk(architecture.config_class)
    config.architectures = [name]
    write_checkpoint(config, tmp_path, tokenizer=make_tokenizer(), dtype=dtype)
    model = architecture.from_pretrained(tmp_path, dtype=dtype)
    wanted = {key: tensor.dtype for key, tensor in model.state_dict().items()}
    checkpoint = Checkpoint(folder=tmp_path, config=model.config)
    found = build_model(AnyModel, checkpoint, dtype, torch.device("cpu"))
    ours = {key: param.dtype for key, param in found.inner.named_parameters()}
    assert ours == {key: wanted[key] for key in ours}
    assert set(ours.values()) == {torch.float32, dtype}


class EncoderOfT5(TransformersTower):
    """Restores the embeddings' second name before buffers are computed, as AnyModel does."""

    def __init__(self, config):
        super().__init__(config, transformers.T5EncoderModel)
        self.ties = buffers.untie(self.inner)
        self.weight_targets = WeightTable(self.inner, "inner.", self.ties).targets

    def init_buffers(self, device):
        buffers.retie(self.inner, self.ties)
        super().init_buffers(device)


def test_an_encoder_in_float16(tmp_path):
    """T5's MLPs overflow in float16, so the second layer of each stays in float32."""
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 48}
    config = transformers.T5Config(**sizes, num_layers=2, num_heads=2)
    torch.manual_seed(0)
    transformers.T5EncoderModel(config).save_pretrained(tmp_path)
    own = transformers.T5EncoderModel.from_pretrained(tmp_path, dtype=torch.float16).eval()
    checkpoint = Checkpoint(folder=tmp_path, config=own.config)
    found = build_model(EncoderOfT5, checkpoint, torch.float16, torch.device("cpu")).inner
    wide = {name for name, param in found.named_parameters() if param.dtype == torch.float32}
    assert wide == {name for name, _ in own.named_parameters() if name.endswith(".wo.weight")}
    ids = torch.arange(5, 25).unsqueeze(0)
    with torch.inference_mode():
        ours, wanted = (each(input_ids=ids).last_hidden_state for each in (found, own))
    torch.testing.assert_close(ours, wanted, atol=4e-3, rtol=4e-3)
