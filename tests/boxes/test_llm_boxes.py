"""LLM.boxes: from an answer to pixels of the file, EXIF orientation applied."""

import io
from dataclasses import replace

import pytest
from PIL import Image

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.boxes.reading import Box
from mmdeploy_llm.errors import RequestError
from mmdeploy_llm.outputs import Completions

PARAMS = SamplingParams(temperature=0, max_tokens=2)
TEXT = '[{"bbox_2d": [100, 100, 300, 500], "label": "cat"}]'


def saying(output, text):
    """Returns the output with another answer: the bundled model writes no boxes."""
    return replace(output, outputs=Completions([replace(output.outputs[0], text=text)]))


def asked(*parts):
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "Where is the cat?"}]}]


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
