"""Convolutions of transformers' towers compute in float32 where a CPU has no products of their
dtype, and as torch does where it has."""

import pytest
import torch
from mmdeploy_llm_plugins.transformers_parts import wide_conv
from mmdeploy_llm_plugins.transformers_parts.tower import TransformersTower
from torch import nn
from transformers import WhisperConfig
from transformers.models.whisper.modeling_whisper import WhisperEncoder

SHAPES = {
    nn.Conv1d: (2, 8, 40),
    nn.Conv2d: (2, 8, 12, 10),
    nn.Conv3d: (1, 8, 4, 6, 6),
}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "options", [{}, {"groups": 8, "bias": False}, {"padding_mode": "circular"}]
)
def test_sums_are_those_of_float32_rounded_once(kind, dtype, options, monkeypatch):
    monkeypatch.setattr(wide_conv, "has_product", lambda dtype: dtype is torch.float32)
    plain = kind(8, 16, 3, stride=2, padding=1, **options).to(dtype)
    expected = kind(8, 16, 3, stride=2, padding=1, **options)
    expected.load_state_dict({name: own.float() for name, own in plain.state_dict().items()})
    x = torch.randn(SHAPES[kind]).to(dtype)
    model = nn.Sequential(plain)
    wide_conv.widen_convolutions(model)
    assert isinstance(model[0], kind)
    found = model(x)
    assert found.dtype is dtype
    torch.testing.assert_close(found, expected(x.float()).to(dtype), rtol=0, atol=0)


def test_where_there_are_products_torch_computes(monkeypatch):
    monkeypatch.setattr(wide_conv, "has_product", lambda dtype: True)
    monkeypatch.setattr(torch.Tensor, "float", None)  # which would be called
    conv = nn.Sequential(nn.Conv1d(8, 8, 3).bfloat16())
    x = torch.randn(1, 8, 9).bfloat16()
    expected = conv(x)
    wide_conv.widen_convolutions(conv)
    assert torch.equal(conv(x), expected)


def test_a_class_of_its_own_stays():
    class Own(nn.Conv1d):
        pass

    model = nn.Sequential(Own(4, 4, 3))
    wide_conv.widen_convolutions(model)
    assert type(model[0]) is Own


def test_a_tower_has_them():
    config = WhisperConfig(
        d_model=32, encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=64, vocab_size=64
    )
    tower = TransformersTower(config, WhisperEncoder).inner
    assert {type(tower.conv1), type(tower.conv2)} == {wide_conv.WideConv1d}
