"""Models with a vector for each token against transformers, with its own processors."""

import numpy as np
import pytest
import torch
import transformers
from mmdeploy_llm_plugins.colpali import provide_media_processors, provide_models
from mmdeploy_llm_plugins.colpali.tiny import SIDE
from PIL import Image
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from mmdeploy_llm import LLM
from mmdeploy_llm.errors import CheckpointError, ModelNotSupportedError
from mmdeploy_llm.hooks import MediaLimits, MediaSpan
from mmdeploy_llm.hooks.factories import imported
from mmdeploy_llm.testing.embedder_conformance import EmbedderConformance
from mmdeploy_llm.testing.model_conformance import build
from mmdeploy_llm.testing.models.embedders import EmbedderReference
from mmdeploy_llm.testing.models.models import ModelSubject
from mmdeploy_llm.weights.folder import read_checkpoint

SPECS = {spec.name: spec for spec in provide_models()}
LATE = ("colpali", "colqwen2", "colmodernvbert")
PROCESSORS = {
    "colpali": transformers.ColPaliProcessor,
    "colqwen2": transformers.ColQwen2Processor,
    "colmodernvbert": transformers.ColModernVBertProcessor,
}
TOKENS = {"colpali": {"bos_token": "<bos>"}, "colqwen2": {"pad_token": "<|endoftext|>"}}
FAMILIES = [pytest.param(name, marks=[pytest.mark.full] * (name != "colpali")) for name in LATE]
QUERIES = ["a red circle", "how many are there?"]


def picture(seed):
    size = (50 + 30 * seed, 200 - 30 * seed, 3)
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, size, dtype=np.uint8))


def own_processor(name, folder):
    spec = next(spec for spec in provide_media_processors() if name in spec.models)
    return imported(spec.factory)(read_checkpoint(folder), {})


def processor_of(name, folder):
    """Returns transformers' processor, with the tokens that published tokenizers have."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for field, token in TOKENS.get(name, {}).items():
        setattr(tokenizer, field, token)
    images = transformers.AutoImageProcessor.from_pretrained(folder)
    images.image_seq_length = 16
    options = {"image_seq_len": 4} if name == "colmodernvbert" else {}
    return PROCESSORS[name](image_processor=images, tokenizer=tokenizer, **options)


def span_of(ids, processor, item, tokenizer):
    """Returns where the tokens of an item are."""
    token_id = tokenizer.convert_tokens_to_ids(processor.token)
    rows = [index for index, own in enumerate(ids) if own == token_id]
    assert len(rows) == item.num_tokens
    is_run = rows[-1] - rows[0] + 1 == len(rows)
    return MediaSpan(
        offset=rows[0], item=item, rows=None if is_run else tuple(row - rows[0] for row in rows)
    )


class LateReference(EmbedderReference):
    """Computes the positions of M-RoPE, which the class of transformers takes but does not
    compute."""

    def _asked(self, model, prompt, media):
        ids = torch.tensor([list(prompt)])
        inputs = self._media_inputs(ids, media) if media else {}
        if "image_grid_thw" in inputs:
            kinds = (ids == model.config.vlm_config.image_token_id).int()
            inputs["position_ids"], _ = model.vlm.get_rope_index(
                ids, mm_token_type_ids=kinds, image_grid_thw=inputs["image_grid_thw"]
            )
        elif model.config.model_type == "colpali":
            inputs["token_type_ids"] = torch.zeros_like(ids)
        return model(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs)


@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_are_those_of_transformers(name, tiny_folder):
    folder = tiny_folder(name)
    processor, own = processor_of(name, folder), own_processor(name, folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rules = imported(SPECS[name].vectors)
    for text in QUERIES:
        written = rules.prompts["query"] + text + rules.suffixes["query"]
        expected = processor.process_queries(text=[text])["input_ids"][0].tolist()
        assert tokenizer(written)["input_ids"] == expected
    for seed in range(3):
        decoded = own.decode(picture(seed), MediaLimits())
        item = own.process(decoded, {})
        made = processor.process_images(images=[picture(seed)])
        ids = tokenizer(item.prompt_text, add_special_tokens=False)["input_ids"]
        assert ids == made["input_ids"][0].tolist()
        assert own.prompt_text(decoded, {}) == item.prompt_text
        assert own.count_tokens(decoded, {}) == item.num_tokens
        pixels = next(
            item.tensors[key] for key in ("pixel_values", "pixels") if key in item.tensors
        )
        assert pixels.numel() == made["pixel_values"].numel()


class TestLateInteraction(EmbedderConformance):
    @pytest.fixture(scope="class", params=[*FAMILIES, "ultravbert", "neomme_retrieval"])
    @classmethod
    def subject(cls, request, tiny_folder):
        name = request.param
        folder = tiny_folder(name)
        own = own_processor(name, folder)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

        def make_prompt(config, grids, *, seed=0):
            if not grids:
                return EmbedderConformance.make_prompt(config, grids, seed=seed)
            item = own.process(own.decode(picture(seed % 3), MediaLimits()), {})
            ids = tokenizer(item.prompt_text, add_special_tokens=False)["input_ids"]
            return ids, [span_of(ids, own, item, tokenizer)]

        image = ((1, 1, 1),)
        return ModelSubject(
            spec=SPECS[name],
            folder=folder,
            config=read_checkpoint(folder).config,
            cases={"text": (), "image": image, "other text": (), "other image": image},
            tolerance=2e-5,
            make_prompt=make_prompt,
            make_reference=LateReference,
        )


@pytest.mark.full
@pytest.mark.parametrize("name", FAMILIES)
def test_scores_of_queries_and_pages_are_those_of_transformers(name, tiny_folder):
    folder = tiny_folder(name)
    processor, reference = processor_of(name, folder), LateReference(folder)
    pages = [picture(seed) for seed in range(3)]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    queries = [processor.process_queries(text=[text])["input_ids"][0] for text in QUERIES]
    vectors = [reference.vectors(ids.tolist()) for ids in queries]
    own = own_processor(name, folder)
    documents = []
    for page in pages:
        item = own.process(own.decode(page, MediaLimits()), {})
        ids = tokenizer(item.prompt_text, add_special_tokens=False)["input_ids"]
        documents.append(reference.vectors(ids, [span_of(ids, own, item, tokenizer)]))
    expected = processor.score_retrieval(vectors, documents)
    with LLM(str(folder), dtype="float32", use_warmup=False, quiet=True) as llm:
        items = [{"multimodal_data": {"image": page}} for page in pages]
        for query, scores in zip(QUERIES, expected, strict=True):
            found = [output.score for output in llm.score(query, items, use_tqdm=False)]
            np.testing.assert_allclose(found, scores, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("colpali", {"text_config.model_type": "qwen2"}, "text model 'qwen2'"),
        ("colpali", {"vision_config.model_type": "clip_vision_model"}, "'clip_vision_model'"),
        ("colmodernvbert", {"pixel_shuffle_factor": 3}, "blocks of 3 x 3 patches"),
    ],
)
def test_what_a_config_may_not_ask_for_is_refused(name, changes, message, tiny_folder):
    config = read_checkpoint(tiny_folder(name)).config
    for path, value in changes.items():
        *parts, field = path.split(".")
        owner = config.vlm_config
        for part in parts:
            owner = getattr(owner, part)
        setattr(owner, field, value)
    with pytest.raises(ModelNotSupportedError, match=message):
        build(SPECS[name], tiny_folder(name), config, torch.float32)


def test_words_around_an_image_must_have_it_once(tiny_copy, tmp_path):
    folder = tiny_copy("colqwen2", tmp_path)
    (folder / "processor_config.json").write_text('{"visual_prompt_prefix": "Describe"}')
    with pytest.raises(CheckpointError, match=r"<\|image_pad\|> once"):
        own_processor("colqwen2", folder)


def test_images_of_another_size_are_refused(tiny_folder):
    spec = next(spec for spec in provide_media_processors() if "colpali" in spec.models)
    new, checkpoint = imported(spec.factory), read_checkpoint(tiny_folder("colpali"))
    with pytest.raises(CheckpointError, match=r"28 x 28 pixels, .* reads 56 x 56"):
        new(checkpoint, {"size": {"height": 28, "width": 28}})


@pytest.mark.parametrize("size", [(50, 70), (56, 56), (300, 90), (90, 300), (600, 610), (57, 900)])
def test_a_picture_has_as_many_tiles_as_are_allowed(size, tiny_folder):
    """UltraVBert's longest edge falls by a tile until Idefics 3's processor makes few enough."""
    own = own_processor("ultravbert", tiny_folder("ultravbert"))
    theirs = Idefics3ImageProcessorPil(**own._fields)
    image = Image.new("RGB", size, "red")
    for edge in range(3 * SIDE, 0, -SIDE):
        made = theirs(
            [image], size={"longest_edge": edge}, return_row_col_info=True, return_tensors="pt"
        )
        rows, columns = made["rows"][0][0], made["cols"][0][0]
        if rows * columns <= 4:
            break
    item = own.process(own.decode(image, MediaLimits()), {})
    assert torch.equal(item.tensors["pixel_values"], made["pixel_values"])
    assert item.prompt_text.count("<row_") == rows * columns
    assert item.num_tokens == 4 * made["pixel_values"].shape[1]
