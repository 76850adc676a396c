"""InternVL from end to end: chats with images against transformers' model and image processor, and
checkpoints whose values no model can have."""

import json

import pytest
import torch
import transformers
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from mmdeploy_llm import LLM
from mmdeploy_llm.errors import CheckpointError, ModelNotSupportedError
from mmdeploy_llm.testing.tiny import write_tiny

from .image_chats import GREEDY, NUM_TOKENS, chat, noise

TOKENS_OF_TILE = 4
OPTIONS = {
    "limit_mm_per_prompt": {"image": 4},
    "block_size": 16,
    "num_gpu_blocks_override": 64,
    "max_model_len": 512,
    "max_num_seqs": 8,
    "num_threads": 1,
    "use_warmup": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny("internvl", tmp_path_factory.mktemp("internvl"))


def expected(folder, prompt, images):
    """Returns transformers' greedy tokens; each marker of `prompt` becomes the tiles' tokens."""
    architecture = transformers.InternVLForConditionalGeneration
    model = architecture.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = {}
    if images:
        processor = GotOcr2ImageProcessorPil.from_pretrained(folder, crop_to_patches=True)
        made = processor(images, return_tensors="pt")
        inputs["pixel_values"] = made["pixel_values"]
        first, *rest = prompt.split("<IMG_CONTEXT>")
        for num_tiles, text in zip(made["num_patches"].tolist(), rest, strict=True):
            tokens = "<IMG_CONTEXT>" * (TOKENS_OF_TILE * num_tiles)
            first += f"<img>{tokens}</img>{text}"
        prompt = first
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    with torch.inference_mode():
        options = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": None}
        mask = torch.ones_like(ids)
        found = model.generate(input_ids=ids, attention_mask=mask, **options, **inputs)
    return ids[0].tolist(), found[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("budget", [512, 24], ids=["whole", "in chunks"])
def test_chats_equal_transformers(budget, folder):
    groups = [
        [],
        [noise(0, 60, 50)],
        [noise(1, 300, 100)],
        [noise(2, 90, 200), noise(3, 50, 50)],
    ]
    with LLM(str(folder), dtype="float32", max_num_batched_tokens=budget, **OPTIONS) as llm:
        outputs = llm.chat([chat(images) for images in groups], GREEDY, use_tqdm=False)
    for output, images in zip(outputs, groups, strict=True):
        assert output.is_ok, output.error_msg
        ids, tokens = expected(folder, output.prompt, images)
        assert list(output.prompt_token_ids) == ids
        assert list(output.outputs.token_ids) == tokens
    assert outputs[0].num_input_image_tokens == 0
    assert outputs[1].num_input_image_tokens % TOKENS_OF_TILE == 0


def changed(folder, tmp_path, **values):
    """Returns a copy of the folder's configs; vision__x sets x of the vision config."""
    for file in folder.iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    for name, value in values.items():
        part, _, field = name.rpartition("__")
        (config[f"{part}_config"] if part else config)[field] = value
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    return tmp_path


@pytest.mark.parametrize(
    "values",
    [
        {"vision__num_attention_heads": 7},
        {"vision__num_channels": 0},
        {"vision__norm_type": "batch_norm"},
        {"vision__hidden_act": "softplus"},
        {"vision__use_absolute_position_embeddings": False},
        {"vision__image_size": [56, 28]},
        {"vision__image_size": [70, 70]},
        {"downsample_ratio": 0.0},
        {"downsample_ratio": 0.3},
        {"downsample_ratio": -0.5},
        {"vision_feature_layer": 0},
        {"vision_feature_select_strategy": "full"},
        {"projector_hidden_act": "softplus"},
        {"text__model_type": "llama"},
    ],
    ids=str,
)
def test_values_that_are_refused(values, folder, tmp_path):
    with pytest.raises((ModelNotSupportedError, CheckpointError), match="not supported"):
        LLM(str(changed(folder, tmp_path, **values)), load_format="dummy", **OPTIONS)


@pytest.mark.parametrize(
    "values",
    [
        {"vision__hidden_size": 0},
        {"vision__hidden_size": -48},
        {"vision__hidden_size": "48"},
        {"vision__num_hidden_layers": 0},
        {"vision__image_size": [0, 0]},
        {"vision__patch_size": [-14, -14]},
        {"vision__patch_size": "14"},
        {"downsample_ratio": "half"},
    ],
    ids=str,
)
def test_values_that_no_config_has(values, folder, tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json of the model"):
        LLM(str(changed(folder, tmp_path, **values)), load_format="dummy", **OPTIONS)
