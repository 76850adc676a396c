"""EmbeddingGemma 2 against transformers, with texts, images and sounds."""

import numpy as np
import pytest
import torch
import transformers
from mmdeploy_llm_plugins.gemma import provide_media_processors, provide_models
from PIL import Image

from mmdeploy_llm import LLM
from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.hooks import MediaLimits, MediaSpan
from mmdeploy_llm.hooks.factories import imported
from mmdeploy_llm.testing.embedder_conformance import EmbedderConformance
from mmdeploy_llm.testing.model_conformance import build
from mmdeploy_llm.testing.models.embedders import EmbedderReference
from mmdeploy_llm.testing.models.models import ModelSubject
from mmdeploy_llm.weights.folder import read_checkpoint

SPECS = {spec.name: spec for spec in provide_models() if spec.name.startswith("embedding")}
TEXTS = {"text": (), "other text": (), "one token": (), "part of a text": ()}
CASES = {
    "embedding_gemma2_text": TEXTS,
    "embedding_gemma2": {**TEXTS, "image": ((1, 6, 9),), "two images": ((1, 3, 6), (1, 6, 6))},
}


class TestEmbeddingGemma2(EmbedderConformance):
    @pytest.fixture(scope="class", params=[*SPECS])
    @classmethod
    def subject(cls, request, tiny_folder):
        folder = tiny_folder(request.param)
        return ModelSubject(
            spec=SPECS[request.param],
            folder=folder,
            config=read_checkpoint(folder).config,
            cases=CASES[request.param],
            tolerance=2e-5,
            make_prompt=EmbedderConformance.make_prompt,
            make_reference=EmbedderReference,
        )


def prompt_of(folder, kind, content):
    """Returns the token ids and the span of a picture or a sound, alone, as its processor has
    them."""
    checkpoint = read_checkpoint(folder)
    spec = next(
        spec
        for spec in provide_media_processors()
        if spec.kind == kind and "embedding_gemma2" in spec.models
    )
    processor = imported(spec.factory)(checkpoint, {})
    item = processor.process(processor.decode(content, MediaLimits()), {})
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(item.prompt_text)["input_ids"]
    offset = ids.index(getattr(checkpoint.config, f"{kind}_token_id"))
    return ids, MediaSpan(offset=offset, item=item)


def test_texts_pictures_and_sounds_of_one_call_are_those_of_transformers(tiny_folder):
    folder = tiny_folder("embedding_gemma2")
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (50, 90, 3), np.uint8))
    sound = np.random.default_rng(1).standard_normal(9000).astype(np.float32) / 9
    reference, tokenizer = EmbedderReference(folder), transformers.AutoTokenizer
    tokenize = tokenizer.from_pretrained(folder)
    texts = ["a red circle", "how many circles are there in this picture, and of which colour?"]
    asked = [(tokenize(text)["input_ids"], []) for text in texts]
    for kind, content in (("image", picture), ("audio", (sound, 16000))):
        ids, span = prompt_of(folder, kind, content)
        asked.append((ids, [span]))
    expected = [reference.vectors(ids, media).mean(0) for ids, media in asked]
    items = [
        {"multimodal_data": {"image": picture}},
        {"multimodal_data": {"audio": (sound, 16000)}},
    ]
    with LLM(str(folder), dtype="float32", use_warmup=False, quiet=True) as llm:
        outputs = llm.embed([*texts, *items], use_tqdm=False)
    for output, vector in zip(outputs, expected, strict=True):
        found = torch.from_numpy(output.embedding)
        torch.testing.assert_close(found, vector / vector.norm(), atol=2e-5, rtol=0)


def test_a_config_without_a_vision_tower_is_refused(tiny_folder):
    config = read_checkpoint(tiny_folder("embedding_gemma2")).config
    config.vision_config = None
    with pytest.raises(ModelNotSupportedError, match="vision_config of this embedding_gemma2"):
        build(SPECS["embedding_gemma2"], tiny_folder("embedding_gemma2"), config, torch.float32)
