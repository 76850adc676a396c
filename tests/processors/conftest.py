"""Shared by the processor tests: processors of a bare checkpoint, and images of random noise."""

import ast
import io
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from mmdeploy_llm_processors.image.processor import (
    ErnieImageProcessor,
    GlmImageProcessor,
    PaddleOCRImageProcessor,
    Qwen3ImageProcessor,
    QwenImageProcessor,
)
from PIL import Image

from mmdeploy_llm.hooks import Checkpoint, MediaLimits

FAMILIES = {
    "ernie": ErnieImageProcessor,
    "glm": GlmImageProcessor,
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


@pytest.fixture(scope="session")
def rules_of():
    """rules_of(model, name, ...): functions of the model's processor of videos, or of another kind,
    in transformers, read from its source, because the module cannot be imported without
    torchvision."""

    def rules(model, *names, kind="video"):
        path = f"models/{model}/{kind}_processing_{model}.py"
        source = (Path(transformers.__file__).parent / path).read_text("utf-8")
        found = {"math": math, "np": np, "torch": torch}
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and node.name in names:
                for part in (node, *node.args.args):
                    part.annotation = part.returns = None
                node.decorator_list = []
                exec(compile(ast.Module([node], []), node.name, "exec"), found)
        return SimpleNamespace(**{name: found[name] for name in names})

    return rules
