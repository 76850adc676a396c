"""Gives a class of the census what its images need: a tokenizer with the special tokens that the
code of its processor names, a small image processor, and prompts with images.

Most is found in the config and the code of the processor; the tables have what differs by class.
"""

import inspect
import json
import re
import sys

import numpy as np
import torch
import transformers
from mmdeploy_llm_plugins.transformers_media import processing
from PIL import Image
from shrink import PINPOINTS, SIDE
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from mmdeploy_llm.testing import tiny

SIZES = ((70, 50), (40, 90))  # of the images in the prompts
NUM_OTHERS = 12  # special tokens for ids that no token of the processor fits
LITERAL = re.compile(r"""["']((?:<[^"'\s\\{(]+>|\[[A-Z_]+\]|\|[A-Z]+\||\]<\][^"'\s]+\[>\[))["']""")
NAMED = re.compile(r"""tokenizer(?:\.|, ["'])(\w+_token)\b(?!_id)""")
PLAIN = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token")
PROCESSORS = {  # model type -> processor, where transformers' table has none
    "cosmos3_omni": "Qwen3VLProcessor",
    "fast_vlm": "LlavaProcessor",
    "glm_ocr": "Glm46VProcessor",
    "kosmos-2": "Kosmos2Processor",
    "kosmos-2.5": "Kosmos2_5Processor",
    "qwen2_5_omni_thinker": "Qwen2_5OmniProcessor",
    "qwen3_omni_moe_thinker": "Qwen3OmniMoeProcessor",
}
IMAGE_PROCESSORS = {
    "fast_vlm": "CLIPImageProcessor",
    "glm4v_moe": "Glm4vImageProcessor",
    "glm_ocr": "Glm46VImageProcessor",
    "qwen3_vl_moe": "Qwen2VLImageProcessor",
    "qwen2_5_omni_thinker": "Qwen2VLImageProcessor",
    "qwen3_omni_moe_thinker": "Qwen2VLImageProcessor",
}
# Image processor, processor or model type -> fields of the former that the rules below do not find.
OPTIONS = {
    "ChameleonImageProcessor": {
        "size": {"shortest_edge": 64},
        "crop_size": {"height": 64, "width": 64},
    },
    "Apertus1p5ImageProcessor": {"size": {"min_pixels": 48 * 48, "max_pixels": 64 * 64}},
    "AriaImageProcessor": {"max_image_size": 980},
    "Cohere2VisionImageProcessor": {"patch_size": 2},  # a tile's side, in tokens
    "InklingImageProcessor": {"size": {"height": 14, "width": 14}},  # of a token
    "Inkling2ImageProcessor": {"size": {"height": 28, "width": 28}},  # of a token
    "Lfm2VlImageProcessor": {
        "encoder_patch_size": 14,
        "tile_size": SIDE,
        "max_tiles": 4,
        "min_image_tokens": 4,
        "max_image_tokens": 16,
        "max_num_patches": 64,
    },
    "Molmo2ImageProcessor": {
        "size": {"height": SIDE, "width": SIDE},
        "overlap_margins": [1, 1],
        "max_crops": 2,
    },
    "MuseGlimmerImageProcessor": {"max_image_tokens": 16},
    "MiniCPMOcrImageProcessor": {"scale_resolution": SIDE, "max_slice_nums": 4},
    "Dots3NoteProcessor": {"temporal_patch_size": 1},
    "fast_vlm": {  # its tower has one feature for 64 x 64 pixels
        "size": {"shortest_edge": 256},
        "crop_size": {"height": 256, "width": 256},
    },
    "PerceptionLMImageProcessor": {"tile_size": SIDE, "max_num_tiles": 4},
    "GotOcr2Processor": {"size": {"height": 128, "width": 128}},
    "Gemma4ImageProcessor": {"max_soft_tokens": 70},
    "Gemma4UnifiedImageProcessor": {"max_soft_tokens": 70},
    "UnlimitedOcrImageProcessor": {
        "size": {"height": 96, "width": 96},
        "tile_size": 48,
        "max_patches": 4,
    },
    "DeepseekOcr2ImageProcessor": {"size": {"height": 96, "width": 96}, "tile_size": 96},
    "Step3p7ImageProcessor": {  # one token of 56 x 56 pixels, in the whole and in its tiles
        "size": {"height": 112, "width": 112},
        "patch_size": 56,
    },
    "PaliGemmaProcessor": {"image_seq_length": (SIDE // 14) ** 2},
    "DeepseekVLHybridImageProcessor": {"high_res_size": {"height": SIDE, "width": SIDE}},
}
PROCESSOR_OPTIONS = {
    "AyaVisionProcessor": {"img_size": SIDE, "downsample_factor": 2},
    "DeepseekOcr2Processor": {"patch_size": 2},
    "UnlimitedOcrProcessor": {"patch_size": 2},
    "Granite4VisionProcessor": {"downsample_rate": "1/2"},
    "fast_vlm": {
        "patch_size": 64,
        "vision_feature_select_strategy": "full",
        "num_additional_image_tokens": 0,
    },
    "PerceptionLMProcessor": {"patch_size": 14, "pooling_ratio": 1},
    "LlavaOnevisionProcessor": {"num_image_tokens": 16},
    "LlavaProcessor": {"vision_feature_select_strategy": "default"},
}
TEXTS = {  # tokens that the plugins of single families name
    "Gemma4Processor": {
        "image_token": "<|image|>",
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
    },
    "Gemma4UnifiedProcessor": {
        "image_token": "<|image|>",
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
    },
    "Ernie4_5_VLMoeProcessor": {
        f"{kind}_{word}token": f"<|{kind.upper()}_{text}|>"
        for kind in ("image", "video")
        for word, text in (("start_", "START"), ("", "PLACEHOLDER"), ("end_", "END"))
    },
}
INDICATORS = tuple(f"<IMG_{word}>" for word in ("START", "GRID", "COL", "ROW", "END"))
NUMBERS = ("image_seq_length", "image_seq_len", "num_image_tokens", "num_query_tokens")
OMNI = "<|vision_bos|>{}<|vision_eos|>"
MARKERS = {  # around an image's token
    "HunYuanVLProcessor": "<|image_start|>{}<|image_end|>",
    "Qwen2_5OmniProcessor": OMNI,
    "Qwen3OmniMoeProcessor": OMNI,
}
LITERALS = {  # names of tokens in a config whose processor has their text only
    "image_start_token": "<im_start>",
    "image_end_token": "<im_end>",
    "low_res_image_start_token": "<low_res_im_start>",
    "frame_start_token": "<frame_start>",
    "frame_end_token": "<frame_end>",
}
ALIASES = {"vision_start_token": "vision_bos_token", "vision_end_token": "vision_eos_token"}
AROUND = {  # what a processor writes before and after a prompt with images
    "ChameleonProcessor": ("", "</s>"),
    "Emu3Processor": ("<s>", ""),
    "Molmo2Processor": ("<s>", ""),
    "PaliGemmaProcessor": ("", "\n"),
}
AFTER_IMAGES = {  # and after its last image
    "PaliGemmaProcessor": "<s>",
}
# Pads images of one prompt to one size, which changes the smaller one; takes no others together.
ALONE = ("Emu3Processor", "PerceptionLMProcessor")
TYPED = (
    "Cosmos3EdgeProcessor",
    "Gemma4Processor",
    "Gemma4UnifiedProcessor",
)  # returns types of tokens only when it is asked to
BEFORE = (
    "Blip2Processor",
    "InstructBlipProcessor",
    "Kosmos2Processor",
)  # its image comes first, and every prompt has one
FEW = 7  # tokens per image before the model says how many it makes


QUESTIONS = "qformer_tokenizer"  # a component, and its folder in a checkpoint


class NoProcessor(Exception):
    """transformers has no processor of images for a class."""


def processor_class(kind):
    """Returns the processor's class and its name. Raises NoProcessor."""
    name = PROCESSORS.get(kind) or PROCESSOR_MAPPING_NAMES.get(kind)
    found = getattr(transformers, name, None) if isinstance(name, str) else None
    if name == "PixtralProcessor" and getattr(found, "is_dummy", False):
        from mmdeploy_llm_plugins.transformers_media.pixtral import PixtralProcessor as found
    if found is None:
        raise NoProcessor(f"transformers has no processor for {kind}")
    return found, name


def image_processor_class(kind):
    """Returns (class with the Pillow backend, name for the file)."""
    name = IMAGE_PROCESSORS.get(kind)
    if name is None:
        names = IMAGE_PROCESSOR_MAPPING_NAMES.get(kind) or {}
        if not names:
            raise NoProcessor(f"transformers has no image processor for {kind}")
        name = (names.get("pil") or names["torchvision"]).removesuffix("Pil")
    for own in (name + "Pil", name):
        found = getattr(transformers, own, None)
        if found is not None and not getattr(found, "is_dummy", False):
            return found, name
    return None, name  # it needs torchvision


def needs_torchvision(kind):
    """Whether the only image processor of a model type needs torchvision."""
    names = IMAGE_PROCESSOR_MAPPING_NAMES.get(kind) or {}
    return kind not in IMAGE_PROCESSORS and "torchvision" in names and not names.get("pil")


def make_tokenizer(processor):
    """Returns a tokenizer of bytes with the special tokens in the code of the processor."""
    source = "".join(
        inspect.getsource(sys.modules[kind.__module__])
        for kind in processor.__mro__
        if "transformers.models" in kind.__module__ or "plugins" in kind.__module__
    )
    defaults = inspect.signature(processor.__init__).parameters.values()
    literal = LITERAL.findall(source)
    literal += [p.default for p in defaults if p.name.endswith("_token")]
    names = [name for name in dict.fromkeys(NAMED.findall(source)) if name not in PLAIN]
    names = [name for name in names if f'hasattr(tokenizer, "{name}")' not in source]
    named = {name: f"<|{name.removesuffix('_token')}|>" for name in names}
    named |= TEXTS.get(processor.__name__, {})
    special = ["<pad>", "<s>", "</s>", *named.values(), *filter(None, literal), *INDICATORS]
    special += [f"<other_{number}>" for number in range(NUM_OTHERS)]
    special = list(dict.fromkeys(text for text in special if isinstance(text, str)))
    words = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        sep_token="</s>",
        unk_token="<s>" if "unk_token_id" in source else None,
        extra_special_tokens=named,
        clean_up_tokenization_spaces=False,
    )


def configs_in(config):
    """Yields a config and all that it contains."""
    yield config
    for name in config.sub_configs:
        inner = getattr(config, name, None)
        if isinstance(inner, transformers.PreTrainedConfig):
            yield from configs_in(inner)


def set_tokens(config, processor):
    """Gives the config the ids of the processor's tokens, others to fields that fit none."""
    tokenizer = processor.tokenizer
    others = iter(f"<other_{number}>" for number in range(NUM_OTHERS))
    ids = {"image_token": placeholder_id(processor)}
    if hasattr(config, "visual_indicator_token_ids"):
        config.visual_indicator_token_ids = tokenizer.convert_tokens_to_ids(INDICATORS)
    if hasattr(config, "image_patch_id"):
        config.image_patch_id = placeholder_id(processor)
    if hasattr(config, "vocabulary_map"):
        config.vocabulary_map["<image>"] = placeholder_id(processor)
    for inner in configs_in(config):
        for field in inner.to_dict():
            stem = re.sub(r"_(id|index)$", "", field)
            if not stem.endswith("_token") or stem == field or stem in PLAIN:
                continue
            if not isinstance(getattr(inner, field, None), int):
                continue
            if stem not in ids:
                text = token_text(stem, processor) or next(others)
                ids[stem] = tokenizer.convert_tokens_to_ids(text)
            setattr(inner, field, ids[stem])


def placeholder_id(processor):
    """Returns the id of the most frequent token of an image."""
    image = {"prompt": marker(processor), "multimodal_data": {"image": pictures()[:1]}}
    made = inputs(processor, image)["input_ids"][0]
    values, counts = made.unique(return_counts=True)
    return values[counts.argmax()].item()


def token_text(name, processor):
    """Returns the text of a special token by its name, or None."""
    for holder in (processor.tokenizer, processor):
        text = getattr(holder, name, None) or getattr(holder, ALIASES.get(name, name), None)
        if isinstance(text, str) and text in processor.tokenizer.get_vocab():
            return text
    text = LITERALS.get(name)
    return text if text in processor.tokenizer.get_vocab() else None


def image_options(kind, config):
    """Returns the fields of a small image processor."""
    made = kind()
    vision = getattr(config, "vision_config", None) or config
    given = {}
    for name in ("size", "crop_size", "max_image_size", "min_pixels", "max_pixels"):
        value = getattr(made, name, None)
        if value is not None:
            given[name] = SIDE if isinstance(value, int) else small(dict(value))
    for name, pixels in (("min_pixels", SIDE * SIDE // 2), ("max_pixels", 4 * SIDE * SIDE)):
        if name in given:
            given[name] = pixels
    for name in ("patch_size", "merge_size", "spatial_merge_size", "temporal_patch_size"):
        own = getattr(vision, name, None) or getattr(vision, "spatial_" + name, None)
        if getattr(made, name, None) is not None and isinstance(own, int):
            given[name] = own
    for name in ("max_patches", "max_num_tiles", "max_image_tiles"):
        if isinstance(getattr(made, name, None), int):
            given[name] = 4
    if getattr(made, "image_grid_pinpoints", None) is not None:
        given["image_grid_pinpoints"] = PINPOINTS
    return given | OPTIONS.get(kind.__name__.removesuffix("Pil"), {})


def small(value):
    """Returns a small size, which is in pixels in all or of edges."""
    edges = {"shortest_edge", "longest_edge"} == set(value)
    if edges and min(value.values()) > 2048:
        return {"shortest_edge": SIDE * SIDE // 2, "longest_edge": 4 * SIDE * SIDE}
    if edges:
        return {"shortest_edge": SIDE // 2, "longest_edge": SIDE}
    return dict.fromkeys(value, SIDE)


def pictures():
    """Returns smooth random images."""
    random = np.random.RandomState(0)
    return [
        Image.fromarray(random.randint(0, 255, (6, 6, 3), dtype=np.uint8)).resize(
            size, Image.Resampling.BICUBIC
        )
        for size in SIZES
    ]


def theirs(checkpoint):
    """Returns transformers' processor of a checkpoint, with the tokenizer of its Q-Former."""
    found = processing.load_processor(checkpoint, {})
    if QUESTIONS in found.get_attributes():
        folder = checkpoint.folder / QUESTIONS
        found.qformer_tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return found


def write_processor(folder, kind, config):
    """Writes the files of a small processor, with one token per image where it takes a number."""
    base, name = processor_class(kind)
    if QUESTIONS in base.get_attributes():
        tiny.make_tokenizer().save_pretrained(folder / QUESTIONS)
    made, file_name = image_processor_class(kind)
    fields = (
        {
            **made().to_dict(),
            **image_options(made, config),
            **OPTIONS.get(name, {}),
            **OPTIONS.get(kind, {}),
        }
        if made
        else {}
    )
    fields |= {"image_processor_type": file_name}
    (folder / "preprocessor_config.json").write_text(json.dumps(fields, default=str))
    (folder / "processor_config.json").write_text(
        json.dumps({"processor_class": name, **processor_options(base, config)})
    )


def processor_options(base, config):
    """Returns arguments of the processor that belong to the sizes of the model."""
    known = inspect.signature(base.__init__).parameters
    vision = getattr(config, "vision_config", None) or config
    given = dict.fromkeys((name for name in NUMBERS if name in known), FEW)
    tower = getattr(vision, "model_type", "")
    if "num_additional_image_tokens" in known:
        given["num_additional_image_tokens"] = int("clip" in tower)
    for name in ("patch_size", "vision_feature_select_strategy", "spatial_merge_size"):
        for holder in (config, vision):
            own = getattr(holder, name, None)
            if name in known and isinstance(own, (int, str)):
                given[name] = own
                break
    own = PROCESSOR_OPTIONS.get(config.model_type, {})
    return given | PROCESSOR_OPTIONS.get(base.__name__, {}) | own


def set_number(name, folder, processor):
    """Gives the processor the number of tokens per image, where it takes one: as many as the model
    makes of an image."""
    path = folder / "processor_config.json"
    fields = json.loads(path.read_text())
    names = [name for name in NUMBERS if fields.get(name) == FEW]
    if not names:
        return
    whole = getattr(transformers, name).from_pretrained(folder, dtype=torch.float32).eval()
    base = getattr(whole, "model", None)
    model = base if hasattr(base, "get_image_features") else whole
    made = inputs(processor, prompts(processor)[0])
    accepted = inspect.signature(model.get_image_features).parameters
    with torch.inference_mode():
        found = model.get_image_features(
            **{key: value for key, value in made.items() if key in accepted}, return_dict=True
        )
    found = getattr(found, "pooler_output", found)
    parts = [found] if isinstance(found, torch.Tensor) else found
    rows = sum(part.numel() // part.shape[-1] for part in parts)
    count = (made["input_ids"] == placeholder_id(processor)).sum().item()
    path.write_text(json.dumps(fields | dict.fromkeys(names, rows * FEW // count)))


def marker(processor):
    """Returns the text of an image in a prompt."""
    text = getattr(processor, "image_placeholder_token", None) or processor.image_token
    return MARKERS.get(type(processor).__name__, "{}").format(text)


def prompts(processor):
    """Returns prompts with one image, two images, and none."""
    image = marker(processor)
    first, second = pictures()
    if type(processor).__name__ in BEFORE:
        texts = f"{image}What is in it?", f"{image}."
        pairs = zip(texts, (first, second), strict=True)
        return [{"prompt": text, "multimodal_data": {"image": [one]}} for text, one in pairs]
    if type(processor).__name__ in ALONE:
        second = second.resize(first.size)
    return [
        {"prompt": f"What is in {image} it?", "multimodal_data": {"image": [first]}},
        {
            "prompt": f"{image} and {image}.",
            "multimodal_data": {"image": [second, first]},
        },
        {"prompt": "Nothing to see here."},
    ]


def ours(processor, prompt):
    """Returns a prompt as this engine takes it, which writes nothing around it."""
    if "multimodal_data" not in prompt:
        return prompt
    before, after = AROUND.get(type(processor).__name__, ("", ""))
    head, image, tail = prompt["prompt"].rpartition(marker(processor))
    head += image + AFTER_IMAGES.get(type(processor).__name__, "")
    return {**prompt, "prompt": f"{before}{head}{tail}{after}"}


def inputs(processor, prompt):
    """Returns the arguments of transformers' forward, for a model in float32."""
    text = prompt["prompt"]
    if type(processor).__name__ in BEFORE:
        text = text.removeprefix(marker(processor))
    given = {"text": [text], "return_tensors": "pt"}
    pictured = prompt.get("multimodal_data", {}).get("image")
    if pictured is None:
        return dict(processor.tokenizer(**given))
    if type(processor).__name__ in TYPED:
        given["return_mm_token_type_ids"] = True
    made = dict(processor(images=pictured, **given))
    for name, value in made.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            made[name] = value.float()  # Llama 4's are rounded to bfloat16
    return made
