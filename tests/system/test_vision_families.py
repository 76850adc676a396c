"""GLM-4V, LFM2-VL and videos of InternVL from end to end: chats against transformers' model, with
the pixels that our processors make and the prompts of transformers' processors."""

import re

import numpy as np
import pytest
import transformers
from PIL import Image

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.hooks import MediaLimits
from mmdeploy_llm.model_folder import read_checkpoint
from mmdeploy_llm.request import MediaSpan
from mmdeploy_llm.testing.reference import Reference
from mmdeploy_llm.testing.tiny import write_tiny

NUM_TOKENS = 10
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, min_tokens=0, ignore_eos=True)
OPTIONS = {
    "limit_mm_per_prompt": {"image": 4, "video": 1},
    "block_size": 16,
    "num_gpu_blocks_override": 96,
    "max_model_len": 768,
    "max_num_batched_tokens": 100,
    "max_num_seqs": 8,
    "num_threads": 1,
    "use_warmup": False,
    "dtype": "float32",
}


def picture(seed, width, height):
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def clip(num):
    return np.random.default_rng(num).integers(0, 256, (num, 60, 90, 3), dtype=np.uint8)


IMAGES = [
    [],
    [("image", picture(0, 60, 50))],
    [("image", picture(1, 200, 90)), ("image", picture(2, 30, 40))],
]
VIDEO = [[("video", clip(5))]]
FRAME = r"<\|begin_of_image\|>(<\|image\|>)+<\|end_of_image\|>"
# Family -> chats, and the text of the video in the prompt.
CASES = {
    "glm4v": (IMAGES + VIDEO, rf"<\|begin_of_video\|>({FRAME}0){{3}}<\|end_of_video\|>"),
    "glm_ocr": (IMAGES + VIDEO, rf"({FRAME}0.0 seconds)({FRAME}0.1 seconds)({FRAME}0.2 seconds)"),
    "glm4v_moe": (IMAGES[:2], ""),
    "lfm2_vl": (IMAGES, ""),
    "internvl": (VIDEO, r"Frame1: <img>(<IMG_CONTEXT>)+</img>\n(Frame\d: .*\n){3}Frame5: <img>"),
}


def chat(media):
    parts = [{"type": kind, kind: item} for kind, item in media]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is this?"}]}]


def spans_of(processors, ids, placeholder, media):
    """Returns the spans of media whose placeholders are the same token."""
    places = [index for index, token in enumerate(ids) if token == placeholder]
    spans = []
    for kind, source in media:
        processor = processors[kind]
        item = processor.process(processor.decode(source, MediaLimits()), {})
        own, places = places[: item.num_tokens], places[item.num_tokens :]
        rows = tuple(place - own[0] for place in own)
        spans.append(MediaSpan(offset=own[0], item=item, rows=rows))
    assert not places
    return spans


@pytest.mark.full
@pytest.mark.parametrize("family", CASES)
def test_chats_equal_transformers(family, tmp_path):
    folder = write_tiny(family, tmp_path)
    chats, text = CASES[family]
    reference = Reference(folder)
    with LLM(str(folder), **OPTIONS) as llm:
        outputs = llm.chat([chat(media) for media in chats], GREEDY, use_tqdm=False)
        processors = {
            kind: llm.plugins.build(
                llm.plugins.media_processor(kind, family), read_checkpoint(folder), {}
            )
            for kind in {kind for media in chats for kind, _ in media}
        }
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for output, media in zip(outputs, chats, strict=True):
        assert output.is_ok, output.error_msg
        ids = list(output.prompt_token_ids)
        spans = spans_of(processors, ids, reference.config.image_token_id, media)
        assert list(output.outputs.token_ids) == reference.generate(ids, NUM_TOKENS, spans)
        if media and media[0][0] == "video":
            assert re.search(text, tokenizer.decode(ids)), tokenizer.decode(ids)
