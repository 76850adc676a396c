"""LLM.boxes: from an answer to pixels of the file, EXIF orientation applied."""

import io
from dataclasses import replace

import pytest
from PIL import Image

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.errors import RequestError
from mmdeploy_llm.media.boxes.reading import Box
from mmdeploy_llm.testing.tiny import write_tiny
from mmdeploy_llm.values.outputs.request_output import Completions

PARAMS = SamplingParams(temperature=0, max_tokens=2)
TEXT = '[{"bbox_2d": [100, 100, 300, 500], "label": "cat"}]'


def saying(output, text):
    """Returns the output with another answer: the bundled model writes no boxes."""
    return replace(output, outputs=Completions([replace(output.outputs[0], text=text)]))


def asked(*parts):
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "Where is the cat?"}]}]


@pytest.mark.full
@pytest.mark.parametrize("budget", ["full", 16])
def test_pixels_of_the_resized_picture_follow_its_budget(tmp_path, budget):
    """Where a family counts pixels of what it sees, fewer tokens of a picture are other pixels."""
    write_tiny("qwen2_5_vl", tmp_path / "model")
    picture = {"type": "image", "image": Image.new("RGB", (1000, 500), "red")}
    with LLM(str(tmp_path / "model"), image_tokens=budget, quiet=True, use_warmup=False) as llm:
        (output,) = llm.chat(asked(picture), PARAMS, use_tqdm=False)
        (width, height) = {"full": (308, 140), 16: (140, 56)}[budget]
        assert output.num_input_image_tokens == (width // 28) * (height // 28)
        text = f'[{{"bbox_2d": [0, 0, {width}, {height / 2}], "label": "top"}}]'
        assert llm.boxes(saying(output, text)) == [Box(label="top", x0=0, y0=0, x1=1000, y1=250)]


@pytest.mark.full
def test_boxes_of_a_turned_photo():
    """A photo that a camera stored on its side has boxes as it is shown; other prompts have none,
    and say why."""
    stored, turned = io.BytesIO(), Image.Exif()
    turned[0x0112] = 6
    Image.new("RGB", (400, 200), "red").save(stored, "JPEG", exif=turned)
    picture = {"type": "image", "image": stored.getvalue()}
    with LLM("shapes-vl", limit_mm_per_prompt={"image": 2}, quiet=True) as llm:
        prompts = [asked(picture), asked(picture, picture), asked()]
        one, two, none = (llm.chat(prompt, PARAMS, use_tqdm=False)[0] for prompt in prompts)
        assert llm.boxes(saying(one, TEXT)) == [Box(label="cat", x0=20, y0=40, x1=60, y1=200)]
        assert llm.boxes(saying(one, "no cat")) == []
        for other in (two, none):
            with pytest.raises(RequestError, match="boxes need a prompt with one picture"):
                llm.boxes(saying(other, TEXT))
