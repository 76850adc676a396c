"""Gated DeltaNet against transformers: the rule, the layer over several steps, and its state."""

from types import SimpleNamespace

import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from mmdeploy_llm.layers import GatedDeltaConfig, GatedDeltaNet
from mmdeploy_llm.layers.states.delta_rule import delta_sequence, delta_step, normalized
from mmdeploy_llm.layers.states.short_conv import ShortConv

KEY, VALUE, HEADS = 8, 6, 3


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def rows_of_rule(count):
    q, k = torch.randn(count, HEADS, KEY), torch.randn(count, HEADS, KEY)
    v = torch.randn(count, HEADS, VALUE)
    return q, k, v, -3 * torch.rand(count, HEADS), torch.rand(count, HEADS)


def expected(rule, rows, state):
    q, k, v, g, beta = (x[None] for x in rows)
    return rule(
        q,
        k,
        v,
        g=g,
        beta=beta,
        initial_state=state[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )


@pytest.mark.parametrize("count", [1, 5, 64, 65, 200])
def test_a_sequence(count):
    rows, state = rows_of_rule(count), torch.randn(HEADS, KEY, VALUE)
    want, last = expected(theirs.torch_chunk_gated_delta_rule, rows, state)
    q, k, *others = rows
    out, after = delta_sequence(normalized(q) * KEY**-0.5, normalized(k), *others, state)
    torch.testing.assert_close(out, want[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(after, last[0], atol=1e-5, rtol=1e-5)


def test_steps_equal_the_recurrence():
    rows, state = rows_of_rule(7), torch.randn(HEADS, KEY, VALUE)
    want, last = expected(theirs.torch_recurrent_gated_delta_rule, rows, state)
    q, k, *others = rows
    q, k, state = normalized(q) * KEY**-0.5, normalized(k), state[None].clone()
    for index in range(7):
        one = (x[index : index + 1] for x in (q, k, *others))
        out = delta_step(*one, state)
        torch.testing.assert_close(out, want[:, index], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(state, last, atol=1e-5, rtol=1e-5)


def context(tensors, *sequences):
    """The states of a step. sequences: (number of tokens, row to read, row to write)."""
    counts, read, write = zip(*sequences, strict=True)
    num_decode = sum(count == 1 for count in counts)
    return SimpleNamespace(
        read=torch.tensor(read),
        write=torch.tensor(write),
        query_lens=counts,
        num_decode=num_decode,
        tensors=lambda layer: tensors,
    )


@pytest.fixture
def pair():
    """transformers' layer and ours with the same random weights."""
    config = Qwen3_5TextConfig(
        vocab_size=32,
        hidden_size=24,
        num_hidden_layers=1,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=KEY,
        linear_value_head_dim=VALUE,
        layer_types=["linear_attention"],
    )
    reference = theirs.Qwen3_5GatedDeltaNet(config, 0).eval()
    ours = GatedDeltaNet(
        GatedDeltaConfig(
            hidden_size=24,
            num_key_heads=2,
            num_value_heads=4,
            key_head_dim=KEY,
            value_head_dim=VALUE,
            kernel_size=config.linear_conv_kernel_dim,
            norm_eps=config.rms_norm_eps,
        ),
        0,
    )
    for parameter in reference.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3
    state = reference.state_dict()
    parts = ("qkv", "z", "b", "a")
    fused = torch.cat([state.pop(f"in_proj_{part}.weight") for part in parts])
    ours.load_state_dict({**state, "in_proj.weight": fused})
    return reference, ours


@torch.inference_mode()
def test_the_layer_in_chunks_decode_steps_and_a_batch(pair):
    reference, ours = pair
    long, short = torch.randn(90, 24), torch.randn(11, 24)
    want_long, want_short = (reference(x[None])[0] for x in (long, short))
    shapes = ours.config.state.shapes
    tensors = tuple(torch.zeros(8, *shape) for shape in shapes)
    found = [ours(long[:70], context(tensors, (70, 0, 2)))]
    # A decode token comes first in a step; the other sequence goes on, or begins, after it.
    out = ours(torch.cat([long[70:71], short[:7]]), context(tensors, (1, 2, 3), (7, 0, 4)))
    found.append(out[:1])
    found_short = [out[1:]]
    out = ours(torch.cat([long[71:72], short[7:8]]), context(tensors, (1, 3, 2), (1, 4, 5)))
    found.append(out[:1])
    found_short.append(out[1:])
    found.append(ours(long[72:], context(tensors, (18, 2, 3))))
    found_short.append(ours(short[8:], context(tensors, (3, 5, 4))))
    torch.testing.assert_close(torch.cat(found), want_long, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(torch.cat(found_short), want_short, atol=1e-5, rtol=1e-4)
    assert not any(tensor[0].any() for tensor in tensors), "the row of zeros was written"


@torch.inference_mode()
def test_a_kept_state_serves_two_sequences(pair):
    _, ours = pair
    shared, one, two = torch.randn(20, 24), torch.randn(5, 24), torch.randn(6, 24)
    tensors = tuple(torch.zeros(8, *shape) for shape in ours.config.state.shapes)
    ours(shared, context(tensors, (20, 0, 2)))
    kept = [tensor[2].clone() for tensor in tensors]
    both = ours(torch.cat([one, two]), context(tensors, (5, 2, 3), (6, 2, 4)))
    assert all(torch.equal(tensor[2], old) for tensor, old in zip(tensors, kept, strict=True))
    for own, out in ((one, both[:5]), (two, both[5:])):
        fresh = tuple(torch.zeros_like(tensor) for tensor in tensors)
        whole = torch.cat([shared, own])
        want = ours(whole, context(fresh, (len(whole), 0, 2)))[20:]
        torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-4)


@torch.inference_mode()
def test_a_convolution_equals_torch_s():
    conv = ShortConv(5, 4, has_silu=False)
    conv.weight.data = torch.randn(5, 1, 4)
    x = torch.randn(9, 5)
    want = torch.nn.functional.conv1d(x.T[None], conv.weight, padding=3, groups=5)[0, :, :9].T
    state = torch.zeros(4, 5, 3)
    found = [conv(x[:6], state, context((state,), (6, 0, 2)))]
    found.append(conv(x[6:7], state, context((state,), (1, 2, 3))))
    found.append(conv(x[7:], state, context((state,), (2, 3, 2))))
    torch.testing.assert_close(torch.cat(found), want)
