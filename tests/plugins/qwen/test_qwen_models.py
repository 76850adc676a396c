"""Qwen2 and Qwen2.5-VL against transformers: see testing.model_conformance."""

import pytest
import torch
from mmdeploy_llm_plugins.qwen import provide_models
from mmdeploy_llm_plugins.qwen.tower import window_order

from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.request import MediaInput, MediaSpan
from mmdeploy_llm.testing.model_conformance import ModelConformance, build, max_difference
from mmdeploy_llm.testing.reference import Reference
from mmdeploy_llm.testing.tiny import write_tiny

SPECS = {spec.name: spec for spec in provide_models()}
TEXT_ONLY = {"text": (), "other text": ()}


class TestQwen(ModelConformance):
    """Biases on query, key and value; heads of 10 channels; an untied head."""

    spec = SPECS["qwen2"]
    cases = TEXT_ONLY

    @staticmethod
    def write(folder):
        write_tiny("qwen2", folder)


class TestQwenScaledRope(ModelConformance):
    """YaRN frequencies and attention factor; a tied head."""

    spec = SPECS["qwen2"]
    cases = TEXT_ONLY

    @staticmethod
    def write(folder):
        rope = {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 512,
        }
        write_tiny("qwen2", folder, seed=1, rope_parameters=rope, tie_word_embeddings=True)


class TestQwenVL(ModelConformance):
    """Windows smaller at the edges, images larger than a window, videos."""

    spec = SPECS["qwen2_5_vl"]
    cases = {  # noqa: RUF012 - never written to
        "text": (),
        "one image": ((1, 4, 6),),
        "images of different sizes": ((1, 4, 6), (1, 18, 12), (1, 8, 16), (1, 4, 6)),
        "video": ((4, 6, 8),),
        "image and video": ((1, 10, 4), (2, 10, 12)),
    }

    @staticmethod
    def write(folder):
        write_tiny("qwen2_5_vl", folder)

    def test_positions_equal_the_reference(self, runner, reference, prompts):
        for name, (ids, media) in zip(self.cases, prompts, strict=True):
            if media:
                expected = reference.positions(ids, media)
                assert torch.equal(runner.model.positions(len(ids), media), expected), name

    def test_encoding_together_equals_one_by_one(self, runner, prompts):
        items = [span.item for _, media in prompts for span in media]
        together = runner.model.encode_media(items)
        for item, embed in zip(items, together, strict=True):
            (alone,) = runner.model.encode_media([item])
            assert embed.shape == (item.num_tokens, runner.model.hidden_size)
            assert max_difference(embed, alone) < self.tolerance, item.key

    def test_seconds_between_frames_stretch_the_time_axis(self, runner):
        item = MediaInput(
            kind="video",
            tensors={"second_per_grid": torch.tensor(0.5)},
            num_tokens=3,
            key="video",
            grid_thw=(3, 2, 2),
        )
        positions = runner.model.positions(6, [MediaSpan(offset=1, item=item)])
        # 4 positions per second, 0.5 s between frames; the text continues at the frame's extent
        assert positions[0].tolist() == [0, 1, 3, 5, 2, 3]
        assert positions[1].tolist() == [0, 1, 1, 1, 2, 3]


def test_windows_are_contiguous_in_their_frames():
    order, lengths = window_order([(1, 10, 12), (2, 4, 4)], merge_size=2, window_size=4)
    assert sorted(order.tolist()) == list(range(30 + 8))
    # 5 x 6 tokens: windows of 4 x 4 and 4 x 2, then one row below; two frames of 2 x 2
    assert lengths == [16, 8, 4, 2, 4, 4]
    assert order[16:20].tolist() == [4, 5, 10, 11]
    assert order[28:30].tolist() == [28, 29]


def test_layers_of_unknown_types_are_refused(tmp_path):
    write_tiny("qwen2", tmp_path)
    config = Reference(tmp_path).config
    config.layer_types = ["full_attention", "linear_attention", "full_attention"]
    with pytest.raises(ModelNotSupportedError, match="linear_attention of this qwen2 model"):
        build(SPECS["qwen2"], tmp_path, config, torch.float32)


def test_windows_without_a_size_are_refused(tmp_path):
    write_tiny("qwen2", tmp_path)
    config = Reference(tmp_path).config
    config.layer_types = ["full_attention", "sliding_attention", "full_attention"]
    with pytest.raises(ModelNotSupportedError, match="sliding_window is None"):
        build(SPECS["qwen2"], tmp_path, config, torch.float32)
