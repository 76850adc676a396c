"""InternVL and PDF documents as plugins of one file that an outsider could have written: they pass
the kit and compute what transformers does."""

import json
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
import transformers
from PIL import Image
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.errors import MediaError, MediaLimitError, UnsupportedMediaError
from mmdeploy_llm.hooks import Checkpoint, MediaLimits
from mmdeploy_llm.hooks.files import load_file
from mmdeploy_llm.media import decode_image
from mmdeploy_llm.testing import (
    MediaProcessorConformance,
    ModelConformance,
    ModelVariantConformance,
)
from mmdeploy_llm.testing.check import check_plugin
from mmdeploy_llm.testing.media.samples.pictures import pixels
from mmdeploy_llm.testing.media.subject import checkpoint_of
from mmdeploy_llm.testing.media.truth import MediaTruth, TransformersSounds
from mmdeploy_llm.testing.tiny import write_family
from mmdeploy_llm.weights.folder import read_checkpoint
from tests.plugins.transformers_any.sound_families import FAMILIES, WHISPER, sound

PLUGINS = Path(__file__).parents[2] / "examples" / "plugins"
NAMES = ("internvl", "pdf", "picture", "qwen2_audio")
internvl, pdf, square, heard = (load_file(PLUGINS / f"{name}.py") for name in NAMES)
MAX_LINES = {"internvl": 180, "pdf": 80, "picture": 40, "qwen2_audio": 120}
LONG = {**WHISPER, "chunk_length": 30}
TILES = {
    "text": (),
    "one image": ((1, 4, 4),),
    "images of several tiles": ((1, 4, 4), (3, 4, 4), (1, 4, 4)),
}


@pytest.mark.full
@pytest.mark.parametrize(
    # A process that imports torch for each.
    "name",
    [pytest.param(name, marks=[pytest.mark.full] * (name != "picture")) for name in MAX_LINES],
)
def test_the_file_is_short_and_keeps_the_contract_of_plugins(name):
    file = PLUGINS / f"{name}.py"
    assert len(file.read_text().splitlines()) <= MAX_LINES[name]
    # What it provides, which comes after the file itself, is checked by the classes below.
    verdicts = list(takewhile(lambda verdict: not verdict.subject, check_plugin(str(file))))
    assert [verdict for verdict in verdicts if verdict.outcome == "fail"] == []
    assert any(verdict.outcome == "pass" for verdict in verdicts)


class TestInternVL(ModelVariantConformance):
    spec = internvl.provide_models()[0]
    cases = MappingProxyType(TILES)

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, references):
        return references.tiny("internvl")


@pytest.mark.full
class TestInternVL3(TestInternVL):
    """Version 3, with Qwen2 and a tied head."""

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, references):
        return references.tiny("internvl", model_type="qwen2", tie_word_embeddings=True)


@pytest.mark.full
class TestAllOfInternVL(ModelConformance):
    """All checks of the kit."""

    spec = internvl.provide_models()[0]
    cases = MappingProxyType(TILES)

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, references):
        return references.tiny("internvl")


class TestInternVLImages(MediaProcessorConformance):
    spec = internvl.provide_media_processors()[0]
    other_options = ({"max_patches": 2}, {"image_mean": [0.1, 0.2, 0.3]})
    item_options = ({"max_patches": 3}, {"crop_to_patches": False})

    @classmethod
    def checkpoint(cls, folder):
        from mmdeploy_llm_plugins.internvl import provide_media_processors

        return checkpoint_of(provide_media_processors()[0], folder)

    @staticmethod
    def make_reference(kind, checkpoint):
        """transformers' processor, with tiles as InternVLProcessor asks for them."""

        def truth(source, options, markers):
            asked = {**checkpoint.preprocessor, "crop_to_patches": True, **options}
            made = GotOcr2ImageProcessorPil(**asked)(opened(source), return_tensors="pt")
            pixels = in_blocks(made["pixel_values"])
            count = 4 * len(made["pixel_values"])
            text = f"<img>{'<IMG_CONTEXT>' * count}</img>"
            return MediaTruth(tensors={"pixels": pixels}, num_tokens=count, prompt_text=text)

        return truth


def opened(source):
    """The image as transformers gets it."""
    return decode_image(source).image


def in_blocks(pixels):
    """Patch rows of tiles [I, 3, 56, 56], in blocks of 2 x 2."""
    cells = pixels.view(len(pixels), 3, 2, 2, 14, 2, 2, 14)
    return cells.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(len(pixels) * 16, -1)


def test_the_processors_do_the_same(references):
    """Tokens, texts and pixels are those of the built-in plugin, with a budget too."""
    from mmdeploy_llm_plugins.internvl.image import InternVLImageProcessor

    checkpoint = read_checkpoint(references.tiny("internvl"))
    ours, theirs = internvl.images(checkpoint, {}), InternVLImageProcessor(checkpoint, {})
    for size in ((300, 100), (56, 56), (100, 400), (333, 211)):
        image = Image.fromarray(pixels(size[1], size[0], seed=3))
        for one, two in ((ours, theirs), (ours.with_budget(12), theirs.with_budget(12))):
            first, second = (
                processor.process(processor.decode(image, MediaLimits()), {})
                for processor in (one, two)
            )
            assert torch.equal(first.tensors["pixels"], second.tensors["pixels"])
            assert first.prompt_text == second.prompt_text


@pytest.mark.full
def test_answers_are_those_of_the_built_in_plugin(references):
    folder, answers = str(references.tiny("internvl")), []
    sizes = ((300, 100), (56, 56))
    images = [Image.fromarray(pixels(height, width, seed=5)) for width, height in sizes]
    prompt = {"prompt": "A <IMG_CONTEXT> and <IMG_CONTEXT>:", "multimodal_data": {"image": images}}
    params = SamplingParams(temperature=0, max_tokens=6)
    for files in ((), (str(PLUGINS / "internvl.py"),)):
        with LLM(folder, quiet=True, limit_mm_per_prompt={"image": 2}, plugin_files=files) as llm:
            (output,) = llm.generate(prompt, params, use_tqdm=False)
        assert output.error_msg is None
        answers.append((output.prompt_token_ids, output.outputs.token_ids))
    assert answers[0] == answers[1]


class TestPages:
    """Pages are lazy, right and bounded."""

    @pytest.fixture(scope="class")
    @classmethod
    def documents(cls):
        made = pdf.Documents(Checkpoint(folder=Path("."), config=None), {})
        yield made
        made.close()

    @pytest.fixture(scope="class")
    @classmethod
    def blob(cls, load_file):
        return load_file("processors/pdfs.py").simple_pdf(("one", "two", "three"))

    def test_pages(self, documents, blob):
        parts = documents.split(blob, {}, MediaLimits())
        assert [part.label for part in parts] == ["page 1", "page 2", "page 3"]
        assert len({part.source.digest for part in parts}) == 3
        found = decode_image(parts[1].source)
        assert found.size == (417, 208)  # 200 x 100 points at 150 dpi
        assert found.image.getpixel((5, 200)) == (255, 0, 0)
        assert found.image.getpixel((300, 5)) == (255, 255, 255)
        assert parts[0].source.draw((20, 10), MediaLimits()).shape == (10, 20, 3)

    @pytest.mark.parametrize(("pages", "count"), [("2", 1), (2, 1), ("2-3", 2), ("1-3", 3)])
    def test_some_pages(self, documents, blob, pages, count):
        parts = documents.split(blob, {"pages": pages}, MediaLimits())
        assert len(parts) == count

    @pytest.mark.parametrize("pages", ["0", "4", "3-2", "1-4", "x", "", "1-2-3", None, "²"])
    def test_pages_that_are_not_there(self, documents, blob, pages):
        with pytest.raises(MediaError, match="pages must be such as 2 or 2-5, of 3 pages"):
            documents.split(blob, {"pages": pages}, MediaLimits())

    def test_what_is_no_document(self, documents, blob):
        with pytest.raises(MediaLimitError):
            documents.split(blob, {}, MediaLimits(max_bytes=100))
        with pytest.raises(UnsupportedMediaError, match="a pdf is a file, got int"):
            documents.split(1, {}, MediaLimits())
        with pytest.raises(MediaError, match="no option dpi; known: pages"):
            documents.split(blob, {"dpi": 3}, MediaLimits())
        for broken in (b"", b"%PDF-1.7", blob[:100]):
            with pytest.raises(MediaError, match="cannot be decoded"):
                documents.split(broken, {}, MediaLimits())
        parts = documents.split(blob, {}, MediaLimits())
        with pytest.raises(MediaLimitError, match="pixels, 1000 are allowed"):
            decode_image(parts[0].source, MediaLimits(max_pixels=1000))


@pytest.mark.full
def test_a_document_is_read_by_a_model(references, load_file, tmp_path):
    (tmp_path / "a.pdf").write_bytes(load_file("processors/pdfs.py").simple_pdf(("one", "two")))
    prompt = {
        "prompt": "Read <pdf>:",
        "multimodal_data": {"pdf": [{"pdf": str(tmp_path / "a.pdf"), "pages": "1-2"}]},
    }
    options = {
        "limit_mm_per_prompt": {"image": 2},
        "plugin_files": (str(PLUGINS / "pdf.py"),),
    }
    with LLM(str(references.tiny("internvl")), quiet=True, **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=2)
        (output,) = llm.generate(prompt, params, use_tqdm=False)
    assert output.error_msg is None
    assert output.num_input_image_tokens == 24  # two tiles and a thumbnail for each page


class TestPicture(MediaProcessorConformance):
    spec = square.provide_media_processors()[0]
    other_options = ({"max_side": 70}, {"patch_size": 7})
    item_options = MappingProxyType({"max_side": 60})

    @classmethod
    def checkpoint(cls, folder):
        return Checkpoint(folder=folder, config=None, preprocessor={"patch_size": 16})


@pytest.fixture(scope="module")
def qwen2_audio(tmp_path_factory):
    """A tiny checkpoint of Qwen2-Audio."""
    return write_family(FAMILIES["qwen2_audio"], tmp_path_factory.mktemp("qwen2_audio"))


@pytest.mark.full
class TestQwen2AudioSounds(MediaProcessorConformance):
    spec = heard.provide_media_processors()[0]
    item_options = ({"start": 0.1}, {"end": 0.2})

    @staticmethod
    def make_reference(kind, checkpoint):
        """transformers' processor of Qwen2-Audio fills its sounds, on the way to the extractor."""
        return TransformersSounds(checkpoint, padding="max_length")

    @classmethod
    def checkpoint(cls, folder):
        (folder / "preprocessor_config.json").write_text(json.dumps(LONG))
        return Checkpoint(folder=folder, config=None, preprocessor=LONG)


@pytest.mark.full
def test_answers_about_sounds_are_those_of_transformers(qwen2_audio):
    """Two sounds of different lengths: ids of the prompt, and tokens of the answer."""
    sounds = [sound(seconds, seed) for seconds, seed in ((0.7, 1), (1.5, 2))]
    folder, marker = str(qwen2_audio), "<|audio_bos|><|AUDIO|><|audio_eos|>"
    text = f"Compare {marker} and {marker}:"
    kind = transformers.Qwen2AudioForConditionalGeneration
    model = kind.from_pretrained(folder, attn_implementation="eager").eval()
    processor = transformers.Qwen2AudioProcessor.from_pretrained(folder)
    made = processor(text=[text], audio=sounds, sampling_rate=16_000, return_tensors="pt")
    with torch.inference_mode():
        expected = model.generate(**made, max_new_tokens=6, do_sample=False, eos_token_id=None)[0]
    options = {"limit_mm_per_prompt": {"audio": 2}, "dtype": "float32", "use_warmup": False}
    files = (str(PLUGINS / "qwen2_audio.py"),)
    with LLM(folder, quiet=True, plugin_files=files, **options) as llm:
        prompt = {
            "prompt": text,
            "multimodal_data": {"audio": [(samples, 16_000) for samples in sounds]},
        }
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        (output,) = llm.generate(prompt, params, use_tqdm=False)
    assert output.error_msg is None
    assert [*output.prompt_token_ids, *output.outputs.token_ids] == expected.tolist()
