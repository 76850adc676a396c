"""Tiny random checkpoints of every family, and transformers' own models as the reference."""

from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

import mmdeploy_llm_plugins.ernie
import numpy as np
import pytest
import torch
import transformers
from PIL import Image, ImageDraw, ImageFont
from transformers.models.ernie4_5_vl_moe.image_processing_pil_ernie4_5_vl_moe import (
    Ernie4_5_VLMoeImageProcessorPil,
)
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import (
    PaddleOCRVLImageProcessorPil,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from mmdeploy_llm import LLM
from mmdeploy_llm.hooks import hookimpl
from mmdeploy_llm.testing.tiny import MAX_PIXELS, MIN_PIXELS

QWEN = ("qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5")
ERNIE = ("ernie4_5_vl_moe",)
QWEN3 = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5")
IMAGE_TOKENS = {
    **dict.fromkeys((*ERNIE, "paddleocr_vl"), "<|IMAGE_PLACEHOLDER|>"),
    **dict.fromkeys(QWEN, "<|image_pad|>"),
}
VIDEO_TOKENS = {
    **dict.fromkeys(ERNIE, "<|VIDEO_PLACEHOLDER|>"),
    **dict.fromkeys(QWEN, "<|video_pad|>"),
}
IMAGE_MARKERS = {
    **dict.fromkeys((*ERNIE, "paddleocr_vl"), ("<|IMAGE_START|>", "<|IMAGE_END|>")),
    **dict.fromkeys(QWEN, ("<|vision_start|>", "<|vision_end|>")),
}
VIDEO_MARKERS = {
    **dict.fromkeys(ERNIE, ("<|VIDEO_START|>", "<|VIDEO_END|>")),
    **dict.fromkeys(QWEN, ("<|vision_start|>", "<|vision_end|>")),
}
PROCESSORS = {
    **dict.fromkeys(ERNIE, Ernie4_5_VLMoeImageProcessorPil),
    **dict.fromkeys(QWEN, Qwen2VLImageProcessorPil),
    "paddleocr_vl": PaddleOCRVLImageProcessorPil,
}
FONT = Path(mmdeploy_llm_plugins.ernie.__file__).with_name("Roboto-Regular.ttf")
RATE = 8  # frames per second of the clips
# Of the tiny checkpoints' video_preprocessor_config.json.
VIDEO_SIZE = {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS}
# Qwen3-VL bounds a video as a whole; the clips of these tests lie within its bounds.
NO_BOUNDS = {"shortest_edge": 32 * 32, "longest_edge": 2**24}


def picture(seed, width, height):
    """A smooth random colour image."""
    rng = np.random.RandomState(seed)
    small = rng.randint(0, 255, (6, 6, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def filled(prompt, placeholder, counts):
    """The prompt with each placeholder repeated."""
    first, *rest = prompt.split(placeholder)
    for count, text in zip(counts, rest, strict=True):
        first += placeholder * count + text
    return first


def written_out(prompt, marker, texts):
    """The prompt with the i-th marker replaced by the i-th text."""
    first, *rest = prompt.split(marker)
    return first + "".join(text + part for text, part in zip(texts, rest, strict=True))


def stamped(frame, seconds):
    """ERNIE's time stamp: 10 % of the shorter side high, black on white, in the corner."""
    frame = frame.copy()
    size = int(min(frame.size) * 0.1)
    text = f"time: 00:00:{seconds:05.2f}"
    font = ImageFont.truetype(FONT, size)
    outline = {"stroke_width": int(size * 0.1), "stroke_fill": (255, 255, 255)}
    ImageDraw.Draw(frame).text((0, 0), text, font=font, fill=(0, 0, 0), **outline)
    return frame


@dataclass(frozen=True)
class Clip:
    """A video as frames of one size, RATE a second, and the numbers of those that are used."""

    frames: list
    used: list
    options: dict = field(default_factory=dict)

    @property
    def item(self):
        """Returns what the caller gives."""
        return {"video": self.frames, "source_fps": RATE, **self.options}


class Reference:
    """transformers' model of a checkpoint, run on one prompt at a time, greedily. It is loaded for
    what was not asked before, see tests/references.py."""

    def __init__(self, family, folder, answers):
        self.family, self.folder = family, folder
        self.config = transformers.AutoConfig.from_pretrained(folder)
        self._answers = answers

    @cached_property
    def model(self):
        architecture = getattr(transformers, self.config.architectures[0])
        return architecture.from_pretrained(self.folder, dtype=torch.float32).eval()

    @cached_property
    def tokenizer(self):
        return transformers.AutoTokenizer.from_pretrained(self.folder)

    @property
    def has_images(self):
        return self.family in IMAGE_TOKENS

    @property
    def has_videos(self):
        return self.family in VIDEO_TOKENS

    def image_text(self):
        """Returns the placeholder text of one image in a prompt."""
        start, end = IMAGE_MARKERS[self.family]
        return f"{start}{IMAGE_TOKENS[self.family]}{end}"

    def video_text(self):
        """Returns the placeholder text of one video in a prompt."""
        start, end = VIDEO_MARKERS[self.family]
        return f"{start}{VIDEO_TOKENS[self.family]}{end}"

    def inputs(self, prompt, images=(), videos=()):
        """The model's inputs for a prompt, made by transformers' tokenizer and image processor.

        transformers' video processors need torchvision; a video's frames go through the image
        processor one by one, and its time stamps are drawn here.
        """
        extra = {}
        if images:
            processor = PROCESSORS[self.family].from_pretrained(self.folder)
            extra |= dict(processor(list(images), return_tensors="pt"))
            counts = [int(grid.prod()) // 4 for grid in extra["image_grid_thw"]]
            prompt = filled(prompt, IMAGE_TOKENS[self.family], counts)
        if videos:
            made = [self.video_inputs(clip) for clip in videos]
            extra["pixel_values_videos"] = torch.cat([pixels for pixels, _, _ in made])
            extra["video_grid_thw"] = torch.tensor([grid for _, grid, _ in made])
            frames_a_token = 8 if self.is_ernie else 4
            counts = [int(np.prod(grid)) // frames_a_token for _, grid, _ in made]
            if self.family in QWEN3:
                texts = [self.stamped_text(*pair) for pair in zip(videos, counts, strict=True)]
                prompt = written_out(prompt, self.video_text(), texts)
            else:
                prompt = filled(prompt, VIDEO_TOKENS[self.family], counts)
            if self.family == "qwen2_5_vl":
                extra["second_per_grid_ts"] = [seconds for _, _, seconds in made]
        ids = self.tokenizer(prompt, return_tensors="pt").input_ids
        if self.has_images:
            extra |= self._token_types(ids)
        return {"input_ids": ids, **extra}

    def stamped_text(self, clip, count):
        """A clip of `count` tokens in a prompt of Qwen3-VL, with a time before every two frames."""
        used = [*clip.used, *clip.used[-1:] * (len(clip.used) % 2)]
        start, end = VIDEO_MARKERS[self.family]
        tokens = VIDEO_TOKENS[self.family] * (2 * count // len(used))
        return "".join(
            f"<{(first + last) / 2 / RATE:.1f} seconds>{start}{tokens}{end}"
            for first, last in zip(used[::2], used[1::2], strict=True)
        )

    @property
    def media_size(self):
        """Values that the encoder gives for a token."""
        config = self.config
        taps = getattr(config.vision_config, "deepstack_visual_indexes", ())
        return config.text_config.hidden_size * (1 + len(taps))

    @property
    def is_ernie(self):
        return self.family == "ernie4_5_vl_moe"

    def video_inputs(self, clip):
        """(pixels, grid, seconds between two steps in time) of the clip's used frames."""
        frames = [clip.frames[index] for index in clip.used]
        if self.is_ernie:
            frames = [
                stamped(frame, index / RATE) for frame, index in zip(frames, clip.used, strict=True)
            ]
        frames += frames[-1:] * (len(frames) % 2)
        size = NO_BOUNDS if self.family in QWEN3 else VIDEO_SIZE
        processor = PROCESSORS[self.family].from_pretrained(self.folder, size=size)
        made = processor(frames, return_tensors="pt")
        _, rows, columns = made["image_grid_thw"][0].tolist()
        pixels = made["pixel_values"].view(len(frames), rows * columns, -1)
        if self.is_ernie:
            return pixels.flatten(0, 1), (len(frames), rows, columns), None
        # An image is its own second frame there: of each pair take one of either.
        patches = pixels.view(len(frames), rows * columns, 3, 2, -1)
        pairs = torch.stack([patches[0::2, :, :, 0], patches[1::2, :, :, 0]], dim=3)
        seconds = 2 / (len(clip.used) / len(clip.frames) * RATE)
        grid = (len(frames) // 2, rows, columns)
        return pairs.flatten(2).flatten(0, 1), grid, seconds

    def _token_types(self, ids):
        config = self.config
        types = (ids == config.image_token_id).int() + 2 * (ids == config.video_token_id).int()
        found = {"mm_token_type_ids": types}
        if self.is_ernie:
            routed = torch.zeros_like(ids, dtype=torch.int)
            for number, kind in ((1, "image"), (2, "video")):
                for part in ("", "_start", "_end"):
                    routed[ids == getattr(config, f"{kind}{part}_token_id")] = number
            found["moe_mm_token_type_ids"] = routed
        return found

    def generate(self, prompt, images=(), videos=(), max_tokens=12):
        """Returns the new token ids, end of sequence included."""

        def compute():
            return torch.tensor(self._generate(prompt, images, videos, max_tokens))

        pictures = [[image.size, image.mode, image.tobytes()] for image in images]
        clips = [
            [clip.used, [[frame.size, frame.tobytes()] for frame in clip.frames]] for clip in videos
        ]
        return self._answers(compute, "chat", prompt, max_tokens, pictures, clips).tolist()

    @torch.inference_mode()
    def _generate(self, prompt, images, videos, max_tokens):
        inputs = self.inputs(prompt, images, videos)
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


# One family of each kind: dense with windows, M-RoPE, experts by modality, layers with states. The
# conformance kit compares every family with transformers, test_exact_chat.py every one with media.
VL_FAMILIES = ("qwen2_5_vl", "ernie4_5_vl_moe", "qwen3_5")
FAMILIES = ("mistral", *VL_FAMILIES)


@pytest.fixture(scope="session")
def reference_of(references):
    """family -> Reference."""

    @cache
    def reference(family):
        folder = references.tiny(family)
        return Reference(family, folder, references.of(folder).answers)

    return reference


@pytest.fixture(params=FAMILIES)
def reference(request, reference_of):
    return reference_of(request.param)


@pytest.fixture(
    params=[
        pytest.param(name, marks=[pytest.mark.full] * (name not in VL_FAMILIES))
        for name in sorted(IMAGE_TOKENS)
    ]
)
def chat_reference(request, reference_of):
    return reference_of(request.param)


@pytest.fixture(params=[*VL_FAMILIES, "qwen3_vl"])
def vl_reference(request, reference_of):
    """Includes one whose encoder yields several values for a token."""
    return reference_of(request.param)


@pytest.fixture(
    params=["qwen2_5_vl", *(pytest.param(name, marks=pytest.mark.full) for name in VL_FAMILIES[1:])]
)
def video_reference(request, reference_of):
    return reference_of(request.param)


@pytest.fixture
def make_llm():
    """LLM(folder, ...) with a small KV cache, closed after the test; `.stats` observes its
    steps."""
    opened = []

    def make(folder, **options):
        defaults = {
            "limit_mm_per_prompt": {"image": 4, "video": 2},
            "block_size": 16,
            "use_warmup": False,
        }
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


@pytest.fixture(scope="session")
def make_clip():
    """Frames that differ from each other, `num` of them."""

    def make(seed, num, width, height, used, **options):
        frames = [picture(100 * seed + number, width, height) for number in range(num)]
        return Clip(frames=frames, used=list(used), options=options)

    return make
