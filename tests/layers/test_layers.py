"""Layers, compared with their plain formulas."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.kernels import plain
from mmdeploy_llm.layers import (
    GatedMLP,
    LayerNorm,
    MergedLinear,
    RMSNorm,
    Rotary,
    RotaryConfig,
    alternating_axes,
    quick_gelu,
    sectioned_axes,
)
from mmdeploy_llm.layers.basic import mlp as mlp_module
from mmdeploy_llm.layers.basic.experts import Experts
from mmdeploy_llm.layers.moe import Modality, ModalityMLP, MoEConfig, Router

DTYPES = (torch.float32, torch.bfloat16)


def fill(module, seed=0, dtype=None):
    """Fills a module with random weights and computes its buffers."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    for child in module.modules():
        if hasattr(child, "init_buffers"):
            child.init_buffers(torch.device("cpu"))
    return module if dtype is None else module.to(dtype)


def randn(*shape, seed=1, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class TestLinear:
    def test_parts_lie_side_by_side(self):
        merged = fill(MergedLinear(6, {"q_proj": 4, "k_proj": 2, "v_proj": 3}, bias=True))
        x = randn(5, 6)
        out = merged(x)
        for name, columns in (("q_proj", (0, 4)), ("k_proj", (4, 6)), ("v_proj", (6, 9))):
            kernel_layer = merged.parts[name]
            assert (kernel_layer.start, kernel_layer.stop) == columns
            alone = F.linear(x, merged.weight[kernel_layer], merged.bias[kernel_layer])
            torch.testing.assert_close(out[:, kernel_layer], alone)


class TestRMSNorm:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_is_bit_equal_to_the_formula(self, dtype):
        norm = fill(RMSNorm(48, 1e-5), dtype=dtype)
        x = randn(7, 48, dtype=dtype)
        before = x.clone()
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        assert torch.equal(norm(x), norm.weight * wide.to(dtype))
        assert torch.equal(x, before)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_add_is_addition_then_norm(self, dtype):
        norm = fill(RMSNorm(48, 1e-5), dtype=dtype)
        x, residual = randn(7, 48, dtype=dtype), randn(7, 48, seed=2, dtype=dtype)
        total = x + residual
        normed, new_residual = norm.add(x, residual)
        assert torch.equal(new_residual, total)
        assert torch.equal(normed, norm(total))

    def test_without_a_residual_x_starts_it(self):
        norm = fill(RMSNorm(8, 1e-5))
        x = randn(3, 8)
        normed, residual = norm.add(x, None)
        assert residual is x
        assert torch.equal(normed, norm(x))

    def test_layer_norm(self):
        norm = fill(LayerNorm(8, 1e-5))
        x = randn(3, 8)
        expected = F.layer_norm(x, (8,), norm.weight, norm.bias, 1e-5)
        assert torch.equal(norm(x), expected)


class TestRotary:
    @staticmethod
    def angles(positions, head_dim, theta):
        """Returns the angles [T, D / 2] of one position per token."""
        frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        return positions[:, None].double() * frequencies

    @pytest.mark.parametrize("is_interleaved", [False, True])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_rotates_each_pair_by_its_angle(self, is_interleaved, dtype):
        positions = torch.tensor([0, 5, 2, 700])
        config = RotaryConfig(head_dim=8, theta=100.0, is_interleaved=is_interleaved)
        rope = fill(Rotary(config))(positions)
        x = randn(4, 3, 8, dtype=dtype)
        angles = self.angles(positions, 8, 100.0)[:, None]
        wide = x.double()
        first = wide[..., 0::2] if is_interleaved else wide[..., :4]
        second = wide[..., 1::2] if is_interleaved else wide[..., 4:]
        rotated = (
            first * angles.cos() - second * angles.sin(),
            second * angles.cos() + first * angles.sin(),
        )
        expected = (
            torch.stack(rotated, -1).flatten(-2) if is_interleaved else torch.cat(rotated, -1)
        )
        found = rope.rotate(x.clone())
        assert found.dtype is dtype
        tolerance = (
            {"atol": 2e-4, "rtol": 0} if dtype is torch.float32 else {"atol": 0.02, "rtol": 0.01}
        )
        torch.testing.assert_close(found.double(), expected, **tolerance)

    @pytest.mark.parametrize("is_interleaved", [False, True])
    def test_heads_may_be_a_slice_of_a_wider_tensor(self, is_interleaved):
        rope = fill(Rotary(RotaryConfig(head_dim=8, is_interleaved=is_interleaved)))(
            torch.arange(4)
        )
        wide = randn(4, 5, 8)
        alone = rope.rotate(wide[:, :3].clone())
        torch.testing.assert_close(rope.rotate(wide[:, :3]), alone)

    @pytest.mark.parametrize("axes", [sectioned_axes((2, 1, 1)), alternating_axes((1, 1, 2))])
    def test_equal_axes_are_one_position(self, axes):
        plain = fill(Rotary(RotaryConfig(head_dim=8)))
        by_axis = fill(Rotary(RotaryConfig(head_dim=8, axes=axes)))
        positions = torch.tensor([3, 1, 4, 15])
        x = randn(4, 2, 8)
        expected = plain(positions).rotate(x.clone())
        assert torch.equal(by_axis(positions.expand(3, -1)).rotate(x), expected)

    def test_axes_of_both_families(self):
        assert sectioned_axes((2, 3, 1)) == (0, 0, 1, 1, 1, 2)
        assert alternating_axes((2, 2, 3)) == (1, 2, 1, 2, 0, 0, 0)
        with pytest.raises(ValueError, match="equally many"):
            alternating_axes((2, 3, 1))

    def test_scale_lengthens_the_vectors(self):
        rope = fill(Rotary(RotaryConfig(head_dim=8, scale=2.0)))(torch.tensor([9]))
        x = randn(1, 1, 8)
        torch.testing.assert_close(rope.rotate(x.clone()).norm(), 2 * x.norm())


class TestRowParts:
    @pytest.mark.parametrize("num_rows", [0, 1, 64, 65, 128, 1000])
    def test_parts_are_whole_tiles_that_cover_all_rows(self, num_rows):
        parts = plain.row_chunks(torch.zeros(num_rows, 3), 10, 1300)
        covered = [row for part in parts for row in range(part.start, part.stop)]
        assert covered == list(range(num_rows))
        assert all(part.start % plain.TILE == 0 for part in parts)
        assert all(part.stop - part.start <= 128 for part in parts)

    def test_a_wide_row_still_gives_a_tile(self):
        assert plain.row_chunks(torch.zeros(70, 3), 10**9, 1) == [slice(0, 64), slice(64, 70)]

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_norm_and_rotary_in_chunks_equal_the_whole(self, dtype, monkeypatch):
        x = randn(200, 32, dtype=dtype)
        norm = fill(RMSNorm(32, 1e-5), dtype=dtype)
        ropes = [
            fill(Rotary(RotaryConfig(head_dim=8, is_interleaved=flag)))(torch.arange(200))
            for flag in (False, True)
        ]

        def compute():
            return [norm(x), *(rope.rotate(x.view(200, 4, 8).clone()) for rope in ropes)]

        whole = compute()
        monkeypatch.setattr(plain, "MAX_VALUES", 1)
        for found, expected in zip(compute(), whole, strict=True):
            assert torch.equal(found, expected)


class TestMLP:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("num_rows", [5, 64, 65, 300])
    @pytest.mark.parametrize("max_values", [1, 24 * 128, 2**20])
    def test_any_split_of_the_rows(self, dtype, num_rows, max_values, monkeypatch):
        monkeypatch.setattr(mlp_module, "MAX_VALUES", max_values)
        mlp = fill(GatedMLP(16, 24, bias=True), dtype=dtype)
        x = randn(num_rows, 16, dtype=dtype)
        gate, up = mlp.gate_up_proj(x).chunk(2, -1)
        torch.testing.assert_close(mlp(x), mlp.down_proj(F.silu(gate) * up))

    def test_quick_gelu(self):
        x = randn(5, 5)
        torch.testing.assert_close(quick_gelu(x), x * torch.sigmoid(1.702 * x))


class TestMoE:
    config = MoEConfig(num_experts=5, top_k=2, intermediate_size=12)

    def test_router_chooses_by_corrected_scores_and_weighs_by_scores(self):
        router = fill(Router(8, self.config))
        router.correction_bias.data = torch.tensor([[0.0, 0.0, 9.0, 0.0, 0.0]])
        x = randn(6, 8)
        weights, experts = router(x)
        scores = F.linear(x, router.weight).softmax(-1)
        assert (experts[:, 0] == 2).all()  # whatever its score
        chosen = scores.gather(1, experts)
        torch.testing.assert_close(weights, chosen / chosen.sum(-1, keepdim=True))

    def test_experts_equal_one_token_at_a_time(self):
        experts = fill(Experts(5, 8, 12))
        x = randn(9, 8)
        ids = torch.stack([torch.randperm(4)[:2] for _ in range(9)])  # expert 4 gets nothing
        weights = torch.rand(9, 2)
        expected = torch.zeros(9, 8)
        for token in range(9):
            for expert, weight in zip(ids[token].tolist(), weights[token], strict=True):
                gate, up = (experts.gate_up_proj[expert] @ x[token]).chunk(2)
                expected[token] += weight * (experts.down_proj[expert] @ (F.silu(gate) * up))
        torch.testing.assert_close(experts(x, weights, ids), expected)

    def test_no_tokens(self):
        experts = fill(Experts(5, 8, 12))
        nothing = torch.zeros(0, 2, dtype=torch.int64)
        assert experts(randn(0, 8), torch.zeros(0, 2), nothing).shape == (0, 8)

    @pytest.mark.parametrize("media", [[], [1, 2, 4], [0, 1, 2, 3, 4, 5]])
    def test_each_token_goes_to_the_experts_of_its_modality(self, media):
        config = MoEConfig(
            num_experts=4,
            top_k=2,
            intermediate_size=12,
            vision_intermediate_size=6,
            shared_size=10,
        )
        mlp = fill(ModalityMLP(8, config))
        x = randn(6, 8)
        is_vision = torch.zeros(6, dtype=torch.bool)
        is_vision[media] = True
        routed = torch.where(is_vision[:, None], mlp.vision_moe(x), mlp.text_moe(x))
        expected = routed + mlp.shared_experts(x)
        torch.testing.assert_close(mlp(x, Modality(is_vision)), expected)

    def test_no_media_need_no_split(self):
        assert Modality(torch.zeros(3, dtype=torch.bool)).rows is None


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 24), (7, 24), (3, 2, 24)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_dtype_on_a_cpu_without_it(monkeypatch, has_bias, shape, dtype):
    """Torch multiplies in float32, some rows of the weight at once; with one row alone its own
    product is as fast."""
    x, weight = torch.randn(shape).to(dtype), torch.randn(20, 24).to(dtype)
    bias = torch.randn(20).to(dtype) if has_bias else None
    expected = F.linear(x, weight, bias)
    monkeypatch.setattr(plain, "has_product", lambda _: False)
    monkeypatch.setattr(plain, "WIDE_VALUES", 8 * 24)
    monkeypatch.setattr(plain, "MIN_WIDE_ROWS", 1)
    dtypes, multiply = [], F.linear

    def watched(x, *args):
        dtypes.append(x.dtype)
        return multiply(x, *args)

    monkeypatch.setattr(F, "linear", watched)
    found = plain.linear(x, weight, bias)
    torch.testing.assert_close(found, expected, atol=0.05, rtol=2**-7)
    assert dtypes == ([dtype] if len(x) == 1 else [torch.float32] * 3)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"axes": (0, 1, 2)}, "axes for 3 pairs"),
        ({"axes": (0,) * 9}, "axes for 9 pairs"),
        ({"axes": (0, 1, 2, 3, 0, 0, 0, 0)}, "more than 3 axes"),
        ({"axes": (0, -1, 0, 0, 0, 0, 0, 0)}, "more than 3 axes"),
        ({"frequencies": (1.0,) * 4}, "frequencies for 4 pairs"),
        ({"long_frequencies": (1.0,) * 16}, "long_frequencies for 16 pairs"),
        ({"rotary_dim": 8, "axes": (0,) * 8}, "rotate 4 pairs"),
    ],
)
def test_a_rotary_embedding_has_values_for_each_pair(wrong, message):
    """Kernels read them without looking: a config that says otherwise ended the process."""
    with pytest.raises(CheckpointError, match=message):
        RotaryConfig(head_dim=16, **wrong)
