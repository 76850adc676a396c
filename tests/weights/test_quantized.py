"""Quantised checkpoints are dequantised to the last bit as the libraries that own the formats do
it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.weights.quantized.settings import quantization_settings

from .packing import awq_tensors, gptq_tensors, grouped, random_codes
from .readable import tensors_seen

LAYER = "model.layers.0.mlp.up_proj"


@pytest.fixture
def read(tmp_path):
    """Returns a function that writes tensors and reads all that a model would see, by key."""

    def run(tensors, **settings):
        save_file({k: t.contiguous() for k, t in tensors.items()}, tmp_path / "model.safetensors")
        config = SimpleNamespace(quantization_config=settings)
        return tensors_seen(tmp_path / "model.safetensors", config)

    return run


@pytest.fixture
def random():
    return torch.Generator().manual_seed(0)


class TestGPTQ:
    @pytest.mark.one_is_quick
    @pytest.mark.parametrize("num_bits", [4, 8])
    @pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
    @pytest.mark.parametrize("has_order", [False, True])
    def test_values(self, read, random, num_bits, version, has_order):
        n, k, size = 16, 64, 32
        codes, zeros, scales = random_codes(n, k, size, random, num_bits)
        group_of = torch.arange(k) // size
        if has_order:
            group_of = group_of[torch.randperm(k, generator=random)]
        stored = gptq_tensors(
            LAYER, codes, zeros, scales, group_of, num_bits=num_bits, version=version
        )
        found = read(
            {**stored, "norm.weight": torch.ones(3)},
            quant_method="gptq",
            bits=num_bits,
            group_size=size,
            checkpoint_format=version,
        )
        assert sorted(found) == [f"{LAYER}.weight", "norm.weight"]
        assert torch.equal(found[f"{LAYER}.weight"], grouped(codes, zeros, scales, group_of))

    def test_a_zero_point_of_0_borrows_from_its_neighbour(self, read):
        """The first version lowers whole words by one in each value, as GPTQModel does."""
        zeros = torch.tensor([0, 5, 15, 0, 1, 0, 9, 7])
        word = sum(int(zero) << 4 * i for i, zero in enumerate(zeros)) - 0x1111_1111
        tensors = {
            f"{LAYER}.qweight": torch.zeros(1, 8, dtype=torch.int32),
            f"{LAYER}.qzeros": torch.tensor([[word]], dtype=torch.int32),
            f"{LAYER}.scales": torch.ones(1, 8).half(),
        }
        found = read(tensors, quant_method="gptq", bits=4, group_size=8)[f"{LAYER}.weight"]
        assert torch.equal(found[:, 0], -zeros.half())

    def test_an_output_head_in_floats_beside_the_quantised_one_is_not_read(self, read, random):
        codes, zeros, scales = random_codes(16, 64, 32, random)
        group_of = torch.arange(64) // 32
        tensors = gptq_tensors("lm_head", codes, zeros, scales, group_of)
        found = read({**tensors, "lm_head.weight": torch.ones(16, 64)}, quant_method="gptq", bits=4)
        assert torch.equal(found["lm_head.weight"], grouped(codes, zeros, scales, group_of))

    def test_groups_that_divide_no_columns(self, read):
        tensors = {
            f"{LAYER}.qweight": torch.zeros(8, 8, dtype=torch.int32),
            f"{LAYER}.qzeros": torch.zeros(3, 1, dtype=torch.int32),
            f"{LAYER}.scales": torch.ones(3, 8).half(),
        }
        with pytest.raises(CheckpointError, match=r"3 groups for 64 columns.* are 2: config\.json"):
            read(tensors, quant_method="gptq", bits=4, group_size=32)

    def test_a_group_that_is_not_there(self, read):
        tensors = {
            f"{LAYER}.qweight": torch.zeros(4, 8, dtype=torch.int32),
            f"{LAYER}.qzeros": torch.zeros(1, 1, dtype=torch.int32),
            f"{LAYER}.scales": torch.ones(1, 8).half(),
            f"{LAYER}.g_idx": torch.full((32,), 7, dtype=torch.int32),
        }
        with pytest.raises(CheckpointError, match=r"up_proj\.g_idx names groups 7 to 7"):
            read(tensors, quant_method="gptq", bits=4, group_size=32)


def test_awq(read, random):
    n, k, size = 16, 64, 32
    codes, zeros, scales = random_codes(n, k, size, random)
    stored = awq_tensors(LAYER, codes, zeros, scales)
    found = read(stored, quant_method="awq", bits=4, group_size=size, version="gemm")
    wanted = grouped(codes, zeros, scales, torch.arange(k) // size)
    assert torch.equal(found[f"{LAYER}.weight"], wanted)


@pytest.mark.one_is_quick
@pytest.mark.parametrize("block", [(128, 128), (32, 64), None])
@pytest.mark.parametrize("scale", [torch.float32, torch.bfloat16, torch.uint8])
def test_fp8(read, random, block, scale):
    n, k = 256, 128
    weight = torch.randn(n, k, generator=random).to(torch.float8_e4m3fn)
    rows, columns = block or (n, k)
    shape = (n // rows, k // columns)
    if scale is torch.uint8:
        scales = torch.randint(110, 130, shape, generator=random).to(torch.uint8)
    else:
        scales = torch.rand(shape, generator=random).to(scale)
    tensors = {f"{LAYER}.weight": weight, f"{LAYER}.weight_scale_inv": scales}
    found = read(tensors, quant_method="fp8", weight_block_size=block)
    for dtype in (torch.float32, torch.bfloat16):
        wanted = Fp8Dequantize(None)._dequantize_one(weight, scales, output_dtype=dtype)
        assert torch.equal(found[f"{LAYER}.weight"].to(dtype), wanted)


def test_fp8_blocks_that_do_not_fill_the_weight(read, random):
    weight = torch.randn(40, 72, generator=random).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3, generator=random)
    tensors = {f"{LAYER}.weight": weight, f"{LAYER}.weight_scale_inv": scales}
    found = read(tensors, quant_method="fp8", weight_block_size=(32, 32))[f"{LAYER}.weight"]
    for row, column in ((0, 0), (31, 31), (32, 63), (39, 71)):
        wanted = weight[row, column].float() * scales[row // 32, column // 32]
        assert found[row, column] == wanted


def test_mxfp4(read, random):
    blocks = torch.randint(0, 256, (3, 8, 2, 16), generator=random).to(torch.uint8)
    scales = torch.randint(100, 140, (3, 8, 2), generator=random).to(torch.uint8)
    name = "model.layers.0.mlp.experts.down_proj"
    tensors = {f"{name}_blocks": blocks, f"{name}_scales": scales}
    found = read(tensors, quant_method="mxfp4")
    assert torch.equal(found[name], convert_moe_packed_tensors(blocks, scales))


class TestCompressedTensors:
    """Files that the library compressed are read as it decompresses them."""

    @pytest.fixture
    def library(self):
        return pytest.importorskip(
            "compressed_tensors", reason="needs compressed-tensors, the format's own library"
        )

    @pytest.mark.one_is_quick
    @pytest.mark.parametrize(
        ("kind", "weights"),
        [
            ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
            (
                "pack-quantized",
                {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
            ),
            ("pack-quantized", {"num_bits": 8, "strategy": "channel"}),
            ("pack-quantized", {"num_bits": 4, "strategy": "channel", "symmetric": False}),
            ("pack-quantized", {"num_bits": 3, "strategy": "group", "group_size": 64}),
            ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
            ("int-quantized", {"num_bits": 8, "strategy": "tensor"}),
            ("int-quantized", {"num_bits": 4, "strategy": "channel"}),
            ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
            ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
            (
                "float-quantized",
                {
                    "num_bits": 8,
                    "type": "float",
                    "strategy": "block",
                    "block_structure": [32, 64],
                },
            ),
            (
                "nvfp4-pack-quantized",
                {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
            ),
            (
                "mxfp4-pack-quantized",
                {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
            ),
        ],
    )
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_values(self, library, read, random, kind, weights, dtype):
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

        n, k = 64, 128
        args = QuantizationArgs(**{"type": "int", "symmetric": True, **weights})
        if kind.startswith("mxfp4"):
            args.scale_dtype = torch.uint8
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        compressor = BaseCompressor.get_value_from_registry(kind)
        state = {"weight": torch.randn(n, k, generator=random).to(dtype)}
        state.update(scales_of(weights, n, k, random, dtype))
        stored = compressor.compress(dict(state), scheme)
        wanted = compressor.decompress(dict(stored), scheme)["weight"]
        group = {"targets": ["Linear"], "weights": weights}
        found = read(
            {f"{LAYER}.{name}": tensor for name, tensor in stored.items()},
            quant_method="compressed-tensors",
            format=kind,
            config_groups={"group_0": group},
        )
        assert list(found) == [f"{LAYER}.weight"]
        assert torch.equal(found[f"{LAYER}.weight"].to(wanted.dtype), wanted)

    def test_groups_are_found_by_name_pattern_and_class(self, read):
        def group(size, *targets):
            return {"targets": targets, "weights": {"strategy": "group", "group_size": size}}

        names = ("a.first", "a.second", "a.third")
        tensors = {}
        for name, size in zip(names, (4, 8, 16), strict=True):
            tensors[f"{name}.weight"] = torch.ones(2, 16, dtype=torch.int8)
            tensors[f"{name}.weight_scale"] = torch.full((2, 16 // size), float(size))
        found = read(
            tensors,
            format="int-quantized",
            config_groups={
                "all": group(16, "Linear"),
                "one": group(4, "a.first"),
                "pattern": group(8, "re:.*second$"),
            },
        )
        assert [float(found[f"{name}.weight"][0, 0]) for name in names] == [4, 8, 16]


def scales_of(weights, n, k, random, dtype):
    """Returns random scales, and zero points where the scheme has them, as the library stores
    them."""
    shape = {
        "group": (n, k // weights.get("group_size", k)),
        "tensor_group": (n, k // weights.get("group_size", k)),
        "channel": (n, 1),
        "tensor": (1,),
        "block": (n // 32, k // 64),
    }[weights["strategy"]]
    state = {"weight_scale": (torch.rand(shape, generator=random) + 0.1).to(dtype)}
    if weights["strategy"] == "tensor_group":
        state["weight_global_scale"] = torch.tensor([3.0])
    if not weights.get("symmetric", True):
        zeros = torch.randint(-8, 8, shape, generator=random)
        state["weight_zero_point"] = zeros.to(torch.int8)
    return state


WORDS = torch.zeros(2, 2, dtype=torch.int32)


def test_weights_that_were_dequantised_are_read_as_they_are(read):
    weight = torch.rand(2, 3)
    found = read({"a.weight": weight}, quant_method="gptq", bits=4)
    assert torch.equal(found["a.weight"], weight)


class TestRefusals:
    def test_an_unknown_method(self, read):
        with pytest.raises(CheckpointError, match="'bitsandbytes' quantised the weights, which is"):
            read({"a.weight": torch.ones(2, dtype=torch.uint8)}, quant_method="bitsandbytes")

    def test_an_unknown_method_whose_weights_are_plain(self, read):
        """They may be the values that the method has still to transform."""
        with pytest.raises(CheckpointError, match="'spinquant' quantised the weights, which is"):
            read({"a.weight": torch.rand(2, 3)}, quant_method="spinquant")

    @pytest.mark.one_is_quick
    @pytest.mark.parametrize("method", ["gptq", "awq", "auto-round"])
    @pytest.mark.parametrize("size", [0, -5, 2**40, "32", 32.0, True, [32]])
    def test_a_group_size_that_is_none(self, read, method, size):
        with pytest.raises(CheckpointError, match=r"quantization_config\.group_size of config"):
            read({"a.qweight": WORDS}, quant_method=method, bits=4, group_size=size)

    @pytest.mark.one_is_quick
    @pytest.mark.parametrize("size", [0, -5, 2**40, "32"])
    def test_a_group_size_of_compressed_tensors(self, read, size):
        weights = {"num_bits": 4, "strategy": "group", "group_size": size}
        groups = {"one": {"targets": ["Linear"], "weights": weights}}
        with pytest.raises(CheckpointError, match=r"weights\.group_size of config"):
            read({"a.weight_scale": WORDS}, format="pack-quantized", config_groups=groups)

    @pytest.mark.one_is_quick
    @pytest.mark.parametrize(
        ("method", "name"), [("gptq", "desc_act"), ("gptq", "sym"), ("awq", "zero_point")]
    )
    @pytest.mark.parametrize("value", ["yes", 1, "true"])
    def test_a_flag_that_is_none(self, read, method, name, value):
        with pytest.raises(CheckpointError, match=rf"quantization_config\.{name} of config"):
            read({"a.qweight": WORDS}, **{"quant_method": method, "bits": 4, name: value})

    def test_an_unknown_scheme_names_the_layer(self, read):
        tensors = {f"{LAYER}.qweight": torch.zeros(1, 1, dtype=torch.int32)}
        with pytest.raises(
            CheckpointError, match=rf"layer {LAYER} is quantised by GPTQ with 5 bits"
        ):
            read(tensors, quant_method="gptq", bits=5)
        with pytest.raises(CheckpointError, match=rf"layer {LAYER} .* version 'gemv'"):
            read(tensors, quant_method="awq", bits=4, version="gemv")

    def test_a_setting_of_the_wrong_type(self, read):
        with pytest.raises(CheckpointError, match=r"quantization_config\.bits of config\.json"):
            read({"a.qweight": WORDS}, quant_method="gptq", bits="many")

    @pytest.mark.one_is_quick
    @pytest.mark.parametrize("pattern", ["(a+)+$", "(.*.*)*x", ".*.*.*.*x", "(", "x" * 501])
    def test_a_pattern_that_is_made_to_hurt(self, read, pattern):
        tensors = {f"{LAYER}.weight_scale": torch.ones(1), f"{LAYER}.weight": WORDS}
        group = {"targets": [f"re:{pattern}"], "weights": {"num_bits": 8}}
        with pytest.raises(CheckpointError, match=r"has the (malformed )?pattern"):
            read(tensors, format="int-quantized", config_groups={"one": group})

    @pytest.mark.parametrize("values", [5, [1], "awq"])
    def test_no_object(self, values):
        with pytest.raises(CheckpointError, match="must be an object"):
            quantization_settings(SimpleNamespace(quantization_config=values))

    @pytest.mark.parametrize(
        ("method", "settings", "tensors"),
        [
            ("awq", {}, {"qweight": [4], "qzeros": [4], "scales": [4]}),
            ("gptq", {"bits": 4}, {"qweight": [0, 4], "qzeros": [1, 1], "scales": [1, 4]}),
            ("gptq", {"bits": 4}, {"qweight": [4, 4, 4], "qzeros": [4], "scales": [4]}),
        ],
    )
    def test_parts_that_are_no_matrices(self, read, method, settings, tensors):
        stored = {
            f"{LAYER}.{name}": torch.zeros(shape, dtype=torch.int32)
            for name, shape in tensors.items()
        }
        with pytest.raises(CheckpointError, match="must be a matrix"):
            read(stored, quant_method=method, **settings)

    def test_a_block_of_no_size(self, read):
        with pytest.raises(CheckpointError, match=r"quantization_config\.weight_block_size\.0"):
            read({"a.qweight": WORDS}, quant_method="fp8", weight_block_size=[0, 4])

    def test_a_missing_part(self, read):
        tensors = {f"{LAYER}.qweight": torch.zeros(4, 8, dtype=torch.int32)}
        with pytest.raises(CheckpointError, match=rf"{LAYER} has no tensor {LAYER}.qzeros"):
            read(tensors, quant_method="gptq", bits=4)

    def test_a_part_of_another_shape(self, read):
        tensors = {
            f"{LAYER}.weight": torch.zeros(64, 64).to(torch.float8_e4m3fn),
            f"{LAYER}.weight_scale_inv": torch.ones(3, 3),
        }
        with pytest.raises(CheckpointError, match=r"is float32 \[3, 3\], but must be .* \[2, 2\]"):
            read(tensors, quant_method="fp8", weight_block_size=(32, 32))
