"""NeoMME against transformers: pictures, positions, texts by task, and scores."""

import ast
import inspect
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from mmdeploy_llm_plugins.colpali.neomme_image import NeoMMEImages
from PIL import Image
from transformers.image_utils import SizeDict
from transformers.models.neomme.processing_neomme import NeoMMEProcessor

from mmdeploy_llm import LLM
from mmdeploy_llm.errors import CheckpointError, ConfigError
from mmdeploy_llm.hooks import MediaLimits
from mmdeploy_llm.weights.folder import read_checkpoint

NAME, PATCH = "neomme_retrieval", 14
LIMITS = MediaLimits(isolation="thread")


def theirs(name):
    """Returns a function of transformers' image processor, whose file needs torchvision."""
    file = Path(inspect.getfile(NeoMMEProcessor)).with_name("image_processing_neomme.py")
    tree = ast.parse(file.read_text())
    tree.body = [own for own in tree.body if getattr(own, "name", None) == name]
    found = {"math": math, "SizeDict": SizeDict, "torch": torch}
    exec(compile(tree, str(file), "exec"), found)
    return found[name]


@pytest.fixture
def images(tiny_folder):
    return lambda **options: NeoMMEImages(read_checkpoint(tiny_folder(NAME)), options)


def processed(own, image):
    return own.process(own.decode(image, LIMITS), {})


def picture(width, height):
    values = np.random.default_rng(width).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


@pytest.mark.parametrize(
    "bounds",
    [
        {},
        {"max_side": 50},
        {"min_pixels": 900, "max_pixels": 1600},
        {"max_side": 33, "min_pixels": 4000, "max_pixels": 5000},
        {"min_pixels": 2000, "max_pixels": 2001},
    ],
)
@pytest.mark.parametrize("size", [(20, 31), (50, 33), (7, 90), (300, 11), (64, 64), (45, 44)])
def test_sizes_are_those_of_transformers(images, bounds, size):
    own = images(max_side=0, **bounds) if "max_side" not in bounds else images(**bounds)
    pixels = {name: bounds[name] for name in ("min_pixels", "max_pixels") if name in bounds}
    height, width = theirs("get_resize_output_size")(
        size[1], size[0], bounds.get("max_side"), SizeDict(**pixels) if pixels else None
    )
    item = processed(own, picture(*size))
    assert item.grid_thw == (1, -(-height // PATCH), -(-width // PATCH))


@pytest.mark.parametrize("size", [(28, 42), (20, 31), (56, 55)])
def test_patches_and_words_are_those_of_transformers(images, tiny_folder, size):
    """A picture that keeps its size is filled with black to whole patches."""
    image = picture(*size)
    item = processed(images(), image)
    _, rows, columns = item.grid_thw
    canvas = Image.new("RGB", (columns * PATCH, rows * PATCH))
    canvas.paste(image)
    pixels = torch.from_numpy(np.array(canvas)).permute(2, 0, 1)[None] / 255
    expected = theirs("convert_image_to_patches")((pixels - 0.5) / 0.5, PATCH)[0]
    torch.testing.assert_close(item.tensors["pixel_values"], expected, atol=1e-6, rtol=0)
    processor = NeoMMEProcessor.__new__(NeoMMEProcessor)
    processor.tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_folder(NAME))
    grids = {"image_grid_hw": [(rows, columns)]}
    assert item.prompt_text == "<doc>" + processor.replace_image_token(grids, 0)


@pytest.mark.parametrize("size", [(300, 200), (7, 900), (56, 56)])
def test_a_picture_is_within_its_budget(images, size):
    """Without one it keeps its size."""
    own = images(max_side=0)
    decoded = own.decode(picture(*size), LIMITS)
    whole = -(-size[0] // PATCH) * -(-size[1] // PATCH) + 1
    assert own.process(decoded, {}).num_tokens == own.count_tokens(decoded, {}) == whole
    limited = own.with_budget(16)
    made = limited.process(decoded, {})
    assert 2 <= made.num_tokens == limited.count_tokens(decoded, {}) <= 16


class Reference:
    """transformers' model of the folder."""

    def __init__(self, folder):
        self.model = transformers.NeoMMEForRetrieval.from_pretrained(folder).eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    @torch.no_grad()
    def vectors(self, text, item=None):
        ids = self.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        given = {}
        if item is not None:
            places = NeoMMEProcessor._image_positions(*item.grid_thw[1:])
            given = {"pixel_values": item.tensors["pixel_values"]}
            given["position_ids"] = places.T[:, None]
        return self.model(ids, attention_mask=torch.ones_like(ids), **given).embeddings[0]

    def asked(self, text, task):
        messages = [{"role": "user", "content": text}]
        return self.tokenizer.apply_chat_template(messages, tokenize=False, task=task)


def conversation(text, task):
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "chat_template_kwargs": {"task": task}}


def test_vectors_of_tasks_and_pictures_are_those_of_transformers(images, tiny_folder):
    """In one batch, of several lengths; a text by itself has no words around it."""
    reference = Reference(tiny_folder(NAME))
    page = picture(40, 50)
    item = processed(images(), page)
    queries = ("a red circle", "how many are there in the picture?")
    prompts = [conversation(queries[0], "query"), conversation(queries[1], "document")]
    prompts += [queries[1], {"multimodal_data": {"image": page}}]
    expected = [
        reference.vectors(reference.asked(queries[0], "query")),
        reference.vectors(reference.asked(queries[1], "document")),
        reference.vectors(queries[1]),
        reference.vectors(item.prompt_text, item),
    ]
    with LLM(str(tiny_folder(NAME)), dtype="float32", use_warmup=False, quiet=True) as llm:
        outputs = llm.embed(prompts, use_tqdm=False)
    for output, own in zip(outputs, expected, strict=True):
        assert output.error_msg is None
        np.testing.assert_allclose(np.asarray(output.embedding), own.numpy(), atol=1e-4)


@pytest.mark.parametrize("kind", ["Model", "ForMaskedLM"])
def test_classes_without_vectors_of_tokens_give_a_mean(tiny_copy, tmp_path, kind):
    folder = tiny_copy(NAME, tmp_path)
    whole = Reference(folder)
    config = whole.model.config
    model = getattr(transformers, f"NeoMME{kind}")(config)
    (model if kind == "Model" else model.model).load_state_dict(whole.model.model.state_dict())
    model.save_pretrained(folder)
    text = "how many are there?"
    ids = whole.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        states = whole.model.model(ids).last_hidden_state[0]
    expected = torch.nn.functional.normalize(states.mean(0), dim=0)
    with LLM(str(folder), dtype="float32", use_warmup=False, quiet=True) as llm:
        outputs = llm.embed([text, "a red circle"], use_tqdm=False)
    np.testing.assert_allclose(outputs[0].embedding, expected.numpy(), atol=1e-4)


def test_a_picture_with_words_is_refused(tiny_folder):
    with LLM(str(tiny_folder(NAME)), dtype="float32", use_warmup=False, quiet=True) as llm:
        page = {"image": picture(28, 28)}
        beside = {"prompt": "<img> a page", "multimodal_data": page}
        found = llm.embed([beside, {"multimodal_data": page}], use_tqdm=False)
    assert "each as a prompt of its own" in found[0].error_msg
    assert found[1].error_msg is None


def test_wrong_options_are_refused(images, tiny_copy, tmp_path):
    with pytest.raises(ConfigError, match="max_side"):
        images(max_side="large")
    folder = tiny_copy(NAME, tmp_path)
    (folder / "preprocessor_config.json").write_text('{"patch_size": 16}')
    with pytest.raises(CheckpointError, match="patches of 16 pixels, the model takes 14"):
        NeoMMEImages(read_checkpoint(folder), {})
    (folder / "preprocessor_config.json").write_text('{"patch_size": 14, "do_normalize": false}')
    with pytest.raises(CheckpointError, match="switches off do_normalize"):
        NeoMMEImages(read_checkpoint(folder), {})
