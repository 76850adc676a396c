"""Families with media from end to end: chats against transformers' model, and configs that no model
can have."""

import json
import re

import numpy as np
import pytest
import torch
import transformers

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.errors import CheckpointError, ModelNotSupportedError
from mmdeploy_llm.hooks import MediaLimits
from mmdeploy_llm.request import MediaSpan
from mmdeploy_llm.weights.folder import read_checkpoint

from .image_chats import INPUTS, INTERNVL_TILE, chat, noise

NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, min_tokens=0, ignore_eos=True)
OPTIONS = {
    "limit_mm_per_prompt": {"image": 4, "video": 1},
    "block_size": 16,
    "num_gpu_blocks_override": 128,
    "max_model_len": 768,
    "max_num_seqs": 8,
    "num_threads": 1,
    "use_warmup": False,
    "dtype": "float32",
}


def images(*sizes):
    return [noise(seed, *size) for seed, size in enumerate(sizes)]


SMALL, WIDE = images((60, 50)), images((300, 90))
SQUARES = {"gemma3": images((40, 200), (50, 50)), "gemma4": images((90, 200), (5, 700))}
PAN = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 20}
# Family, options of its image processor, tokens per step, tokens of the images of a chat.
PROCESSED = [
    ("gemma3", {}, 60, {1: 4, 2: 4}),
    pytest.param("gemma3", PAN, 512, {2: 16}, marks=pytest.mark.full),
    ("gemma4", {}, 100, {}),
    ("internvl", {}, 24, {1: INTERNVL_TILE}),
    ("minicpmv4_6", {}, 40, {1: 4}),
    pytest.param("minicpmv4_6", {"downsample_mode": "4x"}, 512, {1: 16}, marks=pytest.mark.full),
]


def groups(family):
    """Images of each chat: none, one, one of several tiles, two."""
    return [[], SMALL, WIDE, SQUARES.get(family, images((120, 200), (50, 50)))]


@pytest.fixture
def expected(references):
    """expected(family, prompt, images, options) -> the ids that transformers' processor makes of a
    rendered chat, and the tokens that transformers' model adds."""

    def ask(family, prompt, media, options):
        folder = references.tiny(family)
        reference = references.of(folder)
        inputs = INPUTS[family](folder, prompt, media, **options)

        def compute():
            settings = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": None}
            with torch.inference_mode():
                return reference.model.generate(**inputs, **settings)[0]

        ids = inputs["input_ids"][0].tolist()
        whole = reference.answers(compute, "chat", NUM_TOKENS, inputs)
        return ids, whole[len(ids) :].tolist()

    return ask


@pytest.mark.one_is_quick
@pytest.mark.parametrize(("family", "options", "budget", "num_tokens"), PROCESSED)
def test_chats_equal_transformers(references, expected, family, options, budget, num_tokens):
    """Ids, tokens and counts, in one batch, then again from the prefix cache."""
    given = {"max_num_batched_tokens": budget, "mm_processor_kwargs": options, **OPTIONS}
    chats = [chat([("image", image) for image in group]) for group in groups(family)]
    with LLM(str(references.tiny(family)), **given) as llm:
        outputs = llm.chat(chats, GREEDY, use_tqdm=False)
        again = llm.chat(chats, GREEDY, use_tqdm=False)
        counts = [llm.count_tokens(messages) for messages in chats]
    for output, repeated, counted, group in zip(
        outputs, again, counts, groups(family), strict=True
    ):
        assert output.is_ok, output.error_msg
        ids, tokens = expected(family, output.prompt, group, options)
        assert list(output.prompt_token_ids) == ids
        assert list(output.outputs.token_ids) == list(repeated.outputs.token_ids) == tokens
        assert counted.num_input_image_tokens == output.num_input_image_tokens
    assert sum(output.num_cached_tokens for output in again) > 0
    found = [output.num_input_image_tokens for output in outputs]
    assert found[0] == 0 < min(found[1:])
    assert {number: found[number] for number in num_tokens} == num_tokens


@pytest.mark.full
@pytest.mark.parametrize("family", ["gemma3", "minicpmv4_6"])
def test_ids_that_transformers_processor_made(references, expected, family):
    group = groups(family)[3]
    with LLM(str(references.tiny(family)), **OPTIONS) as llm:
        messages = chat([("image", image) for image in group])
        rendered = llm.chat(messages, GREEDY, use_tqdm=False)[0]
        ids, tokens = expected(family, rendered.prompt, group, {})
        prompt = {"prompt_token_ids": ids, "multimodal_data": {"image": group}}
        output = llm.generate(prompt, GREEDY, use_tqdm=False)[0]
    assert output.is_ok, output.error_msg
    assert list(output.prompt_token_ids) == ids
    assert list(output.outputs.token_ids) == tokens


def clip(num):
    return np.random.default_rng(num).integers(0, 256, (num, 60, 90, 3), dtype=np.uint8)


IMAGES = [
    [],
    [("image", noise(0, 60, 50))],
    [("image", noise(1, 200, 90)), ("image", noise(2, 30, 40))],
]
VIDEO = [[("video", clip(5))]]
FRAME = r"<\|begin_of_image\|>(<\|image\|>)+<\|end_of_image\|>"
# Family -> chats, the text of the video in the prompt, and the token of its frames.
WITH_OUR_PIXELS = {
    "glm4v": (IMAGES + VIDEO, rf"<\|begin_of_video\|>({FRAME}0){{3}}<\|end_of_video\|>", "image"),
    "glm_ocr": (
        IMAGES + VIDEO,
        rf"({FRAME}0.0 seconds)({FRAME}0.1 seconds)({FRAME}0.2 seconds)",
        "image",
    ),
    "glm4v_moe": (IMAGES[:2], "", "image"),
    "lfm2_vl": (IMAGES, "", "image"),
    "internvl": (
        VIDEO,
        r"Frame1: <img>(<IMG_CONTEXT>)+</img>\n(Frame\d: .*\n){3}Frame5: <img>",
        "image",
    ),
    "gemma4": (VIDEO, r"<\|video\|>", "video"),
}


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
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=[pytest.mark.full] * (name not in ("glm4v", "gemma4")))
        for name in WITH_OUR_PIXELS
    ],
)
def test_the_pixels_of_our_processors(family, references):
    """transformers' tower and decoder give the same tokens for our pixels of images and frames;
    transformers' own processors need torchvision."""
    folder = references.tiny(family)
    chats, text, kind = WITH_OUR_PIXELS[family]
    reference = references.of(folder)
    with LLM(str(folder), max_num_batched_tokens=100, **OPTIONS) as llm:
        outputs = llm.chat([chat(media) for media in chats], GREEDY, use_tqdm=False)
        processors = {
            kind: llm.plugins.build(
                llm.plugins.media_processor(kind, family), read_checkpoint(folder), {}
            )
            for kind in {kind for media in chats for kind, _ in media}
        }
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    placeholder = getattr(reference.config, f"{kind}_token_id")
    for output, media in zip(outputs, chats, strict=True):
        assert output.is_ok, output.error_msg
        ids = list(output.prompt_token_ids)
        spans = spans_of(processors, ids, placeholder, media)
        assert list(output.outputs.token_ids) == reference.generate(ids, NUM_TOKENS, spans)
        if media and media[0][0] == "video":
            assert re.search(text, tokenizer.decode(ids)), tokenizer.decode(ids)


# Family -> part of the config, or none, its field and a value that the model does not implement.
REFUSED = {
    "gemma3": [
        (None, "mm_tokens_per_image", 9),
        (None, "mm_tokens_per_image", 16),
        (None, "image_token_index", 10**6),
        ("vision_config", "hidden_act", "softplus"),
        ("vision_config", "model_type", "clip_vision_model"),
        ("text_config", "hidden_activation", "silu"),
    ],
    "gemma4": [
        ("vision_config", "hidden_activation", "relu"),
        ("vision_config", "num_key_value_heads", 1),
        ("vision_config", "attention_bias", True),
        ("text_config", "hidden_activation", "silu"),
        ("text_config", "vocab_size_per_layer_input", 8),
        ("text_config", "pad_token_id", 10**6),
    ],
    "internvl": [
        ("vision_config", "num_attention_heads", 7),
        ("vision_config", "num_channels", 0),
        ("vision_config", "norm_type", "batch_norm"),
        ("vision_config", "hidden_act", "softplus"),
        ("vision_config", "use_absolute_position_embeddings", False),
        ("vision_config", "image_size", [56, 28]),
        ("vision_config", "image_size", [70, 70]),
        (None, "downsample_ratio", 0.0),
        (None, "downsample_ratio", 0.3),
        (None, "downsample_ratio", -0.5),
        (None, "vision_feature_layer", 0),
        (None, "vision_feature_select_strategy", "full"),
        (None, "projector_hidden_act", "softplus"),
        ("text_config", "model_type", "llama"),
    ],
    "minicpmv4_6": [
        (None, "merger_times", 2),
        (None, "merge_kernel_size", [2, 4]),
        (None, "insert_layer_id", 3),
        ("vision_config", "window_kernel_size", [4, 4]),
        ("vision_config", "hidden_act", "softplus"),
        ("text_config", "model_type", "qwen3"),
    ],
}
# What no config of InternVL has.
NO_VALUES = [
    ("vision_config", "hidden_size", 0),
    ("vision_config", "hidden_size", -48),
    ("vision_config", "hidden_size", "48"),
    ("vision_config", "num_hidden_layers", 0),
    ("vision_config", "image_size", [0, 0]),
    ("vision_config", "patch_size", [-14, -14]),
    ("vision_config", "patch_size", "14"),
    (None, "downsample_ratio", "half"),
]


def changed(folder, new, part, name, value):
    """Returns a copy of the folder's configs with another value, in a part of config.json or
    outside."""
    for file in folder.glob("*.json"):
        (new / file.name).write_bytes(file.read_bytes())
    config = json.loads((new / "config.json").read_text("utf-8"))
    (config[part] if part else config)[name] = value
    (new / "config.json").write_text(json.dumps(config), "utf-8")
    return str(new)


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("family", "change"),
    [(family, change) for family, changes in REFUSED.items() for change in changes],
    ids=str,
)
def test_configs_that_are_refused(family, change, tiny_folder, tmp_path):
    message = f"{change[1]} = " if family == "gemma4" else "not supported|must be a multiple"
    with pytest.raises((ModelNotSupportedError, CheckpointError), match=message):
        LLM(changed(tiny_folder(family), tmp_path, *change), load_format="dummy", **OPTIONS)


@pytest.mark.one_is_quick
@pytest.mark.parametrize("change", NO_VALUES, ids=str)
def test_values_that_no_config_has(change, tiny_folder, tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json of the model"):
        LLM(changed(tiny_folder("internvl"), tmp_path, *change), load_format="dummy", **OPTIONS)
