"""Mixtures of experts: routers choose as torch does, and experts in one call have the bits of a
loop over them."""

import threading

import pytest
import torch

from mmdeploy_llm.kernels.cpu import CpuKernels
from mmdeploy_llm.kernels.cpu.mixtures import Mixture
from mmdeploy_llm.kernels.low_rank import Change
from mmdeploy_llm.kernels.mixtures import Gates, RouteRule
from mmdeploy_llm.layers.basic.adapted import (
    NO_SLOT,
    ActiveAdapters,
    ExpertAdapters,
    MatrixAdapters,
)
from mmdeploy_llm.layers.basic.experts import Experts
from mmdeploy_llm.layers.moe import MoEConfig, Router, SoftmaxRouter
from mmdeploy_llm.testing.tiny import randomize_empty

from .test_kernels import DTYPES, values

EXPERTS, TOP_K, SIZE, INNER = 12, 3, 72, 104
CLOSE = {torch.float32: {"atol": 1e-6, "rtol": 1e-5}, torch.bfloat16: {"atol": 0, "rtol": 0.01}}


def assert_alike(found, expected, dtype):
    """The same experts in the same order, with weights alike."""
    assert torch.equal(found[1], expected[1])
    assert found[0].dtype is expected[0].dtype is dtype
    torch.testing.assert_close(found[0], expected[0], **CLOSE[dtype])


def distinct_logits(dtype):
    """Rows without equal values: which of them torch chooses is not specified."""
    torch.manual_seed(8)
    rows = torch.stack([torch.randperm(EXPERTS) for _ in range(40)])
    return ((rows - EXPERTS / 2) * 0.3).to(dtype)


def router_of(kind, dtype, **options):
    torch.manual_seed(5)
    sizes = {"num_experts": EXPERTS, "top_k": TOP_K, "intermediate_size": INNER}
    router = kind(SIZE, MoEConfig(**sizes | options))
    randomize_empty(router)
    exact = getattr(kind, "fp32_parameters", ())
    for name, param in router.named_parameters():
        param.data = (3 * param.data).to(torch.float32 if name in exact else dtype)
    return router


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Router, {}),
        (Router, {"norm_min": 0.9}),
        (SoftmaxRouter, {}),
        (SoftmaxRouter, {"is_normed": False}),
        (SoftmaxRouter, {"rounds_weights": False}),
    ],
)
def test_routers_equal_plain_torch(kernels, dtype, kind, options):
    router, x = router_of(kind, dtype, **options), values(33, SIZE, dtype=dtype)
    expected, logits = router(x), router.product(x.float() if kind is Router else x)
    router.kernels = kernels
    found = router(x)
    own_dtype = dtype if options.get("rounds_weights", True) else torch.float32
    assert found[0].dtype is expected[0].dtype is own_dtype
    torch.testing.assert_close(found[0], expected[0], **CLOSE[dtype])
    # Of experts with equal logits torch chooses any.
    own = logits if kind is SoftmaxRouter else logits.softmax(-1) + router.correction_bias
    torch.testing.assert_close(own.gather(1, found[1]), own.gather(1, expected[1]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_have_factors_of_their_weights(kernels, dtype):
    logits, factors = distinct_logits(dtype), values(EXPERTS, dtype=dtype, seed=2)
    scores, experts = logits.softmax(-1, dtype=torch.float32).topk(TOP_K, -1)
    weights = (scores / scores.sum(-1, keepdim=True)).to(dtype) * factors[experts]
    found = kernels.choose(logits, None, RouteRule(top_k=TOP_K), dtype, factors)
    assert_alike(found, (weights, experts), dtype)
    wide = kernels.widen(factors)
    weights = scores / scores.sum(-1, keepdim=True) * wide[experts]
    found = kernels.choose(logits, None, RouteRule(top_k=TOP_K), torch.float32, wide)
    assert_alike(found, (weights, experts), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_used", [1, 2, 4])
def test_sigmoids_in_groups(kernels, dtype, num_used):
    """Groups are chosen by the sum of their two best, experts by score plus bias, and weighted by
    the score alone."""
    logits, bias = distinct_logits(dtype), values(EXPERTS, dtype=torch.float32, seed=4) / 9
    rule = RouteRule(
        top_k=TOP_K, scores="sigmoid", norm_more=1e-20, num_groups=4, num_used=num_used, factor=2.5
    )
    scores = logits.float().sigmoid()
    groups = (scores + bias).view(len(logits), 4, -1)
    best = groups.topk(2, -1).values.sum(-1).topk(num_used, -1).indices
    left_out = torch.ones(groups.shape[:2], dtype=torch.bool).scatter_(1, best, False)
    choice = groups.masked_fill(left_out[..., None], float("-inf")).flatten(1)
    experts = choice.topk(TOP_K, -1).indices
    weights = scores.gather(-1, experts)
    weights = (weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5).to(dtype)
    assert_alike(kernels.choose(logits, bias, rule, dtype), (weights, experts), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_of_the_chosen(kernels, dtype):
    logits = distinct_logits(dtype)
    rule = RouteRule(top_k=TOP_K, scores="softmax of chosen", is_normed=False)
    scores, experts = logits.topk(TOP_K, -1)
    assert_alike(kernels.choose(logits, None, rule, dtype), (scores.softmax(-1), experts), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_that_are_rounded(kernels, dtype):
    logits, bias = distinct_logits(dtype), values(EXPERTS, dtype=torch.float32, seed=4) / 9
    rule = RouteRule(top_k=TOP_K, scores="sigmoid", norm_more=1e-6, factor=1.5, rounds=True)
    scores = logits.sigmoid()
    experts = (scores + bias).topk(TOP_K, -1).indices
    weights = scores.gather(-1, experts)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-6) * 1.5
    assert_alike(kernels.choose(logits, bias, rule, dtype), (weights, experts), dtype)


def test_the_first_of_equal_scores(kernels):
    weights, experts = kernels.choose(
        torch.zeros(2, EXPERTS), None, RouteRule(top_k=TOP_K), torch.float32
    )
    assert experts.tolist() == [[0, 1, 2]] * 2
    assert weights.eq(1 / 3).all()


def test_scores_that_are_no_numbers(kernels):
    """Weights are no numbers either, and experts exist."""
    logits = torch.full((1, EXPERTS), float("nan"))
    for scores in ("softmax", "softmax of chosen", "sigmoid"):
        rule = RouteRule(top_k=TOP_K, scores=scores, num_groups=3, num_used=2)
        weights, experts = kernels.choose(logits, None, rule, torch.float32)
        assert weights.isnan().all()
        assert 0 <= experts.min() <= experts.max() < EXPERTS


def experts_of(kernels, dtype, quantization, activation="silu", kind=Experts):
    torch.manual_seed(6)
    experts = kind(EXPERTS, SIZE, INNER, activation)
    randomize_empty(experts)
    for param in experts.parameters():
        param.data = param.data.to(dtype)
    for module in experts.modules():
        module.kernels = kernels
    experts.pack(kernels, quantization)
    return experts


def routed(num_rows, dtype):
    """Rows, and for each row other weights and experts, of which some have none."""
    torch.manual_seed(7)
    ids = torch.stack([torch.randperm(EXPERTS - 2)[:TOP_K] for _ in range(num_rows)])
    return values(num_rows, SIZE, dtype=dtype), torch.rand(num_rows, TOP_K).to(dtype), ids


@pytest.mark.one_is_quick
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantization", [None, "int8", "int8a8", "int4"])
@pytest.mark.parametrize("num_threads", [1, 2, 16])
def test_one_call_has_the_bits_of_a_loop(kernels, monkeypatch, dtype, quantization, num_threads):
    """Threads compute the same with experts of their own and with shares of each. Where registers
    are narrow, torch multiplies float32, and at the portable level it loops over all experts."""
    experts = experts_of(kernels, dtype, quantization)
    is_torchs = dtype is torch.float32 and quantization is None and not kernels.has_wide_registers
    assert experts.is_packed is not is_torchs
    torch.set_num_threads(num_threads)
    for num_rows in (1, 2, 17, 64):
        given = routed(num_rows, dtype)
        found = experts(*given)
        with monkeypatch.context() as context:
            context.setattr(type(experts), "_mixture", lambda *args: None)
            expected = experts(*given)
        assert torch.equal(found, expected)


def test_weights_in_more_bits(kernels, monkeypatch):
    """Those in float32 are not rounded to the dtype of the rows, which the sum has."""
    experts = experts_of(kernels, torch.bfloat16, None)
    x, weights, ids = routed(5, torch.float32)
    found = experts(x.bfloat16(), weights, ids)
    assert found.dtype is torch.bfloat16
    monkeypatch.setattr(type(experts), "_mixture", lambda *args: None)
    assert torch.equal(found, experts(x.bfloat16(), weights, ids))


def test_activations_of_gates(kernels, monkeypatch):
    experts = experts_of(kernels, torch.bfloat16, None, "gelu_pytorch_tanh")
    given = routed(5, torch.bfloat16)
    found = experts(*given)
    monkeypatch.setattr(type(experts), "_mixture", lambda *args: None)
    assert torch.equal(found, experts(*given))


def test_a_matrix_that_is_replaced(kernels, monkeypatch):
    """The call has the new one, and one that only watches its input is called itself. The portable
    level has no call for all experts."""
    experts, given = experts_of(kernels, torch.bfloat16, None), routed(5, torch.bfloat16)
    before = experts(*given)
    for expert in range(EXPERTS):
        other = kernels.pack(values(SIZE, INNER, dtype=torch.bfloat16, seed=9), None)
        experts.replace(expert, other, is_down=True)
    after = experts(*given)
    assert not torch.equal(after, before)
    monkeypatch.setattr(type(experts), "_mixture", lambda *args: None)
    assert torch.equal(after, experts(*given))
    monkeypatch.undo()

    class Watched:
        def product(self, x, bias):
            return other.product(x, bias)

    sizes = SIZE, INNER
    own = kernels, sizes, torch.bfloat16, experts.biases
    assert isinstance(experts.mixture(*own), Mixture) is not kernels.leaves_many_rows_to_torch
    experts.replace(0, Watched(), is_down=True)
    assert experts.mixture(*own) is None
    assert torch.equal(experts(*given), after)


def test_changes_of_adapters_have_the_bits_of_the_loop(kernels, monkeypatch):
    """Two of three adapters change some matrices of some experts; a row has one of them, or none.
    A step that no adapter changes, in an engine that has some, is plain."""
    dtype = torch.bfloat16
    experts, given = experts_of(kernels, dtype, None), routed(9, dtype)
    plain = experts(*given)
    step = ActiveAdapters(torch.device("cpu"))
    experts.adapted = ExpertAdapters(step)
    parts = {"gate_up_proj": (0, INNER, 2 * INNER), "down_proj": (0, SIZE)}
    for name, starts in parts.items():
        for expert in range(0, EXPERTS, 2):
            own = MatrixAdapters(step, slots={0, 1})
            k = SIZE if name == "gate_up_proj" else INNER
            own.table = kernels.low_rank_table(3, starts, k, dtype)
            for slot in own.slots:
                rank, num_parts = 2 + slot, len(starts) - 1
                a = values(num_parts * rank, k, dtype=dtype, seed=slot + expert)
                b = values(starts[-1], rank, dtype=dtype, seed=9 + slot)
                scales = (0.5,) * num_parts
                own.table.put(slot, Change(a=a, b=b, starts=starts, scales=scales))
            experts.adapted.matrices[name, expert] = own
    step.set([9], [2])
    assert torch.equal(experts(*given), plain)
    step.set([2, 4, 2, 1], [0, 1, NO_SLOT, 2])
    found = experts(*given)
    is_changed = (found != plain).any(1)
    assert is_changed[:6].any()
    assert not is_changed[6:].any()
    monkeypatch.setattr(type(experts), "_mixture", lambda *args: None)
    assert torch.equal(found, experts(*given))


def clamped_in_torch(both, alpha, limit):
    gate = both[..., ::2].clamp(max=limit)
    up = both[..., 1::2].clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


@pytest.mark.parametrize("dtype", DTYPES)
def test_clamped_gates(kernels, dtype):
    both = 4 * values(9, 80, dtype=dtype)
    both[0, :3] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    found = kernels.clamped_mul(both, 1.702, 7.0)
    expected = clamped_in_torch(both, 1.702, 7.0)
    limits = {"atol": 2e-2, "rtol": 2e-2} if dtype is torch.bfloat16 else CLOSE[dtype]
    torch.testing.assert_close(found, expected, **limits, equal_nan=True)


class Clamped(Experts):
    """Experts with biases and clamped gates."""

    is_plain = False
    gates = Gates(activation="clamped", alpha=1.702, limit=7.0)

    def biases(self, expert):
        return self.first[expert], self.last[expert] if expert % 2 else None

    def activate(self, both):
        return self.kernels.clamped_mul(both, 1.702, 7.0)


def test_experts_with_biases(kernels, monkeypatch):
    experts, dtype = experts_of(kernels, torch.bfloat16, None, kind=Clamped), torch.bfloat16
    experts.first = values(EXPERTS, 2 * INNER, dtype=dtype)
    experts.last = values(EXPERTS, SIZE, dtype=dtype, seed=1)
    given = routed(5, dtype)
    found = experts(*given)
    monkeypatch.setattr(type(experts), "_mixture", lambda *args: None)
    assert torch.equal(found, experts(*given))


class Plain(Experts):
    """Experts without gates."""

    is_plain = False
    gates = Gates(activation="relu2", has_gate=False)

    def __init__(self, num_experts, size, inner, activation):
        super().__init__(num_experts, size, inner, activation)
        shape = num_experts, inner, size
        self.gate_up_proj = torch.nn.Parameter(torch.empty(shape), requires_grad=False)

    def activate(self, both):
        return self.kernels.activate(both, "relu2")


@pytest.mark.parametrize("weights", DTYPES)
@pytest.mark.parametrize("quantization", [None, "int4"])
def test_experts_without_gates(kernels, monkeypatch, quantization, weights):
    """Products with weights in float32 are not rounded before they are added."""
    experts = experts_of(kernels, torch.bfloat16, quantization, kind=Plain)
    x, factors, ids = routed(5, torch.bfloat16)
    given = x, torch.rand(factors.shape).to(weights), ids
    found = experts(*given).to(torch.bfloat16)  # the loop leaves float32, as the model rounds it
    monkeypatch.setattr(type(experts), "_mixture", lambda *args: None)
    assert torch.equal(found, experts(*given).to(torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_gated", [True, False])
def test_rows_that_are_added(kernels, dtype, is_gated):
    to, x = values(9, 40, dtype=dtype), values(9, 50, dtype=dtype, seed=1)[:, 5:45]
    gate = 4 * values(9, 1, dtype=dtype, seed=2) if is_gated else None
    expected = to + (x if gate is None else gate.sigmoid() * x)
    found = kernels.add_rows(to, x, gate)
    assert found.data_ptr() == to.data_ptr()
    torch.testing.assert_close(found, expected, **CLOSE[dtype])


def test_widened_rows(kernels):
    x = values(5, 30, dtype=torch.bfloat16)
    assert kernels.widen(x).equal(x.float())
    assert kernels.widen(x.float()).dtype is torch.float32


def test_calls_of_other_threads_are_made(kernels):
    """While the arguments of calls are looked at, media are prepared."""
    x = values(3, 8, dtype=torch.float32)

    def look():
        other = threading.Thread(target=lambda: kernels.scale(x, 2.0))
        other.start()
        other.join()
        kernels.scale(x, 3.0)

    before = x.clone()
    assert isinstance(kernels, CpuKernels)
    ((name, args),) = kernels.captured(look)
    assert (name, args.factor) == ("scale", 3.0)
    assert x.equal(2 * before)


def test_every_level(kernels_of_level, monkeypatch):
    for dtype in DTYPES:
        test_routers_equal_plain_torch(kernels_of_level, dtype, Router, {})
        test_sigmoids_in_groups(kernels_of_level, dtype, 2)
        test_rows_that_are_added(kernels_of_level, dtype, True)
    for quantization in (None, "int8", "int4"):
        test_one_call_has_the_bits_of_a_loop(
            kernels_of_level, monkeypatch, torch.bfloat16, quantization, 1
        )
