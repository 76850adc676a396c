"""Loads transformers' processor of a checkpoint without the components that need torchvision."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers

# Not by its public name, which older versions refuse without torchvision, for any backend.
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from mmdeploy_llm.errors import CheckpointError, ConfigError, UnsupportedMediaError
from mmdeploy_llm.hooks import Checkpoint

from .pixtral import PixtralProcessor

VIDEO_PREFIX = "video_"  # options of a video processor
NAMING_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")


def load_processor(checkpoint: Checkpoint, options: Mapping[str, Any]) -> Any:
    """Loads the processor with its image processor (Pillow) and tokenizer, nothing else.

    Raises UnsupportedMediaError when the model has none for images, ConfigError for unknown
    options, CheckpointError for files that transformers cannot use.
    """
    base = _processor_class(checkpoint)
    try:
        image_processor = AutoImageProcessor.from_pretrained(
            checkpoint.folder, backend="pil", local_files_only=True
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            checkpoint.folder, local_files_only=True, trust_remote_code=False
        )
        image_processor = _with_options(image_processor, options)
        components = {"image_processor": image_processor, "tokenizer": tokenizer}
        processor = _with_components(base, components).from_pretrained(
            checkpoint.folder, local_files_only=True
        )
    except ConfigError:
        raise
    except Exception as error:  # transformers raises whatever its classes raise
        raise CheckpointError(
            f"transformers' {base.__name__} cannot be made from the checkpoint's files: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not getattr(processor, "image_token", None):
        raise UnsupportedMediaError(f"transformers' {base.__name__} names no token for images")
    return processor


def placeholder_token(config: Any, processor: Any) -> str:
    """Returns the text of the placeholder token, whose rows take image embeddings."""
    token_id = getattr(config, "image_token_id", None)
    if token_id is None:
        token_id = getattr(config, "image_token_index", None)
    if token_id is None:
        return str(processor.image_token)
    return str(processor.tokenizer.convert_ids_to_tokens(token_id))


def _processor_class(checkpoint: Checkpoint) -> Any:
    """Returns the class that the checkpoint names, else the one for its model type.

    Raises UnsupportedMediaError when there is none for images.
    """
    config = checkpoint.config
    name = _named(checkpoint.folder) or PROCESSOR_MAPPING_NAMES.get(config.model_type)
    found = getattr(transformers, name, None) if isinstance(name, str) else None
    if name == PixtralProcessor.__name__ and getattr(found, "is_dummy", False):
        found = PixtralProcessor
    if found is None or "image_processor" not in found.get_attributes():
        raise UnsupportedMediaError(
            f"transformers has no processor of images for the model type {config.model_type!r}"
        )
    return found


def _named(folder: Path) -> str | None:
    """Returns the class name in the checkpoint's files, in transformers' order, or None."""
    for name in NAMING_FILES:
        path = folder / name
        if path.is_file():
            found = json.loads(path.read_text("utf-8")).get("processor_class")
            if found:
                return str(found)
    return None


def _with_components(base: Any, components: Mapping[str, Any]) -> Any:
    """Builds a subclass of transformers' class with these components; the others are None."""

    def take(cls: Any, *_: Any, **__: Any) -> list[Any]:
        return [components.get(name) for name in cls.get_attributes()]

    def accept(*_: Any) -> None:
        """Accepts None for a component."""

    methods = {
        "_get_arguments_from_pretrained": classmethod(take),
        "check_argument_for_proper_class": accept,
    }
    return type(base.__name__, (base,), methods)


def _with_options(image_processor: Any, options: Mapping[str, Any]) -> Any:
    """Returns an image processor with the user's options. Raises ConfigError for unknown ones."""
    given = {name: value for name, value in options.items() if not name.startswith(VIDEO_PREFIX)}
    if not given:
        return image_processor
    kind = type(image_processor)
    known = sorted(kind.valid_kwargs.__annotations__)
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise ConfigError(
                f"mm_processor_kwargs: transformers' {kind.__name__} has no option {name!r}; {hint}"
            )
    return kind.from_dict({**image_processor.to_dict(), **given})
