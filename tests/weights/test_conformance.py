"""The formats that come with the engine pass the checks of an author's format."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from mmdeploy_llm.hooks import PluginManager, WeightFormatSpec
from mmdeploy_llm.testing import WeightFormatConformance
from mmdeploy_llm.testing.weights.subject import WeightFormatSubject

from .packing import awq_tensors, gptq_tensors, words_of

SIZE = 32  # columns of a group
MAX_FP8 = 448.0


def spec_of(name):
    return PluginManager.load(plugins=("quantized",)).named(WeightFormatSpec, "weight format", name)


def rounded(weight):
    """Rounds to 4 bits in groups: codes [n, k], zeros and scales [n, G]."""
    n, k = weight.shape
    if n % 8 or k % SIZE:
        raise ValueError("words hold 8 outputs, groups 32 columns")
    groups = weight.view(n, -1, SIZE)
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scales = ((high - low) / 15).half()
    zeros = (-low / scales.float()).round().clamp(1, 15).int()
    codes = (groups / scales.float()[..., None]).round() + zeros[..., None]
    return codes.clamp(0, 15).int().view(n, k), zeros, scales


def awq(weight):
    return awq_tensors("", *rounded(weight)), {
        "quant_method": "awq",
        "bits": 4,
        "group_size": SIZE,
        "version": "gemm",
        "zero_point": True,
    }


def gptq(weight):
    group_of = torch.arange(weight.shape[1]) // SIZE
    settings = {"quant_method": "gptq", "bits": 4, "group_size": SIZE, "desc_act": False}
    return gptq_tensors("", *rounded(weight), group_of), settings


def autoround(weight):
    settings = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}
    return gptq(weight)[0], {**settings, "bits": 4, "group_size": SIZE}


def compressed(kind, **weights):
    group = {"targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": group},
    }


def packed(weight):
    codes, zeros, scales = rounded(weight)
    tensors = {
        ".weight_packed": words_of(codes, 4),
        ".weight_scale": scales,
        ".weight_zero_point": words_of(zeros.T, 4).T,
        ".weight_shape": torch.tensor(weight.shape),
    }
    settings = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": SIZE}
    return tensors, compressed("pack-quantized", **settings, symmetric=False)


def by_row(weight):
    scales = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scales).round().to(torch.int8)
    tensors = {".weight": codes, ".weight_scale": scales}
    return tensors, compressed("int-quantized", num_bits=8, type="int", strategy="channel")


def fp8(weight):
    n, k = weight.shape
    if n % SIZE or k % SIZE:
        raise ValueError("whole blocks, for the test's sake")
    blocks = weight.view(n // SIZE, SIZE, k // SIZE, SIZE)
    scales = blocks.abs().amax((1, 3)) / MAX_FP8
    codes = (blocks / scales[:, None, :, None]).view(n, k).to(torch.float8_e4m3fn)
    tensors = {".weight": codes, ".weight_scale_inv": scales}
    return tensors, {"quant_method": "fp8", "weight_block_size": [SIZE, SIZE]}


class Format(WeightFormatConformance):
    """Settings of other libraries have notes of their own."""

    __test__ = False
    shapes = ((64, 64), (48, 96))
    ignores_unknown_settings = True


class TestAWQ(Format):
    __test__ = True
    spec, quantise = spec_of("awq"), staticmethod(awq)


@pytest.mark.full
class TestGPTQ(Format):
    __test__ = True
    spec, quantise = spec_of("gptq"), staticmethod(gptq)


@pytest.mark.full
class TestAutoRound(Format):
    __test__ = True
    spec, quantise = spec_of("auto-round"), staticmethod(autoround)


class TestFP8(Format):
    __test__ = True
    spec, quantise = spec_of("fp8"), staticmethod(fp8)


class TestPacked(Format):
    __test__ = True
    spec, quantise = spec_of("compressed-tensors"), staticmethod(packed)


@pytest.mark.full
class TestByRow(Format):
    __test__ = True
    spec, quantise = spec_of("compressed-tensors"), staticmethod(by_row)


class TestMXFP4(Format):
    """A checkpoint of which another library says what it holds."""

    __test__ = True
    spec = spec_of("mxfp4")

    @staticmethod
    def reference(tensors, settings):
        names = [key.removesuffix("_blocks") for key in tensors if key.endswith("_blocks")]
        return {
            name: convert_moe_packed_tensors(tensors[f"{name}_blocks"], tensors[f"{name}_scales"])
            for name in names
        }

    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls, tmp_path_factory):
        folder, random = tmp_path_factory.mktemp("mxfp4"), torch.Generator().manual_seed(0)
        blocks = torch.randint(0, 256, (3, 8, 2, 16), generator=random).to(torch.uint8)
        scales = torch.randint(100, 140, (3, 8, 2), generator=random).to(torch.uint8)
        tensors = {"experts.down_proj_blocks": blocks, "experts.down_proj_scales": scales}
        save_file(tensors, folder / "model.safetensors")
        config = {"quantization_config": {"quant_method": "mxfp4"}}
        (folder / "config.json").write_text(json.dumps(config))
        return WeightFormatSubject(
            spec=cls.spec, folder=folder, reference=cls.reference, ignores_unknown_settings=True
        )
