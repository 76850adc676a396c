"""Every preset of an OCR family is chosen for its models alone, and names what there is."""

from contextlib import suppress

import pytest
from mmdeploy_llm_plugins import documents

from mmdeploy_llm import SamplingParams
from mmdeploy_llm.hooks import PluginManager, ReadPage

PLUGINS = PluginManager.load(("documents",))
PRESETS = documents.provide_reading_presets()
MODELS = [
    ("PaddleOCRVLForConditionalGeneration", "models/paddle", "paddleocr-vl"),
    ("GlmOcrForConditionalGeneration", "models/glm", "glm-ocr"),
    ("DeepseekOcr2ForConditionalGeneration", "models/ds", "deepseek-ocr"),
    ("LightOnOcrForConditionalGeneration", "models/l", "lighton-ocr"),
    ("QianfanOCRForConditionalGeneration", "models/q", "qianfan-ocr"),
    ("Qwen2VLForConditionalGeneration", "opendatalab/MinerU2.5-2509-1.2B", "mineru"),
    ("Qwen2_5_VLForConditionalGeneration", "allenai/olmOCR-2-7B-1025", "olmocr"),
    ("Qwen2VLForConditionalGeneration", "models/olmocr-7b", "olmocr"),
    ("DotsOCRForCausalLM", "models/d", "dots-ocr"),
    ("PPFormulaNetForConditionalGeneration", "models/f", "pp-formulanet"),
    ("Kosmos2_5ForConditionalGeneration", "models/k", "kosmos-2.5"),
    (
        "GraniteDoclingForConditionalGeneration",
        "granite-docling-258M",
        "granite-docling",
    ),
    ("Idefics3ForConditionalGeneration", "ds4sd/SmolDocling-256M-preview", "granite-docling"),
    ("Qwen2VLForConditionalGeneration", "models/Qwen2-VL-2B", None),
    ("Idefics3ForConditionalGeneration", "models/Idefics3-8B", None),
]


@pytest.mark.parametrize(("architecture", "about", "name"), MODELS)
def test_the_preset_of_a_model(architecture, about, name):
    found = PLUGINS.reading_preset_for(architecture, about)
    assert (found and found.name) == name


@pytest.mark.parametrize("preset", PRESETS, ids=lambda own: own.name)
def test_a_preset_names_what_there_is(preset):
    SamplingParams(max_tokens=preset.max_tokens, **preset.sampling)
    convert = PLUGINS.resolve(PLUGINS.reading_preset(preset.name))
    with suppress(ValueError):  # an answer that is empty is none
        convert("", ReadPage(task="page"))
    assert "page" in preset.tasks
    assert preset.source


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (r"\frac { a } { b } = \alpha x", r"\frac{a}{b}=\alpha x"),
        (r"\sin x + { \mathrm { d } y }", r"\sin x+{\mathrm{d}y}"),
        (r"\operatorname { s i n } ( x ) ^ { 2 }", r"\operatorname{s i n}(x)^{2}"),
        ("  ", ""),
    ],
)
def test_formulas_lose_the_spaces_that_latex_does_not_need(answer, found):
    convert = PLUGINS.resolve(PLUGINS.reading_preset("pp-formulanet"))
    assert convert(answer, ReadPage(task="page")) == (f"$$\n{found}\n$$" if found else "")
