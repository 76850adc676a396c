"""Recorded decode steps, compared with the same steps computed layer by layer."""

from dataclasses import replace

import pytest
import torch

from mmdeploy_llm.forward import ForwardInputs
from mmdeploy_llm.hooks import BatchLayout, KVCache
from mmdeploy_llm.kernels.cpu import BuildError, CpuKernels, Level, cpu_levels
from mmdeploy_llm.layers import DecoderConfig, Rotary, RotaryConfig
from mmdeploy_llm.layers.attention.native import NativeAttention
from mmdeploy_llm.layers.attention.windows import WindowAttention
from mmdeploy_llm.layers.basic import recordings
from mmdeploy_llm.layers.decoder import Decoder
from mmdeploy_llm.layers.install import install_kernels
from mmdeploy_llm.layers.moe import MoEConfig
from mmdeploy_llm.testing.tiny import randomize_empty

BLOCK_SIZE, NUM_BLOCKS = 4, 400
SIZES = {"num_experts": 6, "top_k": 2, "intermediate_size": 32}
MIXTURES = {
    "corrected": {},
    "softmax": {"router": "softmax"},
    "not normed": {"router": "softmax", "is_normed": False, "activation": "gelu_pytorch_tanh"},
    "shared": {"router": "softmax", "shared_size": 48},
    "shared by a gate": {"router": "softmax", "shared_size": 48, "is_shared_gated": True},
    "one of modalities": {"vision_intermediate_size": 16, "shared_size": 48},
}
OPTIONS = {
    "plain": {},
    "biases": {"qkv_bias": True, "out_bias": True, "mlp_bias": True},
    "norms": {"post_norms": True},
    "windows": {"windows": (3, None)},
    "sinks": {"has_sinks": True},
    "norms of heads": {"qk_norm": True},
    "norms of heads that are not rotated": {"qk_norm": True, "nope_layers": frozenset({1})},
    "centred norms": {
        "qk_norm": True,
        "zero_centered_norms": True,
        "rotary": RotaryConfig(head_dim=16, theta=1e4, rotary_dim=8),
    },
    "norms rounded late": {"qk_norm": True, "post_norms": True, "rounds_norms_late": True},
    "factors": {"embed_scale": 64**0.5, "residual_scale": 0.22},
    "gelu": {"activation": "gelu_pytorch_tanh"},
    "squares": {"has_gate": False, "activation": "relu2"},
    "plain MLP": {"has_gate": False, "activation": "gelu"},
    "axes": {"rotary": RotaryConfig(head_dim=16, theta=1e4, axes=(0, 0, 1, 1, 1, 2, 2, 2))},
    "layer norms": {"layer_norms": True, "zero_centered_norms": True},
    "layer norms with biases, parallel": {
        "layer_norms": True,
        "has_norm_biases": True,
        "is_parallel": True,
        "has_mlp_norm": True,
    },
    "one norm for both": {"layer_norms": True, "has_norm_weights": False, "is_parallel": True},
    "norms of outputs and of all channels": {
        "pre_norms": False,
        "post_norms": True,
        "has_full_qk_norm": True,
    },
} | {
    f"experts {name}": {"moe": MoEConfig(**SIZES | options), "moe_layers": frozenset({1})}
    for name, options in MIXTURES.items()
}


def make_decoder(kernels, quantization, options, dtype=torch.bfloat16):
    sizes = {
        "vocab_size": 50,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "rotary": RotaryConfig(head_dim=16, theta=1e4),
        "norm_eps": 1e-6,
    }
    config = DecoderConfig(**sizes | options)
    torch.manual_seed(3)
    model = Decoder(config)
    randomize_empty(model)
    for module in model.modules():
        if isinstance(module, Rotary):
            module.init_buffers(torch.device("cpu"))
    for module in model.modules():
        exact = getattr(module, "fp32_parameters", ())
        for key, param in module.named_parameters(recurse=False):
            param.data = param.data if key in exact else param.data.to(dtype)
    install_kernels(model, kernels, quantization)
    return model


def decode(model, kernels, steps, dtype=torch.bfloat16, windows=None):
    """Returns hidden states of decode steps, and the set of whether they were recorded; sequences
    and their block tables grow. steps: the number of sequences with one token each, or the number
    of tokens of each sequence. windows: layer -> window, for layers with block tables of their
    own."""
    shape = (NUM_BLOCKS, BLOCK_SIZE, 2, 16)
    cache = KVCache(
        keys=tuple(torch.zeros(shape, dtype=dtype) for _ in range(2)),
        values=tuple(torch.zeros(shape, dtype=dtype) for _ in range(2)),
    )
    backend, lengths, states = NativeAttention(kernels), [0] * 4, []
    if windows:
        backend = WindowAttention(lambda: NativeAttention(kernels), windows)
    for step, counts in enumerate(steps):
        counts = counts if isinstance(counts, tuple) else (1,) * counts
        num, rows = len(counts), torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        places = torch.cat(
            [torch.arange(n, n + count) for n, count in zip(lengths, counts, strict=False)]
        )
        lengths[:num] = [n + count for n, count in zip(lengths, counts, strict=False)]
        num_blocks = -(-max(lengths[:num]) // BLOCK_SIZE)
        tables = torch.arange(num * 70).view(num, 70)[:, :num_blocks].int()
        layout = BatchLayout(
            num_decode=counts.count(1),
            query_lens=counts,
            context_lens=tuple(lengths[:num]),
            block_tables=tables,
            slots=tables[rows, places // BLOCK_SIZE].long() * BLOCK_SIZE + places % BLOCK_SIZE,
        )
        if windows:
            layout = replace(layout, windows=(layout.block_tables.clone(), layout.slots.clone()))
        inputs = ForwardInputs(
            token_ids=(torch.arange(len(places)) * 7 + step) % 50,
            positions=places
            if model.rotary.axes is None
            else torch.stack([places, places // 2, places + 3]),
            in_prompt=torch.zeros(len(places), dtype=torch.bool),
            attn=backend.begin(layout, cache),
        )
        with torch.inference_mode():
            states.append(model(inputs).clone())
    # Read while the backend lives: a recording is forgotten with its frame.
    return states, {recording is not None for recording in model._recordings.values()}


@pytest.mark.one_is_quick
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("name", OPTIONS)
def test_recorded_steps_equal_computed_ones(kernels, monkeypatch, name, quantization):
    """Every step has the same bits: with new numbers of sequences, known ones and longer block
    tables."""
    batch_sizes = [2, 3, 2, 1, 3, 3, 3, 3, 3, 1]
    model = make_decoder(kernels, quantization, OPTIONS[name])
    found, are_recorded = decode(model, kernels, batch_sizes)
    assert are_recorded == {True}
    monkeypatch.setattr(recordings, "MAX_RECORDED_ROWS", 0)
    expected, _ = decode(model, kernels, batch_sizes)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


DRAFTS = [(1, 1), (1, 5), (2, 4), (3, 3), (1, 1, 4), (8,), (1, 5), (1, 1), (2, 2, 2), (8,)]


@pytest.mark.one_is_quick
@pytest.mark.parametrize("windows", [None, {1: 3}], ids=["one table", "two tables"])
@pytest.mark.parametrize("name", sorted(OPTIONS.keys() - {"axes"}))
def test_steps_with_drafts_equal_computed_ones(kernels, monkeypatch, name, windows):
    """Several tokens of a sequence, and as many tokens divided among the sequences differently."""
    model = make_decoder(
        kernels, "int8", OPTIONS[name] | ({"windows": (None, 3)} if windows else {})
    )
    found, are_recorded = decode(model, kernels, DRAFTS, windows=windows)
    assert are_recorded == {True}
    monkeypatch.setattr(recordings, "MAX_RECORDED_ROWS", 0)
    expected, _ = decode(model, kernels, DRAFTS, windows=windows)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_chunks_of_prompts_are_not_recorded(kernels):
    """They have many lengths, and each would be recorded for one step."""
    model = make_decoder(kernels, None, {})
    assert decode(model, kernels, [(1, 9), (12,)])[1] == set()


BEST, *OTHERS = cpu_levels()
COMPILED = (Level.AVX2, Level.PORTABLE)  # for the full tests of tests/kernels/cpu


@pytest.fixture(
    params=[
        BEST,
        *(
            pytest.param(level, marks=pytest.mark.full if level in COMPILED else pytest.mark.long)
            for level in OTHERS
        ),
    ],
    ids=lambda level: level.value,
)
def kernels_of_level(request, build_kernels):
    try:
        return CpuKernels(build_kernels(request.param))
    except BuildError as error:
        pytest.skip(f"no kernels on this machine: {error}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_are_recorded_at_every_level(kernels_of_level, monkeypatch, dtype):
    """But for float32 on the portable level, where torch multiplies."""
    batch_sizes = [1, 3, 3, 1]
    model = make_decoder(kernels_of_level, None, OPTIONS["biases"], dtype)
    found, are_recorded = decode(model, kernels_of_level, batch_sizes, dtype)
    assert are_recorded == {dtype is torch.bfloat16 or kernels_of_level.has_wide_registers}
    monkeypatch.setattr(recordings, "MAX_RECORDED_ROWS", 0)
    expected, _ = decode(model, kernels_of_level, batch_sizes, dtype)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_steps_with_two_block_tables_are_recorded(kernels, monkeypatch):
    batch_sizes, options = [2, 3, 2, 1, 3, 3, 2, 1], {"windows": (None, 3)}
    model = make_decoder(kernels, None, options)
    found, are_recorded = decode(model, kernels, batch_sizes, windows={1: 3})
    assert are_recorded == {True}
    monkeypatch.setattr(recordings, "MAX_RECORDED_ROWS", 0)
    expected, _ = decode(model, kernels, batch_sizes)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.full
def test_longer_block_tables(kernels, monkeypatch):
    """A block table that outgrows its memory gets new memory, and its step is recorded again."""
    model = make_decoder(kernels, None, {})
    found, _ = decode(model, kernels, [1] * 262)
    monkeypatch.setattr(recordings, "MAX_RECORDED_ROWS", 0)
    expected, _ = decode(model, kernels, [1] * 262)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
