"""Video processors turn videos into pixels, grids and token counts."""

import io
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mmdeploy_llm_plugins.ernie.video import ErnieVideoProcessor
from mmdeploy_llm_plugins.qwen.video import QwenVideoProcessor
from PIL import Image

from mmdeploy_llm.errors import MediaError, MediaLimitError, MediaTimeoutError
from mmdeploy_llm.hooks import Checkpoint, MediaLimits
from mmdeploy_llm.system.portable import children

LIMITS = MediaLimits()
FAMILIES = {"ernie": ErnieVideoProcessor, "qwen": QwenVideoProcessor}
SMALL = {"video_min_pixels": 56 * 56, "video_max_pixels": 28 * 28 * 16, "video_min_frames": 2}


@pytest.fixture
def files(load_file):
    return load_file("media/video_files.py")


@pytest.fixture
def make():
    def processor(family="ernie", folder=Path("."), **options):
        vision = SimpleNamespace(patch_size=14, spatial_merge_size=2)
        checkpoint = Checkpoint(folder=folder, config=SimpleNamespace(vision_config=vision))
        return FAMILIES[family](checkpoint, {**SMALL, **options})

    return processor


@pytest.mark.one_is_quick
@pytest.mark.parametrize("family", ["qwen", pytest.param("ernie", marks=pytest.mark.full)])
@pytest.mark.parametrize("num", [1, 2, 3, 8])
def test_counts_and_grids(make, files, family, num):
    processor = make(family, video_fps=10)
    item = processor.decode(files.video(num, 10), LIMITS)
    made = processor.process(item, {})
    used = num if family == "ernie" or num == 1 else num // 2 * 2
    frames = used + used % 2
    steps, rows, columns = made.grid_thw
    assert steps == (frames if family == "ernie" else frames // 2)
    assert made.num_tokens == frames * rows * columns // 8
    assert processor.count_tokens(item, {}) == made.num_tokens
    assert made.tensors["pixels"].shape == (
        steps * rows * columns,
        588 if family == "ernie" else 1176,
    )
    assert made.tensors["pixels"].dtype == torch.float32


@pytest.mark.parametrize("is_encoded", [False, True])
def test_guesses_about_single_frames_are_notes_of_the_video(make, is_encoded):
    """The frames hold numbers of 32 bits, and each note is told once."""
    frames, processor = [], make("qwen")
    for _ in range(4):
        frame = Image.fromarray(np.full((56, 84), 40_000, np.int32))
        file = io.BytesIO()
        frame.save(file, "TIFF")
        frames.append(file.getvalue() if is_encoded else frame)
    item = processor.decode(frames, LIMITS)
    for _ in range(2):
        (note,) = processor.process(item, {"source_fps": 2}).notes
        assert ("from 40000 to 40000" if is_encoded else "read as one of 16 bits") in note
    plain = processor.decode([Image.new("RGB", (84, 56))] * 4, LIMITS)
    assert processor.process(plain, {"source_fps": 2}).notes == ()


def test_the_last_frame_is_doubled(make, files):
    processor = make(video_fps=10, video_draw_on_frames=False)
    made = processor.process(processor.decode(files.video(3, 10), LIMITS), {})
    frames = made.tensors["pixels"].view(4, -1)
    assert torch.equal(frames[2], frames[3])
    assert not torch.equal(frames[1], frames[2])


def test_default_sizes():
    vision = SimpleNamespace(patch_size=14, spatial_merge_size=2)
    checkpoint = Checkpoint(folder=Path("."), config=SimpleNamespace(vision_config=vision))
    frames = [np.zeros((720, 1280, 3), np.uint8)] * 2
    grids = {}
    for family, factory in FAMILIES.items():
        processor = factory(checkpoint, {})
        grids[family] = processor.process(processor.decode(frames, LIMITS), {}).grid_thw
    assert grids == {"ernie": (2, 52, 92), "qwen": (1, 40, 72)}


def test_seconds_between_two_steps(make, files):
    """Qwen's time axis is in seconds: 2 frames per token divided by the sampled rate."""
    processor = make("qwen", video_fps=4)
    made = processor.process(processor.decode(files.video(40, 10), LIMITS), {})
    assert made.grid_thw[0] == 8
    assert float(made.tensors["second_per_grid"]) == pytest.approx(0.5)


def test_item_options(make, files):
    processor = make()
    item = processor.decode(files.video(40, 10), LIMITS)
    few = processor.process(item, {"target_frames": 4, "fps": -1})
    many = processor.process(item, {"fps": 5})
    assert (few.grid_thw[0], many.grid_thw[0]) == (4, 20)
    assert few.key != many.key


def test_a_list_of_frames_is_used_whole(make, files):
    processor = make()
    frames = [files.frame_of(index, 50) for index in range(50)]
    item = processor.decode(frames, LIMITS)
    assert processor.process(item, {}).grid_thw[0] == 50
    assert processor.process(item, {"source_fps": 10, "fps": 2}).grid_thw[0] == 10


@pytest.mark.parametrize(
    ("options", "seconds", "is_told"),
    [
        ({}, [0, 1 / 24, 2 / 24, 3 / 24], True),
        ({"source_fps": 2}, [0, 0.5, 1, 1.5], False),
        ({"times": [3, 4.5, 10, 12]}, [3, 4.5, 10, 12], False),
    ],
)
@pytest.mark.parametrize("is_array", [False, True])
def test_times_of_frames_are_given_or_counted(make, files, options, seconds, is_told, is_array):
    processor = make()
    frames = [files.frame_of(index, 4) for index in range(4)]
    item = processor.decode(np.stack(frames) if is_array else frames, LIMITS)
    plan = processor._plan(item, options)
    assert [*map(plan.timeline.time_of, plan.indices)] == pytest.approx(seconds)
    made = processor.process(item, options)
    assert bool(made.notes) == is_told
    assert all("counted, at 24 a second" in note for note in made.notes)


def test_frames_at_other_times_are_another_item(make, files):
    processor = make()
    item = processor.decode([files.frame_of(index, 2) for index in range(2)], LIMITS)
    keys = {processor.process(item, {"times": times}).key for times in ([0, 1], [0, 2], [5, 6])}
    assert len(keys) == 3


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ([0, 1], "times has 2 numbers, and the video 3 frames"),
        ([0, 2, 1], "seconds, of 0 or more, that ascend"),
        ([-1, 0, 1], "seconds, of 0 or more, that ascend"),
        ("abc", "seconds, of 0 or more, that ascend"),
    ],
)
def test_wrong_times(make, files, times, message):
    processor = make()
    item = processor.decode([files.frame_of(index, 3) for index in range(3)], LIMITS)
    with pytest.raises(MediaError, match=message):
        processor.process(item, {"times": times})


def test_a_file_has_times_of_its_own(make, files):
    processor = make()
    item = processor.decode(files.video(3, 10), LIMITS)
    with pytest.raises(MediaError, match="times is an option of a list of frames"):
        processor.process(item, {"times": [0, 1, 2]})


def test_pixels_that_are_not_square_count_as_they_are_shown(make, load_file):
    blob = load_file("media/numbered_videos.py").encoded(
        "mp4", "libx264", ticks=range(2), aspect=Fraction(2)
    )
    processor = make(video_max_pixels=28 * 28 * 400)
    grids = [
        processor.process(processor.decode(blob, limits), {}).grid_thw
        for limits in (LIMITS, replace(LIMITS, pixels="as-stored"))
    ]
    # 256 x 64 and 128 x 64 pixels, in steps of 28, of two patches each
    assert [grid[1:] for grid in grids] == [(4, 18), (4, 10)]


def test_a_long_list_is_thinned_out(make, files):
    frames = [files.frame_of(index, 50) for index in range(50)]
    processor = make(video_max_frames=10)
    assert processor.process(processor.decode(frames, LIMITS), {}).grid_thw[0] == 10


def test_frame_limit(make, files):
    processor = make(video_fps=10)
    item = processor.decode(files.video(40, 10), replace(LIMITS, max_frames=8))
    with pytest.raises(MediaLimitError, match="40 frames of the video would be used, 8 are"):
        processor.process(item, {})


def test_wrong_item_option(make, files):
    processor = make()
    item = processor.decode(files.video(8, 10), LIMITS)
    with pytest.raises(MediaError, match="no video option 'max_pixels'"):
        processor.process(item, {"max_pixels": 100})


@pytest.mark.full
def test_a_strip_for_people(make, files):
    """Previews are at most eight of the chosen frames, including the first and the last."""
    processor = make(video_fps=10, video_draw_on_frames=False)
    item = processor.decode(files.video(40, 10), LIMITS)
    strip = [Image.open(io.BytesIO(blob)) for blob in processor.previews(item, {})]
    assert [files.index_of(frame, 40) for frame in strip] == [0, 6, 11, 17, 22, 28, 33, 39]
    few = processor.previews(item, {"target_frames": 3, "fps": -1})
    assert len(few) == 3


class TestIsolation:
    """A worker process returns the same pixels and the same errors."""

    def test_same_pixels(self, make, files):
        processor, blob = make(video_fps=10), files.video(12, 10)
        made = [
            processor.process(processor.decode(blob, replace(LIMITS, isolation=mode)), {})
            for mode in ("process", "thread", "auto")
        ]
        assert len({item.key for item in made}) == 1
        assert all(
            torch.equal(item.tensors["pixels"], made[0].tensors["pixels"]) for item in made[1:]
        )
        processor.close()

    @pytest.mark.full
    def test_the_process_is_used_again(self, make, files, monkeypatch):
        started, start = [], children.subprocess.Popen

        def watched(*args, **kwargs):
            started.append(start(*args, **kwargs))
            return started[-1]

        monkeypatch.setattr(children.subprocess, "Popen", watched)
        processor = make(video_fps=10)
        for num in (3, 4, 5):
            item = processor.decode(files.video(num, 10), LIMITS)
            processor.process(item, {})
            processor.previews(item, {})
        assert len(started) == 1
        processor.close()

    @pytest.mark.full
    def test_same_errors(self, make, files):
        processor = make()
        for blob in (b"\0" * 400, files.video(8)[:400], files.sound()):
            found = []
            for mode in ("process", "thread"):
                with pytest.raises(MediaError) as caught:
                    processor.decode(blob, replace(LIMITS, isolation=mode))
                found.append((caught.type, str(caught.value)))
            assert found[0] == found[1]
        processor.close()

    @pytest.mark.full
    def test_a_deadline(self, make, files):
        processor = make(video_fps=10)
        processor.decode(files.video(4, 10), LIMITS)  # starts the process
        with pytest.raises(MediaTimeoutError, match="media_timeout"):
            processor.decode(files.video(200, 10), replace(LIMITS, decode_timeout=1e-9))
        assert processor.decode(files.video(4, 10), LIMITS).video.timeline.num_frames == 4
        processor.close()
