"""Shared by the processor tests: processors of a bare checkpoint, and images of random noise."""

import io
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from mmdeploy_llm_processors.image.processor import (
    ErnieImageProcessor,
    PaddleOCRImageProcessor,
    Qwen3ImageProcessor,
    QwenImageProcessor,
)
from PIL import Image

from mmdeploy_llm.hooks import Checkpoint, MediaLimits

FAMILIES = {
    "ernie": ErnieImageProcessor,
    "paddleocr": PaddleOCRImageProcessor,
    "qwen": QwenImageProcessor,
    "qwen3": Qwen3ImageProcessor,
}


@pytest.fixture
def limits():
    return MediaLimits()


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


@pytest.fixture
def noise():
    def make(width, height, seed=0):
        values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
        return Image.fromarray(values)

    return make


@pytest.fixture
def encode():
    def encoded(image, format="PNG", **options):
        buffer = io.BytesIO()
        image.save(buffer, format, **options)
        return buffer.getvalue()

    return encoded
