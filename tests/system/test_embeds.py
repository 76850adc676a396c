"""Embeddings that transformers' own encoder computed give the tokens of the media themselves."""

import re

import numpy as np
import pytest
import torch

from mmdeploy_llm import SamplingParams
from tests.together import begin_together

GREEDY = SamplingParams(temperature=0, max_tokens=12)
SIZES = [(70, 90), (150, 60), (112, 112)]
OTHERS = ("ernie4_5_vl_moe", "qwen3_5", "qwen3_vl")
ONE_QUICK = ["qwen2_5_vl", *(pytest.param(name, marks=pytest.mark.full) for name in OTHERS)]


def rows_of(found, index):
    """Rows of the item at `index`, from the output of transformers' encoder: with
    the features of inner layers, where there are any, as this engine's encoder returns them."""
    rows = found.pooler_output
    layers = getattr(found, "deepstack_features", None) or ()
    return torch.cat([rows[index], *(layer[index] for layer in layers)], dim=1)


@torch.inference_mode()
def image_embeds(reference, images):
    made = reference.inputs(reference.image_text() * len(images), images)
    grids = made["image_grid_thw"]
    found = reference.model.get_image_features(
        pixel_values=made["pixel_values"], image_grid_thw=grids, return_dict=True
    )
    return [
        {"image_embeds": rows_of(found, index), "grid": tuple(grid.tolist())}
        for index, grid in enumerate(grids)
    ]


@torch.inference_mode()
def video_embeds(reference, clip):
    pixels, grid, seconds = reference.video_inputs(clip)
    grids = torch.tensor([grid])
    found = reference.model.get_video_features(
        pixel_values_videos=pixels, video_grid_thw=grids, return_dict=True
    )
    item = {"video_embeds": rows_of(found, 0), "grid": grids[0]}
    if reference.family == "qwen2_5_vl":
        item["second_per_grid"] = seconds
    if reference.family == "qwen3_vl":
        text = reference.stamped_text(clip, int(np.prod(grid)) // 4)
        item["timestamps"] = [float(time) for time in re.findall(r"<([\d.]+) seconds>", text)]
    return item


def cases(reference, make_picture):
    """Returns (prompt, images): one image, several of different sizes, two next to each other."""
    pictures = [make_picture(seed, *size) for seed, size in enumerate(SIZES)]
    image = reference.image_text()
    return [
        (f"User: Picture 1:{image}what is it? Assistant:", pictures[:1]),
        (f"A {image} B {image} C {image} D", pictures),
        (f"{image}{image} which is larger?", pictures[1:]),
    ]


def as_prompt(reference, text, images):
    return {"prompt": text, "multimodal_data": {"image": image_embeds(reference, images)}}


def run(llm, prompts):
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.error_msg for output in outputs] == [None] * len(prompts)
    return outputs


def tokens(outputs):
    return [list(output.outputs.token_ids) for output in outputs]


@pytest.fixture
def found(vl_reference, make_picture):
    return cases(vl_reference, make_picture)


@pytest.fixture
def prompts(vl_reference, found):
    return [as_prompt(vl_reference, *case) for case in found]


@pytest.fixture
def wanted(vl_reference, found):
    return [vl_reference.generate(*case) for case in found]


@pytest.mark.full
@pytest.mark.parametrize("vl_reference", ONE_QUICK, indirect=True)
def test_in_chunks_and_with_a_prefix_hit(vl_reference, make_llm, found, prompts, wanted):
    atomic = vl_reference.is_ernie
    llm, _ = make_llm(
        vl_reference.folder,
        block_size=4,
        max_num_seqs=3,
        max_num_batched_tokens=40 if atomic else 5,
    )
    cold, warm = run(llm, prompts), run(llm, prompts)
    assert tokens(cold) == tokens(warm) == wanted
    assert all(output.num_cached_tokens > 0 for output in warm)
    for output, prompt, case in zip(cold, prompts, found, strict=True):
        ids = vl_reference.inputs(*case)["input_ids"][0].tolist()
        assert list(output.prompt_token_ids) == ids
        count = llm.count_tokens(prompt)
        assert count.num_prompt_tokens == len(ids)
        assert count.num_input_image_tokens == output.num_input_image_tokens > 0


@pytest.mark.full
def test_with_preemption_among_images(vl_reference, make_llm, found, prompts, wanted):
    """Every prompt occurs with images and with embeddings, and some request always waits for
    blocks."""
    longest = max(vl_reference.inputs(*case)["input_ids"].shape[1] for case in found)
    llm, stats = make_llm(
        vl_reference.folder,
        block_size=4,
        num_gpu_blocks_override=-(-(longest + GREEDY.max_tokens) // 4) + 6,
        max_num_seqs=12,
        enable_prefix_caching=False,
    )
    images = [{"prompt": text, "multimodal_data": {"image": own}} for text, own in found]
    begin_together(llm, 12)
    assert tokens(run(llm, (prompts + images) * 2)) == wanted * 4
    assert stats.steps[-1].num_preemptions > 0


@pytest.mark.full
def test_with_room_for_one_item(vl_reference, make_llm, prompts, wanted):
    most = max(w * h for w, h in SIZES) // (28 * 28) + 8
    llm, _ = make_llm(
        vl_reference.folder, encoder_cache_memory=4 * vl_reference.media_size * most, max_num_seqs=3
    )
    assert tokens(run(llm, prompts)) == wanted


@pytest.mark.full
def test_the_encoder_is_not_called(vl_reference, make_llm, prompts, wanted, monkeypatch):
    llm, _ = make_llm(vl_reference.folder)
    monkeypatch.setattr(llm.model, "encode_media", None)
    assert tokens(run(llm, prompts)) == wanted


@pytest.mark.full
def test_other_embeddings_of_the_same_shape_are_no_prefix_hit(vl_reference, make_llm, make_picture):
    llm, _ = make_llm(vl_reference.folder, block_size=4)
    text = f"User: {vl_reference.image_text()} what is it? Assistant:"
    for seed in range(3):
        case = (text, [make_picture(seed, 112, 112)])
        (output,) = run(llm, [as_prompt(vl_reference, *case)])
        assert tokens([output]) == [vl_reference.generate(*case)]


@pytest.mark.full
def test_a_tensor_that_changes_after_the_call_is_another_item(vl_reference, make_llm, make_picture):
    llm, _ = make_llm(vl_reference.folder, block_size=4)
    text = f"User: {vl_reference.image_text()} what is it? Assistant:"
    case, other = ((text, [make_picture(seed, 112, 112)]) for seed in range(2))
    prompt, second = as_prompt(vl_reference, *case), as_prompt(vl_reference, *other)
    assert tokens(run(llm, [prompt])) == [vl_reference.generate(*case)]
    changed = prompt["multimodal_data"]["image"][0]["image_embeds"]
    with torch.inference_mode():
        changed.copy_(second["multimodal_data"]["image"][0]["image_embeds"])
    assert tokens(run(llm, [prompt])) == [vl_reference.generate(*other)]


@pytest.mark.full
def test_forms(vl_reference, make_llm, found, wanted):
    """An array, a dict without a list, the dict itself as multimodal_data, a part of a message."""
    llm, _ = make_llm(vl_reference.folder)
    (text, images), want = found[0], wanted[0]
    (item,) = image_embeds(vl_reference, images)
    array = {"image_embeds": item["image_embeds"].numpy(), "grid": np.array(item["grid"])}
    data = [{"image": array}, {"image": item}, item, {"image": [{**item, "grid": [*item["grid"]]}]}]
    each = [{"prompt": text, "multimodal_data": own} for own in data]
    assert tokens(run(llm, each)) == [want] * len(data)
    part = {"type": "image", "image": item}
    chats = [[{"role": "user", "content": [own]}] for own in (part, {**part, "image": images[0]})]
    one, other = llm.chat(chats, GREEDY, use_tqdm=False)
    assert one.error_msg is None
    assert one.prompt_token_ids == other.prompt_token_ids
    assert tokens([one]) == tokens([other])


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen2_5_vl", "ernie4_5_vl_moe", "qwen3_vl"])
def test_videos(reference_of, make_llm, make_clip, family):
    reference = reference_of(family)
    llm, _ = make_llm(reference.folder, block_size=4)
    video = reference.video_text()
    short, odd = make_clip(1, 4, 70, 90, range(4)), make_clip(2, 5, 90, 60, range(5))
    found = [
        (f"User: Video 1:{video}what moves? Assistant:", [short]),
        (f"{video} and {video} which is longer?", [odd, short]),
    ]
    prompts = [
        {
            "prompt": text,
            "multimodal_data": {"video": [video_embeds(reference, clip) for clip in clips]},
        }
        for text, clips in found
    ]
    wanted = [reference.generate(text, videos=clips) for text, clips in found]
    outputs = run(llm, prompts)
    assert tokens(outputs) == wanted
    for output, (text, clips) in zip(outputs, found, strict=True):
        ids = reference.inputs(text, videos=clips)["input_ids"][0].tolist()
        assert list(output.prompt_token_ids) == ids


class TestErrors:
    @pytest.fixture
    def reference(self, reference_of):
        return reference_of("qwen2_5_vl")

    @pytest.fixture
    def llm(self, make_llm, reference):
        return make_llm(reference.folder)[0]

    @pytest.fixture
    def good(self, reference, make_picture):
        (item,) = image_embeds(reference, [make_picture(0, 112, 112)])
        return item

    def errors(self, llm, reference, good, kind, items):
        """Returns the outputs of wrong items, between two good ones that they do not disturb."""
        text = f"what? {reference.image_text() if kind == 'image' else reference.video_text()}"
        fine = {"prompt": f"what? {reference.image_text()}", "multimodal_data": {"image": good}}
        wrong = [{"prompt": text, "multimodal_data": {kind: [item]}} for item in items]
        first, *outputs, last = llm.generate([fine, *wrong, fine], GREEDY, use_tqdm=False)
        assert first.is_ok
        assert last.is_ok
        assert tokens([first]) == tokens([last])
        for prompt, output in zip(wrong, outputs, strict=True):
            with pytest.raises(ValueError, match=re.escape(output.error_msg)):
                llm.count_tokens(prompt)
        return [(output.error_code, output.error_msg) for output in outputs]

    def test_shapes_and_dtypes(self, llm, reference, good):
        rows = good["image_embeds"]
        wrong = {
            "a list": (rows.tolist(), 415, "must be a tensor or an array"),
            "integers": (rows.int(), 415, "must have one of the dtypes float64, float32"),
            "an array of integers": (rows.int().numpy(), 415, "must be a tensor or an array"),
            "sparse": (rows.to_sparse(), 415, "must be a dense tensor"),
            "meta": (rows.to("meta"), 415, "must be a dense tensor"),
            "several": (rows[None], 400, "must have the shape [tokens, media_size], got [1, 16"),
            "no rows": (rows[:0], 400, "must have the shape [tokens, media_size], got [0, "),
            "narrow": (
                rows[:, 1:],
                400,
                f"the encoder of this model returns rows of {rows.shape[1]}",
            ),
            "short": (rows[1:], 400, "image_embeds has 15 rows, but its grid (1, 8, 8) has 16"),
        }
        items = [{**good, "image_embeds": values} for values, _, _ in wrong.values()]
        found = self.errors(llm, reference, good, "image", items)
        for (code, message), (_, want, text) in zip(found, wrong.values(), strict=True):
            assert code == want
            assert text in message

    def test_grids_and_options(self, llm, reference, good):
        wrong = {
            "need a 'grid'": None,
            "three whole numbers above 0": (1, 8),
            "above 0, patches in (time, rows, columns), got (1, 8, 0)": (1, 8, 0),
            "got (1, 8, 8.5)": (1, 8, 8.5),
            "got 'abc'": "abc",
            "cannot be merged by 1 in time and by 2": (1, 7, 8),
            "has 2 steps in time; allowed is 1": (2, 4, 8),
            "has 16 rows, but its grid (1, 16, 16) has 64 tokens": (1, 16, 16),
        }
        found = self.errors(
            llm, reference, good, "image", [{**good, "grid": grid} for grid in wrong.values()]
        )
        for (code, message), text in zip(found, wrong, strict=True):
            assert code == 400
            assert text in message
        ((code, message),) = self.errors(llm, reference, good, "image", [{**good, "fps": 3}])
        assert code == 400
        assert "unknown option 'fps'; known: 'image_embeds', 'grid'" in message

    @pytest.mark.full
    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_values_that_are_not_finite(self, llm, reference, good, value):
        rows = good["image_embeds"].clone()
        rows[3, 4] = value
        prompt = {
            "prompt": reference.image_text(),
            "multimodal_data": {"image": {**good, "image_embeds": rows}},
        }
        (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert output.error_code == 400
        assert "image_embeds has values that are not finite in float32" in output.error_msg

    @pytest.mark.full
    def test_videos(self, llm, reference, good, reference_of, make_llm, make_clip):
        item = video_embeds(reference, make_clip(1, 4, 56, 56, range(4)))
        wrong = {"no such": {**item, "grid": None}, "seconds": {**item, "second_per_grid": "1"}}
        found = self.errors(llm, reference, good, "video", list(wrong.values()))
        assert [code for code, _ in found] == [400, 400]
        assert "video_embeds of this model need a 'grid'" in found[0][1]
        assert "second_per_grid must be seconds" in found[1][1]
        other = reference_of("qwen3_vl")
        llm, _ = make_llm(other.folder)
        item = video_embeds(other, make_clip(1, 4, 56, 56, range(4)))
        (good,) = image_embeds(other, [make_clip(1, 4, 112, 112, range(4)).frames[0]])
        wrong = [{**item, "timestamps": times} for times in (None, [1], [0.5, "x"], 3)]
        for code, message in self.errors(llm, other, good, "video", wrong):
            assert code == 400
            assert "timestamps" in message

    @pytest.mark.full
    def test_limits(self, make_llm, reference, good):
        llm, _ = make_llm(reference.folder, max_media_bytes=100)
        prompt = {"prompt": reference.image_text(), "multimodal_data": good}
        (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert output.error_code == 413
        assert "image_embeds has" in output.error_msg
        llm, _ = make_llm(reference.folder, limit_mm_per_prompt={"image": 1})
        text = reference.image_text() * 2
        prompt = {"prompt": text, "multimodal_data": {"image": [good, good]}}
        (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert output.error_code == 413
