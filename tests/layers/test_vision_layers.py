"""Building blocks of vision towers: segments, patch positions, M-RoPE positions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers.vision_utils import get_vision_interpolation_indices_and_weights

from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.layers import (
    PositionTable,
    Segments,
    VisionConfig,
    VisionEncoder,
    axial_rotary,
    frame_lengths,
    grid_positions,
    patch_positions,
    vision,
)

CPU = torch.device("cpu")


def attend_one_by_one(lengths, q, k, v):
    parts = []
    for x in zip(*(t.split(lengths) for t in (q, k, v)), strict=True):
        heads = [part.transpose(0, 1) for part in x]
        parts.append(F.scaled_dot_product_attention(*heads).transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("lengths", [[4], [3, 3, 3], [2, 5, 2, 2, 7], [4, 4, 6], [6, 4, 4]])
def test_segments_equal_one_call_each(lengths):
    q, k, v = torch.randn(3, sum(lengths), 2, 8).unbind(0)
    found = Segments(lengths, CPU).attend(q, k, v)
    torch.testing.assert_close(found, attend_one_by_one(lengths, q, k, v))


def test_one_call_per_length():
    assert len(Segments([4, 9, 4, 9, 9], CPU).groups) == 2
    assert len(Segments([4] * 100, CPU).groups) == 1


def test_patch_positions_go_block_by_block():
    rows, columns = patch_positions([(1, 2, 4), (2, 2, 2)], 2, CPU).tolist()
    assert rows == [0, 0, 1, 1, 0, 0, 1, 1] + [0, 0, 1, 1] * 2
    assert columns == [0, 1, 0, 1, 2, 3, 2, 3] + [0, 1, 0, 1] * 2


def test_frames_are_segments():
    assert frame_lengths([(1, 2, 4), (3, 2, 2)]) == [8, 4, 4, 4]


def test_axial_rotary_repeats_the_frequencies_per_axis():
    config = axial_rotary(16, 10000.0)
    assert config.axes == (0, 0, 0, 0, 1, 1, 1, 1)
    assert config.frequencies is not None
    assert config.frequencies[:4] == config.frequencies[4:]


def test_text_positions_count_up_on_all_axes():
    assert grid_positions(4, []).tolist() == [[0, 1, 2, 3]] * 3


def test_media_positions():
    """The tokens: two of text, a grid of 1 x 2 x 3, one of text, a grid of 2 x 1 x 1, one of
    text."""
    found = grid_positions(12, [(2, (1, 2, 3), 1.0), (9, (2, 1, 1), 4.0)])
    assert found[0].tolist() == [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 10, 7]
    assert found[1].tolist() == [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 6, 7]
    assert found[2].tolist() == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 6, 7]


@pytest.mark.parametrize("align_corners", [True, False])
@pytest.mark.parametrize("merge", [1, 2])
def test_a_position_table_equals_transformers(align_corners, merge):
    """The grids are larger and smaller than the table, of its size, of one row, and of several
    frames."""
    grids = [(1, 12, 4), (1, 2, 2), (1, 6, 6), (3, merge, 8)]
    table = PositionTable(36, 5, align_corners=align_corners)
    table.weight.data.normal_()
    places, weights = get_vision_interpolation_indices_and_weights(
        torch.tensor(grids),
        num_grid_per_side=6,
        align_corners=align_corners,
        spatial_merge_size=merge,
    )
    expected = (table.weight[places] * weights[..., None]).sum(1)
    torch.testing.assert_close(table(grids, merge), expected)


def vision_config(**options):
    sizes = {"size": 16, "intermediate_size": 24, "num_layers": 3, "num_heads": 2}
    fixed = {"patch_shape": (12,), "norm_eps": 1e-6, "theta": 1e4, "merge_size": 2}
    return VisionConfig(**{**sizes, **fixed, "activation": "gelu", **options})


def test_the_last_state_is_the_encoders_result():
    encoder = VisionEncoder(vision_config(num_positions=16))
    for parameter in encoder.parameters():
        parameter.data.normal_(std=0.2)
    encoder.rotary.init_buffers(CPU)
    pixels, grids = torch.randn(24, 12), [(1, 2, 4), (2, 4, 2)]
    states = [state.clone() for state in encoder.states(pixels, grids)]
    assert len(states) == 3
    assert not torch.equal(states[0], states[1])
    assert torch.equal(encoder(pixels, grids), states[-1])


def test_unknown_activations_are_refused():
    with pytest.raises(ModelNotSupportedError, match=r"'relu6' of the vision tower.*only gelu,"):
        VisionEncoder(vision_config(activation="relu6"))


def test_one_call_for_segments_of_any_lengths(monkeypatch):
    """A fake checks the arguments that torch's varlen attention gets on CUDA."""
    lengths = [3, 8, 3, 1]
    segments = Segments(lengths, CPU)
    q, k, v = torch.randn(3, sum(lengths), 2, 16)

    def attend_varlen(q, k, v, starts, longest):
        assert starts.dtype is torch.int32
        assert longest == max(lengths)
        return attend_one_by_one(starts.diff().tolist(), q, k, v)

    expected = segments.attend(q, k, v)
    monkeypatch.setattr(vision, "_takes_varlen", lambda q: True)
    monkeypatch.setattr(vision, "_attend_varlen", attend_varlen)
    torch.testing.assert_close(segments.attend(q, k, v), expected)
