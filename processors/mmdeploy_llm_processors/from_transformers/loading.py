"""Loads image processors (Pillow) and feature extractors of transformers. Code of the checkpoint is
never run."""

from __future__ import annotations

import difflib
import inspect
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import transformers

# Not by its public name, which older versions refuse without torchvision, for any backend.
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from mmdeploy_llm.errors import (
    CheckpointError,
    ConfigError,
    MediaError,
    UnsupportedMediaError,
)
from mmdeploy_llm.hooks import Checkpoint

PROCESSOR_FILE = "processor_config.json"
PREPROCESSOR_FILE = "preprocessor_config.json"
SOUND_PARTS = ("feature_extractor", "audio_processor")  # names of what processes sounds
OTHER_KINDS = ("video_", "audio_")  # options of other processors begin with these


def load_image_processor(
    checkpoint: Checkpoint,
    name: str | None,
    options: Mapping[str, Any],
    *,
    fields: Mapping[str, Any] | None = None,
    owner: str | None = None,
) -> Any:
    """Returns the image processor of transformers' class `name`, or that the checkpoint names.

    fields: override those of the checkpoint. options: the user's, which override both. owner: the
    processor that it belongs to, for messages. Raises
    UnsupportedMediaError where the class needs a library that is not installed, CheckpointError for
    files that transformers cannot use, ConfigError for an unknown option.
    """
    owner = owner or name or "image processor"
    try:
        found = _image_processor(checkpoint, name)
    except UnsupportedMediaError:
        raise
    except Exception as error:  # transformers raises whatever its classes raise
        if "torchvision" in str(error):
            raise needs_torchvision(owner) from error
        raise CheckpointError(
            f"transformers' {owner} cannot be made from the checkpoint's files: {reason_of(error)}"
        ) from error
    found = with_fields(found, fields) if fields else found
    return with_options(found, options)


def _image_processor(checkpoint: Checkpoint, name: str | None) -> Any:
    if name is None:
        return AutoImageProcessor.from_pretrained(
            checkpoint.folder, backend="pil", local_files_only=True, trust_remote_code=False
        )
    own = name if name.endswith("Pil") else f"{name}Pil"
    kind = next(filter(None, (_class_of(each) for each in dict.fromkeys((own, name)))), None)
    if kind is None:
        raise needs_torchvision(name)
    return kind.from_dict(dict(checkpoint.preprocessor))


def load_feature_extractor(checkpoint: Checkpoint, name: str | None = None) -> Any:
    """Returns the feature extractor of transformers' class `name`, or that the checkpoint names.

    Raises UnsupportedMediaError where there is none or it needs a library that is not installed,
    CheckpointError for files that transformers cannot use.
    """
    fields = extractor_fields(checkpoint)
    if fields is None:
        raise UnsupportedMediaError("the checkpoint has no file that describes a feature extractor")
    named = name or str(fields.get("feature_extractor_type"))
    kind = _class_of(named)
    if kind is None:
        raise UnsupportedMediaError(
            f"transformers has no feature extractor {named!r}, or it needs a library that is not "
            "installed"
        )
    try:
        return kind.from_dict(dict(fields))
    except Exception as error:  # transformers raises whatever its classes raise
        raise CheckpointError(
            f"transformers' {named} cannot be made from the checkpoint's files: {reason_of(error)}"
        ) from error


def extractor_fields(checkpoint: Checkpoint) -> Mapping[str, Any] | None:
    """Returns the options of the feature extractor: of its own file, or of the processor's; None
    where there are none."""
    nested = checkpoint.read_json(PROCESSOR_FILE)
    for name in SOUND_PARTS:
        if isinstance(nested.get(name), Mapping):
            found: Mapping[str, Any] = nested[name]
            return found
    own = checkpoint.read_json(PREPROCESSOR_FILE)
    return own if own.get("feature_extractor_type") else None


def longest(extractor: Any) -> list[float]:
    """Returns the seconds after which a feature extractor may cut sounds off, as its class says."""
    rate = int(extractor.sampling_rate)
    parameters = inspect.signature(type(extractor).__call__).parameters
    default = getattr(parameters.get("max_length"), "default", None)
    found = [
        getattr(extractor, "chunk_length", None),
        default / rate if isinstance(default, int) and default > 0 else None,
    ]
    return sorted({float(value) for value in found if isinstance(value, (int, float)) and value})


def cut_by(extractor: Any) -> str:
    """Returns why a sound may be no longer, for messages."""
    return f"this model hears at once, since {type(extractor).__name__} cuts the rest off"


def with_fields(processor: Any, others: Mapping[str, Any]) -> Any:
    """Returns a processor with other values of its fields."""
    return type(processor).from_dict({**processor.to_dict(), **others})


def with_options(processor: Any, options: Mapping[str, Any]) -> Any:
    """Returns an image processor with the user's options. Raises ConfigError for unknown ones."""
    given = {name: value for name, value in options.items() if not name.startswith(OTHER_KINDS)}
    if not given:
        return processor
    kind = type(processor)
    known = sorted(kind.valid_kwargs.__annotations__)
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise ConfigError(
                f"mm_processor_kwargs: transformers' {kind.__name__} has no option {name!r}; {hint}"
            )
    return with_fields(processor, given)


def described(processor: Any) -> str:
    """Returns a text that differs for processors of other classes or fields."""
    fields = json.dumps(processor.to_dict(), sort_keys=True, default=str)
    return f"{type(processor).__name__}\0{fields}"


def reason_of(error: Exception) -> str:
    """Returns what transformers says, without its advice to trust code of the checkpoint."""
    if "trust_remote_code" in str(error):
        return "it needs Python code of its own (auto_map), which is never run"
    return f"{type(error).__name__}: {error}"


def needs_torchvision(name: str) -> UnsupportedMediaError:
    """Returns the error for a processor that exists for torchvision only."""
    return UnsupportedMediaError(
        f"the image processor of {name} exists in transformers for torchvision only, which is not "
        "installed; install torchvision for your torch, or use a plugin made for this model"
    )


def _class_of(name: str) -> Any:
    """Returns transformers' class; None for an unknown one and for one that cannot be used here."""
    found = getattr(transformers, name, None)
    return None if getattr(found, "is_dummy", False) else found


@contextmanager
def prepared_by(owner: object, num_samples: int, rate: int) -> Iterator[None]:
    """Raises MediaError where transformers cannot take a sound in the block, such as one that is
    shorter than a window. owner: transformers' object. rate: samples per second."""
    try:
        yield
    except (RuntimeError, ValueError, IndexError) as error:
        raise MediaError(
            f"transformers' {type(owner).__name__} cannot take a sound of {num_samples} samples "
            f"({num_samples / rate:.4g} s); give a longer one ({error})"
        ) from error
