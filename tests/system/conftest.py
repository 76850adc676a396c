"""Tiny random checkpoints of every family, and transformers' own models as the reference."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers.models.ernie4_5_vl_moe.image_processing_pil_ernie4_5_vl_moe import (
    Ernie4_5_VLMoeImageProcessorPil,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from mmdeploy_llm import LLM
from mmdeploy_llm.hooks import hookimpl
from mmdeploy_llm.testing.tiny import write_tiny

PLACEHOLDERS = {"ernie4_5_vl_moe": "<|IMAGE_PLACEHOLDER|>", "qwen2_5_vl": "<|image_pad|>"}
MARKERS = {
    "ernie4_5_vl_moe": ("<|IMAGE_START|>", "<|IMAGE_END|>"),
    "qwen2_5_vl": ("<|vision_start|>", "<|vision_end|>"),
}
PROCESSORS = {
    "ernie4_5_vl_moe": Ernie4_5_VLMoeImageProcessorPil,
    "qwen2_5_vl": Qwen2VLImageProcessorPil,
}


def picture(seed, width, height):
    """A smooth random colour image."""
    rng = np.random.RandomState(seed)
    small = rng.randint(0, 255, (6, 6, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


class Reference:
    """transformers' model of a checkpoint, run on one prompt at a time, greedily."""

    def __init__(self, family, folder):
        self.family, self.folder = family, folder
        config = transformers.AutoConfig.from_pretrained(folder)
        architecture = getattr(transformers, config.architectures[0])
        self.model = architecture.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    @property
    def has_images(self):
        return self.family in PLACEHOLDERS

    def image_text(self):
        """What stands for one image in a prompt."""
        start, end = MARKERS[self.family]
        return f"{start}{PLACEHOLDERS[self.family]}{end}"

    def inputs(self, prompt, images=()):
        """The model's inputs for a prompt, made by transformers' tokenizer and image processor."""
        extra = {}
        if images:
            processor = PROCESSORS[self.family].from_pretrained(self.folder)
            extra = dict(processor(list(images), return_tensors="pt"))
            placeholder = PLACEHOLDERS[self.family]
            first, *rest = prompt.split(placeholder)
            for grid, text in zip(extra["image_grid_thw"], rest, strict=True):
                first += placeholder * (int(grid.prod()) // 4) + text
            prompt = first
        ids = self.tokenizer(prompt, return_tensors="pt").input_ids
        if self.has_images:
            extra |= self._token_types(ids)
        return {"input_ids": ids, **extra}

    def _token_types(self, ids):
        config = self.model.config
        types = {"mm_token_type_ids": (ids == config.image_token_id).int()}
        if self.family == "ernie4_5_vl_moe":
            names = ("image_token_id", "image_start_token_id", "image_end_token_id")
            vision = torch.tensor([getattr(config, name) for name in names])
            types["moe_mm_token_type_ids"] = torch.isin(ids, vision).int()
        return types

    @torch.inference_mode()
    def generate(self, prompt, images=(), max_tokens=12):
        """The new token ids, end of sequence included."""
        inputs = self.inputs(prompt, images)
        out = self.model.generate(
            **inputs,
            attention_mask=torch.ones_like(inputs["input_ids"]),
            max_new_tokens=max_tokens,
            do_sample=False,
        )
        return out[0, inputs["input_ids"].shape[1] :].tolist()

    @torch.inference_mode()
    def logprobs(self, prompt, images=()):
        """[tokens, vocab] log-probabilities of the prompt's positions."""
        return self.model(**self.inputs(prompt, images)).logits[0].float().log_softmax(-1)


@dataclass
class Stats:
    """Observes the engine's steps."""

    steps: list = field(default_factory=list)

    @hookimpl
    def on_step(self, stats):
        self.steps.append(stats)


FAMILIES = ("ernie4_5", "ernie4_5_moe", "ernie4_5_vl_moe", "qwen2", "qwen2_5_vl")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """family -> folder of its tiny checkpoint."""
    folders = {}

    def folder(family):
        if family not in folders:
            folders[family] = write_tiny(family, tmp_path_factory.mktemp(family))
        return folders[family]

    return folder


@pytest.fixture(scope="session")
def reference_of(tiny_folder):
    """family -> Reference."""
    references = {}

    def reference(family):
        if family not in references:
            references[family] = Reference(family, tiny_folder(family))
        return references[family]

    return reference


@pytest.fixture(params=FAMILIES)
def reference(request, reference_of):
    return reference_of(request.param)


@pytest.fixture(params=sorted(PLACEHOLDERS))
def vl_reference(request, reference_of):
    return reference_of(request.param)


@pytest.fixture
def make_llm():
    """LLM(folder, ...) with a small KV cache, closed after the test; `.stats` observes its
    steps."""
    opened = []

    def make(folder, **options):
        defaults = {"limit_mm_per_prompt": {"image": 4}, "block_size": 16, "use_warmup": False}
        llm = LLM(model=str(folder), **{**defaults, **options})
        stats = Stats()
        llm.plugins.register(stats, name="stats")
        opened.append(llm)
        return llm, stats

    yield make
    for llm in opened:
        llm.close()


@pytest.fixture(scope="session")
def make_picture():
    return picture
