"""Experts on the device, compared with the loop over experts."""

import pytest
import torch

from mmdeploy_llm.kernels import RouteRule
from mmdeploy_llm.layers.basic.experts import Experts
from mmdeploy_llm.layers.install import install_kernels
from mmdeploy_llm.layers.moe import Modality, ModalityMLP, MoEConfig, SparseMLP
from mmdeploy_llm.testing.tiny import randomize_empty


def filled(module, device, dtype=torch.float32):
    torch.manual_seed(3)
    randomize_empty(module)
    return module.to(device, dtype)


def routed(num_tokens, num_experts, top_k, size, device, dtype):
    """Returns routes where experts above num_experts / 2 get no tokens; weights are 0.1 to 1.1."""
    used = max(top_k, num_experts // 2)
    ids = torch.stack([torch.randperm(used)[:top_k] for _ in range(num_tokens)])
    x, weights = torch.randn(num_tokens, size), torch.rand(num_tokens, top_k) + 0.1
    return x.to(device, dtype), weights.to(device, dtype), ids.to(device)


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "size", "inner"),
    [
        (1, 6, 2, 32, 24),
        (7, 4, 1, 40, 17),
        pytest.param(40, 5, 3, 20, 70, marks=pytest.mark.full),
        pytest.param(90, 2, 2, 150, 33, marks=pytest.mark.full),
    ],
)
def test_equal_to_the_loop(
    kernels, dtypes, triton_device, assert_near, num_tokens, num_experts, top_k, size, inner
):
    for dtype in dtypes:
        experts = filled(Experts(num_experts, size, inner), triton_device, dtype)
        given = routed(num_tokens, num_experts, top_k, size, triton_device, dtype)
        expected = experts(*given)
        install_kernels(experts, kernels)
        assert_near(experts(*given), expected)


@pytest.mark.parametrize("max_ranked", [0, 4096])
def test_routes_are_sorted(triton_device, monkeypatch, max_ranked):
    """Both by the kernel and by torch."""
    from mmdeploy_llm.kernels.cuda import experts

    monkeypatch.setattr(experts, "MAX_RANKED", max_ranked)
    ids = torch.randint(0, 8, (150,), device=triton_device)  # 7 is no expert
    routes = experts.sort_routes(ids, 7)
    order = ids.sort(stable=True).indices
    assert routes.order.tolist() == order.tolist()
    assert routes.ends.tolist() == ids.bincount(minlength=8).cumsum(0)[:7].tolist()


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("is_by_torch", [False, True])
def test_routes_to_no_expert_add_nothing(kernels, triton_device, monkeypatch, is_by_torch):
    """Also with torch's grouped product, which leaves their rows undefined."""
    from mmdeploy_llm.kernels.cuda import experts as module

    monkeypatch.setattr(module, "_can_use_torch", lambda *_: is_by_torch)
    experts = filled(Experts(4, 16, 8), triton_device)
    x, weights, ids = routed(9, 4, 2, 16, triton_device, torch.float32)
    expected = experts(x, weights, ids)
    install_kernels(experts, kernels)
    left_out = torch.arange(9, device=triton_device) % 3 == 0
    found = experts(x, weights, ids.masked_fill(left_out[:, None], 4))
    assert found[left_out].eq(0).all()
    torch.testing.assert_close(found[~left_out], expected[~left_out])
    assert experts(x, weights, torch.full_like(ids, 4)).eq(0).all()


def test_no_tokens(kernels, triton_device):
    experts = filled(Experts(4, 16, 8), triton_device)
    install_kernels(experts, kernels)
    given = routed(1, 4, 2, 16, triton_device, torch.float32)
    assert experts(*(x[:0] for x in given)).shape == (0, 16)


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    "options",
    [
        {"router": "corrected"},
        {"router": "corrected", "norm_min": 0.8},
        pytest.param({"router": "softmax"}, marks=pytest.mark.full),
        pytest.param(
            {"router": "softmax", "is_normed": False, "is_shared_gated": True},
            marks=pytest.mark.full,
        ),
    ],
)
def test_sparse_mlp(kernels, triton_device, options):
    config = MoEConfig(num_experts=6, top_k=3, intermediate_size=12, shared_size=10, **options)
    mlp = filled(SparseMLP(16, config), triton_device)
    x = torch.randn(11, 16, device=triton_device)
    expected = mlp(x)
    install_kernels(mlp, kernels)
    torch.testing.assert_close(mlp(x), expected)


@pytest.mark.one_is_quick
@pytest.mark.parametrize("media", [[], [1, 2, 4], [0, 1, 2, 3, 4, 5]])
def test_modalities_need_no_split(kernels, triton_device, media, monkeypatch):
    """Each token gets the same experts as with a split by rows, which the host would have to
    count."""
    config = MoEConfig(
        num_experts=4, top_k=2, intermediate_size=12, vision_intermediate_size=6, shared_size=10
    )
    mlp = filled(ModalityMLP(8, config), triton_device)
    x = torch.randn(6, 8, device=triton_device)
    is_vision = torch.zeros(6, dtype=torch.bool, device=triton_device)
    is_vision[media] = True
    expected = mlp(x, Modality(is_vision))
    install_kernels(mlp, kernels)
    monkeypatch.setattr(Modality, "rows", None)  # an error in the plain path
    torch.testing.assert_close(mlp(x, Modality(is_vision)), expected)
    torch.testing.assert_close(mlp(x, None)[~is_vision], expected[~is_vision])


@pytest.mark.one_is_quick
@pytest.mark.parametrize("has_bias", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.parametrize("norm_min", [None, 0.0, 0.9])
@pytest.mark.parametrize(("num_experts", "top_k"), [(6, 3), (64, 6), (5, 5), (128, 1)])
def test_route(kernels, triton_device, has_bias, norm_min, num_experts, top_k):
    logits = torch.randn(9, num_experts, device=triton_device) * 2
    logits[0] = 1.0  # all equal
    bias = torch.linspace(0.4, 0, num_experts, device=triton_device) if has_bias else None
    is_normed = norm_min is not None
    rule = RouteRule(top_k=top_k, is_normed=is_normed, norm_min=norm_min or 0.0)
    weights, ids = kernels.choose(logits, bias, rule, torch.float32)
    assert ids.dtype is torch.int32  # the kernel's
    scores = logits.softmax(-1)
    ranked = scores if bias is None else scores + bias
    expected = ranked.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    assert ids.tolist() == expected.tolist()
    chosen = scores.gather(1, expected)
    if norm_min is not None:
        chosen = chosen / chosen.sum(-1, keepdim=True).clamp(min=norm_min)
    torch.testing.assert_close(weights, chosen)
