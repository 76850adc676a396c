"""Qwen3-VL makes vectors and scores pairs as the owners of Qwen3-VL-Embedding and Qwen3-VL-Reranker
do: the same conversation, the last token, the weights of "yes" less those of "no"."""

import numpy as np
import pytest
import torch
import transformers
from mmdeploy_llm_plugins.qwen.vectors import TASK
from PIL import Image

from mmdeploy_llm import LLM

pytestmark = pytest.mark.full
SIZE = (96, 64)
TOLERANCE = 2e-5
SYSTEM = "Represent the user's input."


@pytest.fixture(scope="module")
def add_words(load_file):
    return load_file("system/test_embedding_page.py").add_words


@pytest.fixture(scope="module")
def folder(add_words, tiny_copy, tmp_path_factory):
    made = tiny_copy("qwen3_vl", tmp_path_factory.mktemp("vl") / "model")
    add_words(made)
    return made


@pytest.fixture(scope="module")
def picture():
    noise = np.random.default_rng(3).integers(0, 255, (SIZE[1], SIZE[0], 3), dtype=np.uint8)
    return Image.fromarray(noise)


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(str(folder), max_model_len=2048, kv_cache_memory=2**26) as made:
        yield made


class Owner:
    """The model in transformers, with its tokenizer and image processor."""

    def __init__(self, folder):
        auto = transformers.AutoModelForImageTextToText
        self.model = auto.from_pretrained(folder, dtype=torch.float32).eval()
        self.words = transformers.AutoTokenizer.from_pretrained(folder)
        self.pixels = transformers.Qwen2VLImageProcessorPil.from_pretrained(folder)

    @torch.inference_mode()
    def last(self, system, content, images):
        """Returns the ids of a conversation and the state of its last token."""
        own = {"add_generation_prompt": True, "tokenize": False}
        messages = [
            {"role": "system", "content": [{"type": "text", "text": system}]},
            {"role": "user", "content": content},
        ]
        text = self.words.apply_chat_template(messages, **own)
        media = {}
        token = self.words.convert_ids_to_tokens(self.model.config.image_token_id)
        if images:
            media = dict(self.pixels(images, return_tensors="pt"))
            merge = self.model.config.vision_config.spatial_merge_size**2
            for grid in media["image_grid_thw"]:
                text = text.replace(token, "<placeholder>" * (int(grid.prod()) // merge), 1)
            text = text.replace("<placeholder>", token)
        ids = self.words(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        types = (ids == self.model.config.image_token_id).long()
        states = self.model.model(input_ids=ids, mm_token_type_ids=types, **media)
        return ids[0].tolist(), states.last_hidden_state[0, -1]

    @torch.inference_mode()
    def score(self, *args):
        """Returns the ids, and the probability of "yes" against "no"."""
        ids, last = self.last(*args)
        yes, no = (self.words.get_vocab()[word] for word in ("yes", "no"))
        head = self.model.lm_head.weight
        return ids, float(torch.sigmoid(last @ (head[yes] - head[no])))


@pytest.fixture(scope="module")
def owner(folder):
    return Owner(folder)


def text(value):
    return {"type": "text", "text": value}


IMAGE = {"type": "image"}


@pytest.mark.parametrize("kind", ["text", "image", "both"])
def test_vectors(llm, owner, picture, kind):
    content = {"text": [text("a cat")], "image": [IMAGE], "both": [IMAGE, text("a cat")]}[kind]
    images = [] if kind == "text" else [picture]
    prompt = {"prompt": "a cat"} if kind != "image" else {}
    if images:
        prompt["multimodal_data"] = {"image": picture}
    for instruction, system in ((None, SYSTEM), ("Find it.", "Find it.")):
        (output,) = llm.embed([prompt], instruction=instruction, use_tqdm=False)
        assert output.is_ok, output.error_msg
        ids, last = owner.last(system, content, images)
        assert output.prompt_token_ids == ids
        expected = torch.nn.functional.normalize(last, dim=0).numpy()
        np.testing.assert_allclose(output.embedding, expected, atol=TOLERANCE)


def test_scores(llm, owner, picture):
    documents = ["a dog", {"multimodal_data": {"image": picture}}]
    default = "Given a search query, retrieve relevant candidates that answer the query."
    scores = llm.score("a cat", documents, use_tqdm=False)
    own = llm.score("a cat", documents, instruction="Judge", use_tqdm=False)
    for outputs, instruction in ((scores, default), (own, "Judge")):
        for output, content, images in zip(
            outputs, ([text("a dog")], [IMAGE]), ([], [picture]), strict=True
        ):
            assert output.is_ok, output.error_msg
            parts = [text(f"<Instruct>: {instruction}"), text("<Query>:"), text("a cat")]
            ids, expected = owner.score(TASK, [*parts, text("\n<Document>:"), *content], images)
            assert output.prompt_token_ids == ids
            assert output.score == pytest.approx(expected, abs=TOLERANCE)


def test_few_bits_stay_near(folder):
    """Random weights are rounded worse than trained ones; the cosine to bfloat16 says how far."""
    texts = ["a cat", "the quick brown fox jumps over the lazy dog", "stocks fell by two percent"]
    vectors = {}
    for bits in (None, "int8", "int4"):
        options = {"dtype": "bfloat16", "quantization": bits, "kv_cache_memory": 2**26}
        with LLM(str(folder), max_model_len=512, **options) as llm:
            found = llm.embed(texts, use_tqdm=False)
            vectors[bits] = np.stack([output.embedding for output in found])
    cosines = {bits: (vectors[None] * vectors[bits]).sum(1).min() for bits in ("int8", "int4")}
    assert cosines["int8"] > 0.99  # 0.998
    assert cosines["int4"] > 0.85  # 0.896
