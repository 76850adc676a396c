"""Videos give the tokens of transformers' own model: its own video processors prepare them, without
torchvision."""

import numpy as np
import pytest
import torch
from mmdeploy_llm_plugins.transformers_media.video.sampling import Sampling
from PIL import Image

from mmdeploy_llm import SamplingParams
from mmdeploy_llm.errors import ConfigError, MediaError
from mmdeploy_llm.media import constant_timeline
from mmdeploy_llm.testing.media.samples import pixels
from mmdeploy_llm.testing.tiny import write_tiny
from tests.together import begin_together

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
NATIVE = ("glm", "qwen")
MARKERS = {
    "glm4v": "<|begin_of_video|><|video|><|end_of_video|>",
    "qwen2_5_vl": "<|vision_start|><|video_pad|><|vision_end|>",
    "qwen2_vl": "<|vision_start|><|video_pad|><|vision_end|>",
}
VIDEOS = {"limit_mm_per_prompt": {"image": 2, "video": 4}}


@pytest.fixture(scope="module")
def made(load_file):
    return load_file("plugins/transformers_any/video_families.py")


@pytest.fixture(scope="module")
def blobs(made):
    return made.videos()


@pytest.fixture(scope="module")
def frames(made, blobs):
    return [made.decoded(blob) for blob in blobs]


@pytest.fixture(scope="module")
def reference_of(load_file, made, tmp_path_factory):
    """Returns a function from the name of a family to its VideoReference, written once."""
    helpers, found = load_file("plugins/transformers_any/conftest.py"), {}

    def reference(name):
        if name not in found:
            own = made.families(helpers)[name]
            found[name] = made.VideoReference(helpers, own, tmp_path_factory.mktemp(name))
        return found[name]

    return reference


@pytest.fixture(
    params=[
        "llava_onevision",
        *(pytest.param(name, marks=pytest.mark.full) for name in ("llava_next_video", "smolvlm")),
    ]
)
def reference(request, reference_of):
    return reference_of(request.param)


def cases(reference, frames):
    """Returns (prompt, numbers of the videos): one, another, the same twice, none."""
    marker = reference.own.family.marker
    return [
        (f"User: {marker}what is it? Assistant:", [0]),
        (f"A {marker} B", [1]),
        (f"{marker} and {marker} the lazy dog", [0, 0]),
        ("The quick brown fox", []),
    ]


def run(llm, found, blobs):
    prompts = [
        {"prompt": text, "multimodal_data": {"video": [blobs[number] for number in numbers]}}
        for text, numbers in found
    ]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.error_msg for output in outputs] == [None] * len(found)
    return outputs


def tokens(outputs):
    return [list(output.outputs.token_ids) for output in outputs]


def expected(reference, found, frames):
    return [
        reference.generate(text, [frames[number] for number in numbers]) for text, numbers in found
    ]


@pytest.mark.full
def test_batched(reference, make_llm, blobs, frames):
    llm, stats = make_llm(reference.folder, **VIDEOS)
    found = cases(reference, frames)
    begin_together(llm, len(found))
    outputs = run(llm, found, blobs)
    for (text, numbers), output in zip(found, outputs, strict=True):
        ids = reference.ids(text, [frames[number] for number in numbers])[0].tolist()
        assert list(output.prompt_token_ids) == ids
        prompt = {"prompt": text, "multimodal_data": {"video": [blobs[n] for n in numbers]}}
        count = llm.count_tokens(prompt)
        assert count.num_prompt_tokens == len(ids)
        assert count.num_input_video_tokens == output.num_input_video_tokens
        assert (output.num_input_video_tokens > 0) == bool(numbers)
    assert tokens(outputs) == expected(reference, found, frames)
    assert max(step.num_scheduled_requests for step in stats.steps) > 1


@pytest.mark.full
def test_in_chunks_with_a_prefix_hit(reference, make_llm, blobs, frames):
    llm, stats = make_llm(
        reference.folder, **VIDEOS, block_size=4, max_num_batched_tokens=7, max_num_seqs=3
    )
    found = cases(reference, frames)
    cold, warm = run(llm, found, blobs), run(llm, found, blobs)
    assert tokens(cold) == tokens(warm) == expected(reference, found, frames)
    assert any(output.num_cached_tokens > 0 for output in warm)
    assert max(step.num_scheduled_tokens for step in stats.steps) <= 7


@pytest.mark.full
def test_pixels(reference, make_llm, blobs, frames):
    llm, _ = make_llm(reference.folder, **VIDEOS)
    for blob, own in zip(blobs, frames, strict=True):
        prompt = {"prompt": reference.own.family.marker, "multimodal_data": {"video": [blob]}}
        request, *_ = llm._desk.intake.accept(prompt, GREEDY)
        [span] = request.media
        found = span.item.tensors[reference.own.tensor]
        torch.testing.assert_close(found, reference.pixels(own), rtol=0, atol=1e-6)


@pytest.mark.full
def test_options_choose_frames(reference_of, make_llm, made, blobs, frames):
    reference = reference_of("llava_onevision")
    llm, _ = make_llm(reference.folder, **VIDEOS, mm_processor_kwargs={"video_num_frames": 4})
    chosen = frames[0][list(made.CHOSEN)]
    few = [Image.fromarray(frame.permute(1, 2, 0).numpy()) for frame in chosen]
    prompts = [
        {"prompt": "User: <video>", "multimodal_data": {"video": [video]}}
        for video in (blobs[0], {"video": blobs[0], "target_frames": 4}, few)
    ]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert tokens(outputs) == [reference.generate("User: <video>", [chosen])] * 3


@pytest.mark.full
def test_wrong_options(reference_of, make_llm, blobs):
    folder = reference_of("llava_onevision").folder
    with pytest.raises(ConfigError, match="no video option 'video_num_frame'; did you mean"):
        make_llm(folder, mm_processor_kwargs={"video_num_frame": 4})
    llm, _ = make_llm(folder, **VIDEOS)
    for given, reason in (
        ({"fps": 2, "num_frames": 4}, "exclude each other"),
        ({"num_frames": 0}, "num_frames must be a whole number above 0, got 0"),
        ({"fps": float("nan")}, "fps must be a number above 0"),
        ({"frames": 4}, "no video option 'frames'"),
    ):
        video = {"video": blobs[0], **given}
        prompt = {"prompt": "<video>", "multimodal_data": {"video": [video]}}
        [output] = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert reason in output.error_msg


@pytest.mark.full
def test_hostile_videos_lose_nothing_else(reference, make_llm, blobs, frames):
    """One frame is enough, more frames than there are means all; the others are errors."""
    llm, _ = make_llm(reference.folder, **VIDEOS, max_video_frames=6)
    marker = reference.own.family.marker
    picture = Image.fromarray(pixels(40, 60, seed=3))
    good = {"video": blobs[1], "num_frames": 99, "fps": -1}
    if reference.own.tensor == "pixel_values":  # SmolVLM computes with both
        good = blobs[1]
    hostile = [b"", bytes(512), [], blobs[0][:200], [picture] * 7]
    prompts = [
        {"prompt": f"A {marker} B", "multimodal_data": {"video": [video]}}
        for video in (good, *hostile, [picture], good)
    ]
    first, *bad, single, last = llm.generate(prompts, GREEDY, use_tqdm=False)
    want = reference.generate(f"A {marker} B", [frames[1]])
    assert tokens([first, last]) == [want] * 2
    assert all(output.outputs.finish_reason == "error" for output in bad)
    assert "the video has 7 frames, 6 are allowed" in bad[-1].error_msg
    alone = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None]
    assert tokens([single]) == [reference.generate(f"A {marker} B", [alone])]


@pytest.mark.full
def test_more_frames_of_a_file_than_are_allowed(reference_of, make_llm, blobs, frames):
    reference = reference_of("llava_onevision")
    llm, _ = make_llm(reference.folder, **VIDEOS, max_video_frames=6)
    prompts = [{"prompt": "<video>", "multimodal_data": {"video": [blob]}} for blob in blobs]
    long, short = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert "12 frames of the video would be used, 6 are allowed; give fewer" in long.error_msg
    assert tokens([short]) == [reference.generate("<video>", [frames[1]])]


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(MARKERS))
def test_as_the_native_plugin(name, make_llm, tmp_path, frames):
    """These plugins have videos of their own, compared with transformers in their tests."""
    write_tiny(name, tmp_path)
    pictures = [[Image.fromarray(f.permute(1, 2, 0).numpy()) for f in own[:4]] for own in frames]
    found = []
    for blocked in ((), NATIVE):
        llm, _ = make_llm(tmp_path, **VIDEOS, blocked_plugins=blocked)
        marker = MARKERS[name]
        text = f"User: {marker} and {marker} Assistant:"
        prompt = {"prompt": text, "multimodal_data": {"video": pictures}}
        [output] = llm.generate([prompt], GREEDY, use_tqdm=False)
        assert output.error_msg is None
        found.append(
            (output.prompt_token_ids, output.num_input_video_tokens, output.outputs.token_ids)
        )
    assert found[0] == found[1]


class Rule:
    """A video processor as transformers has them, whose default bounds are 16 to 100 frames."""

    class valid_kwargs:
        fps: float
        num_frames: int
        min_frames: int
        max_frames: int

    do_sample_frames = True
    fps, num_frames, min_frames, max_frames = 2, None, 16, 100

    def sample_frames(self, metadata, num_frames, fps, min_frames, max_frames):
        assert min_frames <= max_frames
        return list(
            range(num_frames or min(max(int(metadata.duration * fps), min_frames), max_frames))
        )


def test_default_bounds_give_way_to_given_ones():
    sampling, timeline = Sampling(Rule(), {}, {}), constant_timeline(64, 64, 1000, 10.0)
    for given, count in (({}, 100), ({"max_frames": 4}, 4), ({"min_frames": 300}, 300)):
        options = sampling.of_item(given)
        assert len(sampling.choose(timeline, options, is_chosen=False)) == count
    both = {"min_frames": 9, "max_frames": 4}
    with pytest.raises(MediaError, match="min_frames = 9 is above max_frames = 4"):
        sampling.of_item(both)
    with pytest.raises(ConfigError, match="min_frames = 9 is above max_frames = 4"):
        Sampling(Rule(), both, {})
    with pytest.raises(MediaError, match="min_frames = 9 is above max_frames = 4"):
        Sampling(Rule(), {"min_frames": 9}, {}).of_item({"max_frames": 4})
