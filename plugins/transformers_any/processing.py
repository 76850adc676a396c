"""transformers' processor of a checkpoint, without the parts that need torchvision."""

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
    """The processor with its image processor (Pillow) and tokenizer, no other part.

    Raises UnsupportedMediaError when the model has none for images, ConfigError for unknown
    options, CheckpointError for files that cannot be used.
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
        parts = {"image_processor": image_processor, "tokenizer": tokenizer}
        processor = _without_other_parts(base, parts).from_pretrained(
            checkpoint.folder, local_files_only=True
        )
    except ConfigError:
        raise
    except Exception as error:  # transformers raises whatever its classes raise
        raise CheckpointError(
            f"transformers' {base.__name__} cannot be made of the checkpoint's files: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not getattr(processor, "image_token", None):
        raise UnsupportedMediaError(f"transformers' {base.__name__} names no token for images")
    return processor


def placeholder_token(config: Any, processor: Any) -> str:
    """The text of the token whose places take embeddings."""
    token_id = getattr(config, "image_token_id", None)
    if token_id is None:
        token_id = getattr(config, "image_token_index", None)
    if token_id is None:
        return str(processor.image_token)
    return str(processor.tokenizer.convert_ids_to_tokens(token_id))


def _processor_class(checkpoint: Checkpoint) -> Any:
    """By the name that the checkpoint gives, else by the type of its model."""
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
    """The class that the checkpoint's files name, as transformers looks for it."""
    for name in NAMING_FILES:
        path = folder / name
        if path.is_file():
            found = json.loads(path.read_text("utf-8")).get("processor_class")
            if found:
                return str(found)
    return None


def _without_other_parts(base: Any, parts: Mapping[str, Any]) -> Any:
    """A child of transformers' class whose parts are these, the others None."""

    def take(cls: Any, *_: Any, **__: Any) -> list[Any]:
        return [parts.get(name) for name in cls.get_attributes()]

    def accept(*_: Any) -> None:
        """A part may be None."""

    methods = {
        "_get_arguments_from_pretrained": classmethod(take),
        "check_argument_for_proper_class": accept,
    }
    return type(base.__name__, (base,), methods)


def _with_options(image_processor: Any, options: Mapping[str, Any]) -> Any:
    """A new one with the user's options. Raises ConfigError for what it does not know."""
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
