"""Prompts with videos, and with images and videos mixed, give the tokens of transformers' own
model."""

import base64
import io

import numpy as np
import pytest
import torch

from mmdeploy_llm import SamplingParams
from tests.together import begin_together

GREEDY = SamplingParams(temperature=0, max_tokens=12)


def video_cases(reference, make_clip, make_picture):
    """Returns (prompt, images, videos): one clip, odd and even counts, a long one whose time
    positions extend past the text after it, two clips, and clips among images."""
    video, image = reference.video_text(), reference.image_text()
    short = make_clip(1, 4, 70, 90, range(4))
    odd = make_clip(2, 5, 90, 60, range(5))
    long = make_clip(3, 24, 60, 60, range(24))
    pictures = [make_picture(7, 84, 60), make_picture(8, 112, 112)]
    return [
        (f"User: Video 1:{video}what moves? Assistant:", [], [short]),
        (f"User: Video 1:{video}what moves? Assistant:", [], [odd]),
        (f"User: {video} Assistant:", [], [long]),
        (f"{video} and {video} which is longer?", [], [odd, long]),
        (f"{image} {video} {image} what changed?", pictures, [short]),
        (f"{video}{image}", pictures[:1], [long]),
    ]


def as_prompt(text, images, videos):
    data = {"image": list(images), "video": [clip.item for clip in videos]}
    return {"prompt": text, "multimodal_data": {kind: data[kind] for kind in data if data[kind]}}


def run(llm, found, params=GREEDY):
    outputs = llm.generate([as_prompt(*case) for case in found], params, use_tqdm=False)
    assert [output.error_msg for output in outputs] == [None] * len(found)
    return outputs


def tokens(outputs):
    return [list(output.outputs.token_ids) for output in outputs]


@pytest.fixture
def found(video_reference, make_clip, make_picture):
    return video_cases(video_reference, make_clip, make_picture)


@pytest.fixture
def wanted(video_reference, found):
    return [video_reference.generate(*case) for case in found]


def test_token_ids_and_counts(video_reference, make_llm, found):
    llm, _ = make_llm(video_reference.folder)
    config = video_reference.config
    for case, output in zip(found, run(llm, found), strict=True):
        ids = video_reference.inputs(*case)["input_ids"][0].tolist()
        assert list(output.prompt_token_ids) == ids
        assert output.num_input_video_tokens == ids.count(config.video_token_id)
        assert output.num_input_image_tokens == ids.count(config.image_token_id)


@pytest.mark.full
def test_ids_that_are_written_out(video_reference, make_llm, found, wanted):
    """Prompt ids with every token of every item, as transformers' processor writes them."""
    llm, _ = make_llm(video_reference.folder)
    for case, want in zip(found, wanted, strict=True):
        ids = video_reference.inputs(*case)["input_ids"][0].tolist()
        request = {**as_prompt(*case), "prompt_token_ids": ids}
        del request["prompt"]
        [output] = llm.generate([request], GREEDY, use_tqdm=False)
        assert output.error_msg is None
        assert (list(output.prompt_token_ids), list(output.outputs.token_ids)) == (ids, want)


@pytest.mark.full
def test_pixels(video_reference, make_llm, found):
    """Patch rows equal those of transformers' image processor on the same frames, bit for bit."""
    llm, _ = make_llm(video_reference.folder)
    for case in found:
        request, *_ = llm._desk.intake.accept(as_prompt(*case), GREEDY)
        want = video_reference.inputs(*case)
        got = [span.item for span in request.media if span.item.kind == "video"]
        pixels = torch.cat([item.tensors["pixels"] for item in got])
        assert torch.equal(pixels, want["pixel_values_videos"])
        assert [list(item.grid_thw) for item in got] == want["video_grid_thw"].tolist()


@pytest.mark.full
def test_alone(video_reference, make_llm, found, wanted):
    llm, _ = make_llm(video_reference.folder)
    assert [tokens(run(llm, [case]))[0] for case in found] == wanted


@pytest.mark.full
def test_batched(video_reference, make_llm, found, wanted):
    llm, stats = make_llm(video_reference.folder)
    begin_together(llm, len(found))
    assert tokens(run(llm, found)) == wanted
    assert max(step.num_scheduled_requests for step in stats.steps) > 1


@pytest.mark.full
def test_in_chunks_smaller_than_a_video(video_reference, make_llm, found, wanted):
    llm, stats = make_llm(video_reference.folder, max_num_batched_tokens=7, max_num_seqs=3)
    assert tokens(run(llm, found)) == wanted
    assert max(step.num_scheduled_tokens for step in stats.steps) <= 7


@pytest.mark.full
def test_with_a_prefix_cache_hit(video_reference, make_llm, found, wanted):
    llm, _ = make_llm(video_reference.folder, block_size=4)
    cold, warm = run(llm, found), run(llm, found)
    assert tokens(cold) == tokens(warm) == wanted
    assert all(output.num_cached_tokens > 0 for output in warm)


@pytest.fixture(scope="module")
def blob(load_file):
    return load_file("media/video_files.py").video(8, 10)


# What a form becomes is the same for every model.
@pytest.mark.parametrize("video_reference", ["qwen2_5_vl"], indirect=True)
class TestForms:
    """A video in every form, in generate and in chat."""

    @pytest.fixture
    def ask(self, video_reference, make_llm):
        llm, _ = make_llm(video_reference.folder)

        def ask(source):
            """Returns its tokens from generate and from chat, which must have the same video
            tokens."""
            prompt = f"User: {video_reference.video_text()} what moves? Assistant:"
            generate = {"prompt": prompt, "multimodal_data": {"video": [source]}}
            part = {"type": "video", "video": source}
            if isinstance(source, dict):
                part = {"type": "video", **source}
            text = {"type": "text", "text": "what moves?"}
            [one] = llm.generate([generate], GREEDY, use_tqdm=False)
            [other] = llm.chat([{"role": "user", "content": [part, text]}], GREEDY, use_tqdm=False)
            assert (one.error_msg, other.error_msg) == (None, None)
            assert one.num_input_video_tokens == other.num_input_video_tokens > 0
            return tokens([one, other])

        return ask

    @pytest.mark.full
    def test_files(self, ask, blob, tmp_path):
        path = tmp_path / "a clip.mp4"
        path.write_bytes(blob)
        data_url = "data:video/mp4;base64," + base64.b64encode(blob).decode()
        want = ask(blob)
        with path.open("rb") as file:
            for source in (
                str(path),
                path,
                path.as_uri(),
                data_url,
                bytearray(blob),
                io.BytesIO(blob),
                file,
                {"video": blob},
            ):
                assert ask(source) == want

    @pytest.mark.full
    def test_frames(self, ask, make_clip):
        frames = make_clip(5, 4, 60, 84, range(4)).frames
        array = np.stack([np.asarray(frame) for frame in frames])
        want = ask(frames)
        for source in (
            tuple(frames),
            array,
            list(array),
            torch.from_numpy(array),
            torch.from_numpy(array).permute(0, 3, 1, 2),
            {"video": frames},
        ):
            assert ask(source) == want

    @pytest.mark.full
    def test_a_url_part(self, video_reference, make_llm, blob):
        """OpenAI's form, with options next to the URL."""
        llm, _ = make_llm(video_reference.folder)
        url = "data:video/mp4;base64," + base64.b64encode(blob).decode()
        text, found = {"type": "text", "text": "what moves?"}, []
        for options in ({"fps": 5, "min_frames": 2}, {"fps": 10}):
            part = {"type": "video_url", "video_url": {"url": url}, **options}
            [output] = llm.chat([{"role": "user", "content": [part, text]}], GREEDY, use_tqdm=False)
            assert output.error_msg is None
            found.append(output.num_input_video_tokens)
        assert found[1] == 2 * found[0]
