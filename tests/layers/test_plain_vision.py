"""The plain vision transformer against transformers' SigLIP, and the order of its patches."""

import pytest
import torch
from transformers import SiglipVisionConfig, SiglipVisionModel

from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.layers import PlainVisionConfig, PlainVisionEncoder, in_blocks
from mmdeploy_llm.testing.tiny import randomize

SIDE, PATCH, SIZE = 6, 5, 24  # patches and pixels along a side, channels
NAMES = (
    ("vision_model.", ""),
    ("embeddings.patch_embedding.", "patch_embed.proj."),
    ("embeddings.position_embedding.weight", "positions"),
    ("encoder.layers.", "blocks."),
    (".layer_norm", ".norm"),
    (".self_attn.out_proj.", ".attn.proj."),
)


def tower(**options):
    sizes = {"size": SIZE, "intermediate_size": 40, "num_layers": 2, "num_heads": 3}
    patches = {"image_side": SIDE, "patch_size": PATCH, "merge_size": 2}
    config = {**sizes, **patches, "norm_eps": 1e-6, "activation": "gelu_pytorch_tanh", **options}
    return PlainVisionEncoder(PlainVisionConfig(**config)).requires_grad_(False)


def siglip():
    config = SiglipVisionConfig(
        hidden_size=SIZE,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=3,
        image_size=SIDE * PATCH,
        patch_size=PATCH,
        vision_use_head=False,
    )
    model = SiglipVisionModel(config).eval()
    torch.manual_seed(0)
    randomize(model)
    for module in model.modules():
        if hasattr(module, "post_layernorm"):
            module.post_layernorm = torch.nn.Identity()
    return model


def load(encoder, model):
    """Copies the weights; query, key and value become one matrix."""
    parameters = dict(encoder.named_parameters())
    filled = set()
    for key, value in model.state_dict().items():
        for theirs, ours in NAMES:
            key = key.replace(theirs, ours)
        part = next((part for part in "qkv" if f".self_attn.{part}_proj." in key), None)
        if part is not None:
            key = key.replace(f".self_attn.{part}_proj.", ".attn.qkv.")
            start = "qkv".index(part) * SIZE
            parameters[key][start : start + SIZE] = value
        else:
            parameters[key].copy_(value)
        filled.add(key)
    assert filled == set(parameters)


def test_siglip_of_transformers():
    model, encoder = siglip(), tower()
    load(encoder, model)
    images = torch.randn(2, 3, SIDE * PATCH, SIDE * PATCH)
    cells = images.view(2, 3, SIDE // 2, 2, PATCH, SIDE // 2, 2, PATCH)
    pixels = cells.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(2 * SIDE**2, -1)
    with torch.inference_mode():
        found = encoder(pixels).view(2, SIDE**2, SIZE)
        lines = model(images).last_hidden_state
    expected = torch.stack([in_blocks(image, SIDE, 2) for image in lines])
    assert torch.allclose(found, expected, atol=1e-5)


def test_blocks_are_contiguous():
    rows = torch.arange(16)[:, None]
    assert in_blocks(rows, 4, 2)[:8, 0].tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    assert torch.equal(in_blocks(rows, 4, 1), rows)
    assert torch.equal(in_blocks(rows, 4, 4), rows)


def test_an_unknown_activation():
    with pytest.raises(ModelNotSupportedError, match="hidden_act 'softplus'"):
        tower(activation="softplus")
