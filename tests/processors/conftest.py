"""Shared by the processor tests: processors of a bare checkpoint."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from mmdeploy_llm_plugins.ernie.image import ErnieImageProcessor
from mmdeploy_llm_plugins.glm.image import GlmImageProcessor
from mmdeploy_llm_plugins.paddleocr.image import PaddleOCRImageProcessor
from mmdeploy_llm_plugins.qwen.image import Qwen3ImageProcessor, QwenImageProcessor

from mmdeploy_llm.hooks import Checkpoint

FAMILIES = {
    "ernie": ErnieImageProcessor,
    "glm": GlmImageProcessor,
    "paddleocr": PaddleOCRImageProcessor,
    "qwen": QwenImageProcessor,
    "qwen3": Qwen3ImageProcessor,
}


@pytest.fixture
def make_processor():
    def make(family="qwen", options=None, preprocessor=None, vision_config=None):
        checkpoint = Checkpoint(
            folder=Path("."),
            config=SimpleNamespace(vision_config=vision_config),
            preprocessor=preprocessor or {},
        )
        return FAMILIES[family](checkpoint, options or {})

    return make
