"""Loads transformers' processor of a checkpoint without the components that need torchvision."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
import transformers
from mmdeploy_llm_processors.from_transformers.loading import load_image_processor
from mmdeploy_llm_processors.from_transformers.loading import reason_of as reason_of
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from mmdeploy_llm.errors import CheckpointError, MediaError, UnsupportedMediaError
from mmdeploy_llm.hooks import Checkpoint

from .pixtral import PixtralProcessor

NO_OPTIONS = frozenset({"audio_tokenizer", "chat_template"})  # in processor_config.json
PLACES = "image_embeds_position_mask"  # 1 where embeddings go
# Keys of a processor's result that belong to the text given with an item.
OF_TEXT = frozenset(
    {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}
    | {"text_replacement_offsets", "qformer_input_ids", "qformer_attention_mask", PLACES}
)
# Class that says nothing of how it writes images -> its token before and after each. Between two
# images that touch there is one, and a space after it where a word touches it.
JOINTS = {"Idefics2Processor": "fake_image_token"}
# Say nothing of it either, and write an image before a prompt that does not name it.
BEFORE = ("Blip2Processor", "InstructBlipProcessor", "Kosmos2Processor")
# Class that writes ids of words where embeddings go -> its token that stands for them here, which a
# prompt with an image has nowhere else, and its token before them. It says by PLACES where they go.
UNNAMED = {"Kosmos2Processor": ("eol_token", "boi_token")}
VIDEOS = "video_processor"
NAMING_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")


def load_processor(
    checkpoint: Checkpoint, options: Mapping[str, Any], video_processor: Any = None
) -> Any:
    """Loads the processor with its image processor (Pillow) and tokenizer, and with the video
    processor that is given, nothing else.

    Raises UnsupportedMediaError when the model has none for images, nor for the videos that are
    processed, ConfigError for unknown options, CheckpointError for files that transformers cannot
    use.
    """
    kinds = ("image_processor",) if video_processor is None else ("image_processor", VIDEOS)
    base, image_processor = processor_class(checkpoint, kinds), None
    if "image_processor" in base.get_attributes():
        image_processor = load_image_processor(checkpoint, None, options, owner=base.__name__)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            checkpoint.folder, local_files_only=True, trust_remote_code=False
        )
        components = {"image_processor": image_processor, "tokenizer": tokenizer}
        # What a Q-Former reads of a prompt is no image's; see transformers_any/before.py.
        components["qformer_tokenizer"] = tokenizer
        if video_processor is not None:
            components[VIDEOS] = video_processor
        processor = assembled(base, components, checkpoint.read_json("processor_config.json"))
    except Exception as error:  # transformers raises whatever its classes raise
        raise CheckpointError(
            f"transformers' {base.__name__} cannot be made from the checkpoint's files: "
            f"{reason_of(error)}"
        ) from error
    if base.__name__ in UNNAMED:
        named = (getattr(processor, name) for name in UNNAMED[base.__name__])
        processor.image_token, processor.image_placeholder_token = named
    if image_processor is not None and not getattr(processor, "image_token", None):
        raise UnsupportedMediaError(f"transformers' {base.__name__} names no token for images")
    return processor


def image_marker(processor: Any) -> str:
    """Returns the text that stands for an image in a prompt."""
    start, end = tokens_around(processor)
    token = getattr(processor, "image_placeholder_token", None) or processor.image_token
    return f"{start}{token}{end}"


def tokens_around(processor: Any) -> tuple[str, str]:
    """Returns the texts that must stand before and after the placeholders of an image. Some models
    count positions from them (Qwen Omni)."""
    start, end = (getattr(processor, f"vision_{name}_token", None) for name in ("bos", "eos"))
    return (start, end) if isinstance(start, str) and isinstance(end, str) else ("", "")


def marked(processor: Any, marker: str) -> str:
    """Returns a prompt of one image. Processors that insist on tokens around it, which stay as they
    are, get these, and those that write the image by themselves nothing."""
    if type(processor).__name__ in BEFORE:
        return ""
    tokens = (getattr(processor, f"image_{name}_token", None) for name in ("start", "end"))
    start, end = (token if isinstance(token, str) else "" for token in tokens)
    return f"{start}{marker}{end}"


def made_of_one(
    processor: Any, made: Mapping[str, Any], item: str
) -> tuple[str, dict[str, torch.Tensor]]:
    """Returns the prompt text of the one item ("an image") that the processor has just made this
    of, and the tensors that do not belong to the text. Raises MediaError where it told no text."""
    written = made.get("text_replacement_offsets") or processor.written
    processor.written = ()
    if written:
        text = written[0][0]["replacement"]
    elif type(processor).__name__ in UNNAMED:
        text = _around_places(processor, made["input_ids"][0], made[PLACES][0].bool())
    elif type(processor).__name__ in (*JOINTS, *BEFORE):
        text = _decoded(processor.tokenizer, made["input_ids"][0].tolist())
    else:
        raise MediaError(
            f"transformers' {type(processor).__name__} does not say how it writes {item} in a "
            "prompt; use a plugin made for this model"
        )
    tensors = {
        name: torch.tensor(value) if _is_counts(value) else value
        for name, value in made.items()
        if name not in OF_TEXT and (isinstance(value, torch.Tensor) or _is_counts(value))
    }
    return text, tensors


def joints(processor: Any) -> tuple[tuple[str, str], ...]:
    """Returns what a processor changes where items and texts meet; see MediaProcessor."""
    name = JOINTS.get(type(processor).__name__)
    if name is None:
        return ()
    edge = str(getattr(processor, name))
    pattern = re.escape(edge)
    return ((pattern * 2, edge), (rf"{pattern}(?=[^\s<])", f"{edge} "))


def _is_counts(value: Any) -> bool:
    """Whether a value holds whole numbers for each image, which the processor leaves as lists."""
    rows = value if isinstance(value, list) else []
    flat = [x for row in rows for x in (row if isinstance(row, list) else [row])]
    return bool(flat) and all(type(x) is int for x in flat)


def _around_places(processor: Any, ids: torch.Tensor, is_place: torch.Tensor) -> str:
    """Returns the text of an image from the ids of its prompt, [n]: its token for each embedding,
    and the token on either side."""
    own = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
    places = is_place.nonzero().flatten()
    named = ids.masked_fill(is_place, own)[int(places[0]) - 1 : int(places[-1]) + 2]
    return str(processor.tokenizer.decode(named, skip_special_tokens=False))


def _decoded(tokenizer: Any, ids: list[int]) -> str:
    """Returns the text of a prompt's ids, without what the tokenizer adds around it."""
    added = tokenizer("")["input_ids"]
    if added and ids[-len(added) :] == added:  # the text after the item was empty
        ids = ids[: -len(added)]
    elif ids[:1] == added[:1]:
        ids = ids[1 : -1 if len(added) > 1 else None]
    return str(tokenizer.decode(ids, skip_special_tokens=False))


def placeholder_token(config: Any, processor: Any) -> str:
    """Returns the text of the placeholder token, which the embeddings of an image replace."""
    token_id = getattr(config, "image_token_id", None)
    if token_id is None:
        token_id = getattr(config, "image_token_index", None)
    if token_id is None:
        return str(processor.image_token)
    return str(processor.tokenizer.convert_ids_to_tokens(token_id))


def processor_class(
    checkpoint: Checkpoint,
    components: Collection[str] = ("image_processor",),
    kinds: str = "images",
) -> Any:
    """Returns the class that the checkpoint names, else the one for its model type.

    Raises UnsupportedMediaError when there is none with one of these components, which process
    media of these kinds.
    """
    config = checkpoint.config
    name = _named(checkpoint) or PROCESSOR_MAPPING_NAMES.get(config.model_type)
    found = getattr(transformers, name, None) if isinstance(name, str) else None
    if name == PixtralProcessor.__name__ and getattr(found, "is_dummy", False):
        found = PixtralProcessor
    is_dummy = getattr(found, "is_dummy", False)  # of a library that is not installed
    attributes = None if is_dummy else getattr(found, "get_attributes", None)
    if attributes is None or not set(components) & set(attributes()):
        raise UnsupportedMediaError(
            f"transformers has no processor of {kinds} for the model type {config.model_type!r}"
        )
    return found


def _named(checkpoint: Checkpoint) -> str | None:
    """Returns the class name in the checkpoint's files, in transformers' order, or None."""
    for name in NAMING_FILES:
        found = checkpoint.read_json(name).get("processor_class")
        if found:
            return str(found)
    return None


def assembled(base: Any, components: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Makes transformers' processor of these components; the others are None.

    Not by its from_pretrained: that loads whatever class and repository the file names as its
    audio tokenizer, and asks on stdin whether to run the code there.
    """

    def accept(*_: Any) -> None:
        """Accepts None for a component."""

    def write(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Keeps what is written for images, which some processors do not return."""
        text, self.written = base.get_text_with_replacements(self, *args, **kwargs)
        return text, self.written

    own_methods = {
        "check_argument_for_proper_class": accept,
        "get_text_with_replacements": write,
        "written": (),
    }
    subclass: Any = type(base.__name__, (base,), own_methods)
    own = {name: value for name, value in options.items() if name not in NO_OPTIONS}
    names = base.get_attributes()
    try:
        return subclass.from_args_and_dict([components.get(name) for name in names], own)
    except AttributeError:  # it reads options of the video processor, often those of images
        known = {**components, VIDEOS: components["image_processor"]}
        return subclass.from_args_and_dict([known.get(name) for name in names], own)
