"""Writes tiny random checkpoints of families without their own plugin through transformers, and
runs transformers' own generate as the reference."""

import json
import warnings
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from mmdeploy_llm import LLM
from mmdeploy_llm.hooks import hookimpl
from mmdeploy_llm.testing.tiny import randomize

VOCAB_SIZE = 512
CORPUS = "The quick brown fox jumps over the lazy dog. User: what is it? Assistant: A circle.\n\n"
MEAN = [0.5, 0.4, 0.3]
STD = [0.3, 0.2, 0.25]
NAMED = {  # attributes of a tokenizer that the processors of these families read
    "image_token": "<image>",
    "video_token": "<video>",
}
INTERN = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
GEMMA = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}
IDEFICS_TOKENS = (
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)),
)
GLM_TOKENS = {
    "image_start_token_id": "<|begin_of_image|>",
    "image_end_token_id": "<|end_of_image|>",
    "video_start_token_id": "<|begin_of_video|>",
    "video_end_token_id": "<|end_of_video|>",
    "image_token_id": "<|image|>",
    "video_token_id": "<|video|>",
}
TEMPLATE = (
    "{%% for message in messages %%}User: {%% for part in message['content'] %%}"
    "{%% if part['type'] == 'text' %%}{{ part['text'] }}{%% else %%}%s{%% endif %%}"
    "{%% endfor %%}{%% endfor %%} Assistant:"
)
MISTRAL_TOKENS = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")


@dataclass(frozen=True)
class Family:
    """marker: the text of an image in a prompt. named: special tokens that are attributes of
    the tokenizer, special: the others. config: (tokenizer, fields of the text config) ->
    transformers' config."""

    architecture: str
    config: object
    marker: str = ""
    named: dict = field(default_factory=dict)
    special: tuple = ()
    image_processor: dict = field(default_factory=dict)
    processor: dict = field(default_factory=dict)


def build_tokenizer(family):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>", *family.named.values(), *family.special]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(dict.fromkeys(special)),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS] * 4, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        extra_special_tokens=family.named,
        chat_template=TEMPLATE % family.marker,
        clean_up_tokenization_spaces=False,
    )


def text_fields(**fields):
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **fields,
    }


def vision_fields(**fields):
    return {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 7,
        **fields,
    }


def llava_onevision(tokenizer, pinpoints=((28, 28), (28, 56), (56, 28), (56, 56))):
    return transformers.LlavaOnevisionConfig(
        text_config=transformers.Qwen2Config(**text_fields()),
        vision_config=transformers.SiglipVisionConfig(**vision_fields(patch_size=14)),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=[list(point) for point in pinpoints],
    )


def internvl(tokenizer):
    return transformers.InternVLConfig(
        text_config=transformers.Qwen2Config(**text_fields()),
        vision_config=transformers.InternVLVisionConfig(**vision_fields()),
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
    )


def idefics3(tokenizer):
    return transformers.Idefics3Config(
        text_config=transformers.LlamaConfig(**text_fields()),
        vision_config=transformers.Idefics3VisionConfig(**vision_fields()).to_dict(),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        pad_token_id=0,
    )


def gemma3(tokenizer):
    return transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(
            **text_fields(head_dim=16, sliding_window=12, query_pre_attn_scalar=20)
        ),
        vision_config=transformers.SiglipVisionConfig(**vision_fields()),
        mm_tokens_per_image=4,
        image_token_index=tokenizer.convert_tokens_to_ids("<image_soft_token>"),
        boi_token_index=tokenizer.convert_tokens_to_ids("<start_of_image>"),
        eoi_token_index=tokenizer.convert_tokens_to_ids("<end_of_image>"),
    )


def glm4v(tokenizer):
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    fields = text_fields(num_attention_heads=2, num_key_value_heads=1)
    fields["rope_parameters"] = {**rope, "mrope_section": [2, 3, 3]}
    vision = {"depth": 2, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64}
    return transformers.Glm4vConfig(
        text_config=fields,
        vision_config={**vision, "intermediate_size": 48, "image_size": 56, "patch_size": 14},
        **{key: tokenizer.convert_tokens_to_ids(text) for key, text in GLM_TOKENS.items()},
    )


def mistral3(tokenizer):
    return transformers.Mistral3Config(
        text_config=transformers.MistralConfig(**text_fields(sliding_window=None, head_dim=16)),
        vision_config=transformers.PixtralVisionConfig(**vision_fields(image_size=56)),
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
        spatial_merge_size=2,
    )


def lfm3_vl(tokenizer):
    text = {"head_dim": 16, "sliding_window": 9, "conv_L_cache": 5}
    kinds = ["conv", "sliding_attention", "full_attention"]
    return transformers.Lfm3VlConfig(
        text_config=transformers.Lfm3Config(**text_fields(layer_types=kinds, **text)),
        vision_config=vision_fields(num_key_value_heads=1, layer_types=["conv", "full_attention"]),
        projector_hidden_size=64,
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<|video_pad|>"),
    )


SIDE = {"height": 28, "width": 28}
FAMILIES = {
    "llava_onevision": Family(
        "LlavaOnevisionForConditionalGeneration",
        llava_onevision,
        "<image>",
        NAMED,
        image_processor={
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "size": SIDE,
            "image_grid_pinpoints": [[28, 28], [28, 56], [56, 28], [56, 56]],
        },
        processor={
            "processor_class": "LlavaOnevisionProcessor",
            "num_image_tokens": 4,
            "vision_feature_select_strategy": "full",
        },
    ),
    "internvl": Family(
        "InternVLForConditionalGeneration",
        internvl,
        "<IMG_CONTEXT>",
        INTERN,
        image_processor={
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": SIDE,
            "max_patches": 4,
        },
        processor={"processor_class": "InternVLProcessor", "image_seq_length": 4},
    ),
    "idefics3": Family(
        "Idefics3ForConditionalGeneration",
        idefics3,
        "<image>",
        {},
        ("<image>", *IDEFICS_TOKENS),
        image_processor={
            "size": {"longest_edge": 56},
            "max_image_size": {"longest_edge": 28},
            "image_processor_type": "Idefics3ImageProcessor",
        },
        processor={"processor_class": "Idefics3Processor", "image_seq_len": 4},
    ),
    "gemma3": Family(
        "Gemma3ForConditionalGeneration",
        gemma3,
        "<start_of_image>",
        GEMMA,
        image_processor={"image_processor_type": "Gemma3ImageProcessor", "size": SIDE},
        processor={"processor_class": "Gemma3Processor", "image_seq_length": 4},
    ),
    "glm4v": Family(
        "Glm4vForConditionalGeneration",
        glm4v,
        "<|begin_of_image|><|image|><|end_of_image|>",
        {},
        tuple(GLM_TOKENS.values()),
        image_processor={
            "image_processor_type": "Glm4vImageProcessor",
            "size": {"shortest_edge": 28 * 28 * 2, "longest_edge": 56 * 112 * 2},
        },
        processor={"processor_class": "Glm4vProcessor"},
    ),
    # Its short convolutions keep a state.
    "lfm3_vl": Family(
        "Lfm3VlForConditionalGeneration",
        lfm3_vl,
        "<|image_pad|>",
        {},
        ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"),
        image_processor={
            "image_processor_type": "Qwen2VLImageProcessor",
            "size": {"shortest_edge": 28 * 28, "longest_edge": 56 * 112},
            "patch_size": 7,
        },
        processor={"processor_class": "Lfm3VlProcessor"},
    ),
    "mistral3": Family(
        "Mistral3ForConditionalGeneration",
        mistral3,
        "[IMG]",
        {},
        MISTRAL_TOKENS,
        image_processor={
            "image_processor_type": "PixtralImageProcessor",
            "size": {"longest_edge": 56},
            "patch_size": 7,
        },
        processor={
            "processor_class": "PixtralProcessor",
            "patch_size": 7,
            "spatial_merge_size": 2,
        },
    ),
}


def write(family, folder, make_config=None):
    """Writes the checkpoint of a family; make_config: replaces the family's config."""
    tokenizer = build_tokenizer(family)
    config = (make_config or family.config)(tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, family.architecture)(config)
        randomize(model)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if family.image_processor:
        images = {**family.image_processor, "image_mean": MEAN, "image_std": STD}
        (folder / "preprocessor_config.json").write_text(json.dumps(images))
        (folder / "processor_config.json").write_text(json.dumps(family.processor))
    return folder


class Reference:
    """Runs transformers' model and processor of a checkpoint on one prompt at a time."""

    def __init__(self, family, folder):
        self.family, self.folder = family, folder
        architecture = getattr(transformers, family.architecture)
        self.model = architecture.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.images = self.processor = None
        if family.processor:
            self.images = AutoImageProcessor.from_pretrained(folder, backend="pil")
            self.processor = self._processor()

    def _processor(self):
        """Loads the processor without its video processor, which needs torchvision; returns None
        for Pixtral's, which needs it too."""
        if self.family.processor["processor_class"] == "PixtralProcessor":
            return None
        base = getattr(transformers, self.family.processor["processor_class"])
        checked = {"check_argument_for_proper_class": lambda *_: None}
        given = {key: value for key, value in self.family.processor.items() if "class" not in key}
        if "video_processor" in base.get_attributes():
            given["video_processor"] = None
        return type(base.__name__, (base,), checked)(
            image_processor=self.images, tokenizer=self.tokenizer, **given
        )

    def inputs(self, prompt, images=()):
        if not images:
            return dict(self.tokenizer(prompt, return_tensors="pt"))
        if self.processor is None:
            return self._pixtral_inputs(prompt, images)
        with warnings.catch_warnings():  # numpy warns about transformers' arrays of tensors
            warnings.simplefilter("ignore", DeprecationWarning)
            return dict(self.processor(text=[prompt], images=list(images), return_tensors="pt"))

    def _pixtral_inputs(self, prompt, images):
        """Returns an image's text: rows of 14-pixel cells, each followed by a mark."""
        made = self.images(list(images), patch_size=14, return_tensors="pt")
        first, *rest = prompt.split("[IMG]")
        for (height, width), text in zip(made["image_sizes"].tolist(), rest, strict=True):
            rows = [["[IMG]"] * (width // 14) + ["[IMG_BREAK]"] for _ in range(height // 14)]
            cells = [cell for row in rows for cell in row]
            first += "".join([*cells[:-1], "[IMG_END]", text])
        return {**self.tokenizer(first, return_tensors="pt"), **made}

    @torch.inference_mode()
    def generate(self, prompt, images=(), max_tokens=10):
        """Returns the new token ids; none of them ends the text."""
        inputs = self.inputs(prompt, images)
        out = self.model.generate(
            **inputs, max_new_tokens=max_tokens, do_sample=False, eos_token_id=None
        )
        return out[0, inputs["input_ids"].shape[1] :].tolist()


@dataclass
class Stats:
    """Observes the engine's steps."""

    steps: list = field(default_factory=list)

    @hookimpl
    def on_step(self, stats):
        self.steps.append(stats)


@pytest.fixture(scope="package")
def reference_of(tmp_path_factory):
    """Returns a function from the name of a family to its Reference, written and loaded once."""
    found = {}

    def reference(name):
        if name not in found:
            folder = write(FAMILIES[name], tmp_path_factory.mktemp(name))
            found[name] = Reference(FAMILIES[name], folder)
        return found[name]

    return reference


@pytest.fixture(
    params=[
        pytest.param(name, marks=[pytest.mark.full] * (name != "gemma3"))
        for name in sorted(FAMILIES)
    ]
)
def reference(request, reference_of):
    return reference_of(request.param)


@pytest.fixture(
    params=[
        "gemma3",
        pytest.param("internvl", marks=pytest.mark.full),
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in sorted({*FAMILIES} - {"gemma3", "internvl"})
        ),
    ]
)
def one_reference(request, reference_of):
    """Chooses models for what all families share: one in CI whose images see each other, one with
    tiles."""
    return reference_of(request.param)


@pytest.fixture
def make_llm():
    """Returns a function that makes LLM(folder, ...) with a small KV cache, closed after the test,
    and the stats of its steps."""
    opened = []

    def make(folder, **options):
        defaults = {"limit_mm_per_prompt": {"image": 4}, "block_size": 16, "use_warmup": False}
        # They would serve their families.
        defaults |= {"blocked_plugins": ("gemma", "glm", "internvl")}
        llm = LLM(model=str(folder), num_threads=1, **{**defaults, **options})
        opened.append(llm)
        stats = Stats()
        llm.plugins.register(stats, name="stats")
        return llm, stats

    yield make
    for llm in opened:
        llm.close()


@pytest.fixture(scope="session")
def picture():
    """Draws a smooth random colour image."""

    def make(seed, width, height):
        rng = np.random.RandomState(seed)
        small = rng.randint(0, 255, (6, 6, 3), dtype=np.uint8)
        return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)

    return make
