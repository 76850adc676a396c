"""Gemma 4 from end to end: chats with images against transformers' model and image processor."""

import json

import numpy as np
import pytest
import torch
import transformers
from mmdeploy_llm_plugins.gemma.video4 import Gemma4VideoProcessor
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from mmdeploy_llm import LLM
from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.hooks import Checkpoint, MediaLimits
from mmdeploy_llm.request import MediaSpan
from mmdeploy_llm.testing.reference import Reference
from mmdeploy_llm.testing.tiny import write_tiny

from .image_chats import GREEDY, NUM_TOKENS, chat, noise

OPTIONS = {
    "limit_mm_per_prompt": {"image": 4, "video": 1},
    "block_size": 16,
    "num_gpu_blocks_override": 64,
    "max_model_len": 512,
    "max_num_seqs": 8,
    "num_threads": 1,
    "use_warmup": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny("gemma4", tmp_path_factory.mktemp("gemma4"))


def expected(folder, prompt, images, **options):
    """Returns transformers' greedy tokens; each marker of `prompt` becomes an image's tokens."""
    architecture = transformers.Gemma4ForConditionalGeneration
    model = architecture.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = {}
    if images:
        processor = Gemma4ImageProcessorPil.from_pretrained(folder, **options)
        made = processor(images, return_tensors="pt")
        inputs = {name: made[name] for name in ("pixel_values", "image_position_ids")}
        first, *rest = prompt.split("<|image|>")
        counts = made["num_soft_tokens_per_image"]
        for count, text in zip(counts, rest, strict=True):
            first += f"<|image>{'<|image|>' * int(count)}<image|>{text}"
        prompt = first
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    inputs["mm_token_type_ids"] = (ids == tokenizer.convert_tokens_to_ids("<|image|>")).long()
    with torch.inference_mode():
        options = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": None}
        mask = torch.ones_like(ids)
        found = model.generate(input_ids=ids, attention_mask=mask, **options, **inputs)
    return ids[0].tolist(), found[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("budget", [512, 100], ids=["whole", "in chunks"])
def test_chats_equal_transformers(budget, folder):
    groups = [
        [],
        [noise(0, 60, 50)],
        [noise(1, 300, 20)],
        [noise(2, 90, 200), noise(3, 5, 700)],
    ]
    with LLM(str(folder), dtype="float32", max_num_batched_tokens=budget, **OPTIONS) as llm:
        outputs = llm.chat([chat(images) for images in groups], GREEDY, use_tqdm=False)
    for output, images in zip(outputs, groups, strict=True):
        assert output.is_ok, output.error_msg
        ids, tokens = expected(folder, output.prompt, images)
        assert list(output.prompt_token_ids) == ids
        assert list(output.outputs.token_ids) == tokens
    assert outputs[0].num_input_image_tokens == 0
    assert 0 < outputs[1].num_input_image_tokens <= 70


def test_videos_equal_transformers(folder):
    """Frames of a video, with the pixels that our processor makes, as transformers' tower and
    decoder compute them."""
    frames = np.random.default_rng(5).integers(0, 256, (3, 40, 60, 3), dtype=np.uint8)
    question = {"type": "text", "text": "What happens?"}
    messages = [{"role": "user", "content": [{"type": "video", "video": frames}, question]}]
    with LLM(str(folder), dtype="float32", **OPTIONS) as llm:
        output = llm.chat(messages, GREEDY, use_tqdm=False)[0]
    assert output.is_ok, output.error_msg
    reference = Reference(folder)
    made = processor_of(folder).process(processor_of(folder).decode(frames, MediaLimits()), {})
    ids = list(output.prompt_token_ids)
    places = [i for i, token in enumerate(ids) if token == reference.config.video_token_id]
    assert len(places) == made.num_tokens
    offset = places[0]
    span = MediaSpan(offset=offset, item=made, rows=tuple(place - offset for place in places))
    expected = reference.generate(ids, NUM_TOKENS, [span])
    assert list(output.outputs.token_ids) == expected


def processor_of(folder):
    def read(name):
        return json.loads((folder / name).read_text("utf-8"))

    checkpoint = Checkpoint(
        folder=folder,
        config=transformers.AutoConfig.from_pretrained(folder),
        video_preprocessor=read("video_preprocessor_config.json"),
    )
    return Gemma4VideoProcessor(checkpoint, {})


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("vision_config", "hidden_activation", "relu"),
        ("vision_config", "num_key_value_heads", 1),
        ("vision_config", "attention_bias", True),
        ("text_config", "hidden_activation", "silu"),
        ("text_config", "vocab_size_per_layer_input", 8),
        ("text_config", "pad_token_id", 10**6),
    ],
)
def test_options_that_are_refused(part, name, value, folder, tmp_path):
    for file in folder.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    config[part][name] = value
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    with pytest.raises(ModelNotSupportedError, match=f"{name} = "):
        LLM(str(tmp_path), load_format="dummy", **OPTIONS)
