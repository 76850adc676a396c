"""Gemma 4's images equal those of transformers' PIL image processor, bit for bit; its frames and
times are those of transformers' rules."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mmdeploy_llm_plugins.gemma.image4 import BUDGETS, Gemma4ImageProcessor
from mmdeploy_llm_plugins.gemma.video4 import Gemma4VideoProcessor
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor

from mmdeploy_llm.errors import CheckpointError, ConfigError, MediaError
from mmdeploy_llm.hooks import Checkpoint


def checkpoint_of(folder, file=None, video_file=None, table=10240, **text):
    vision = SimpleNamespace(patch_size=16, pooling_kernel_size=3, position_embedding_size=table)
    config = SimpleNamespace(vision_config=vision, text_config=SimpleNamespace(**text))
    return Checkpoint(
        folder=folder, config=config, preprocessor=file or {}, video_preprocessor=video_file or {}
    )


def in_blocks(item):
    """Patch rows line by line, channels last, as transformers has them."""
    _, height, width = item.grid_thw
    blocks = item.tensors["pixels"].view(height // 3, width // 3, 3, 3, 3, 256)
    return blocks.permute(0, 2, 1, 3, 5, 4).reshape(height * width, 768)


def assert_equal(processor, theirs, image, limits, **options):
    item = processor.decode(image, limits)
    ours = processor.process(item, options)
    expected = theirs(image, return_tensors="pt", **options)
    num_tokens = int(expected["num_soft_tokens_per_image"][0])
    assert ours.num_tokens == processor.count_tokens(item, options) == num_tokens
    assert torch.equal(in_blocks(ours), expected["pixel_values"][0, : 9 * num_tokens])
    text = f"<|image>{'<|image|>' * num_tokens}<image|>"
    assert ours.prompt_text == processor.prompt_text(item, options) == text


@pytest.mark.full
def test_random_sizes_equal_transformers(tmp_path, noise, limits):
    rng, theirs = random.Random(7), Gemma4ImageProcessorPil()
    processor = Gemma4ImageProcessor(checkpoint_of(tmp_path), {})
    for seed in range(12):
        size = rng.randint(1, 900), rng.randint(1, 900)
        assert_equal(processor, theirs, noise(*size, seed=seed), limits)
    for size in ((1, 1), (2, 3000), (3000, 2), (48, 48), (805, 804)):
        assert_equal(processor, theirs, noise(*size, seed=3), limits)


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    "budget",
    [pytest.param(n, marks=[pytest.mark.full] * (n > 280)) for n in BUDGETS],
)
def test_budgets_equal_transformers(tmp_path, noise, limits, budget):
    theirs = Gemma4ImageProcessorPil(max_soft_tokens=budget)
    image = noise(300, 500, seed=1)
    option = {"max_soft_tokens": budget}
    for file, options in (({}, option), (option, {}), ({"max_soft_tokens": 140}, option)):
        processor = Gemma4ImageProcessor(checkpoint_of(tmp_path, file), options)
        assert_equal(processor, theirs, image, limits)


def test_one_image_may_have_less(tmp_path, noise, limits):
    processor = Gemma4ImageProcessor(checkpoint_of(tmp_path), {})
    item = processor.decode(noise(300, 500, seed=1), limits)
    assert processor.count_tokens(item, {"max_soft_tokens": 70}) <= 70
    with pytest.raises(MediaError, match="above the engine's"):
        processor.process(item, {"max_soft_tokens": 560})
    with pytest.raises(MediaError, match="must be one of 70, 140, 280, 560, 1120, got 100"):
        processor.process(item, {"max_soft_tokens": 100})
    with pytest.raises(MediaError, match="below the 2304 pixels of one token"):
        processor.process(item, {"max_pixels": 2303})


def test_options_that_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"preprocessor_config.json: max_soft_tokens must be"):
        Gemma4ImageProcessor(checkpoint_of(tmp_path, {"max_soft_tokens": "280"}), {})
    options = {"max_soft_tokens": 70, "max_pixels": 48 * 48}
    with pytest.raises(ConfigError, match="remove one"):
        Gemma4ImageProcessor(checkpoint_of(tmp_path), options)
    with pytest.raises(ConfigError, match="knows 800 positions; lower max_soft_tokens"):
        Gemma4ImageProcessor(checkpoint_of(tmp_path, table=800), {})
    text = {"use_bidirectional_attention": "vision", "sliding_window": 512}
    Gemma4ImageProcessor(checkpoint_of(tmp_path, **text), {})
    with pytest.raises(ConfigError, match="does not fit into this model's attention window of 512"):
        Gemma4ImageProcessor(checkpoint_of(tmp_path, **text), {"max_soft_tokens": 560})


class TestVideos:
    @pytest.fixture
    def make(self, tmp_path):
        def processor(file=None, **options):
            return Gemma4VideoProcessor(checkpoint_of(tmp_path, video_file=file), options)

        return processor

    def item(self, processor, num_frames, limits, height=60, width=90):
        shape = (num_frames, height, width, 3)
        frames = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
        return processor.decode(frames, limits)

    def test_text_of_transformers(self, make, limits):
        """Times and markers are written as transformers' processor does."""
        processor = make(video_target_frames=5, video_source_fps=0.05)
        made = processor.process(self.item(processor, 5, limits), {})
        per_frame = made.num_tokens // 5
        metadata = SimpleNamespace(fps=0.05, timestamps=[index / 0.05 for index in range(5)])
        host = SimpleNamespace(boi_token="<|image>", eoi_token="<image|>", video_token="<|video|>")
        inputs = {"num_soft_tokens_per_video": [per_frame], "video_metadata": [metadata]}
        expected = Gemma4Processor.replace_video_token(host, inputs, 0)
        assert made.prompt_text == expected
        assert made.prompt_text.startswith("00:00 <|image><|video|>")
        assert "01:20 <|image>" in made.prompt_text

    def test_frames_and_sizes(self, make, limits):
        processor = make()
        for num_frames, wanted in ((1, 1), (7, 7), (32, 32), (50, 32)):
            item = self.item(processor, num_frames, limits)
            made = processor.process(item, {})
            frames, rows, columns = made.grid_thw
            assert frames == wanted
            assert (
                rows * columns // 9 * frames == made.num_tokens == processor.count_tokens(item, {})
            )
            assert made.num_tokens // frames <= 70
            assert made.prompt_text.count("<|video|>") == made.num_tokens
            assert made.tensors["pixels"].min() >= 0
            assert made.tensors["pixels"].max() <= 1

    @pytest.mark.full
    def test_options(self, make, limits):
        few = make({"num_frames": 6, "max_soft_tokens": 140})
        assert few.options.target_frames == 6
        made = few.process(self.item(few, 9, limits), {"target_frames": 4})
        assert made.grid_thw[0] == 4
        assert 70 < made.num_tokens // 4 <= 140
        rate = make(video_fps=2, video_max_frames=100)
        assert rate.process(self.item(rate, 72, limits), {}).grid_thw[0] == 72
        assert rate.process(self.item(rate, 72, limits), {"fps": 1.0}).grid_thw[0] == 3
        with pytest.raises(ConfigError, match="video_max_soft_tokens must be one of"):
            make(video_max_soft_tokens=100)
        with pytest.raises(ConfigError, match="remove one"):
            make(video_max_soft_tokens=70, video_max_pixels=10000)
        with pytest.raises(CheckpointError, match="max_soft_tokens must be one of"):
            make({"max_soft_tokens": 71})
