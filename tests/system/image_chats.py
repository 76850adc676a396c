"""Chats with images that a family answers as transformers' model and processor do."""

import json

import numpy as np
import pytest
from PIL import Image

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.errors import ModelNotSupportedError

NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
OPTIONS = {
    "limit_mm_per_prompt": {"image": 4},
    "block_size": 16,
    "num_gpu_blocks_override": 128,
    "max_model_len": 768,
    "max_num_seqs": 8,
    "num_threads": 1,
    "use_warmup": False,
}


def noise(seed, width, height):
    """A picture in which no pixel is as its neighbour."""
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def chat(images):
    parts = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is this?"}]}]


def new_tokens(model, inputs, **options):
    """Returns the ids of a prompt and the tokens that transformers' model adds."""
    settings = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": None}
    found = model.generate(**inputs, **options, **settings)
    ids = inputs["input_ids"][0].tolist()
    return ids, found[0, len(ids) :].tolist()


def check_chats(folder, groups, expected, budget, options):
    """Compares the answers to one chat for each group of images, alone and from the prefix cache;
    returns the first ones. expected: makes ids and new tokens of a prompt, images and options."""
    given = {"max_num_batched_tokens": budget, "mm_processor_kwargs": options}
    with LLM(str(folder), dtype="float32", **given, **OPTIONS) as llm:
        outputs = llm.chat([chat(images) for images in groups], GREEDY, use_tqdm=False)
        again = llm.chat([chat(images) for images in groups], GREEDY, use_tqdm=False)
        counts = [llm.count_tokens(chat(images)) for images in groups]
    for output, repeated, count, images in zip(outputs, again, counts, groups, strict=True):
        assert output.is_ok, output.error_msg
        ids, tokens = expected(folder, output.prompt, images, **options)
        assert list(output.prompt_token_ids) == ids
        assert list(output.outputs.token_ids) == list(repeated.outputs.token_ids) == tokens
        assert count.num_input_image_tokens == output.num_input_image_tokens
        assert not images or repeated.num_cached_tokens > 0
    return outputs


def check_ids(folder, images, expected):
    """Compares the answer to the ids that transformers' processor makes."""
    with LLM(str(folder), dtype="float32", **OPTIONS) as llm:
        rendered = llm.chat(chat(images), GREEDY, use_tqdm=False)[0]
        ids, tokens = expected(folder, rendered.prompt, images)
        prompt = {"prompt_token_ids": ids, "multimodal_data": {"image": images}}
        output = llm.generate(prompt, GREEDY, use_tqdm=False)[0]
    assert output.is_ok, output.error_msg
    assert list(output.prompt_token_ids) == ids
    assert list(output.outputs.token_ids) == tokens


def check_refused(folder, copy, part, name, value):
    """Checks that a config with another value, in a part of it or outside, is refused."""
    for file in folder.glob("*.json"):
        (copy / file.name).write_bytes(file.read_bytes())
    config = json.loads((copy / "config.json").read_text("utf-8"))
    (config[part] if part else config)[name] = value
    (copy / "config.json").write_text(json.dumps(config), "utf-8")
    with pytest.raises(ModelNotSupportedError, match="not supported"):
        LLM(str(copy), load_format="dummy", **OPTIONS)
